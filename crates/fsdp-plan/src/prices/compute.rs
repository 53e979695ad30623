//! Durations of products, attention, and passes over memory.

use fsdp_core::DType;

use super::Prices;
use crate::cluster::Kind;
use crate::constants::Constants;
use crate::software::{AttentionKernel, Elementwise};
use crate::work::{AttentionWork, CallWork, Listed, Product};

/// The tile of a product that one multiprocessor computes at a time (cuBLAS and CUTLASS, large bf16 products).
const TILE: [usize; 2] = [128, 256];

/// The sides of smaller tiles are multiples of this.
const TILE_STEP: usize = 16;

/// Bytes of memory traffic per score of attention that writes its scores: forward (scale and mask, softmax in f32,
/// dropout) and backward.
const SCORE_BYTES: [f64; 2] = [14.0, 16.0];

/// Factor from listed bytes to moved bytes.
pub(super) fn elementwise(constants: &Constants, how: Elementwise) -> f64 {
    match how {
        Elementwise::ByHand => constants.get("elementwise.by_hand"),
        Elementwise::Fused => constants.get("elementwise.fused"),
        Elementwise::Eager => constants.get("elementwise.eager"),
        Elementwise::EagerInF32 => constants.get("elementwise.eager") * constants.get("elementwise.f32"),
    }
}

/// Speed of FlashAttention-3, relative to FlashAttention-2.
const FLASH3: f64 = 1.6;

/// Speed of an attention kernel on a generation of devices, relative to FlashAttention-2.
pub(super) fn kernel(
    constants: &Constants,
    kernel: AttentionKernel,
    (generation, dtype): (&str, DType),
) -> f64 {
    match kernel {
        AttentionKernel::Flash3 => FLASH3,
        AttentionKernel::Triton => constants.get("attention.triton"),
        AttentionKernel::Libtorch => {
            let is_cudnn = matches!(generation, "hopper" | "blackwell") && dtype.size_bytes() == 2;
            if is_cudnn { FLASH3 } else { 1.0 }
        }
        AttentionKernel::Flash2 | AttentionKernel::Xla | AttentionKernel::None => 1.0,
    }
}

impl Prices<'_> {
    /// Seconds of products of one shape: the roofline, including the fill and drain of tiles, and the wasted
    /// computation in partial tiles and waves, half of which is hidden by splitting the sums.
    pub fn product(&self, product: &Product) -> f64 {
        let faster = if self.software.is_fp8 { self.constants.get("fp8") } else { 1.0 };
        self.product_at(product, self.peak * faster, 2)
    }

    /// Seconds of products in the dtype of master parameters.
    pub(super) fn master_product(&self, product: &Product) -> f64 {
        let (peak, element_bytes) = self.master;
        self.product_at(product, peak, element_bytes)
    }

    fn product_at(&self, product: &Product, peak: f64, element_bytes: usize) -> f64 {
        let Product { m, n, k, count } = *product;
        let filled = |terms: usize| 1.0 + self.constants.get("short_sums") / terms as f64;
        let mut reached = self.products / (filled(k) * filled(n));
        if self.cluster.kind == Kind::Gpu {
            let units = self.cluster.device.units.value;
            // Products with few rows or columns use smaller tiles.
            let [short, long] = TILE.map(|side| side.min(m.min(n).next_multiple_of(TILE_STEP)));
            let tiles = |rows: usize, columns: usize| (m.div_ceil(rows) * n.div_ceil(columns)) as f64;
            let tiles = tiles(short, long).min(tiles(long, short));
            let full = (m * n) as f64 / (short * long) as f64 / ((tiles / units).ceil() * units);
            reached /= 1.0 + 0.5 * (1.0 / full.min(1.0) - 1.0);
        }
        let arithmetic = product.flops() / (peak * reached);
        let bytes = (element_bytes * (m * n + m * k + n * k)) as f64 * count;
        arithmetic.max(bytes / self.bandwidth)
    }

    /// Seconds of all attention in a call.
    pub(super) fn attention_of(&self, call: &CallWork) -> f64 {
        call.attention.iter().map(|attention| self.attention(attention)).sum()
    }

    fn attention(&self, work: &AttentionWork) -> f64 {
        let seq = work.seq as f64;
        if self.software.attention == AttentionKernel::None {
            let scores = work.sequences * seq * seq * SCORE_BYTES[usize::from(work.is_backward)];
            // A product reaches about 0.7 of its speed with such short sums.
            return 2.0 * work.flops / (self.peak * self.products * 0.7) + scores / self.bandwidth;
        }
        if self.software.attention == AttentionKernel::Xla {
            return 2.0 * work.flops / (self.peak * self.attention);
        }
        let mut reached = self.attention * seq / (seq + self.constants.get("short_sequences"));
        if work.head_dim <= 64 && self.software.attention != AttentionKernel::Triton {
            // FlashAttention-2's own benchmarks: heads of 64 elements reach 0.85 to 0.9 of the speed of heads of 128.
            reached *= 0.85;
        }
        if work.is_backward {
            reached *= self.constants.get("attention.backward");
        }
        work.flops / (self.peak * reached)
    }

    /// Seconds of an operation without points: at the speed of large products, or of passes over memory.
    pub(super) fn by_size(&self, listed: &Listed) -> f64 {
        let [_, _, terms] = listed.size;
        if terms > 1.0 { listed.work / (self.peak * self.products) } else { listed.work / self.bandwidth }
    }

    /// Seconds of everything in a call except products and attention.
    pub(super) fn passes(&self, call: &CallWork) -> f64 {
        let bytes = call.elementwise_bytes * self.elementwise + call.logits * self.software.logit_bytes;
        bytes / self.bandwidth
    }
}
