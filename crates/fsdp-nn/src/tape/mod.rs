//! A tape with late-bound parameters: a model is written as forward only, the tape walks it backward.
//!
//! An operation records the *ids* of its parameters, never a view of their values: forward reads the views
//! it is handed, backward is handed fresh ones, and nothing keeps an unsharded parameter alive between the
//! two. There is one recording per block.
//!
//! **Memory.** An operation consumes its input; a tensor that is used twice is cloned (which shares its
//! storage). So a tensor lives exactly as long as someone still needs it, whether that is the model's code or
//! a recording, and operations that may work in place do so as soon as nobody else reads the storage.
//! What each operation keeps for backward:
//!
//! | operation | kept |
//! |---|---|
//! | linear | its input, if the weight is trained |
//! | rms_norm, layer_norm | its input and two numbers (one for rms_norm) per row |
//! | swiglu, gelu | its input |
//! | attention | packed projections, output, one number per head and row |
//! | rope, add, dropout, embedding | nothing (dropout masks come from counters) |
//!
//! The output of a norm, of swiglu and of gelu is never kept: whoever needs it in backward computes it again
//! from what the operation keeps anyway, one pass over memory, with the same bits. Operations on values that
//! no trained parameter reaches record nothing at all.
//!
//! **Recomputation.** A forward that keeps nothing for backward may be replayed by a tape that does
//! ([`Tape::noting`], [`Tape::replaying`]). The replay takes the outputs of linear maps and of attention (with its
//! statistics) from the forward, if that kept them, and goes on without those that nothing reads: a sum or dropout at
//! the end of a layer passes values on, and neither keeps them nor reads them in backward.
//!
//! Values are counted as [`Category::Activation`](fsdp_core::memory::Category), as is the gradient of a
//! block's input; all else in backward, and scratch, is `Workspace`.
//!
//! The first gradient that reaches a value is written, later ones are added, in backward order.

mod backward;
mod batch;
mod forward;
mod ops;
mod products;
mod tensor;

pub use backward::{Backward, Gradient, Node, Recording};
pub use batch::MicroBatch;
pub use forward::{Scope, Tape};
pub use ops::{head_logits, head_loss, head_loss_backward};
pub use products::Replay;
pub use tensor::{BackwardAgain, Recompute, Saved, Tensor, Value};
