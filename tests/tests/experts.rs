//! The parts of the loss and the loads of experts that a step reports.

use std::path::Path;

use fsdp_core::engine::{ProgramOrder, StepReport};
use fsdp_nn::hf::HfConfig;
use fsdp_nn::model::{Architecture as _, Counted};

use crate::runs::train;
use crate::support::{config, job, threads};

/// Returns the reports of two steps of a golden mixture-of-experts model, and the decoder for their sums.
pub(crate) fn reports(case: &str, ranks: usize, more: &[&str]) -> (Vec<StepReport>, Counted) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("golden/families").join(case);
    let text = std::fs::read_to_string(folder.join("config.json")).unwrap();
    let vocab = HfConfig::parse(&text).unwrap().summary().vocab as u32;
    let dir = tempfile::tempdir().unwrap();
    let ranks = format!("run.ranks={ranks}");
    let overrides = [&["fsdp.min_num_params=500", ranks.as_str()], more].concat();
    let job = job(&text, config(dir.path(), vocab, &overrides));
    let counted = Counted::of(job.architecture.description(), &job.plan.spec);
    let order = |_| Box::new(ProgramOrder) as Box<_>;
    let mut outcomes = train(std::slice::from_ref(&job), &threads(), 2, order).unwrap();
    (outcomes.swap_remove(0).reports, counted)
}

#[test]
fn expert_loads_and_loss_parts_are_equal_at_every_world_size() {
    for (case, layers, experts, top) in [("mixtral-balanced", 2, 5, 2), ("qwen3_moe", 1, 6, 3)] {
        let (alone, counted) = reports(case, 1, &["train.z_loss=0.01"]);
        for ranks in [2, 4] {
            assert_eq!(reports(case, ranks, &["train.z_loss=0.01"]).0, alone, "{case}, {ranks} ranks");
        }
        for report in &alone {
            let parts = counted.read(report);
            // 16 samples of 7 tokens, each with a target.
            let loads: Vec<u64> = parts.loads.iter().map(|load| load.iter().sum()).collect();
            assert_eq!(loads, vec![16 * 7 * top; layers], "{case}");
            assert!(parts.loads.iter().all(|load| load.len() == experts), "{case}");
            assert!(parts.z_loss.unwrap() > 0.0, "{case}");
            assert_eq!(parts.router_loss.unwrap() > 0.0, case == "mixtral-balanced", "{case}");
        }
    }
}

#[test]
fn reported_loss_parts_equal_terms_added_to_loss() {
    let loss = |overrides: &[&str]| {
        let (reports, counted) = reports("mixtral-balanced", 2, overrides);
        let first = &reports[0];
        let parts = counted.read(first);
        let mean = |sum: Option<f64>| sum.unwrap_or(0.0) / first.targets as f64;
        (first.loss, mean(parts.router_loss), mean(parts.z_loss))
    };
    let (plain, ..) = loss(&["train.router_aux_loss_coef=0.0"]);
    for terms in [
        &["train.router_aux_loss_coef=0.3"][..],
        &["train.router_aux_loss_coef=0.0", "train.z_loss=0.02"],
        &["train.router_aux_loss_coef=0.3", "train.z_loss=0.02"],
    ] {
        let (with, router_loss, z_loss) = loss(terms);
        assert!(router_loss + z_loss > 1e-3, "{terms:?}");
        // Each is a sum of doubles, rounded when it is added and when it is reported.
        assert!((with - router_loss - z_loss - plain).abs() < 1e-13 * with, "{terms:?}");
    }
}

/// The forward pass does not see the scale; in gradients it changes how many small numbers underflow.
#[test]
fn f16_step_reports_are_independent_of_loss_scale() {
    let terms = ["train.z_loss=0.02", "train.router_aux_loss_coef=0.3", "train.grad_clip=0.1"];
    let of = |more: &[&str]| reports("mixtral-balanced", 2, &[&terms[..], more].concat()).0;
    let [small, large] = ["train.loss_scale.init=16", "train.loss_scale.init=1024"]
        .map(|scale| of(&["fsdp.param_dtype=f16", scale]));
    assert_eq!((small[0].loss, &small[0].sums), (large[0].loss, &large[0].sums));
    let whole = of(&[]);
    for (step, wide) in whole.iter().enumerate() {
        for narrow in [&small[step], &large[step]] {
            assert!(narrow.finite && narrow.targets == wide.targets);
            let pairs = narrow
                .sums
                .iter()
                .zip(&wide.sums)
                .chain([(&narrow.loss, &wide.loss), (&narrow.grad_norm, &wide.grad_norm)]);
            for (narrow, wide) in pairs {
                assert!((narrow - wide).abs() <= 0.02 * wide, "{step}: {narrow} {wide}");
            }
        }
    }
}
