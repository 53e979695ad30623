//! Jobs of whole runs on a GPU. They are also built on machines without one, which checks their configurations.

use fsdp_nn::hf::HfModel;
use fsdp_train::Job;
use tempfile::TempDir;

use crate::support::{GPT2, LLAMA, config, job};

/// Selects the device that memory is predicted for.
const DEVICE: &str = "run.device=\"cuda\"";

/// A job and the folder of its tokens.
pub(crate) struct CardJob {
    pub(crate) job: Job<HfModel>,
    /// The overrides of the job, for messages.
    pub(crate) what: String,
    _dir: TempDir,
}

fn make(model: &str, vocab: u32, overrides: &[&str]) -> CardJob {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let overrides = [&[DEVICE], overrides].concat();
    let job = job(model, config(dir.path(), vocab, &overrides));
    CardJob { job, what: overrides.join(" "), _dir: dir }
}

/// Jobs of four ranks, for two models and each of the policies: parameter dtype, activation checkpointing, offload.
pub(crate) fn policies() -> Vec<CardJob> {
    let mut jobs = Vec::new();
    for (model, vocab, wrap) in [(LLAMA, 61, "LlamaDecoderLayer"), (GPT2, 53, "GPT2Block")] {
        for policy in [
            "fsdp.param_dtype=\"f32\"",
            "fsdp.param_dtype=\"bf16\"",
            "fsdp.activation_checkpointing=\"full\"",
            "fsdp.activation_checkpointing=\"selective\"",
            "fsdp.offload=\"cpu\"",
        ] {
            jobs.push(make(model, vocab, &[&format!("fsdp.wrap=[\"{wrap}\"]"), policy]));
        }
    }
    jobs
}

/// A job of four ranks whose loss soon is not finite.
pub(crate) fn diverging() -> CardJob {
    make(LLAMA, 61, &["train.optimizer.lr=1e30", "train.grad_clip=none"])
}

/// A job of one rank with a few mebibytes of activations.
pub(crate) fn wide() -> CardJob {
    let sizes = [("\"hidden_size\": 24", "\"hidden_size\": 256"), ("_size\": 20,", "_size\": 512,")];
    let model = sizes.iter().fold(LLAMA.to_owned(), |model, (from, to)| {
        assert!(model.contains(from), "the model has another size than {from}");
        model.replace(from, to)
    });
    let sizes = ["data.seq_len=64", "train.micro_batch_size=8", "train.global_batch_size=8", "run.ranks=1"];
    make(&model, 61, &[&["fsdp.param_dtype=\"bf16\""], &sizes[..]].concat())
}

#[test]
fn all_jobs_can_be_built_without_gpu() {
    let jobs: Vec<CardJob> = policies().into_iter().chain([diverging(), wide()]).collect();
    let ranks = jobs.iter().map(|made| made.job.plan.mesh.world());
    assert_eq!(ranks.collect::<Vec<_>>(), [vec![4; 11], vec![1]].concat());
    assert!(jobs.iter().all(|made| made.what.contains(DEVICE)));
}
