//! Update rules over [`Torch`](super::Torch): those of the underlying memory, or AdamW and SGD composed of ATen's
//! operations.
//!
//! A composition makes one pass over memory for every addition, product, quotient and root. Each is rounded separately,
//! in the order of the host's rules, so the results have the same bits.

mod adamw;
mod blocks;
mod delegate;
mod sgd;
