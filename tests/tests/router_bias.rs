//! Corrections of routers that follow the loads of experts instead of a gradient.

use std::sync::Arc;

use fsdp_nn::hf::HfConfig;
use fsdp_nn::model::{Architecture as _, Counted};
use fsdp_nn::{HostMemory, HostOptions};
use fsdp_train::{InitSource, Job, Oracle};

use crate::expert_axis::{check, model};
use crate::resume::Case;
use crate::support::{config, job};

const SPEED: &str = "train.router_bias_update_speed=0.03";

#[test]
fn corrections_have_the_bits_of_the_oracle_on_every_mesh() {
    let meshes = [[1, 1, 1, 1], [1, 4, 1, 2], [1, 2, 2, 2], [2, 2, 1, 2]];
    for case in ["deepseek_v3", "glm4_moe"] {
        check(&model(case), &meshes, &[SPEED]);
    }
    let policies: [&[&str]; 4] = [
        &["fsdp.param_dtype=\"bf16\"", "fsdp.offload=\"cpu\""],
        &["fsdp.param_dtype=\"f16\"", "train.loss_scale={ init = 256 }"],
        &["fsdp.reshard_after_forward=false", "train.global_batch_size=16"],
        &["train.ema_decay=0.9", "train.optimizer={ name = \"muon\", lr = 0.01 }"],
    ];
    for policy in policies {
        check(&model("minimax_m2"), &meshes[1..3], &[&[SPEED], policy].concat());
    }
}

/// After every step, the correction of an expert with fewer routes than the mean has grown by the speed, and that of one with
/// more has fallen.
#[test]
fn corrections_follow_the_loads_of_each_step() {
    let (dir, model) = (tempfile::tempdir().unwrap(), model("deepseek_v3"));
    let job = job(&model, config(dir.path(), 61, &["fsdp.min_num_params=500", SPEED]));
    let description = job.architecture.description();
    let bias = *description.score_biases.values().next().unwrap();
    let counted = Counted::of(description, &job.plan.spec);
    let memory = Arc::new(HostMemory::new(HostOptions::default()).unwrap());
    let mut oracle = Oracle::new(&job, memory).unwrap();
    let (mut expected, mut changed) = (oracle.param(bias).unwrap(), 0);
    for step in 0..4 {
        let report = oracle.step(step, false).unwrap();
        let [loads] = &counted.read(&report).loads[..] else { panic!("there is one mixture") };
        let mean = loads.iter().sum::<u64>() as f64 / loads.len() as f64;
        for (correction, &load) in expected.iter_mut().zip(loads) {
            let difference = mean - load as f64;
            *correction += if difference == 0.0 { 0.0 } else { 0.03_f64.copysign(difference) };
            changed += usize::from(difference != 0.0);
        }
        let got = oracle.param(bias).unwrap();
        // Each sum is rounded to single precision.
        let is_near = |(got, expected): (&f64, &f64)| (got - expected).abs() < 1e-6;
        assert!(got.iter().zip(&expected).all(is_near), "step {step}: {got:?}, not {expected:?}");
    }
    assert!(changed > 8, "{changed}");
}

#[test]
fn corrections_are_resumed_on_other_meshes() {
    let model: &'static str = Box::leak(model("deepseek_v3").into_boxed_str());
    Case {
        model,
        settings: vec!["fsdp.min_num_params=500", "fsdp.chunks={ expert = 4 }", SPEED],
        before: vec!["run.ranks=4", "fsdp.mesh={ expert = 4 }"],
        after: vec!["run.ranks=2", "fsdp.mesh={ expert = 2 }"],
        cut: 2,
        steps: 4,
        is_stopped: false,
    }
    .check();
}

#[test]
fn models_without_corrections_are_refused_by_key() {
    let refusal = |case: &str, more: &[&str]| {
        let (dir, model) = (tempfile::tempdir().unwrap(), model(case));
        let config = config(dir.path(), 61, &[&["fsdp.min_num_params=500", SPEED], more].concat());
        let architecture = HfConfig::parse(&model).unwrap().build().unwrap();
        let init = Arc::new(architecture.description().init.clone());
        Job::new(config, architecture, InitSource::Random { seed: 0, init }).unwrap_err().to_string()
    };
    let plain = refusal("mixtral", &[]);
    assert!(plain.contains("train.router_bias_update_speed") && plain.contains("aux_loss_coef"), "{plain}");
}
