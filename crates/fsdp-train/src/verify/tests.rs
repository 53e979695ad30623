//! Changes the results of ranks after a run that kept every promise; the comparison must notice.

use std::sync::Arc;

use fsdp_config::Resolved;
use fsdp_nn::model::{Mlp, MlpConfig};
use fsdp_nn::{HostMemory, HostOptions};
use fsdp_sim::{ThreadOptions, Threads};

use super::*;
use crate::InitSource;
use crate::shard_runs::Kind;

fn job(dir: &std::path::Path, reduce_op: &str) -> Job<Mlp> {
    let data = dir.join("tokens.bin");
    std::fs::write(&data, (0..200u16).flat_map(|i| (i * i % 7).to_le_bytes()).collect::<Vec<u8>>()).unwrap();
    let text = format!(
        "model = {{ path = 'unused' }}\ndata = {{ train = ['{}'], format = 'tokens-u16', seq_len = 3 }}\n\
         train = {{ steps = 2, micro_batch_size = 1, global_batch_size = 4 }}\n\
         fsdp = {{ wrap = ['MlpLayer'], mesh = {{ replicate = 2 }}, reduce_op = '{reduce_op}' }}\n\
         run = {{ ranks = 4, out_dir = 'unused' }}",
        data.display()
    );
    let sizes = MlpConfig { vocab: 7, widths: vec![3, 5], bias: true, tied: false, std: 0.2 };
    let model = Mlp::new(&sizes).unwrap();
    let init = InitSource::Random { seed: 0, init: Arc::new(model.description().init.clone()) };
    Job::new(Resolved::parse(&text, "test", &[]).unwrap().config, model, init).unwrap()
}

/// The failures found after `tamper` changed what the ranks hold and report.
fn failures(reduce_op: &str, tamper: impl Fn(&mut [RankRun])) -> Vec<String> {
    failures_of(reduce_op, |_, _, ranks| tamper(ranks))
}

/// Like [`failures`]; `tamper` may also change the results of the oracle.
fn failures_of(reduce_op: &str, tamper: impl Fn(&Job<Mlp>, &mut Reference, &mut [RankRun])) -> Vec<String> {
    let dir = tempfile::tempdir().unwrap();
    let job = job(dir.path(), reduce_op);
    let launcher = Threads::new(ThreadOptions::default(), |_, _| {
        Ok(Arc::new(HostMemory::new(HostOptions { resident: true, ..HostOptions::default() })?))
    });
    let oracle = |seat: Seat<HostMemory>| oracle(&job, seat, 2);
    let mut reference = launcher.launch(1, &oracle).unwrap().pop().unwrap();
    let rank = |seat: Seat<HostMemory>| sharded(&job, seat, 2, &mut ProgramOrder);
    let mut ranks = launcher.launch(4, &rank).unwrap();
    tamper(&job, &mut reference, &mut ranks);
    compare::world::<HostMemory, Mlp>(&job, &reference, &ranks, 2).unwrap().failures
}

#[test]
fn values_missing_on_rank_fail_verification() {
    assert_eq!(failures("sum", |_| {}), [""; 0]);
    for kind in [Kind::Param, Kind::Gradient, Kind::State(0)] {
        let found = failures("sum", |ranks| {
            for pieces in [&mut ranks[3].first, &mut ranks[3].last] {
                let at = pieces.values.iter().position(|held| held.kind == kind).unwrap();
                pieces.values.remove(at);
            }
        });
        assert!(found.iter().any(|failure| failure.starts_with("replica 1 holds ")), "{kind:?}: {found:?}");
    }
}

#[test]
fn replica_with_different_bits_fails_verification() {
    let found = failures("sum", |ranks| ranks[2].last.values[0].values[0] += 1.0);
    assert!(
        found.contains(&"rank 2 holds different bits than rank 0, a replica of its shard".into()),
        "{found:?}"
    );
}

#[test]
fn average_in_place_of_sum_exceeds_tolerance() {
    assert_eq!(failures("average", |_| {}), [""; 0]);
    let found = failures("average", |ranks| {
        for report in ranks.iter_mut().flat_map(|run| &mut run.reports) {
            report.grad_norm /= 4.0;
        }
    });
    assert!(
        matches!(&found[..], [norm] if norm.starts_with("the first gradient norm is off by ")),
        "{found:?}"
    );
    let found = failures("average", |ranks| {
        let held = ranks.iter_mut().flat_map(|run| &mut run.first.values);
        for gradient in held.filter(|held| held.kind == Kind::Gradient) {
            gradient.values.iter_mut().for_each(|value| *value /= 4.0);
        }
    });
    assert!(found.iter().any(|failure| failure.starts_with("gradient of ")), "{found:?}");
}

#[test]
fn oracle_rounding_errors_match_its_dtype() {
    failures_of("average", |job, reference, _| {
        let memory = Arc::new(HostMemory::new(HostOptions::default()).unwrap());
        let found = rounding(job, Arc::clone(&memory), (&reference.reports, &reference.first, 1.0)).unwrap();
        let sizes = reference.magnitudes.iter().map(|all| all.iter().copied().fold(0.0, f64::max));
        for (error, size) in found.gradients.iter().zip(sizes) {
            // A few roundings of f32.
            assert!((1e-9..1e-6).contains(&(error / size)), "{error:e} of {size:e}");
        }
        // Gradients are multiplied by the loss scale.
        let other = rounding(job, memory, (&reference.reports, &reference.first, 2.0)).unwrap();
        assert!(other.gradients.iter().zip(&found.gradients).all(|(other, found)| *other > 1e3 * found));
    });
}

/// Other kernels may be as far from the oracle as 8 of its own rounding errors, if that is less than a quarter of the
/// gradient.
#[test]
fn tolerance_for_other_kernels_follows_oracle_rounding_errors() {
    let found = |error: f64, distance: f64| {
        failures_of("average", |_, reference, ranks| {
            let of_param = |all: &Vec<f64>| error * all.iter().copied().fold(0.0, f64::max);
            let gradients = reference.magnitudes.iter().map(of_param).collect();
            // The sum of several leaves is smaller than the sum of their absolute values, so distances are absolute.
            for held in ranks.iter_mut().flat_map(|run| &mut run.first.values) {
                let trained = held.kind == Kind::Gradient;
                let largest = reference.magnitudes[held.param.0].iter().copied().fold(0.0, f64::max);
                held.values.iter_mut().filter(|_| trained).for_each(|value| *value += distance * largest);
            }
            reference.rounding = Some(Rounding { loss: 0.0, gradients });
        })
    };
    let is_off = |failures: Vec<String>| failures.iter().any(|failure| failure.starts_with("gradient of "));
    assert!(!is_off(found(1e-3, 7e-3)));
    assert!(is_off(found(1e-3, 9e-3)));
    assert!(is_off(found(1.0, 0.3)), "at most a quarter");
}
