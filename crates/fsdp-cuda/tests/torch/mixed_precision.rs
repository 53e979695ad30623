//! Compares the loss curve of 16-bit parameters and arithmetic with f32 masters to that of plain f32.

use fsdp_comm::launch::{Launcher, Seat};
use fsdp_core::engine::ProgramOrder;
use fsdp_cuda::torch::Kernels;
use fsdp_train::{RankTrainer, TrainError};

use crate::ranks::{DEVICE, RankMemory, threads};
use crate::support::{config, job};

const STEPS: u64 = 200;
/// Number of steps whose mean loss is one point of the curve.
const WINDOW: usize = 20;
/// Maximum relative difference of a point from the f32 curve. A bf16 activation is rounded by up to 2^-8 after every
/// operation; over some dozens of operations, errors of either sign add up to a few times that.
const BAND: f64 = 0.05;

const MODEL: &str = r#"{
    "model_type": "llama", "vocab_size": 61, "hidden_size": 48, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "initializer_range": 0.02, "tie_word_embeddings": true, "hidden_act": "silu"
}"#;

fn losses(param: &str, reduce: &str) -> Vec<f64> {
    // With this scale no step overflows, so all curves have the same number of updates.
    let scale = (param == "f16").then_some("train.loss_scale.init=256");
    let dir = tempfile::tempdir().expect("a temporary folder");
    let (param, reduce) =
        (format!("fsdp.param_dtype=\"{param}\""), format!("fsdp.reduce_dtype=\"{reduce}\""));
    let overrides = [
        DEVICE,
        "data.seq_len=24",
        "train.global_batch_size=8",
        "train.steps=200",
        "fsdp.wrap=[\"LlamaDecoderLayer\"]",
        "run.ranks=2",
        &param,
        &reduce,
    ];
    let overrides: Vec<&str> = overrides.into_iter().chain(scale).collect();
    let job = job(MODEL, config(dir.path(), 61, &overrides));
    let ranks = threads(Kernels::Fused).launch(2, &|seat: Seat<RankMemory>| {
        let mut trainer = RankTrainer::new(&job, seat)?;
        let mut losses = Vec::new();
        for step in 0..STEPS {
            losses.push(trainer.step(step, false, &mut ProgramOrder, &mut ())?.loss);
        }
        Ok::<_, TrainError>(losses)
    });
    let mut ranks = ranks.unwrap_or_else(|failure| panic!("{failure:?}"));
    ranks.swap_remove(0)
}

fn curve(losses: &[f64]) -> Vec<f64> {
    losses.chunks(WINDOW).map(|window| window.iter().sum::<f64>() / window.len() as f64).collect()
}

#[test]
fn losses_in_16_bits_stay_within_band_of_f32() {
    let full = curve(&losses("f32", "f32"));
    assert!(full[full.len() - 1] < 0.75 * full[0], "it learns: {full:.3?}");
    for (param, reduce) in [("bf16", "f32"), ("bf16", "bf16"), ("f16", "f32")] {
        let half = curve(&losses(param, reduce));
        let off: Vec<f64> = full.iter().zip(&half).map(|(full, half)| (half - full).abs() / full).collect();
        let largest = off.iter().copied().fold(0.0, f64::max);
        println!(
            "f32 {full:.4?}\n{param}, reduced in {reduce} {half:.4?}\nlargest difference {largest:.4}, band {BAND}"
        );
        assert!(largest <= BAND, "{param}, reduced in {reduce}: {off:.4?}");
    }
}
