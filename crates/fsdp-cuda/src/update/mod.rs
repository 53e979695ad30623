//! Update rules on a device.
//!
//! AdamW, SGD, Lion and averages are one kernel per run of elements with the same settings, and yield the same bits as
//! the host's rules; so does AdamW with 8-bit moments, with one kernel per piece. Adafactor is several kernels per
//! piece, whose sums have the host's order within a row and a fixed order beyond. All of these read on the device
//! whether the step was finite, so the host does not wait. Shards in pinned memory are updated by the host's rules.

mod adafactor;
mod adamw;
mod adamw8bit;
mod ema;
mod factored;
mod lion;
mod muon;
mod on_host;
mod runs;
mod sgd;

#[cfg(feature = "torch")]
pub(crate) use runs::runs;
