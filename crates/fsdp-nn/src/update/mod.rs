//! Update rules: what each of them keeps and calculates, for all devices; and how the host runs them.
//!
//! AdamW (also schedule-free), SGD, Lion and averages are element-wise, and AdamW with 8-bit moments works on blocks within a row, so
//! their results do not depend on how a segment is sharded. Neither do those of Muon, which works on the directions
//! of whole matrices. The results of Adafactor depend on sums over ranks, so they agree only approximately.

mod adafactor;
mod adamw;
mod adamw8bit;
mod elementwise;
mod ema;
mod formula;
mod groups;
mod host;
mod lion;
mod muon;
mod rule;
mod schedule_free;
mod sgd;
#[cfg(test)]
mod tests;

pub use adafactor::{Adafactor, AdafactorFactors, AdafactorOptions};
pub use adamw::AdamW;
pub use adamw8bit::AdamW8bit;
pub use elementwise::{Elementwise, ElementwiseRule, Number, STATES_MAX};
pub use ema::Ema;
pub use formula::{Calculation, Formula, Input, Term};
pub use groups::{GroupSettings, Groups};
pub use host::HostScalars;
pub use lion::Lion;
pub use muon::{AdjustLr, Muon, MuonOptions};
pub use rule::{Part, Rule};
pub use schedule_free::ScheduleFree;
pub use sgd::Sgd;
