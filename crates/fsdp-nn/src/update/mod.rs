//! Update rules of the host backend: fused passes over the shard of a segment.
//!
//! AdamW and SGD are element-wise, so their results do not depend on how a segment is cut into shards.

mod adamw;
mod elementwise;
mod sgd;

pub use adamw::AdamW;
pub use sgd::Sgd;
