//! The schedule: one training step (or evaluation) as data.
//!
//! A schedule declares **buffers**, and lists operations on them in **program order**. Each operation belongs to a
//! queue and names its operands. Operations of one queue run in program order; operations of different queues are
//! ordered only by declared waits. The engine executes the list, the checker proves it safe, and the ledger predicts
//! its memory; it can also be printed.
//!
//! A schedule is the same on every rank, and a pure function of (model blocks, layout, mesh, policy, update rule,
//! rounds). Policies are visible only to the compiler ([`compile_step`], [`compile_evaluation`]).

mod before;
mod buffers;
mod compile;
mod display;
mod emit;
mod live;
mod op;
mod order;
mod policy;
mod step;

pub use crate::program::{Checkpointing, Round};
pub(crate) use before::HappensBefore;
pub use buffers::{BufferDecl, BufferId, Lasting, Place, Role, UnitBuffers};
pub use compile::{Compiler, compile_evaluation, compile_evaluation_alone, compile_step};
pub(crate) use display::describe;
pub use op::{Access, Op, OpId, OpKind, Phase, Source};
pub use order::micro_batch_index;
pub use policy::{Accumulation, AccumulationOrder, Offload, Policy, Reshard};
pub use step::{Schedule, Section, SectionKind};

#[cfg(test)]
mod tests;
