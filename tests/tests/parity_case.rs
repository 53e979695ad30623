//! Random runs: a model, a world size and every policy, drawn so that the combination is valid.
//!
//! A case is stored as a user would write it: the sizes of the model, and the overrides of `--set`. A failure prints
//! them. Every choice is drawn from a list whose first entry is the simplest, so that shrinking ends at a case that
//! differs from the defaults only where it must.

use std::fmt;

use fsdp_comm::launch::Launcher;
use fsdp_core::engine::{IssueOrder, ProgramOrder};
use fsdp_nn::HostMemory;
use fsdp_nn::hf::HfConfig;
use fsdp_nn::model::{Architecture, Mlp, MlpConfig};
use fsdp_sim::SeededOrder;
use fsdp_train::Job;
use fsdp_train::verify::{VerifyOptions, VerifyReport, verify};
use proptest::prelude::*;
use proptest::sample::select;

use crate::support::{config, job_of, options, threads_with};

/// One run to verify.
#[derive(Clone)]
pub(crate) struct Case {
    model: Model,
    world: usize,
    overrides: Vec<String>,
    /// Seed of the issue order of queues; `None` is program order.
    seed: Option<u64>,
    /// Whether ranks share the storage of unsharded units.
    shared: bool,
}

#[derive(Clone, Debug)]
enum Model {
    Mlp(MlpConfig),
    HuggingFace(String),
}

impl fmt::Debug for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.model {
            Model::Mlp(config) => writeln!(f, "{config:?}")?,
            Model::HuggingFace(config) => writeln!(f, "{config}")?,
        }
        for setting in &self.overrides {
            writeln!(f, "  --set '{setting}'")?;
        }
        write!(f, "  order seed {:?}, shared storage: {}", self.seed, self.shared)
    }
}

impl Case {
    /// Verifies the case with ranks as threads; returns a report without broken promises, or a text with the failure.
    pub(crate) fn verify(&self, steps: u64) -> Result<VerifyReport, String> {
        let mut options = options();
        options.share_unsharded = self.shared;
        self.verify_on(&threads_with(options), steps)
    }

    /// Like [`Case::verify`], with ranks of the given launcher.
    pub(crate) fn verify_on(
        &self,
        launcher: &impl Launcher<Memory = HostMemory>,
        steps: u64,
    ) -> Result<VerifyReport, String> {
        let dir = tempfile::tempdir().map_err(|error| error.to_string())?;
        let overrides: Vec<&str> = self.overrides.iter().map(String::as_str).collect();
        let config = |vocab: usize| config(dir.path(), vocab as u32, &overrides);
        match &self.model {
            Model::Mlp(sizes) => {
                self.run(&job_of(Mlp::new(sizes).unwrap(), config(sizes.vocab)), launcher, steps)
            }
            Model::HuggingFace(text) => {
                let model = HfConfig::parse(text).unwrap().build().unwrap();
                let vocab = model.head().vocab;
                self.run(&job_of(model, config(vocab)), launcher, steps)
            }
        }
    }

    fn run<A: Architecture + Clone>(
        &self,
        job: &Job<A>,
        launcher: &impl Launcher<Memory = HostMemory>,
        steps: u64,
    ) -> Result<VerifyReport, String> {
        let order = |rank: fsdp_core::Rank| -> Box<dyn IssueOrder> {
            match self.seed {
                Some(seed) => Box::new(SeededOrder::for_rank(seed, rank.0)),
                None => Box::new(ProgramOrder),
            }
        };
        let options = VerifyOptions { order: &order, ..VerifyOptions::new(&[self.world], steps) };
        let report = verify(job, launcher, &options).map_err(|error| error.to_string())?;
        match report.worlds.first() {
            Some(world) if world.failures.is_empty() => Ok(report),
            Some(world) => Err(format!("{}: {:#?}", world.promise, world.failures)),
            None => Err(format!("skipped: {:?}", report.skipped)),
        }
    }
}

/// A model with its choices for `fsdp.wrap` (classes) and `fsdp.frozen` (patterns).
#[derive(Clone, Debug)]
struct Family {
    model: Model,
    wraps: &'static [&'static str],
    frozen: &'static [&'static str],
    /// Whether samples can be cut into two chunks.
    can_be_cut: bool,
    /// Whether it has four experts.
    has_experts: bool,
}

fn mlp() -> impl Strategy<Value = Family> {
    let widths = prop::collection::vec(select(vec![1usize, 2, 3, 5, 7, 11]), 1..4);
    (widths, select(vec![2usize, 3, 13]), any::<bool>(), any::<bool>()).prop_map(
        |(mut widths, vocab, bias, tied)| {
            if tied {
                widths.push(widths[0]);
            }
            let layered = widths.len() > 1;
            let config = MlpConfig { vocab, widths, bias, tied, std: 0.5 };
            let wraps: &[_] = match (layered, tied) {
                (false, true) => &[r#"wrap=[]"#],
                (false, false) => &[r#"wrap=[]"#, r#"wrap=["Embedding"]"#, "min_num_params=4"],
                (true, true) => &[r#"wrap=[]"#, r#"wrap=["MlpLayer"]"#],
                (true, false) => &[
                    r#"wrap=[]"#,
                    r#"wrap=["MlpLayer"]"#,
                    r#"wrap=["Embedding","MlpLayer"]"#,
                    "min_num_params=1",
                    "min_num_params=30",
                ],
            };
            let frozen: &[_] = if layered { &["", "layers.0", "embed"] } else { &[""] };
            Family { model: Model::Mlp(config), wraps, frozen, can_be_cut: true, has_experts: false }
        },
    )
}

fn llama() -> impl Strategy<Value = Family> {
    let heads = select(vec![(1, 1, 2), (2, 1, 2), (2, 2, 6), (3, 1, 4)]);
    (heads, 1usize..4, select(vec![3usize, 7, 12]), select(vec![5usize, 17]), any::<bool>()).prop_map(
        |((heads, kv_heads, head_dim), layers, inner, vocab, tied)| {
            let model = format!(
                r#"{{"model_type": "llama", "vocab_size": {vocab}, "hidden_size": {}, "intermediate_size": {inner},
                "num_hidden_layers": {layers}, "num_attention_heads": {heads}, "num_key_value_heads": {kv_heads},
                "head_dim": {head_dim}, "max_position_embeddings": 16, "initializer_range": 0.3,
                "tie_word_embeddings": {tied}, "hidden_act": "silu", "rms_norm_eps": 1e-5}}"#,
                heads * 2
            );
            let wraps: &[_] = if tied { &LLAMA_WRAPS[..4] } else { &LLAMA_WRAPS };
            let can_be_cut = kv_heads % 2 == 0;
            Family { model: Model::HuggingFace(model), wraps, frozen: LLAMA_FROZEN, can_be_cut, has_experts: false }
        },
    )
}

const LLAMA_WRAPS: [&str; 8] = [
    r#"wrap=["LlamaDecoderLayer"]"#,
    r#"wrap=[]"#,
    r#"wrap=["LlamaDecoderLayer","LlamaMLP"]"#,
    r#"wrap=["LlamaMLP"]"#,
    r#"wrap=["LlamaDecoderLayer","LlamaAttention","LlamaMLP","Linear"]"#,
    r#"wrap=["Embedding","LlamaMLP"]"#,
    "min_num_params=1",
    "min_num_params=60",
];
const LLAMA_FROZEN: &[&str] = &["", "norm", "embed_tokens", r"layers\\.0\\.", "self_attn|lm_head", "mlp"];

fn gpt2() -> impl Strategy<Value = Family> {
    let dropout = select(vec!["0.0", "0.25"]);
    (select(vec![(1, 3), (2, 2), (2, 4)]), 1usize..3, select(vec![5usize, 19]), dropout, any::<bool>())
        .prop_map(|((heads, head_dim), layers, vocab, dropout, tied)| {
            let hidden = heads * head_dim;
            let model = format!(
                r#"{{"model_type": "gpt2", "vocab_size": {vocab}, "n_embd": {hidden}, "n_layer": {layers},
                "n_head": {heads}, "n_positions": 7, "initializer_range": 0.3, "embd_pdrop": {dropout},
                "attn_pdrop": {dropout}, "resid_pdrop": {dropout}, "tie_word_embeddings": {tied}}}"#
            );
            let wraps: &[_] = if tied { &GPT2_WRAPS[..4] } else { &GPT2_WRAPS };
            let can_be_cut = heads % 2 == 0;
            Family {
                model: Model::HuggingFace(model),
                wraps,
                frozen: GPT2_FROZEN,
                can_be_cut,
                has_experts: false,
            }
        })
}

const GPT2_WRAPS: [&str; 6] = [
    r#"wrap=["GPT2Block"]"#,
    r#"wrap=[]"#,
    r#"wrap=["GPT2Block","GPT2MLP","GPT2Attention"]"#,
    r#"wrap=["GPT2MLP"]"#,
    r#"wrap=["Embedding","GPT2Block"]"#,
    "min_num_params=50",
];
const GPT2_FROZEN: &[&str] = &["", "bias", "wpe|ln_", r"h\\.0\\.", "wte"];

fn mixture() -> impl Strategy<Value = Family> {
    (select(vec![(1, 1, 2), (2, 2, 6)]), 1usize..3, 1usize..4, select(vec![3usize, 7]), any::<bool>()).prop_map(
        |((heads, kv_heads, head_dim), layers, top, inner, normalized)| {
            let model = format!(
                r#"{{"model_type": "qwen3_moe", "vocab_size": 17, "hidden_size": {}, "intermediate_size": {inner},
                "moe_intermediate_size": {inner}, "num_hidden_layers": {layers}, "num_attention_heads": {heads},
                "num_key_value_heads": {kv_heads}, "head_dim": {head_dim}, "max_position_embeddings": 16,
                "initializer_range": 0.3, "num_experts": 4, "num_experts_per_tok": {top}, "hidden_act": "silu",
                "norm_topk_prob": {normalized}, "decoder_sparse_step": 1, "tie_word_embeddings": false,
                "rms_norm_eps": 1e-5, "router_aux_loss_coef": 0.1, "output_router_logits": {normalized}}}"#,
                heads * 2
            );
            let (can_be_cut, has_experts) = (kv_heads % 2 == 0, true);
            let (wraps, frozen) = (&MIXTURE_WRAPS, MIXTURE_FROZEN);
            Family { model: Model::HuggingFace(model), wraps, frozen, can_be_cut, has_experts }
        },
    )
}

const MIXTURE_WRAPS: [&str; 4] =
    [r#"wrap=["Qwen3MoeDecoderLayer"]"#, r#"wrap=[]"#, "min_num_params=1", "min_num_params=60"];
const MIXTURE_FROZEN: &[&str] = &["", "norm", r"layers\\.0\\.", "experts", "self_attn|lm_head|gate_proj"];

const PRECISIONS: [(&str, &str); 7] = [
    ("f32", "f32"),
    ("f64", "f64"),
    ("bf16", "f32"),
    ("bf16", "bf16"),
    ("f32", "bf16"),
    ("f32", "f64"),
    ("bf16", "f64"),
];

const OPTIMIZERS: [&str; 10] = [
    r#"{ name = "sgd", lr = 1e-1 }"#,
    r#"{ name = "adamw", lr = 1e-2, weight_decay = 0.1 }"#,
    r#"{ name = "adamw", lr = 1e-2, no_decay = ["weight"] }"#,
    r#"{ name = "lion", lr = 1e-2, weight_decay = 0.1,
         group = [{ patterns = ["emb|wte"], lr = 1e-3 }, { patterns = ["weight"], lr_scale = 2 }] }"#,
    r#"{ name = "sgd", lr = 1e-2, momentum = 0.9, nesterov = true, weight_decay = 0.01 }"#,
    r#"{ name = "adamw8bit", lr = 1e-2, weight_decay = 0.1 }"#,
    r#"{ name = "muon", lr = 1e-2, adamw_lr = 1e-2 }"#,
    r#"{ name = "schedule_free_adamw", lr = 1e-2, weight_decay = 0.1, warmup_steps = 2 }"#,
    r#"{ name = "adafactor" }"#,
    r#"{ name = "adafactor", lr = 1e-2, relative_step = false, scale_parameter = false, beta1 = 0.9 }"#,
];

/// Further settings that change a step.
const EXTRAS: [&str; 4] = ["", "train.label_smoothing=0.1", "train.z_loss=0.01", "train.ema_decay=0.9"];

/// Draws ranks, replicas, rounds, samples per micro-batch and tokens per sample.
fn sizes() -> impl Strategy<Value = [usize; 5]> {
    let replicas = any::<bool>();
    (1usize..9, replicas, 1usize..5, 1usize..3, 2usize..7).prop_map(
        |(world, replicated, rounds, micro, seq)| {
            let replicas = if replicated && world.is_multiple_of(2) { 2 } else { 1 };
            // At most 16 micro-batches: two rounds for eight ranks.
            [world, replicas, rounds.min(16 / world), micro, seq]
        },
    )
}

/// Draws overrides of the `[fsdp]` table that are valid for every model.
fn policies(shards: usize) -> impl Strategy<Value = Vec<String>> {
    let groups = (2..=shards).filter(|n| shards.is_multiple_of(*n)).map(|n| n.to_string());
    let plain = ["\"auto\"", "true", "false"].map(str::to_owned).into_iter();
    let reshards: Vec<String> = plain.chain(groups).collect();
    let one = |key: &'static str, values: &[&'static str]| {
        select(values.to_vec()).prop_map(move |value| format!("fsdp.{key}={value}"))
    };
    let precision = select(PRECISIONS.to_vec()).prop_map(|(param, reduce)| {
        [format!("fsdp.param_dtype=\"{param}\""), format!("fsdp.reduce_dtype=\"{reduce}\"")]
    });
    let others = (
        select(reshards).prop_map(|value| format!("fsdp.reshard_after_forward={value}")),
        one("forward_prefetch", &["1", "0", "2", "3"]),
        one("backward_prefetch", &["1", "0", "2", "3"]),
        one("accumulation", &["\"reduce\"", "\"unsharded\""]),
        one("accumulation_order", &["\"tree\"", "\"tree\"", "\"running\""]),
        one("reduce_op", &["\"sum\"", "\"sum\"", "\"average\""]),
        one("offload", &["\"none\"", "\"cpu\""]),
        one("activation_checkpointing", &["\"none\"", "\"full\"", "\"selective\""]),
    );
    (precision, others).prop_map(|(precision, others)| {
        let (reshard, forward, backward, accumulation, order, op, offload, checkpointing) = others;
        let others = [reshard, forward, backward, accumulation, order, op, offload, checkpointing];
        precision.into_iter().chain(others).collect()
    })
}

/// Draws any valid case.
pub(crate) fn cases() -> impl Strategy<Value = Case> {
    let family = prop_oneof![mlp(), llama(), gpt2(), mixture()];
    let cut = select(vec![None, Some("context = 2"), Some("context = 1")]);
    let experts = select(vec![[1, 1], [2, 2], [2, 4], [4, 4], [1, 4]]);
    let order = (prop::option::of(any::<u64>()), any::<bool>(), cut, experts);
    let update = (select(OPTIMIZERS.to_vec()), select(vec!["\"none\"", "0.1"]), select(EXTRAS.to_vec()));
    (family, sizes(), order, update)
        .prop_flat_map(|(family, sizes, order, update)| {
            let (wrap, frozen) = (select(family.wraps), select(family.frozen));
            let [world, replicas, ..] = sizes;
            let can_be_cut = family.can_be_cut && (world / replicas).is_multiple_of(2);
            let chosen = Just((family.model, (can_be_cut, family.has_experts), sizes, order, update));
            (chosen, wrap, frozen, policies(world / replicas))
        })
        .prop_map(|((model, (can_be_cut, has_experts), sizes, order, update), wrap, frozen, policies)| {
            let ((seed, shared, cut, experts), (optimizer, clip, extra)) = (order, update);
            let [world, replicas, rounds, micro, mut seq] = sizes;
            let mut mesh = format!("replicate = {replicas}");
            let cut = cut.filter(|_| can_be_cut);
            if let Some(axis) = cut {
                mesh += &format!(", {axis}");
                seq = seq.next_multiple_of(2);
            }
            let [expert, expert_chunks] = match experts {
                [expert, chunks] if has_experts && (world / replicas).is_multiple_of(expert) => {
                    [expert, chunks]
                }
                _ => [1, 1],
            };
            mesh += &format!(", expert = {expert}");
            let mut overrides = vec![
                format!("run.ranks={world}"),
                format!("fsdp.mesh={{ {mesh} }}"),
                format!("fsdp.chunks.context={}", 1 + usize::from(cut.is_some())),
                format!("fsdp.chunks.expert={expert_chunks}"),
                format!("train.micro_batch_size={micro}"),
                format!("train.global_batch_size={}", micro * world * rounds),
                format!("data.seq_len={seq}"),
                format!("fsdp.{wrap}"),
                format!("train.optimizer={optimizer}"),
                format!("train.grad_clip={clip}"),
            ];
            // Muon and offload exclude each other, as do an expert axis and averages.
            let misfits = |policy: &String| {
                (optimizer.contains("muon") && policy.contains("fsdp.offload"))
                    || (expert > 1 && policy.contains("average"))
            };
            overrides.extend(policies.into_iter().filter(|policy| !misfits(policy)));
            // A schedule-free rule keeps an average already.
            let has_two_averages = optimizer.contains("schedule_free") && extra.contains("ema");
            if !extra.is_empty() && !has_two_averages {
                overrides.push(extra.to_owned());
            }
            if !frozen.is_empty() {
                overrides.push(format!("fsdp.frozen=[\"{frozen}\"]"));
            }
            Case { model, world, overrides, seed, shared }
        })
}
