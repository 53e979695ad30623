//! Peak memory of a run of other software, by its parts.
//!
//! The ledger counts this engine's memory. For other software, no schedule shows what compilers keep or allocators
//! hold, so this is arithmetic over shapes. It also covers runs whose time is outside of the model: other accelerators,
//! offload, context parallelism. It does not cover tensor and pipeline parallelism.

use fsdp_plan::cluster::Kind;

use crate::row::Row;
use crate::sizes::Sizes;
use crate::words::{Words, matches, number_in};
use crate::{hardware, recipe};

const GIB: f64 = (1 << 30) as f64;

/// Bytes of communicators, workspaces and fragmentation. Assumed.
const OVERHEAD_BYTES: f64 = GIB;

/// Devices per node, the group within which hybrid sharding shards.
const NODE: usize = 8;

/// A run counts as fitting if its prediction is at most this factor times the memory of a device. The excess is the
/// mean error of these predictions, because users choose the largest micro-batch that fits.
const TOLERANCE: f64 = 1.07;

/// Matches tensor, pipeline and other parallelism.
const OTHER_PARALLELISM: &str = r"tp|pp|megatron";

/// Predicted and measured peak memory of a device, and whether the run fits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct PeakMemory {
    /// Predicted GiB per device.
    pub(crate) predicted: f64,
    /// Measured GiB; `None` if the source does not state it.
    pub(crate) measured: Option<f64>,
    /// Whether the prediction fits the device; `None` if its memory is not known.
    pub(crate) fits: Option<bool>,
    /// Whether the run has fitted; `None` if that is not known.
    pub(crate) fitted: Option<bool>,
}

impl PeakMemory {
    /// Predicts the peak memory of a row; `None` if it lacks a size, its sharding or its checkpointing, or uses tensor
    /// or pipeline parallelism.
    pub(crate) fn of(row: &Row) -> Option<Self> {
        let words = &Words::of(row);
        let sizes = Sizes::of(row, words).filter(|sizes| sizes.contradiction().is_none())?;
        if words.checkpointing.is_empty()
            || words.sharding.is_empty()
            || matches(OTHER_PARALLELISM, &words.sharding)
        {
            return None;
        }
        let cluster = hardware::cluster(row);
        let world = row.number("devices")?;
        let context = number_in(r"cp(\d+)", &words.sharding).filter(|&ranks| ranks > 0).unwrap_or(1) as f64;
        let tokens = row.number("micro_batch")? * sizes.seq as f64 / context;
        let is_tpu = cluster.as_ref().is_some_and(|cluster| cluster.kind == Kind::Tpu);
        let is_xla = is_tpu || words.compile.starts_with("xla");
        let peer = Peer { sizes, words, shards: shards(words, world), tokens, is_xla };
        let (bytes, capacity) = (peer.bytes(), cluster.map(|cluster| cluster.device.memory.value));
        Some(Self {
            predicted: bytes / GIB,
            measured: row.number("peak_mem_gib"),
            fits: capacity.map(|capacity| bytes <= TOLERANCE * capacity),
            fitted: row.fitted(),
        })
    }

    /// Relative error of the prediction, with its sign; `None` without a measurement.
    pub(crate) fn error(&self) -> Option<f64> {
        self.measured.map(|measured| self.predicted / measured - 1.0)
    }
}

/// Number of ranks that share states, including those of context parallelism.
fn shards(words: &Words, world: f64) -> f64 {
    match () {
        () if words.sharding == "none" => 1.0,
        () if words.shards_by("hsdp") || words.shards_by("intra") => world.min(NODE as f64),
        () => world,
    }
}

/// A run of other software.
struct Peer<'a> {
    sizes: Sizes,
    words: &'a Words,
    shards: f64,
    /// Tokens of a micro-batch per device.
    tokens: f64,
    is_xla: bool,
}

impl Peer<'_> {
    fn bytes(&self) -> f64 {
        self.states() + self.unsharded() + self.activations() + self.logits() + OVERHEAD_BYTES
    }

    /// Whether parameters are gathered unit by unit.
    fn gathers(&self) -> bool {
        ["fsdp", "hsdp", "zero3", "full_shard"].iter().any(|word| self.words.shards_by(word))
            || self.words.sharding.starts_with("cp")
            || !self.words.is_sharding_understood()
    }

    /// Whether the run is of torchtitan of 2025, as pytorch/ao's are: embedding and head are separate units, the loss
    /// is compiled, and selective checkpointing does not keep products whose outputs backward does not need.
    fn is_recent_titan(&self) -> bool {
        self.words.source.contains("pytorch/ao")
    }

    /// Bytes per element of a gradient in the reduction.
    fn reduced(&self) -> f64 {
        let Words { precision, source, .. } = self.words;
        let is_f32 = precision.contains("reduce=fp32")
            || precision.contains("float8") && !self.is_recent_titan()
            || self.words.shards_by("fsdp2") && source.contains("torchtitan");
        if is_f32 { 4.0 } else { 2.0 }
    }

    /// Bytes of master parameters, gradients and moments.
    fn states(&self) -> f64 {
        let (parameters, shards) = (self.sizes.parameters(), self.shards);
        let is_nanotron = self.words.source.contains("nanotron");
        // bf16 copies of parameters and gradients; with nanotron's ZeRO-1, gradients are summed in f32.
        let [zero1, replicated] = if is_nanotron { [8.0, 20.0] } else { [4.0, 16.0] };
        match () {
            // Only shards in bf16 stay on the device.
            () if self.words.shards_by("offload") => 2.0 * parameters / shards,
            // XLA frees gradients within the step.
            () if self.is_xla => 12.0 * parameters / shards,
            () if self.gathers() => 16.0 * parameters / shards,
            () if self.words.shards_by("zero2") || self.words.shards_by("grad_op") => {
                (2.0 + 14.0 / shards) * parameters
            }
            () if self.words.shards_by("zero1") => (zero1 + 12.0 / shards) * parameters,
            () if self.words.shards_by("ddp") => replicated * parameters,
            // A copy in bf16 (llm.c), or the casts that autocast keeps.
            () if recipe::is_c(self.words) => 16.0 * parameters,
            () => 18.0 * parameters,
        }
    }

    /// Bytes of gathered units and their gradients: three layers, one in reduction, and the root. XLA holds one and the
    /// next.
    fn unsharded(&self) -> f64 {
        if !self.gathers() {
            return 0.0;
        }
        let layer = self.sizes.layer_parameters();
        let root = self.sizes.parameters() - self.sizes.layers as f64 * layer;
        match () {
            () if self.is_xla => 4.0 * layer + 4.0 * root,
            // Only the head.
            () if self.is_recent_titan() => {
                layer * (8.0 + self.reduced()) + root / 2.0 * (4.0 + self.reduced())
            }
            () => layer * (8.0 + self.reduced()) + root * (4.0 + self.reduced()),
        }
    }

    /// Bytes that forward saves for backward, plus one layer that is being computed.
    fn activations(&self) -> f64 {
        let (hidden, layers) = (self.sizes.hidden as f64, self.sizes.layers as f64);
        let kv_ratio = self.sizes.kv_heads as f64 / self.sizes.heads as f64;
        let ffn_ratio = self.sizes.ffn as f64 / hidden;
        let (layer_bytes, input) = (self.layer_bytes(kv_ratio, ffn_ratio), 2.0 * hidden);
        let kind = self.words.checkpointing.as_str();
        let each_token = match kind {
            _ if kind.starts_with("full") => layers * input + layer_bytes,
            _ if kind.starts_with("selective_op") => {
                let outputs = if self.sizes.is_gated { 4.0 + kv_ratio + ffn_ratio } else { 6.0 };
                let spared = if self.is_recent_titan() { 1.0 } else { 0.0 };
                layers * input * (outputs - spared) + 0.5 * layer_bytes
            }
            _ if kind.starts_with("selective_layer") => layers * 0.5 * (layer_bytes + input),
            // A third of the layers.
            "selective" => layers * (0.67 * layer_bytes + 0.33 * input),
            _ => layers * layer_bytes,
        };
        self.tokens * each_token
    }

    /// Bytes per token that a layer saves: products, norms and attention, the gate, and what eager kernels keep in f32.
    fn layer_bytes(&self, kv_ratio: f64, ffn_ratio: f64) -> f64 {
        let hidden = self.sizes.hidden as f64;
        let is_fused = self.is_xla || recipe::is_fused(self.words);
        if self.sizes.is_gated {
            let gates = if is_fused { 3.0 } else { 4.0 };
            let in_f32 = if is_fused { 0.0 } else { 12.0 };
            return hidden * (2.0 * (6.0 + 2.0 * kv_ratio + gates * ffn_ratio) + in_f32);
        }
        // llm-foundry's layers have no dropout.
        let tensors = if is_fused || self.words.model.contains("mpt") { 16.0 } else { 17.0 };
        let spared = if self.words.checkpointing == "gelu_only" { 2.0 * self.sizes.ffn as f64 } else { 0.0 };
        2.0 * hidden * tensors - spared
    }

    /// Bytes of logits, their gradients, and copies of both in f32 where the loss is not one kernel.
    fn logits(&self) -> f64 {
        let Words { compile, source, .. } = self.words;
        let each = match () {
            () if recipe::is_c(self.words) => 2.0,
            () if compile.contains("liger") => 0.0,
            () if self.is_xla || self.is_recent_titan() => 4.0,
            () if source.contains("stas00") => 20.0,
            () => 10.0,
        };
        self.tokens * self.sizes.vocab as f64 * each
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::row::{Row, read};

    /// Compares the predictions with the GiB in the docs of torchtitan, pytorch/ao, llm.c and nanoGPT.
    #[test]
    fn published_peaks_have_mean_error_below_ten_percent() {
        let rows = read(include_str!("../data/published.csv"), "published.csv").unwrap().rows;
        let peaks: Vec<PeakMemory> = rows.iter().filter_map(PeakMemory::of).collect();
        let errors: Vec<f64> = peaks.iter().filter_map(PeakMemory::error).map(f64::abs).collect();
        assert_eq!(errors.len(), 9, "the other four are tensor parallel");
        let mean = errors.iter().sum::<f64>() / errors.len() as f64;
        assert!(mean < 0.10, "{errors:?}");
    }

    fn row(changes: &[(&str, &str)]) -> Row {
        let usual = [
            ("layers", "32"),
            ("hidden", "4096"),
            ("heads", "32"),
            ("kv_heads", "8"),
            ("ffn", "14336"),
            ("vocab", "128256"),
            ("seq", "8192"),
            ("micro_batch", "1"),
            ("devices", "8"),
            ("device_type", "H100-80GB"),
            ("model", "Llama-3-8B"),
            ("sharding", "fsdp2"),
            ("act_ckpt", "full"),
            ("compile", "yes"),
            ("step_time_ms", ""),
        ];
        let value = |(name, usual): &(&str, &'static str)| {
            changes.iter().find(|(change, _)| change == name).map_or(*usual, |(_, value)| *value).to_owned()
        };
        let header = usual.map(|(name, _)| name).join(",");
        let line: Vec<String> = usual.iter().map(value).collect();
        read(&format!("{header}\n{}\n", line.join(",")), "runs.csv").unwrap().rows.remove(0)
    }

    #[test]
    fn predicted_peak_matches_hand_count() {
        let peak = PeakMemory::of(&row(&[])).unwrap();
        let (hidden, tokens) = (4096.0f64, 8192.0f64);
        let layer = hidden * (hidden + 2.0 * 1024.0 + hidden) + 3.0 * hidden * 14336.0;
        let tables = 2.0 * 128_256.0 * hidden;
        let states = 16.0 * (32.0 * layer + tables) / 8.0;
        let units = layer * 10.0 + tables * 6.0;
        let kept = tokens * 2.0 * hidden * (32.0 + 6.0 + 2.0 / 4.0 + 3.0 * 3.5);
        let logits = tokens * 128_256.0 * 10.0;
        let expected = (states + units + kept + logits) / GIB + 1.0;
        assert!((peak.predicted / expected - 1.0).abs() < 1e-9, "{peak:?} {expected}");
        assert_eq!((peak.fits, peak.fitted), (Some(true), None));
    }

    #[test]
    fn measured_run_counts_as_fitted_and_oom_run_does_not() {
        let of = |changes: &[(&str, &str)]| PeakMemory::of(&row(changes)).unwrap();
        assert_eq!(of(&[("step_time_ms", "10")]).fitted, Some(true));
        let large = of(&[("step_time_ms", "OOM"), ("micro_batch", "16"), ("act_ckpt", "none")]);
        assert_eq!((large.fits, large.fitted), (Some(false), Some(false)));
        assert_eq!(of(&[("device_type", "something")]).fits, None);
    }
}
