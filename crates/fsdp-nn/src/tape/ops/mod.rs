//! The operations of a tape: forward as methods of [`Tape`](super::Tape), backward as recorded nodes.

mod attention;
mod dropout;
mod elementwise;
mod embedding;
mod head;
mod linear;
mod norm;

pub use head::{head_logits, head_loss, head_loss_backward};
