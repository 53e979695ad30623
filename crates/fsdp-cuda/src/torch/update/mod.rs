//! Update rules over [`Torch`]: those of the memory below, or AdamW and SGD composed of ATen's operations.
//!
//! A composition makes one pass over memory for every addition, product, quotient and root. Each of them is rounded by
//! itself, in the order of the host's rules, so it gives their bits.

mod adamw;
mod below;
mod blocks;
mod sgd;
