//! A run: its model, schedule and work, and what was measured.

use std::sync::Arc;

use fsdp_core::layout::Layout;
use fsdp_core::plan::Plan;
use fsdp_core::schedule::Policy;
use fsdp_core::update::{RankTables, RuleState};
use fsdp_core::wrap::{self, WrapPolicy};
use fsdp_core::{Error, Mesh};
use fsdp_nn::HostMemory;
use fsdp_nn::backend::HeadChunks;
use fsdp_nn::footprint::RunShape;
use fsdp_nn::listing::listings;
use fsdp_nn::model::unsharded::BlockCall;
use fsdp_nn::model::{
    Architecture, Decoder, DecoderConfig, LayerConfig, Names, NormKind, RopeConfig, RopeScaling,
};
use fsdp_nn::op::{Function, LossTerms};
use fsdp_nn::update::AdamW;
use regex::Regex;

use super::recipe::{self, INCOMPLETE};
use super::row::Row;
use crate::cluster::{Cluster, ClusterError};
use crate::constants::Constants;
use crate::forecast::{Forecast, Planned, forecast};
use crate::software::Software;
use crate::work::{Calls, StepWork};

/// Models without a gate in their MLPs, by name.
const UNGATED: &str = r"^(MPT|GPT|GPT3|minGPT|modded|nanochat|MaxText-22B|MaxText-52B)";
/// Models whose head is their embedding.
const TIED: &str = r"^(MPT|GPT|nanotron-(1|3))";

/// What no model has more of: so many that all products of them are numbers of 64 bits.
const LAYERS_MAX: usize = 4096;
const HEADS_MAX: usize = 4096;
const WIDTH_MAX: usize = 1 << 17;
const INNER_MAX: usize = 1 << 19;
const VOCAB_MAX: usize = 1 << 20;
const SEQ_MAX: usize = 1 << 20;

/// The most devices of a run, and tokens of a micro-batch.
const DEVICES_MAX: f64 = (1 << 20) as f64;
const TOKENS_MAX: f64 = (1 << 22) as f64;

/// The most micro-batches that a schedule is compiled for.
const ROUNDS_MAX: usize = 256;

/// A run inside of the model.
#[derive(Clone, Debug)]
pub struct Run {
    /// As it is written.
    pub row: Row,
    /// Its hardware.
    pub cluster: Cluster,
    /// Its software.
    pub software: Software,
    mesh: Mesh,
    policy: Policy,
    sizes: Sizes,
    micro_batch: usize,
    /// Micro-batches of a step on a rank, as published: not always a whole number.
    accumulated: f64,
}

#[derive(Clone, Copy, Debug)]
struct Sizes {
    layers: usize,
    hidden: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    ffn: usize,
    vocab: usize,
    seq: usize,
    is_gated: bool,
    is_tied: bool,
}

/// A run whose schedule is compiled.
#[derive(Clone, Debug)]
pub struct Prepared {
    /// The run.
    pub run: Run,
    /// Its schedule.
    pub plan: Plan,
    /// What that asks for.
    pub work: StepWork,
}

fn is(pattern: &str, text: &str) -> bool {
    Regex::new(pattern).expect("the pattern is constant").is_match(text)
}

impl Sizes {
    fn of(row: &Row) -> Option<Self> {
        let size = |column: &str| row.number(column).map(|number| number as usize);
        let (hidden, heads, model) = (size("hidden")?, size("heads")?, row.text("model"));
        let head_dim = match () {
            () if model.contains("head_dim128") => 128,
            () if is(r"MaxText-(22|52)B", model) => 256,
            () => hidden / heads,
        };
        Some(Self {
            layers: size("layers")?,
            hidden,
            heads,
            kv_heads: size("kv_heads").unwrap_or(heads),
            head_dim,
            ffn: size("ffn")?,
            vocab: size("vocab")?,
            seq: size("seq")?,
            is_gated: !is(UNGATED, model),
            is_tied: is(TIED, model),
        })
    }

    /// What is wrong with the sizes, if there can be no such model.
    fn contradiction(&self) -> Option<String> {
        let &Self { layers, hidden, heads, kv_heads, head_dim, ffn, vocab, seq, .. } = self;
        let sizes = [
            ("layers", layers, LAYERS_MAX),
            ("hidden", hidden, WIDTH_MAX),
            ("heads", heads, HEADS_MAX),
            ("ffn", ffn, INNER_MAX),
            ("vocab", vocab, VOCAB_MAX),
            ("seq", seq, SEQ_MAX),
        ];
        if let Some((name, size, _)) = sizes.iter().find(|(_, size, most)| size > most) {
            return Some(format!("{name} = {size}, more than any model has"));
        }
        if !heads.is_multiple_of(kv_heads) {
            return Some(format!("{heads} heads do not share {kv_heads} key/value heads evenly"));
        }
        let is_odd = head_dim == 0 || self.is_gated && !head_dim.is_multiple_of(2);
        is_odd.then(|| format!("heads of {head_dim} elements, which can not rotate"))
    }

    /// A model of these sizes: with RMS norms, rotary positions and a gate, or with layer norms and none of these.
    fn config(&self) -> DecoderConfig {
        let names =
            if self.is_gated { Names::LLAMA } else { Names { gate_up: &["up_proj"], ..Names::LLAMA } };
        let rope = self
            .is_gated
            .then(|| Arc::new(RopeConfig { theta: 10_000.0, partial: 1.0, scaling: RopeScaling::Default }));
        let layer = LayerConfig { rope, window: None, mixture: None };
        DecoderConfig {
            names,
            vocab_size: self.vocab,
            embedding_scale: 1.0,
            embedding_dropout: 0.0,
            hidden_size: self.hidden,
            intermediate_size: self.ffn,
            num_attention_heads: self.heads,
            num_key_value_heads: self.kv_heads,
            head_dim: self.head_dim,
            layers: vec![layer; self.layers],
            is_parallel: false,
            qk_norm: None,
            qkv_by_head: false,
            attention_scale: None,
            attention_softcap: None,
            logit_softcap: None,
            is_gated: self.is_gated,
            activation: if self.is_gated { Function::Silu } else { Function::GeluTanh },
            norm: if self.is_gated { NormKind::Rms } else { NormKind::Layer },
            norm_eps: 1e-5,
            tie_word_embeddings: self.is_tied,
            qkv_bias: false,
            output_bias: false,
            mlp_bias: false,
            attention_dropout: 0.0,
            residual_dropout: 0.0,
            router_loss: 0.0,
            initializer_range: 0.02,
            max_position_embeddings: self.seq,
        }
    }

    /// Parameters of products, embeddings and the head.
    fn parameters(&self) -> f64 {
        let (hidden, head_dim) = (self.hidden as f64, self.head_dim as f64);
        let attention = hidden * head_dim * (2 * self.heads + 2 * self.kv_heads) as f64;
        let mlp = if self.is_gated { 3.0 } else { 2.0 } * hidden * self.ffn as f64;
        let tables = if self.is_tied { 1.0 } else { 2.0 };
        self.layers as f64 * (attention + mlp) + tables * self.vocab as f64 * hidden
    }
}

impl Run {
    /// What a row says.
    ///
    /// # Errors
    /// Why it is outside of the model.
    pub fn of(row: &Row) -> Result<Self, String> {
        let incomplete = || INCOMPLETE.to_owned();
        let sizes = Sizes::of(row).ok_or_else(incomplete)?;
        let (Some(world), Some(micro)) = (row.number("devices"), row.number("micro_batch")) else {
            return Err(incomplete());
        };
        if let Some(reason) = recipe::outside(row) {
            return Err(reason.to_owned());
        }
        if micro.fract() != 0.0 {
            return Err(format!("a micro-batch of {micro} samples"));
        }
        if let Some(reason) = sizes.contradiction() {
            return Err(reason);
        }
        if world > DEVICES_MAX || micro * sizes.seq as f64 > TOKENS_MAX {
            return Err(format!("{world} devices with {micro} samples each, more than any run has"));
        }
        let cluster = recipe::cluster(row).expect("it is inside");
        let world = world as usize;
        let mesh = recipe::mesh(row, world, &cluster);
        let mesh = mesh.ok_or_else(|| format!("a mesh that {world} devices can not have"))?;
        let tokens = micro * sizes.seq as f64 * world as f64;
        let accumulated = row.number("global_batch_tokens").map_or(1.0, |global| (global / tokens).max(1.0));
        Ok(Self {
            software: recipe::software(row, mesh, &cluster, sizes.is_gated),
            policy: recipe::policy(row, mesh),
            row: row.clone(),
            cluster,
            mesh,
            sizes,
            micro_batch: micro as usize,
            accumulated,
        })
    }

    /// Compiles its schedule.
    ///
    /// # Errors
    /// Why our schedules can not be those of the run.
    pub fn prepare(self) -> Result<Prepared, String> {
        let (plan, work) = self.compiled().map_err(|error| error.to_string())?;
        Ok(Prepared { run: self, plan, work })
    }

    fn compiled(&self) -> Result<(Plan, StepWork), Error> {
        let architecture = Decoder::new(&self.sizes.config())?;
        let spec = architecture.description().spec.clone();
        let units = wrap::units(&spec, &WrapPolicy::Classes(vec!["LlamaDecoderLayer".to_owned()]))?;
        let policy = self.policy;
        let layout = Layout::new(&spec, &units, self.mesh.shards(), policy.param_dtype);
        let rule = AdamW::default();
        let decl = rule.declare(policy.param_dtype.master());
        let plan = Plan::unproven(spec, layout, self.mesh, policy, &decl, self.rounds())?;
        let shape = RunShape {
            samples: self.micro_batch,
            seq: self.sizes.seq,
            dtype: policy.param_dtype,
            gradient_dtype: policy.reduce_dtype,
            head_chunks: HeadChunks::Large,
            terms: LossTerms::default(),
            packed: false,
        };
        let calls: Vec<BlockCall> = plan.step.calls().into_iter().filter_map(BlockCall::of).collect();
        let listings = listings(&architecture, &plan.spec, shape, &calls)?;
        let listed: Vec<_> = calls.into_iter().zip(listings).collect();
        let tables = RankTables::new::<HostMemory>(&plan, &rule, 0);
        let work = StepWork::new(&plan, Arc::new(Calls::new(shape, &listed)), &tables);
        Ok((plan, work))
    }

    /// Micro-batches of its schedule; of more the rest are as long as these.
    fn rounds(&self) -> usize {
        (self.accumulated.round() as usize).clamp(1, ROUNDS_MAX)
    }

    /// Tokens of a step on a device.
    fn tokens(&self) -> f64 {
        self.accumulated * (self.micro_batch * self.sizes.seq) as f64
    }

    /// Seconds of a step that were measured, if the source says so in any way: as time, as tokens, or as operations by the
    /// formula that it says it uses.
    pub fn measured(&self) -> Option<f64> {
        let (row, source) = (&self.row, self.row.text("source"));
        if let Some(time) = row.number("step_time_ms") {
            return Some(time / 1e3);
        }
        if let Some(tokens) = row.number("tokens_per_s_per_device") {
            return Some(self.tokens() / tokens);
        }
        // That counts recomputation, and is a lower bound.
        if source.contains("hardware utilisation") {
            return None;
        }
        let sizes = &self.sizes;
        let parameters = row.number("params").unwrap_or_else(|| sizes.parameters());
        let is_maxtext = source.to_lowercase().contains("maxtext") && !sizes.is_tied;
        let embedding = if is_maxtext { (sizes.vocab * sizes.hidden) as f64 } else { 0.0 };
        let scores = if source.contains("stas00") { 6.0 } else { 12.0 };
        let attention = scores * (sizes.layers * sizes.heads * sizes.head_dim * sizes.seq) as f64;
        let flops = 6.0 * (parameters - embedding) + attention;
        row.number("tflops_per_device").map(|speed| self.tokens() * flops / (speed * 1e12))
    }
}

impl Prepared {
    /// What is predicted of it.
    ///
    /// # Errors
    /// [`ClusterError::NoPeak`].
    pub fn forecast(&self, constants: &Constants) -> Result<Forecast, ClusterError> {
        let Self { run, plan, work } = self;
        forecast(&Planned {
            plan,
            work,
            cluster: &run.cluster,
            software: run.software,
            constants,
            transport: "nccl",
        })
    }

    /// Seconds of a step that are predicted.
    ///
    /// # Errors
    /// [`ClusterError::NoPeak`].
    pub fn seconds(&self, constants: &Constants) -> Result<f64, ClusterError> {
        let forecast = self.forecast(constants)?;
        Ok(forecast.seconds * self.run.accumulated / self.run.rounds() as f64)
    }
}
