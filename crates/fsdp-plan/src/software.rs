//! What software does beside the arithmetic: ours, and that of others whose runs are published.

use fsdp_core::schedule::Checkpointing;

/// How operations that are no products are run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Elementwise {
    /// Operations of a layer in kernels that a compiler makes, or that were written for that.
    Fused,
    /// Kernels written by hand for one model, with norms, residuals and activations in the products' epilogues (llm.c).
    ByHand,
    /// A kernel for each operation of a model in Python.
    Eager,
    /// The same, where norms and rotations are computed in f32 on the way.
    EagerInF32,
}

/// Which kernel of attention there is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttentionKernel {
    /// FlashAttention-2, and what is as fast.
    Flash2,
    /// FlashAttention-3 and cuDNN on Hopper: 640 beside 400 TFLOP/s at 8192 positions by their authors.
    Flash3,
    /// FlashAttention-1, and Triton's kernel of 2023.
    Triton,
    /// Kernels of XLA, and early ones of Pallas: they compute what causality leaves out.
    Xla,
    /// None: scores are written to memory, as PyTorch/XLA did in 2023.
    None,
}

/// What of a layer is run again for backward, as parts of its forward.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Recomputed {
    /// Of its products.
    pub products: f64,
    /// Of attention.
    pub attention: f64,
    /// Of everything else.
    pub elementwise: f64,
    /// Whether the last product of a layer is spared, because backward does not ask for its output: PyTorch from 2.1 on, and
    /// XLA.
    pub spares_last: bool,
}

impl Recomputed {
    /// All of a layer.
    pub const ALL: Self = Self { products: 1.0, attention: 1.0, elementwise: 1.0, spares_last: false };
}

/// A way to train.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Software {
    /// How operations that are no products are run.
    pub elementwise: Elementwise,
    /// What is run again of a layer that is recomputed; none: what its listing says.
    pub recomputed: Option<Recomputed>,
    /// Bytes that are copied round collectives, for each unsharded parameter and time that it is resharded.
    pub copies_forward: f64,
    /// Whether gradients of views, casts and copies into the reduction take the fitted number of bytes for each unsharded
    /// parameter.
    pub copies_backward: bool,
    /// How attention is computed.
    pub attention: AttentionKernel,
    /// Whether products are in fp8.
    pub is_fp8: bool,
    /// Whether the update is one kernel, rather than many passes.
    pub is_update_fused: bool,
    /// Bytes of traffic for each logit; none: what the operations of the head say.
    pub logit_bytes: f64,
    /// Whether gradients of replicas are summed after all of backward.
    pub is_replication_exposed: bool,
    /// The element size of all-gathers, where it is not that of parameters.
    pub gathered_bytes: Option<f64>,
}

impl Software {
    /// What this engine does: gathers into place, fused operations, no copies.
    pub const OURS: Self = Self {
        elementwise: Elementwise::Fused,
        recomputed: None,
        copies_forward: 0.0,
        copies_backward: false,
        attention: AttentionKernel::Flash2,
        is_fp8: false,
        is_update_fused: true,
        logit_bytes: 14.0,
        is_replication_exposed: false,
        gathered_bytes: None,
    };

    /// What PyTorch's FSDP2 does with the same schedule: copies round collectives; layers that are run again in full but for their
    /// last product, or half of their products where they are checkpointed selectively; kernels of Python unless compiled.
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
