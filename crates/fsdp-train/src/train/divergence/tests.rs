//! Divergences of runs with saved states of known losses.

use std::fs;

use fsdp_ckpt::native::RunDir;
use fsdp_config::Resolved;

use super::*;
use crate::metrics::StepLoss;
use crate::train::folder::{ATTEMPTS_FILE, RESOLVED};

/// The loss of steps whose gradient is zero.
const DEAD: f64 = 5.545;

/// The history of these losses, from step 1 on.
fn known(losses: &[f64]) -> Losses {
    let mut known = Losses::new(256);
    for (step, &loss) in (1..).zip(losses) {
        let grad_norm = if loss == DEAD { 0.0 } else { 1.0 };
        known.push(StepLoss { step, loss, grad_norm });
    }
    known
}

/// An output folder with checkpoints of these steps.
struct Saved {
    dir: tempfile::TempDir,
    lock: RunLock,
}

impl Saved {
    fn new(steps: &[u64]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let run = RunDir::new(dir.path());
        for &step in steps {
            fs::create_dir_all(run.checkpoint(step)).unwrap();
            fs::write(run.checkpoint(step).join("manifest.json"), "{}").unwrap();
        }
        fs::create_dir_all(run.checkpoints()).unwrap();
        let lock = run.lock().unwrap();
        Self { dir, lock }
    }

    /// What is said when a run that began after `from` steps has lost its state after `until` steps.
    fn diverge(&self, (from, until): (u64, u64), lr: Option<f64>, losses: &[f64]) -> Divergence {
        Divergence::at(until, &Began { lock: &self.lock, step: from, lr }, &known(losses))
    }

    /// What is said when a run that began after `from` steps has come to its end with these losses.
    fn end(&self, from: u64, lr: f64, losses: &[f64]) -> Option<String> {
        let began = Began { lock: &self.lock, step: from, lr: Some(lr) };
        Some(Divergence::at_end(losses.len() as u64, &began, &known(losses))?.to_string())
    }

    /// A run that resumes after `step` steps forgets what it computes anew.
    fn resume(&self, step: u64) {
        Attempts::forget_after(self.dir.path(), Some(step)).unwrap();
    }

    fn steps(&self) -> Vec<u64> {
        self.lock.run().steps().unwrap()
    }
}

fn newest(divergence: &Divergence) -> Option<u64> {
    divergence.newest.as_ref().map(|(step, _)| *step)
}

#[test]
fn newest_state_of_sound_loss_is_advised() {
    let saved = Saved::new(&[2, 4, 6, 8]);
    let losses = [5.5, 4.0, 3.0, 3.1, 3.0, 9.0, 1e3, 1e9, f64::INFINITY];
    let divergence = saved.diverge((0, 8), Some(1.0), &losses);
    assert_eq!(newest(&divergence), Some(4));
    assert_eq!(saved.steps(), [2, 4]);
    let steps: Vec<u64> = divergence.aside.iter().map(|aside| aside.step).collect();
    assert_eq!(steps, [8, 6]);
    assert_eq!(divergence.aside[0].reason, Unfit::NotFinite);
    assert_eq!(divergence.aside[1].reason, Unfit::Loss { loss: 1e3, first: 5.5 });
    let text = divergence.to_string();
    assert!(
        text.contains(
            "(train.optimizer.lr = 1.0e-1 or less, since 1e0 failed), --resume continues from step 4"
        ),
        "{text}"
    );
    assert!(
        text.contains("step-00000006.diverged: its loss is 1.0000e3, and the run began with 5.5000"),
        "{text}"
    );
}

#[test]
fn no_sound_state_means_to_start_over() {
    let saved = Saved::new(&[1, 2, 3, 4, 5]);
    let divergence = saved.diverge((0, 5), Some(1e6), &[5.5, 2e9, 2e9, 1e15, 1e20, f64::NAN]);
    assert_eq!((newest(&divergence), saved.steps()), (None, vec![]));
    let text = divergence.to_string();
    assert!(text.contains("2 more were set aside likewise; no saved state is worth continuing"), "{text}");
    assert!(
        text.contains(
            "start over (--overwrite) with a lower learning rate (train.optimizer.lr = 1.0e5 or less"
        ),
        "{text}"
    );
}

#[test]
fn dead_states_are_set_aside() {
    let saved = Saved::new(&[2, 4, 6]);
    let divergence = saved.diverge((0, 8), Some(1.0), &[5.5, 5.4, 5.3, 1e3, DEAD, DEAD, DEAD, f64::NAN]);
    assert_eq!(newest(&divergence), Some(2));
    let text = divergence.to_string();
    assert!(
        text.contains("step-00000004.diverged: its gradient is zero, so no step would change it"),
        "{text}"
    );
}

#[test]
fn nothing_saved_means_to_start_over_and_save() {
    let text = Saved::new(&[]).diverge((0, 5), None, &[5.5]).to_string();
    let advice = "there is no earlier checkpoint: start over with a lower learning rate and --overwrite";
    assert!(text.starts_with(advice), "{text}");
}

#[test]
fn advice_that_failed_is_not_repeated() {
    let saved = Saved::new(&[4, 6]);
    let losses = [3.0; 8];
    let mut advised = vec![newest(&saved.diverge((0, 8), Some(1.0), &losses))];
    let mut rates = Vec::new();
    for _ in 0..20 {
        let Some(from) = advised.last().copied().flatten() else { break };
        saved.resume(from);
        let lr = Attempts::read(saved.dir.path()).lowest_lr(from).map(|lr| lr / 10.0);
        rates.push(lr.unwrap());
        advised.push(newest(&saved.diverge((from, from + 1), lr, &losses)));
    }
    assert_eq!(advised, [Some(6), Some(6), Some(6), Some(4), Some(4), Some(4), None]);
    assert_eq!(rates, [0.1, 0.01, 0.001, 0.1, 0.01, 0.001]);
}

#[test]
fn one_large_cut_of_the_rate_is_enough() {
    let saved = Saved::new(&[4, 6]);
    saved.diverge((0, 8), Some(1e6), &[3.0; 8]);
    saved.resume(6);
    let again = saved.diverge((6, 8), Some(1e-4), &[3.0; 8]);
    assert_eq!(newest(&again), Some(4));
    assert!(
        again.to_string().contains("diverged from there with learning rates from 1e6 to 1e-4"),
        "{again}"
    );
}

#[test]
fn same_rate_again_leaves_the_state() {
    let saved = Saved::new(&[4]);
    for _ in 0..5 {
        saved.resume(4);
        assert_eq!(newest(&saved.diverge((4, 8), Some(1.0), &[3.0; 8])), Some(4));
    }
}

#[test]
fn state_without_a_rate_to_lower_fails_once() {
    let saved = Saved::new(&[4]);
    assert_eq!(newest(&saved.diverge((0, 8), None, &[3.0; 8])), Some(4));
    saved.resume(4);
    let again = saved.diverge((4, 8), Some(0.0), &[3.0; 8]);
    assert_eq!(newest(&again), None);
    assert!(again.to_string().contains("the run diverged again from there"), "{again}");
}

#[test]
fn states_computed_anew_have_not_failed() {
    let saved = Saved::new(&[2, 8]);
    saved.diverge((0, 9), Some(1e6), &[3.0; 9]);
    saved.resume(2);
    // The run goes on to save another state after step 8, and diverges later.
    assert_eq!(newest(&saved.diverge((2, 20), Some(1.0), &[3.0; 20])), Some(8));
    // For the state after step 2, both count.
    assert!(Attempts::read(saved.dir.path()).given_up(2).is_some());
    Attempts::forget_after(saved.dir.path(), None).unwrap();
    assert_eq!(Attempts::read(saved.dir.path()), Attempts::default());
}

#[test]
fn damaged_record_is_as_none() {
    let saved = Saved::new(&[4]);
    for content in ["", "{}", "[{\"from\": -1}]"] {
        fs::write(saved.dir.path().join(ATTEMPTS_FILE), content).unwrap();
        assert_eq!(newest(&saved.diverge((0, 8), Some(1.0), &[3.0; 8])), Some(4), "{content}");
    }
}

#[test]
fn end_with_a_spoiled_loss_names_the_way_back() {
    let saved = Saved::new(&[2, 4, 5]);
    let text = saved.end(0, 1.0, &[5.5, 4.0, 3.0, 9.0, 2e9]).unwrap();
    let began = "the last state is not worth continuing: its loss is 2.0000e9, and the run began with 5.5000; with a lower \
                 learning rate (train.optimizer.lr = 1.0e-1 or less, since 1e0 failed), --resume-from ";
    assert!(text.starts_with(began), "{text}");
    assert!(text.ends_with("--overwrite continues from step 2, the newest checkpoint worth it"), "{text}");
    assert_eq!(saved.steps(), [2, 4, 5]);
    // The same rate again, then a lower one, from a state that the first run went through.
    let repeated = "a run from step 2 had failed with this learning rate or a lower one before";
    for (lr, is_repeated) in [(1.0, true), (2.0, true), (0.1, false), (0.5, true)] {
        saved.resume(2);
        let text = saved.end(2, lr, &[5.5, 4.0, 3.0, 9.0, 2e9]).unwrap();
        assert_eq!(text.contains(repeated), is_repeated, "{lr}: {text}");
    }
    let dead = saved.end(0, 1.0, &[5.5, 9.0, DEAD]).unwrap();
    assert!(dead.contains("its gradient is zero") && dead.contains("no saved state is worth"), "{dead}");
}

#[test]
fn end_with_a_usual_loss_is_silent() {
    let saved = Saved::new(&[2]);
    for losses in [
        &[5.5, 4.0, 3.0][..],
        &[5.5, 5.9],
        &[1.0, 0.5, 3.0],
        &[9.0, 9.5],
        &[0.1, 1e9, 0.1],
        &[0.1, 0.1, 9.0],
        &[],
    ] {
        assert_eq!(saved.end(0, 1.0, losses), None, "{losses:?}");
    }
    // Nothing was done since it began.
    assert_eq!(saved.end(3, 1.0, &[5.5, 4.0, 1e9]), None);
    assert_eq!(Attempts::read(saved.dir.path()), Attempts::default());
}

/// A run that replaces one that is the same but for the rate still knows what failed from its beginning.
#[test]
fn replaced_run_of_another_rate_is_remembered() {
    let text = "model = { path = 'm' }\ndata = { train = ['t.bin'], seq_len = 8 }\nfsdp = { wrap = [] }\nrun = { out_dir = 'out' }\n\
                train = { steps = 5, micro_batch_size = 1, global_batch_size = 1, optimizer = { name = 'adamw', lr = 1.0 } }";
    let run = |change: &str| Resolved::parse(text, "run.toml", &[change.to_owned()]).unwrap().config;
    for (change, is_kept) in [
        ("train.optimizer.lr=0.5", true),
        ("train.steps=9", true),
        ("train.optimizer.weight_decay=0.5", false),
        ("train.optimizer={name='sgd',lr=1.0}", false),
        ("train.grad_clip=3.0", false),
    ] {
        let saved = Saved::new(&[]);
        saved.diverge((0, 5), Some(1.0), &[5.5]);
        fs::write(saved.dir.path().join(RESOLVED), run("train.optimizer.lr=1.0").to_toml()).unwrap();
        Attempts::forget_replaced(saved.dir.path(), &run(change)).unwrap();
        let again = saved.diverge((0, 5), Some(1.0), &[5.5]).to_string();
        assert_eq!(again.contains("a run from step 0 had failed"), is_kept, "{change}: {again}");
    }
}
