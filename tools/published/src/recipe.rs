//! Interprets the text columns of a run: hardware, mesh, policies and software.
//!
//! Every source uses words of its own; their meanings are facts about the sources, and are collected in this module.

use fsdp_core::comm::ReduceOp;
use fsdp_core::schedule::{Accumulation, AccumulationOrder, Checkpointing, Offload, Policy, Reshard};
use fsdp_core::{Axis, DType, Mesh};
use fsdp_plan::cluster::{Cluster, Kind};
use fsdp_plan::stand_in;
use fsdp_plan::{AttentionKernel, Elementwise, Recomputed, Software};

use crate::words::{Words, matches, number_in};

/// Recomputed fractions (products, attention, everything else) by `act_ckpt`; without recomputation, the schedule keeps
/// all.
const RECOMPUTED: [(&str, [f64; 3]); 7] = [
    ("selective_layer", [0.5, 0.5, 0.5]),
    // Every second product; attention is kept.
    ("selective_op", [0.5, 0.0, 1.0]),
    ("selective(attn)", [0.0, 1.0, 1.0]),
    ("selective", [0.33, 0.33, 0.33]),
    ("minimal_with_context", [0.0, 0.0, 1.0]),
    ("minimal", [0.0, 1.0, 1.0]),
    ("gelu_only", [0.0, 0.0, 0.4]),
];

/// How sources name the runs of PyTorch/XLA's FSDP on TPU v4 of 2023.
const XLA_FSDP: &str = "pytorch/xla fsdp";

/// Marks a source whose shapes are not published.
const SHAPES_ASSUMED: &str = "shapes but that of 2b are assumed";

/// Precisions that are known; all others are priced as bf16. An empty column is common.
const UNDERSTOOD_PRECISION: &str = r"^$|bf16|bfloat16|fp16|float16|f16|fp8|float8|amp|mixed|pure";

/// Reasons for which runs are outside of the model, in the order of the checks.
pub(crate) const INCOMPLETE: &str = "incomplete configuration";
const NO_ACCELERATOR: &str = "no runs to calibrate this accelerator";
const OTHER_PARALLELISM: &str = "tensor, pipeline or context parallel";
const OFFLOAD: &str = "offload";
const MUON: &str = "Muon optimizer";

/// Returns why a run is outside of the model, judging by its text; `None` if it is inside.
pub(crate) fn outside(words: &Words, cluster: Option<&Cluster>) -> Option<&'static str> {
    let Words { source, sharding, checkpointing, .. } = words;
    if cluster.is_none_or(|cluster| stand_in(&cluster.generation).is_some()) {
        return Some(NO_ACCELERATOR);
    }
    if matches(r"tp|pp|cp\d|megatron", sharding) {
        return Some(OTHER_PARALLELISM);
    }
    if sharding.contains("offload") || checkpointing.contains("offload") {
        return Some(OFFLOAD);
    }
    let is_muon = sharding.contains("muon") || source.contains("muon") || source.contains("scaleup1b");
    is_muon.then_some(MUON)
}

/// Lists the words that are not known, and how they are interpreted.
pub(crate) fn assumed(words: &Words) -> Vec<String> {
    let mut all = Vec::new();
    if !words.is_sharding_understood() {
        all.push(format!("sharding \"{}\" is read as full sharding", words.sharding));
    }
    if recomputed(words).is_none() && words.checkpointing != "none" {
        all.push(format!("act_ckpt \"{}\" is read as none", words.checkpointing));
    }
    if !matches(UNDERSTOOD_PRECISION, &words.precision) {
        all.push(format!("precision \"{}\" is read as bf16", words.precision));
    }
    if words.source.contains(SHAPES_ASSUMED) && !words.model.ends_with("-2b") {
        all.push("the shape is that of other models of this size: it is not published".to_owned());
    }
    all
}

/// The mesh of a run; `None` if it is impossible.
pub(crate) fn mesh(words: &Words, world: usize, cluster: &Cluster) -> Option<Mesh> {
    let sharding = words.sharding.as_str();
    let node = if cluster.kind == Kind::Tpu { world } else { cluster.devices_per_node() };
    let shards = match () {
        () if sharding == "none" => 1,
        () if sharding.contains("hsdp") => node.min(world),
        () if sharding.contains("intra") => node.min(world),
        () if sharding.starts_with("ddp") && !sharding.contains("zero1") => 1,
        () => match number_in(r"dcn_dp(\d+)", sharding) {
            Some(replicas) if replicas > 0 => world / replicas,
            _ => number_in(r"jax_fsdp(\d+)", sharding).map_or(world, |shards| shards.min(world)),
        },
    };
    Mesh::of_world(world, world.checked_div(shards).unwrap_or(0), 1)
        .ok()
        .filter(|mesh| mesh.size(Axis::Shard) == shards)
}

/// Whether parameters are gathered unit by unit: not with sharded optimizer state alone (ZeRO-1), and not with
/// replicas.
fn gathers(words: &Words, mesh: Mesh) -> bool {
    let sharding = &words.sharding;
    mesh.size(Axis::Shard) > 1 && !sharding.contains("zero1") && !sharding.contains("ddp")
}

/// The policy that the schedule is compiled with.
pub(crate) fn policy(words: &Words, mesh: Mesh) -> Policy {
    let Words { source, sharding, precision, .. } = words;
    let keeps_unsharded = sharding.contains("grad_op") || sharding.contains("zero2") || !gathers(words, mesh);
    let reduces_in_f32 = precision.contains("reduce=fp32")
        || precision.contains("float8")
        || sharding.contains("fsdp2") && source.contains("torchtitan");
    // XLA's FSDP gathers on demand, as does an optimizer with sharded state.
    let prefetch = usize::from(!sharding.contains("xla_fsdp") && gathers(words, mesh));
    let accumulation = if gathers(words, mesh) { Accumulation::Reduce } else { Accumulation::Unsharded };
    let is_kept = recomputed(words).is_none();
    Policy {
        reshard_after_forward: if keeps_unsharded { Reshard::Never } else { Reshard::Auto },
        forward_prefetch: prefetch,
        backward_prefetch: prefetch,
        accumulation,
        accumulation_order: AccumulationOrder::Running,
        param_dtype: DType::Bf16,
        frozen_master: true,
        reduce_dtype: if reduces_in_f32 { DType::F32 } else { DType::Bf16 },
        reduce_op: ReduceOp::Sum,
        checkpointing: if is_kept { Checkpointing::None } else { Checkpointing::Full },
        offload: Offload::None,
        chunks: 1,
        expert_chunks: 1,
    }
}

/// The recomputed parts of a layer; `None` if nothing is recomputed.
fn recomputed(words: &Words) -> Option<Recomputed> {
    let Words { checkpointing: kind, source, .. } = words;
    // Before PyTorch 2.1, and in Megatron of 2022, all of a layer was recomputed.
    let is_old = words.precision.contains("fsdp pure")
        || source.contains("2205.05198")
        || source.contains("2304.11277");
    let is_full = kind.starts_with("full");
    if is_full || kind.starts_with("custom") {
        return Some(Recomputed { spares_last: is_full && !is_old, ..Recomputed::ALL });
    }
    let (_, [products, attention, elementwise]) =
        RECOMPUTED.iter().find(|(name, _)| kind.starts_with(name))?;
    Some(Recomputed {
        products: *products,
        attention: *attention,
        elementwise: *elementwise,
        spares_last: false,
    })
}

/// The properties of the software.
pub(crate) fn software(words: &Words, mesh: Mesh, cluster: &Cluster, is_gated: bool) -> Software {
    let Words { source, sharding, precision, .. } = words;
    let is_c = is_c(words);
    let is_xla = is_xla(words, cluster);
    let is_fused = is_xla || is_fused(words);
    let copies = gathers(words, mesh) && !is_xla;
    let elementwise = match (is_fused, is_gated) {
        _ if is_c => Elementwise::ByHand,
        (true, _) => Elementwise::Fused,
        (false, false) => Elementwise::Eager,
        (false, true) => Elementwise::EagerInF32,
    };
    let gathers_fp8 = precision.contains("fp8_all_gather") && !precision.contains("bf16_all_gather");
    Software {
        elementwise,
        recomputed: recomputed(words),
        // FSDP2 copies parameters out of the one buffer that it gathers into.
        copies_forward: if copies && sharding.contains("fsdp2") { 4.0 } else { 0.0 },
        copies_backward: copies,
        attention: attention(words, cluster),
        is_fp8: ["fp8", "float8", "mxfp8"].iter().any(|word| precision.contains(word))
            && precision != "fp8_all_gather",
        is_update_fused: is_fused || sharding.contains("fsdp2"),
        logit_bytes: if is_c {
            6.0
        } else if is_fused {
            14.0
        } else {
            30.0
        },
        is_replication_exposed: cluster.kind == Kind::Tpu && !source.contains(XLA_FSDP),
        gathered_bytes: gathers_fp8.then_some(1.0),
    }
}

/// Whether everything is written by hand in C and CUDA (llm.c).
pub(crate) fn is_c(words: &Words) -> bool {
    words.compile.contains("c/cuda")
}

/// Whether XLA compiles the run, as it always does on TPUs.
fn is_xla(words: &Words, cluster: &Cluster) -> bool {
    words.compile.starts_with("xla") || cluster.kind == Kind::Tpu
}

/// Whether the operations of a layer are fused into fewer kernels.
pub(crate) fn is_fused(words: &Words) -> bool {
    let compile = &words.compile;
    let prefixes = ["yes", "true", "on", "xla", "torch.compile", "compiled", "inductor"];
    prefixes.iter().any(|word| compile.starts_with(word))
        || is_c(words)
        || compile.contains("fused") && !compile.contains("unfused")
        || compile.contains("liger")
}

fn attention(words: &Words, cluster: &Cluster) -> AttentionKernel {
    let Words { source, compile, .. } = words;
    match cluster.kind {
        Kind::Tpu if source.contains(XLA_FSDP) => AttentionKernel::None,
        Kind::Tpu => AttentionKernel::Xla,
        _ if source.contains("llm-foundry") => AttentionKernel::Triton,
        _ if cluster.generation == "hopper"
            && (["fa3", "cudnn"].iter().any(|word| compile.contains(word))
                || is_c(words)
                || is_xla(words, cluster)) =>
        {
            AttentionKernel::Flash3
        }
        _ => AttentionKernel::Flash2,
    }
}
