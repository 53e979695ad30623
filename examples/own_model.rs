//! A model of your own, trained and verified over 4 ranks.
//!
//! ```text
//! cargo run --release -p fsdp-train --example own_model
//! ```
//!
//! The model is a transformer whose layers compute attention and MLP side by side, from the same norm, as
//! GPT-J does. Describing it once (parameters, modules, blocks) and saying what each block computes is all there is to
//! do; sharding, schedules, backward, optimizers, exports and verification follow by themselves.

use std::error::Error;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use fsdp_comm::{ThreadOptions, Threads};
use fsdp_core::model::BlockId;
use fsdp_nn::graph::{Builder, Tensor};
use fsdp_nn::layer::{Attention, Describe, Description, Embedding, Head, LayerNorm, Linear, Rope};
use fsdp_nn::model::Architecture;
use fsdp_nn::op::Function;
use fsdp_nn::{HostMemory, HostOptions};
use fsdp_train::checkpoint::Resume;
use fsdp_train::config::Resolved;
use fsdp_train::train::{RunOptions, train};
use fsdp_train::verify::{VerifyOptions, verify};
use fsdp_train::{InitSource, Job};

/// The parts of the model. They hold ids of parameters, no values: values are sharded over ranks.
#[derive(Clone)]
struct ParallelGpt {
    description: Description,
    tokens: Embedding,
    layers: Vec<Layer>,
    norm: LayerNorm,
    head: Head,
    attention: Attention,
    rope: Rope,
}

#[derive(Clone)]
struct Layer {
    norm: LayerNorm,
    qkv: [Linear; 3],
    output: Linear,
    up: Linear,
    down: Linear,
}

impl ParallelGpt {
    fn new(vocab: usize, width: usize, layers: usize, heads: usize) -> Result<Self, fsdp_core::Error> {
        // Names become the names in checkpoints; classes are what `fsdp.wrap` asks for.
        let mut describe = Describe::new("ParallelGpt", 0.02);
        let tokens = describe.embedding("tokens", vocab, width);
        let layers = describe.module("layers", "ModuleList", |d| {
            let layer = |i: usize| d.module(&i.to_string(), "ParallelLayer", |d| Layer::describe(width, d));
            (0..layers).map(layer).collect::<Vec<_>>()
        });
        let norm = describe.layer_norm("norm", width, 1e-5);
        let head = describe.head("head", width, vocab, Some(&tokens)); // shares the table of tokens
        // Blocks run one after the other, and each may read the parameters that it lists.
        describe.block("tokens", None, &[&tokens]);
        for (i, Layer { norm, qkv: [q, k, v], output, up, down }) in layers.iter().enumerate() {
            describe.block(&format!("layers.{i}"), Some(i), &[norm, q, k, v, output, up, down]);
        }
        describe.block("head", None, &[&norm, &head]);
        let attention = Attention::new(heads, heads, width / heads);
        let rope = Rope::new(10000.0, width / heads);
        Ok(Self { description: describe.finish()?, tokens, layers, norm, head, attention, rope })
    }
}

impl Layer {
    fn describe(width: usize, d: &mut Describe) -> Self {
        Self {
            norm: d.layer_norm("norm", width, 1e-5),
            qkv: ["query", "key", "value"].map(|name| d.linear(name, width, width, false)),
            output: d.linear("output", width, width, false),
            up: d.linear("up", width, 4 * width, true),
            down: d.linear("down", 4 * width, width, true),
        }
    }
}

/// The forward computation of each block; backward follows from it.
impl Architecture for ParallelGpt {
    fn description(&self) -> &Description {
        &self.description
    }

    fn head(&self) -> Head {
        self.head
    }

    fn first(&self, b: &mut Builder<'_>) -> Result<Tensor, fsdp_core::Error> {
        b.embedding(&self.tokens)
    }

    fn middle(&self, block: BlockId, b: &mut Builder<'_>, x: Tensor) -> Result<Tensor, fsdp_core::Error> {
        let layer = &self.layers[block.0 - 1];
        let normed = b.layer_norm(x, &layer.norm)?;
        let qkv = b.linear_columns(normed, &layer.qkv)?;
        let qkv = b.rope(qkv, &self.attention, &self.rope)?;
        let mixed = b.attention(qkv, &self.attention)?;
        let attended = b.linear(mixed, &layer.output)?;
        let inner = b.linear(normed, &layer.up)?;
        let inner = b.activation(Function::GeluTanh, inner);
        let transformed = b.linear(inner, &layer.down)?;
        let sum = b.add(attended, transformed)?;
        b.add(x, sum)
    }

    fn last(&self, b: &mut Builder<'_>, x: Tensor) -> Result<Tensor, fsdp_core::Error> {
        b.layer_norm(x, &self.norm)
    }
}

/// What a run file says; `fsdp_train::config::Resolved::load` reads one from disk.
fn config(out_dir: &Path) -> Result<Resolved, Box<dyn Error>> {
    let text = format!(
        r#"
        model = {{ path = "own" }}
        data = {{ train = [{data:?}], format = "text", seq_len = 32 }}
        fsdp = {{ wrap = ["ParallelLayer"] }}
        run = {{ ranks = 4, out_dir = {out_dir:?} }}
        [train]
        steps = 30
        micro_batch_size = 2
        global_batch_size = 16
        grad_clip = 1.0
        optimizer = {{ name = "adamw", lr = 1e-2 }}
        "#,
        data = concat!(env!("CARGO_MANIFEST_DIR"), "/src"),
    );
    Ok(Resolved::parse(&text, "own_model", &[])?.config)
}

fn main() -> Result<(), Box<dyn Error>> {
    let out_dir = tempfile::tempdir()?;
    let model = ParallelGpt::new(256, 32, 2, 4)?;
    let init = InitSource::Random { seed: 0, init: Arc::new(model.description().init.clone()) };
    let job = Job::new(config(out_dir.path())?, model, init)?;
    // Ranks are threads here; the number of ranks is that of the job.
    let ranks =
        Threads::new(ThreadOptions::default(), |_, _| Ok(Arc::new(HostMemory::new(HostOptions::default())?)));

    let report = verify(&job, &ranks, &VerifyOptions::new(&[1, 2, 4], 3))?;
    for world in &report.worlds {
        println!("world {}: {}, {} broken", world.world, world.promise, world.failures.len());
    }
    assert!(report.holds(), "sharded training equals unsharded training, bit for bit");

    let options = RunOptions {
        reporter: &(),
        stop: &AtomicBool::new(false),
        resume: Resume::Fresh,
        overwrite: false,
        observer: &|_| Box::new(()),
        config_json: None,
        flops: None,
        process_table: None,
    };
    let summary = train(&job, &ranks, &options)?;
    println!("loss {:.3} first, {:.3} last", summary.first_loss, summary.last_loss);
    assert!(summary.last_loss < 0.8 * summary.first_loss, "the model learns");
    Ok(())
}

/// Verification of a model of your own belongs into its tests.
#[test]
fn it_is_verified_and_trained() {
    main().unwrap();
}
