//! Update rules of the host backend: fused passes over the shard of a segment.
//!
//! AdamW, SGD, Lion and averages are element-wise, AdamW with 8-bit moments works on blocks of a row, so their results do not
//! depend on how a segment is cut into shards; neither do those of Muon, which sees directions of whole matrices. Adafactor's
//! depend on sums over ranks, and are only close.

mod adafactor;
mod adamw;
mod adamw8bit;
mod both;
mod dynamic;
mod elementwise;
mod ema;
mod factored;
mod groups;
mod largest;
mod lion;
mod momentum;
mod muon;
mod orthogonal;
mod sgd;
#[cfg(test)]
mod tests;

pub use adafactor::{Adafactor, AdafactorFactors, AdafactorOptions};
pub use adamw::{AdamW, AdamWFactors};
pub use adamw8bit::AdamW8bit;
pub use both::Both;
pub use dynamic::CodeBook;
pub use ema::Ema;
pub use groups::{GroupSettings, Groups};
pub use lion::{Lion, LionFactors};
pub use muon::{AdjustLr, Muon, MuonOptions};
pub use sgd::Sgd;
