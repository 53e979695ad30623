//! The models whose operations are timed: both kinds of layers, with sizes spaced about evenly on a logarithmic scale.
//!
//! They are built from the text that a user would write, so that every point is from an ordinary run.

use fsdp_config::Device;
use fsdp_core::DType;
use fsdp_train::Job;
use serde_json::json;

use crate::bench::tokens::Tokens;
use crate::error::CliError;
use crate::run_setup::Model;

/// The architecture of a model's layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// RMS norms, rotary embeddings, gated activations, no biases.
    Llama,
    /// Layer norms, biases, `gelu`, dropout, an embedding tied to the head.
    Gpt2,
}

/// A model and its work per step.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    kind: Kind,
    hidden: usize,
    heads: usize,
    kv_heads: usize,
    ffn: usize,
    vocab: usize,
    seq: usize,
    /// Samples per micro-batch.
    samples: usize,
    /// Micro-batches per rank and step.
    rounds: usize,
    optimizer: &'static str,
    checkpointing: &'static str,
}

pub(super) const fn llama(
    [hidden, heads, kv_heads, ffn]: [usize; 4],
    [vocab, seq, samples, rounds]: [usize; 4],
) -> Shape {
    let (kind, optimizer, checkpointing) = (Kind::Llama, "adamw", "none");
    Shape { kind, hidden, heads, kv_heads, ffn, vocab, seq, samples, rounds, optimizer, checkpointing }
}

const fn gpt2([hidden, heads]: [usize; 2], sizes: [usize; 4]) -> Shape {
    Shape { kind: Kind::Gpt2, ..llama([hidden, heads, heads, 4 * hidden], sizes) }
}

/// Tokens of a sample of the models that measure an update rule; no other model has so few.
const OPTIMIZER_SEQ: usize = 32;

/// A model that measures an update rule.
const fn with_optimizer(optimizer: &'static str, shape: Shape) -> Shape {
    Shape { optimizer, ..shape }
}

/// The models for a device, from small to large.
pub(super) const fn shapes(device: Device) -> &'static [Shape; 18] {
    match device {
        Device::Cuda => &FOR_GPUS,
        _ => &FOR_PROCESSORS,
    }
}

/// A GPU is idle most of the time in models that are large for a processor.
const FOR_GPUS: [Shape; 18] = [
    llama([256, 4, 2, 704], [8000, 256, 2, 2]),
    gpt2([384, 6], [16_000, 256, 6, 1]),
    with_optimizer("sgd", GPU_OPTIMIZER_SHAPE),
    with_optimizer("lion", GPU_OPTIMIZER_SHAPE),
    with_optimizer("adafactor", GPU_OPTIMIZER_SHAPE),
    with_optimizer("adamw8bit", GPU_OPTIMIZER_SHAPE),
    llama([512, 8, 4, 1408], [32_000, 512, 4, 2]),
    Shape { checkpointing: "full", ..llama([768, 12, 12, 2048], [32_000, 1024, 2, 1]) },
    gpt2([768, 12], [50_304, 1024, 32, 1]),
    llama([640, 10, 10, 1728], [4000, 128, 24, 1]),
    llama([1024, 16, 8, 2816], [16_000, 2048, 2, 1]),
    llama([1280, 10, 10, 3456], [8000, 512, 12, 1]),
    gpt2([1600, 25], [8000, 512, 8, 1]),
    llama([1536, 12, 4, 4096], [24_000, 384, 16, 2]),
    llama([448, 7, 7, 1216], [128_000, 1024, 8, 1]),
    llama([2048, 32, 8, 8192], [16_000, 2048, 8, 1]),
    llama([3072, 24, 24, 8192], [4000, 2048, 4, 1]),
    llama([4096, 32, 8, 11_008], [4000, 1024, 6, 1]),
];
const GPU_OPTIMIZER_SHAPE: Shape = llama([768, 12, 12, 2048], [8000, OPTIMIZER_SEQ, 1, 1]);

const FOR_PROCESSORS: [Shape; 18] = [
    llama([64, 2, 1, 176], [1000, 96, 2, 2]),
    gpt2([96, 3], [2000, 64, 6, 1]),
    with_optimizer("sgd", PROCESSOR_OPTIMIZER_SHAPE),
    with_optimizer("lion", PROCESSOR_OPTIMIZER_SHAPE),
    with_optimizer("adafactor", PROCESSOR_OPTIMIZER_SHAPE),
    with_optimizer("adamw8bit", PROCESSOR_OPTIMIZER_SHAPE),
    llama([144, 4, 2, 400], [5000, 160, 3, 2]),
    Shape { checkpointing: "full", ..llama([112, 4, 4, 300], [3000, 320, 1, 1]) },
    gpt2([208, 4], [6000, 224, 2, 1]),
    llama([200, 5, 5, 540], [12_000, 384, 1, 1]),
    llama([224, 7, 7, 608], [2500, 128, 12, 1]),
    llama([288, 6, 2, 768], [3000, 80, 4, 2]),
    gpt2([352, 11], [12_000, 96, 5, 1]),
    llama([416, 8, 8, 1120], [24_000, 48, 3, 1]),
    llama([448, 7, 7, 1216], [4500, 640, 1, 1]),
    llama([320, 5, 5, 864], [6000, 256, 10, 1]),
    llama([608, 8, 4, 1632], [9000, 176, 4, 1]),
    llama([832, 13, 13, 2240], [16_000, 128, 3, 1]),
];
const PROCESSOR_OPTIMIZER_SHAPE: Shape = llama([160, 4, 4, 432], [3000, OPTIMIZER_SEQ, 1, 1]);

/// Indices of the models whose whole steps are timed between processes, and with more ranks than threads.
pub(super) const WHOLE_STEP_MODELS: [usize; 6] = [0, 6, 8, 9, 12, 14];

impl Shape {
    /// The job that trains the model with values of `dtype` on `ranks` ranks.
    ///
    /// # Errors
    /// [`CliError`]: the tokens cannot be written.
    pub(super) fn job(&self, device: Device, dtype: DType, ranks: usize) -> Result<Job<Model>, CliError> {
        let tokens = Tokens::of_step("--ranks", self.samples * self.rounds * ranks, self.seq)?;
        let (model, run) = (self.config(device).to_string(), self.run(&tokens, device, dtype, ranks));
        tokens.job("calibrate", self.vocab, &model, &run)
    }

    fn config(&self, device: Device) -> serde_json::Value {
        // On GPUs, attention with dropout is not the kernel that large models run.
        let attention_dropout = if device == Device::Cuda { 0.0 } else { 0.1 };
        let Self { hidden, heads, kv_heads, ffn, vocab, seq, .. } = *self;
        match self.kind {
            Kind::Llama => json!({
                "model_type": "llama", "vocab_size": vocab, "hidden_size": hidden, "intermediate_size": ffn,
                "num_hidden_layers": 2, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
                "max_position_embeddings": seq, "rms_norm_eps": 1e-5, "tie_word_embeddings": false,
            }),
            Kind::Gpt2 => json!({
                "model_type": "gpt2", "vocab_size": vocab, "n_embd": hidden, "n_layer": 2, "n_head": heads,
                "n_positions": seq, "embd_pdrop": 0.1, "attn_pdrop": attention_dropout,
                "resid_pdrop": 0.1,
            }),
        }
    }

    fn run(&self, tokens: &Tokens, device: Device, dtype: DType, ranks: usize) -> String {
        let Self { seq, samples, rounds, optimizer, checkpointing, .. } = self;
        let wrap = if self.kind == Kind::Llama { "LlamaDecoderLayer" } else { "GPT2Block" };
        format!(
            r#"
[model]
path = "made by calibrate"
[data]
train = [{tokens}]
format = "tokens-u32"
seq_len = {seq}
[train]
steps = 100
micro_batch_size = {samples}
global_batch_size = {global}
grad_clip = 1.0
optimizer = {{ name = "{optimizer}"{lr} }}
[fsdp]
wrap = ["{wrap}"]
param_dtype = "{dtype}"
activation_checkpointing = "{checkpointing}"
[run]
device = "{device}"
ranks = {ranks}
out_dir = "unused"
"#,
            tokens = tokens.toml(),
            global = samples * rounds * ranks,
            device = device.name(),
            // Adafactor has its own learning rate.
            lr = if *optimizer == "adafactor" { "" } else { ", lr = 1e-3" },
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_model_builds_valid_job() {
        for shape in [FOR_GPUS, FOR_PROCESSORS].concat() {
            let job = shape.job(Device::Cpu, DType::F32, 2).unwrap();
            assert_eq!(job.plan.step.rounds, shape.rounds, "{shape:?}");
        }
    }

    #[test]
    fn models_have_distinct_matrix_products() {
        for shapes in [FOR_GPUS, FOR_PROCESSORS] {
            let without_rules = shapes.iter().filter(|shape| shape.seq != OPTIMIZER_SEQ);
            let mut all: Vec<(usize, usize)> =
                without_rules.map(|shape| (shape.hidden, shape.seq * shape.samples)).collect();
            let count = all.len();
            all.sort_unstable();
            all.dedup();
            assert_eq!(all.len(), count);
        }
    }
}
