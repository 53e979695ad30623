//! Decisions based on evaluations: `[train.early_stop]` ends a run, `checkpoint.keep_best` keeps the best checkpoints.

use crate::support::Sandbox;

/// A run that learns nothing and evaluates after every step.
const STILL: &str = "train run.toml --set train.optimizer.lr=1e-30 --set data.eval=[\"data.txt\"] --set data.eval_every=1 \
                     --set train.early_stop.patience=2";

#[test]
fn run_with_constant_loss_stops_after_patience() {
    let sandbox = Sandbox::new();
    let ran = sandbox.succeed(&format!("{STILL} --set train.steps=9"));
    assert_eq!(sandbox.metrics("out").len(), 3);
    assert!(ran.stdout.contains("3 of 9: evaluations give no lower loss than 5."), "{}", ran.stdout);
    assert!(ran.stdout.contains(", after step 1, in"), "{}", ran.stdout);
    assert!(sandbox.path("out/model/model.safetensors").exists());
    assert!(!sandbox.path("out/checkpoints/step-00000003").exists(), "no states are kept");
}

#[test]
fn early_stop_patience_survives_resume() {
    let (cut, whole) = (Sandbox::new(), Sandbox::new());
    let kept = format!("{STILL} --set checkpoint.every=1");
    whole.succeed(&format!("{kept} --set train.steps=9"));
    cut.succeed(&format!("{kept} --set train.steps=2"));
    let ran = cut.succeed(&format!("{kept} --set train.steps=9 --resume"));
    assert!(ran.stdout.contains("3 of 9: evaluations"), "{}", ran.stdout);
    assert_eq!(cut.evaluations("out"), whole.evaluations("out"));
    let again = cut.succeed(&format!("{kept} --set train.steps=9 --resume --set run.ranks=4"));
    assert!(again.stdout.contains("3 of 9: evaluations"), "{}", again.stdout);
    assert_eq!(cut.evaluations("out"), whole.evaluations("out"));
    // A larger patience continues the run.
    cut.succeed(&format!("{kept} --set train.steps=9 --resume --set train.early_stop.patience=4"));
    assert_eq!(cut.evaluations("out").len(), 5);
}

#[test]
fn early_stop_requires_known_evaluation_set() {
    let sandbox = Sandbox::new();
    let input_error = |args: &str| {
        let ran = sandbox.fsdp(&format!("train run.toml --set train.early_stop.patience=2 {args}"));
        assert_eq!(ran.code, Some(2), "{}", ran.stderr);
        ran.stderr
    };
    assert!(input_error("").contains("train.early_stop"));
    let other = input_error("--set data.eval=[\"data.txt\"] --set train.early_stop.set=other");
    assert!(other.contains("the name of an evaluation set: eval"), "{other}");
}

/// A run whose loss falls during warm-up and rises once the learning rate is far too high.
const RISING: &str = "train run.toml --set data.eval=[\"data.txt\"] --set data.eval_every=1 --set train.steps=8 \
                      --set train.lr_schedule.name=constant --set train.lr_schedule.warmup_steps=8 \
                      --set train.optimizer.lr=1 --set checkpoint.keep_best=2 --set checkpoint.keep_last=1";

/// Returns the steps of the run's checkpoints.
fn kept(sandbox: &Sandbox) -> Vec<u64> {
    let names = std::fs::read_dir(sandbox.path("out/checkpoints")).unwrap();
    let names = names.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut steps: Vec<u64> = names.filter_map(|name| name.strip_prefix("step-")?.parse().ok()).collect();
    steps.sort_unstable();
    steps
}

/// Returns the steps of the two lowest evaluation losses, lowest first.
fn best(sandbox: &Sandbox) -> [u64; 2] {
    let mut losses: Vec<(f64, u64)> =
        sandbox.evaluations("out").iter().map(|(step, _, loss)| (*loss, *step)).collect();
    losses.sort_by(|one, other| one.partial_cmp(other).unwrap());
    [losses[0].1, losses[1].1]
}

#[test]
fn best_checkpoints_are_kept_with_newest() {
    for (every, newest) in [(0, None), (8, Some(8))] {
        let sandbox = Sandbox::new();
        let ran = sandbox.succeed(&format!("{RISING} --set checkpoint.every={every}"));
        let [lowest, second] = best(&sandbox);
        assert!(lowest < 7 && second < 7, "{:?}", sandbox.evaluations("out"));
        let mut expected = vec![lowest, second];
        expected.extend(newest);
        expected.sort_unstable();
        assert_eq!(kept(&sandbox), expected);
        let summary = format!("after step {lowest}, in out/checkpoints/step-{lowest:08}");
        assert!(ran.stdout.contains(&summary), "{}", ran.stdout);
    }
}

#[test]
fn resumed_run_keeps_best_checkpoints() {
    let sandbox = Sandbox::new();
    let kept_all = format!("{RISING} --set checkpoint.every=1");
    sandbox.succeed(&format!("{kept_all} --set train.steps=7 --set train.lr_schedule.warmup_steps=7"));
    let before = best(&sandbox);
    sandbox.succeed(&format!("{kept_all} --resume --set run.ranks=4"));
    assert_eq!(best(&sandbox), before);
    // The state after 8 steps evaluates so badly that it may be lost, so the newest one that does not stays as well.
    let mut expected = [before[0], before[1], 7, 8];
    expected.sort_unstable();
    assert_eq!(kept(&sandbox), expected);
}

#[test]
fn keep_best_without_evaluations_is_rejected() {
    let rejected = Sandbox::new().fsdp("train run.toml --set checkpoint.keep_best=1");
    assert_eq!(rejected.code, Some(2), "{}", rejected.stderr);
    assert!(rejected.stderr.contains("`checkpoint.keep_best` is 1"), "{}", rejected.stderr);
    assert!(rejected.stderr.contains("unless data.eval is set"), "{}", rejected.stderr);
}
