//! Evaluation alone: bitwise equal to the evaluation in training, with memory as predicted.

use std::path::Path;
use std::sync::Arc;

use fsdp_config::Resolved;
use fsdp_core::Rank;
use fsdp_core::memory::Category;
use fsdp_data::Watch;
use fsdp_nn::model::{Mlp, MlpConfig};
use fsdp_nn::{HostMemory, HostOptions};
use fsdp_sim::{ThreadOptions, Threads};

use super::*;
use crate::InitSource;

const TOKENS: u16 = 9;

/// The configuration, model and weights for `ranks` ranks, with these keys of `fsdp`.
fn parts(dir: &Path, fsdp: &str, ranks: usize) -> (Resolved, Mlp, InitSource) {
    let data = dir.join("tokens.bin");
    let tokens = (0..200).flat_map(|i: u16| (i * i % TOKENS).to_le_bytes());
    std::fs::write(&data, tokens.collect::<Vec<u8>>()).unwrap();
    let text = format!(
        "model = {{ path = 'unused' }}\n\
         data = {{ train = ['{0}'], eval = ['{0}'], format = 'tokens-u16', seq_len = 3 }}\n\
         train = {{ steps = 4, micro_batch_size = 1, global_batch_size = 8 }}\n\
         fsdp = {{ wrap = ['MlpLayer'], {fsdp} }}\n\
         checkpoint = {{ every = 2 }}\n\
         run = {{ ranks = {ranks}, out_dir = 'unused' }}",
        data.display()
    );
    let widths = vec![8, 16, 8];
    let sizes = MlpConfig { vocab: TOKENS.into(), widths, bias: true, tied: false, std: 0.2 };
    let model = Mlp::new(&sizes).unwrap();
    let init = InitSource::Random { seed: 3, init: Arc::new(model.description().init.clone()) };
    (Resolved::parse(&text, "test", &[]).unwrap().config, model, init)
}

/// Ranks with separate storage, so that each counts all that it holds.
fn launcher() -> Threads<HostMemory> {
    Threads::new(ThreadOptions { share_unsharded: false, ..ThreadOptions::default() }, |_, _| {
        let options = HostOptions { poison: true, resident: true, ..HostOptions::default() };
        Ok(Arc::new(HostMemory::new(options)?))
    })
}

#[test]
fn every_policy_matches_training_bits_and_predicted_memory() {
    let cases = [
        ("mesh = { replicate = 1 }", 1),
        ("mesh = { replicate = 1 }", 4),
        ("mesh = { replicate = 2 }", 4),
        ("reshard_after_forward = false", 2),
        ("reshard_after_forward = 2", 4),
        ("offload = 'cpu'", 4),
        ("param_dtype = 'bf16', forward_prefetch = 3", 2),
        ("activation_checkpointing = 'full', accumulation = 'unsharded'", 2),
        ("frozen = ['embed']", 2),
    ];
    for (fsdp, ranks) in cases {
        let dir = tempfile::tempdir().unwrap();
        let (config, model, init) = parts(dir.path(), fsdp, ranks);
        let trained = Job::new(config.clone(), model.clone(), init.clone()).unwrap();
        let in_training = launcher().launch(ranks, &|seat: Seat<HostMemory>| {
            let mut trainer = RankTrainer::new(&trained, seat)?;
            trainer.evaluate(0, &AtomicBool::new(false), &mut ProgramOrder, &mut ())
        });
        let expected = in_training.unwrap().remove(0).unwrap();
        let job = Job::to_evaluate(config, model, init, &Watch::NONE).unwrap();
        let found = evaluate(&job, &launcher(), None).unwrap();
        assert_eq!(found.evaluations, expected, "{fsdp}, {ranks} ranks");
        for (rank, usage) in found.usage.iter().enumerate() {
            let predicted = job.predict::<HostMemory>(Rank(rank)).unwrap();
            for (place, counted, predicted) in
                [("device", usage.device, predicted.device), ("host", usage.host, predicted.host)]
            {
                for category in Category::ALL {
                    let (counted, predicted) = (counted.peak(category), predicted.peak(category));
                    assert_eq!(counted, predicted, "{fsdp}, rank {rank}, {} on {place}", category.name());
                }
                assert_eq!(
                    counted.total_peak_bytes, predicted.total_peak_bytes,
                    "{fsdp}, rank {rank}, {place}"
                );
                for unused in [
                    Category::GradientSlot,
                    Category::ShardedGradient,
                    Category::Accumulator,
                    Category::OptimizerState,
                ] {
                    assert_eq!(counted.peak(unused), 0, "{fsdp}: {} on {place}", unused.name());
                }
            }
        }
    }
}

#[test]
fn non_finite_weights_are_reported_as_cause() {
    let dir = tempfile::tempdir().unwrap();
    let (config, model, _) = parts(dir.path(), "mesh = { replicate = 1 }", 2);
    let init = model.description().init.iter().map(|_| fsdp_nn::Init::Normal { std: f64::INFINITY });
    let init = InitSource::Random { seed: 0, init: Arc::new(init.collect()) };
    let job = Job::to_evaluate(config, model, init, &Watch::NONE).unwrap();
    let error = evaluate(&job, &launcher(), None).unwrap_err();
    assert_eq!(error.kind(), fsdp_core::FailureKind::Permanent);
    assert!(error.to_string().contains("weights contain values that are not finite"), "{error}");
}
