//! Update rules of the host backend: fused passes over the shard of a segment.
//!
//! AdamW, SGD, Lion and averages are element-wise, and AdamW with 8-bit moments works on blocks within a row, so
//! their results do not depend on how a segment is sharded. Neither do those of Muon, which works on the directions
//! of whole matrices. The results of Adafactor depend on sums over ranks, so they agree only approximately.

mod adafactor;
mod adamw;
mod adamw8bit;
mod both;
mod dynamic;
mod elementwise;
mod ema;
mod factored;
mod finite_check;
mod groups;
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
