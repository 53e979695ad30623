//! What columns that are text mean: hardware, mesh, policies and software of a run.
//!
//! Sources write these in words of their own; what the words stand for is a fact about each source, and stands here.

use fsdp_core::comm::ReduceOp;
use fsdp_core::schedule::{Accumulation, AccumulationOrder, Checkpointing, Offload, Policy, Reshard};
use fsdp_core::{DType, Mesh};
use regex::Regex;

use super::row::Row;
use crate::cluster::{Cluster, Kind};
use crate::software::{AttentionKernel, Elementwise, Recomputed, Software};

/// Bytes a second of a node's network, where the column `device_type` names it.
const NETWORKS: [(&str, f64); 4] =
    [("400Gbps", 50e9), ("800Gbps", 100e9), ("2Tbps", 250e9), ("4x100Gb", 50e9)];

/// What of a layer is run again, by the column `act_ckpt`; where nothing is, the schedule keeps everything.
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
const XLA_FSDP: &str = "PyTorch/XLA FSDP";

/// What the column `sharding` has of, where it is understood.
const SHARDINGS: [&str; 7] = ["fsdp", "hsdp", "zero", "ddp", "shard", "intra", "none"];

/// Why runs are outside of the model, in the order in which that is asked.
pub(super) const INCOMPLETE: &str = "incomplete configuration";
const UNKNOWN: &str = "sharding that is not understood";
const NO_ACCELERATOR: &str = "no runs to calibrate this accelerator";
const OTHER_PARALLELISM: &str = "tensor, pipeline or context parallel";
const OFFLOAD: &str = "offload";
const MUON: &str = "Muon optimizer";

fn matches(pattern: &str, text: &str) -> bool {
    Regex::new(pattern).expect("the pattern is constant").is_match(text)
}

/// The number behind a pattern.
fn number_in(pattern: &str, text: &str) -> Option<usize> {
    Regex::new(pattern).expect("the pattern is constant").captures(text)?.get(1)?.as_str().parse().ok()
}

/// Why a run is outside of the model, if it is, as far as text says.
pub(super) fn outside(row: &Row) -> Option<&'static str> {
    let (sharding, source) = (row.text("sharding"), row.text("source"));
    if row.text("act_ckpt").is_empty() || sharding.is_empty() {
        return Some(INCOMPLETE);
    }
    let known = cluster(row).is_some_and(|cluster| crate::prices::stand_in(&cluster.generation).is_none());
    if !known {
        return Some(NO_ACCELERATOR);
    }
    if matches(r"tp\d|tp|pp|cp\d|megatron", sharding) {
        return Some(OTHER_PARALLELISM);
    }
    if !SHARDINGS.iter().any(|word| sharding.contains(word)) {
        return Some(UNKNOWN);
    }
    if sharding.contains("offload") || row.text("act_ckpt").contains("offload") {
        return Some(OFFLOAD);
    }
    let is_muon = sharding.contains("muon") || source.contains("Muon") || source.contains("ScaleUp1B");
    is_muon.then_some(MUON)
}

/// The hardware of a run, if it is known.
pub(super) fn cluster(row: &Row) -> Option<Cluster> {
    let (device, source) = (row.text("device_type"), row.text("source"));
    let begins = |prefix: &str| device.starts_with(prefix);
    let name = match () {
        () if begins("A100-40") => "a100-40-sxm",
        () if begins("A100") || begins("A800") => "a100-80-sxm",
        () if begins("H100") => "h100-sxm",
        () if begins("H200") => "h200-sxm",
        () if begins("B200") => "b200-sxm",
        () if begins("TPU-v4") => "tpu-v4",
        () if begins("TPU-v5e") => "tpu-v5e",
        () if begins("TPU-v5p") => "tpu-v5p",
        () => return None,
    };
    let mut cluster = Cluster::known(name).expect("it is one of ours");
    if device.contains("HBM2e-500W") {
        // A card with less power and older memory: 12 % less in products by the source.
        cluster.device.peak.values_mut().for_each(|peak| peak.value *= 0.88);
        cluster.device.memory_bandwidth.value = 2.4e12;
        cluster.device.memory.value = 96.0 * f64::from(1 << 30);
    }
    let named = NETWORKS.iter().find(|(word, _)| device.contains(word)).map(|(_, bandwidth)| *bandwidth);
    // GCP's A3: 8 NICs of 200 Gb/s, of which TCPX gets half.
    let named = if source.contains("gpu/a3") { Some(100e9) } else { named };
    if let (Some(bandwidth), Some(network)) = (named, &mut cluster.network) {
        network.bandwidth.value = bandwidth;
    }
    Some(cluster)
}

/// How ranks are arranged; none where that can not be.
pub(super) fn mesh(row: &Row, world: usize, cluster: &Cluster) -> Option<Mesh> {
    let sharding = row.text("sharding");
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
    Mesh::of_world(world, world.checked_div(shards).unwrap_or(0)).ok().filter(|mesh| mesh.shards() == shards)
}

/// Whether parameters are gathered a unit at a time: not with sharded optimizer states alone (ZeRO-1), and not with replicas.
fn gathers(row: &Row, mesh: Mesh) -> bool {
    let sharding = row.text("sharding");
    mesh.shards() > 1 && !sharding.contains("zero1") && !sharding.contains("ddp")
}

/// What a schedule is compiled with.
pub(super) fn policy(row: &Row, mesh: Mesh) -> Policy {
    let (sharding, precision) = (row.text("sharding"), row.text("precision"));
    let keeps = sharding.contains("grad_op") || sharding.contains("zero2") || !gathers(row, mesh);
    let reduces_in_f32 = precision.contains("reduce=fp32")
        || precision.contains("float8")
        || sharding.contains("fsdp2") && row.text("source").contains("torchtitan");
    // XLA's FSDP gathers when it needs, as does an optimizer whose states are sharded.
    let prefetch = usize::from(!sharding.contains("xla_fsdp") && gathers(row, mesh));
    let accumulation = if gathers(row, mesh) { Accumulation::Reduce } else { Accumulation::Unsharded };
    let is_kept = recomputed(row).is_none();
    Policy {
        reshard_after_forward: if keeps { Reshard::Never } else { Reshard::Auto },
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
    }
}

/// What of a layer is run again, if anything.
fn recomputed(row: &Row) -> Option<Recomputed> {
    let (kind, source) = (row.text("act_ckpt"), row.text("source"));
    // Before PyTorch 2.1, and in Megatron of 2022, all of a layer was run again.
    let is_old = row.text("precision").contains("fsdp PURE")
        || source.contains("2205.05198")
        || source.contains("2304.11277");
    if kind == "full" || kind.starts_with("custom") {
        return Some(Recomputed { spares_last: kind == "full" && !is_old, ..Recomputed::ALL });
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

/// What the software does beside the arithmetic.
pub(super) fn software(row: &Row, mesh: Mesh, cluster: &Cluster, is_gated: bool) -> Software {
    let (sharding, source) = (row.text("sharding"), row.text("source"));
    let (compiled, precision) = (row.text("compile"), row.text("precision"));
    let is_c = compiled.contains("C/CUDA");
    let is_xla = compiled == "xla";
    let is_fused =
        compiled == "yes" || is_xla || is_c || compiled.contains("fused") || compiled.contains("liger");
    let copies = gathers(row, mesh) && !is_xla;
    let elementwise = match (is_fused, is_gated) {
        _ if is_c => Elementwise::ByHand,
        (true, _) => Elementwise::Fused,
        (false, false) => Elementwise::Eager,
        (false, true) => Elementwise::EagerInF32,
    };
    let gathers_fp8 = precision.contains("fp8_all_gather") && !precision.contains("bf16_all_gather");
    Software {
        elementwise,
        recomputed: recomputed(row),
        // FSDP2 copies what it has gathered out of one buffer.
        copies_forward: if copies && sharding.contains("fsdp2") { 4.0 } else { 0.0 },
        copies_backward: copies,
        attention: attention(row, cluster),
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

fn attention(row: &Row, cluster: &Cluster) -> AttentionKernel {
    let (source, compiled) = (row.text("source"), row.text("compile"));
    match cluster.kind {
        Kind::Tpu if source.contains(XLA_FSDP) => AttentionKernel::None,
        Kind::Tpu => AttentionKernel::Xla,
        _ if source.contains("llm-foundry") => AttentionKernel::Triton,
        _ if cluster.generation == "hopper"
            && (compiled.contains("fa3") || compiled.contains("C/CUDA") || compiled == "xla") =>
        {
            AttentionKernel::Flash3
        }
        _ => AttentionKernel::Flash2,
    }
}
