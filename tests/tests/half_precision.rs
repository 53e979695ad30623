//! Training in f16 with loss scaling: all ranks skip the steps whose gradients overflow.

use std::sync::Arc;

use fsdp_comm::launch::{Launcher, Seat};
use fsdp_core::engine::ProgramOrder;
use fsdp_nn::hf::HfModel;
use fsdp_nn::{HostMemory, HostOptions};
use fsdp_train::checkpoint::LossScale;
use fsdp_train::verify::{VerifyOptions, verify};
use fsdp_train::{Job, Oracle, RankTrainer, TrainError};

use crate::runs::state;
use crate::support::{GPT2, LLAMA, config, job, threads};

/// A loss scale at which gradients overflow in the first steps, and repeatedly later.
pub(crate) const OVERFLOWING: &str = "train.loss_scale={ init = 524288.0, growth_interval = 3 }";

fn half(model: &str, vocab: u32, overrides: &[&str]) -> (tempfile::TempDir, Job<HfModel>) {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), vocab, &[&["fsdp.param_dtype=f16"][..], overrides].concat());
    let job = job(model, config);
    (dir, job)
}

/// Returns which of the first steps the oracle applies.
fn applied(job: &Job<HfModel>, steps: u64) -> Vec<bool> {
    let memory = Arc::new(HostMemory::new(HostOptions::default()).unwrap());
    let mut oracle = Oracle::new(job, memory).unwrap();
    (0..steps).map(|step| oracle.step(step, false).unwrap().finite).collect()
}

#[test]
fn f16_runs_with_skips_are_bitwise_equal_at_every_world_size() {
    let adamw = "train.optimizer={ name = \"adamw\", lr = 3e-3 }";
    let sgd = "train.optimizer={ name = \"sgd\", lr = 1e-1, momentum = 0.9, dampening = 0.1 }";
    let cases: [(&str, u32, &[&str]); 4] = [
        (LLAMA, 61, &[adamw, "fsdp.wrap=[\"LlamaDecoderLayer\"]"]),
        (LLAMA, 61, &[adamw, "fsdp.offload=\"cpu\"", "fsdp.activation_checkpointing=\"full\""]),
        (GPT2, 53, &[sgd, "fsdp.wrap=[\"GPT2Block\"]", "train.ema_decay=0.9"]),
        (GPT2, 53, &[adamw, "fsdp.accumulation=\"unsharded\"", "train.grad_clip=none"]),
    ];
    for (model, vocab, overrides) in cases {
        let (_dir, job) = half(model, vocab, &[overrides, &[OVERFLOWING]].concat());
        let applied = applied(&job, 12);
        let skipped = applied.iter().filter(|applied| !**applied).count();
        assert!(!applied[0] && (2..=10).contains(&skipped), "{overrides:?}: {applied:?}");
        let report = verify(&job, &threads(), &VerifyOptions::new(&[1, 2, 4], 12)).unwrap();
        for world in &report.worlds {
            assert!(world.failures.is_empty(), "{overrides:?}: {:#?}", world.failures);
            assert_eq!(world.promise, "equal bits (D2)");
        }
        assert_eq!(report.worlds.len(), 3);
    }
}

#[test]
fn f16_inexact_reductions_stay_within_bounds() {
    for overrides in [
        &["fsdp.reduce_op=average"][..],
        &["fsdp.reduce_dtype=bf16"],
        &["run.ranks=3", "train.global_batch_size=12"],
    ] {
        let (_dir, job) = half(LLAMA, 61, &[overrides, &[OVERFLOWING]].concat());
        let worlds = if overrides.len() > 1 { &[3][..] } else { &[2, 4] };
        let report = verify(&job, &threads(), &VerifyOptions::new(worlds, 10)).unwrap();
        for world in &report.worlds {
            assert!(world.failures.is_empty(), "{overrides:?}: {:#?}", world.failures);
        }
    }
}

/// Runs steps on two ranks until one fails; returns what rank 0 reported, with the scale after each step.
fn train(job: &Job<HfModel>, steps: u64) -> (Vec<(bool, LossScale)>, Option<TrainError>) {
    let ranks = threads().launch(2, &|seat: Seat<HostMemory>| -> Result<_, TrainError> {
        let mut trainer = RankTrainer::new(job, seat)?;
        let mut found = Vec::new();
        for step in 0..steps {
            match trainer.step(step, false, &mut ProgramOrder, &mut ()) {
                Ok(report) => found.push((report.finite, trainer.loss_scale().unwrap())),
                Err(error) => return Ok((found, Some(error))),
            }
        }
        Ok((found, None))
    });
    let mut ranks = ranks.unwrap();
    assert_eq!(ranks[0].0, ranks[1].0, "all ranks have the same scale");
    ranks.swap_remove(0)
}

#[test]
fn skipped_step_halves_loss_scale() {
    let (_dir, job) = half(LLAMA, 61, &["run.ranks=2", OVERFLOWING]);
    let (found, error) = train(&job, 12);
    assert!(error.is_none());
    let (mut scale, mut good, mut skipped) = (524288.0, 0, 0);
    for (finite, now) in found {
        if finite {
            good += 1;
        } else {
            (scale, good, skipped) = (scale / 2.0, 0, skipped + 1);
        }
        if good == 3 {
            (scale, good) = (scale * 2.0, 0);
        }
        assert_eq!(now, LossScale { scale, good_steps: good, skipped });
    }
    assert!(skipped > 1);
}

/// Includes rules that use gradients before the overflow is known: Adafactor's row means and Muon's momentum.
#[test]
fn overflowing_gradients_change_no_state_under_any_update_rule() {
    for rule in [
        "{ name = \"adamw\", lr = 3e-3, weight_decay = 0.1 }",
        "{ name = \"adamw8bit\", lr = 3e-3 }",
        "{ name = \"adafactor\", relative_step = true }",
        "{ name = \"lion\", lr = 1e-3 }",
        "{ name = \"muon\", lr = 2e-2, adamw_lr = 1e-2 }",
        "{ name = \"sgd\", lr = 1e-1, momentum = 0.9 }",
        "{ name = \"schedule_free_adamw\", lr = 3e-3 }",
    ] {
        let optimizer = format!("train.optimizer={rule}");
        let average = if rule.contains("schedule_free") { "none" } else { "0.9" };
        let average = format!("train.ema_decay={average}");
        let overrides = ["run.ranks=2", &average, OVERFLOWING, &optimizer];
        let (_dir, job) = half(LLAMA, 61, &overrides);
        let train = |seat: Seat<HostMemory>| -> Result<u64, TrainError> {
            let mut trainer = RankTrainer::new(&job, seat)?;
            let (mut before, mut skipped) = (state(&trainer)?, 0);
            for step in 0..10 {
                let report = trainer.step(step, false, &mut ProgramOrder, &mut ())?;
                let after = state(&trainer)?;
                assert_eq!(before != after, report.finite, "{rule}: step {step}");
                skipped += u64::from(!report.finite);
                before = after;
            }
            Ok(skipped)
        };
        let skipped = threads().launch(2, &train).unwrap();
        assert!(skipped[0] > 0 && skipped[0] < 10 && skipped[0] == skipped[1], "{rule}: {skipped:?}");
    }
}

/// A job whose weights make activations overflow, so that no scale helps.
fn overflowing(more: &[&str]) -> (tempfile::TempDir, Job<HfModel>) {
    let model = LLAMA.replace("\"initializer_range\": 0.2", "\"initializer_range\": 9000.0");
    half(&model, 61, &[&["run.ranks=2"][..], more].concat())
}

#[test]
fn run_fails_when_no_loss_scale_helps() {
    let (_dir, job) = overflowing(&["train.loss_scale.init=4"]);
    let (found, error) = train(&job, 12);
    let scales: Vec<f64> = found.iter().map(|(_, now)| now.scale).collect();
    assert_eq!(scales, [2.0, 1.0]);
    let error = error.expect("the third step fails");
    assert!(matches!(error, TrainError::LossScale { step: 3, skipped: 3, .. }), "{error}");
    let message = error.to_string();
    assert!(message.contains("loss scale of 1") && message.contains("fsdp.param_dtype"), "{message}");
}

#[test]
fn overflow_with_fixed_loss_scale_is_an_error() {
    let (_dir, job) = overflowing(&["train.loss_scale={ init = 4, dynamic = false }"]);
    let (found, error) = train(&job, 2);
    assert!(found.is_empty());
    assert!(matches!(error, Some(TrainError::NotFinite { step: 1, .. })), "{error:?}");
}
