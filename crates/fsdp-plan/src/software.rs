//! Properties of software that affect step times: this engine's, and those of other software whose runs are published.

use fsdp_core::schedule::Checkpointing;

/// How operations other than products are run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Elementwise {
    /// The operations of a layer in fused kernels, compiled or written for that purpose.
    Fused,
    /// Kernels written by hand for one model, with norms, residuals and activations fused into the epilogues of
    /// products (llm.c).
    ByHand,
    /// One kernel for each operation of a model in Python.
    Eager,
    /// As `Eager`, with norms and rotations computed in f32.
    EagerInF32,
}

/// The attention kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttentionKernel {
    /// The one that libtorch chooses: for 16 bits on Hopper and Blackwell cuDNN's, as fast as FlashAttention-3;
    /// otherwise FlashAttention-2.
    Libtorch,
    /// FlashAttention-2, and kernels of equal speed.
    Flash2,
    /// FlashAttention-3 and cuDNN on Hopper: 640 instead of 400 TFLOP/s at 8192 positions, according to their authors.
    Flash3,
    /// FlashAttention-1, and Triton's kernel of 2023.
    Triton,
    /// Kernels of XLA and early ones of Pallas, which also compute the positions that causality masks.
    Xla,
    /// No fused kernel: scores are written to memory, as in PyTorch/XLA of 2023.
    None,
}

/// The parts of a layer's forward that are recomputed for backward, as fractions.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Recomputed {
    /// Fraction of its products.
    pub products: f64,
    /// Fraction of its attention.
    pub attention: f64,
    /// Fraction of everything else.
    pub elementwise: f64,
    /// Whether the last product of a layer is not recomputed, because backward does not need its output: PyTorch since
    /// 2.1, and XLA.
    pub spares_last: bool,
}

impl Recomputed {
    /// All of a layer is recomputed.
    pub const ALL: Self = Self { products: 1.0, attention: 1.0, elementwise: 1.0, spares_last: false };
}

/// Properties of a training framework that affect step times.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Software {
    /// How operations other than products are run.
    pub elementwise: Elementwise,
    /// The recomputed parts of a checkpointed layer; `None` for exactly the operations in its listing.
    pub recomputed: Option<Recomputed>,
    /// Bytes copied around all-gathers per unsharded parameter and two reshardings; each resharding counts half.
    pub copies_forward: f64,
    /// Whether gradients of views, casts and copies into the reduction move the fitted number of bytes per unsharded
    /// parameter.
    pub copies_backward: bool,
    /// The attention kernel.
    pub attention: AttentionKernel,
    /// Whether products are computed in fp8.
    pub is_fp8: bool,
    /// Whether the update is one kernel rather than many passes.
    pub is_update_fused: bool,
    /// Bytes of memory traffic per logit.
    pub logit_bytes: f64,
    /// Whether gradients are all-reduced over replicas only after all of backward.
    pub is_replication_exposed: bool,
    /// Bytes per element in all-gathers; `None` if it is the size of parameters.
    pub gathered_bytes: Option<f64>,
}

impl Software {
    /// This engine: gathers in place, fused operations, no copies.
    pub const OURS: Self = Self {
        elementwise: Elementwise::Fused,
        recomputed: None,
        copies_forward: 0.0,
        copies_backward: false,
        attention: AttentionKernel::Libtorch,
        is_fp8: false,
        is_update_fused: true,
        logit_bytes: 14.0,
        is_replication_exposed: false,
        gathered_bytes: None,
    };

    /// PyTorch's FSDP2 with the same schedule: copies around collectives; checkpointed layers are recomputed in full
    /// except their last product, or half of their products with selective checkpointing; eager Python kernels unless
    /// compiled.
    pub fn fsdp2(is_compiled: bool, checkpointing: Checkpointing) -> Self {
        let recomputed = match checkpointing {
            Checkpointing::None => None,
            Checkpointing::Full => Some(Recomputed { spares_last: true, ..Recomputed::ALL }),
            Checkpointing::Selective => {
                Some(Recomputed { products: 0.5, attention: 0.0, elementwise: 1.0, spares_last: false })
            }
        };
        Self {
            elementwise: if is_compiled { Elementwise::Fused } else { Elementwise::EagerInF32 },
            recomputed,
            copies_forward: 4.0,
            copies_backward: true,
            logit_bytes: if is_compiled { 14.0 } else { 30.0 },
            ..Self::OURS
        }
    }
}
