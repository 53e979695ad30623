//! Update rules of the host backend: fused passes over the shard of a segment.
//!
//! AdamW and SGD are element-wise, so their results do not depend on how a segment is cut into shards;
//! Adafactor's depend on sums over ranks, and are only close.

mod adafactor;
mod adamw;
mod elementwise;
mod factored;
mod largest;
mod sgd;
#[cfg(test)]
mod tests;

pub use adafactor::{Adafactor, AdafactorFactors, AdafactorOptions};
pub use adamw::{AdamW, AdamWFactors};
pub use sgd::Sgd;
