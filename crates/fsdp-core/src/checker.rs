//! Proves a schedule safe before any byte moves.
//!
//! The checker walks a schedule in program order. It tracks the symbolic contents of every buffer, and for every
//! operation the operations that certainly happened before it: all earlier ones of its queue, and those that its
//! declared waits imply (vector clocks). It accepts a schedule when
//! - every operation finds the contents it needs in its operands, and overwrites nothing that was not given up,
//! - lengths, dtypes and places of operands match,
//! - every pair of conflicting accesses is ordered, and every collective hands its buffers over before they are used,
//! - norms and updates read gradients that contain every micro-batch exactly once,
//! - at the end, everything is given up except what outlives a step, and every trained segment was updated once,
//! - all ranks issue the same collectives in the same order ([`check_ranks`]).

mod order;
mod ranks;
mod shapes;
mod values;

pub use crate::error::Violation;
pub use ranks::check_ranks;

use crate::layout::Layout;
use crate::model::ModelSpec;
use crate::schedule::{BufferId, HappensBefore, Schedule, describe};

/// Names operations and buffers in violations.
#[derive(Clone, Copy)]
struct Names<'a> {
    schedule: &'a Schedule,
    layout: &'a Layout,
}

impl Names<'_> {
    fn op(&self, index: usize) -> String {
        format!("{index} ({})", describe(&self.schedule.ops[index], self.schedule, self.layout))
    }

    fn buffer(&self, id: BufferId) -> String {
        let decl = self.schedule.buffer(id);
        let unit = decl.unit.map_or_else(String::new, |unit| format!(" of {}", self.layout.unit(unit).name));
        let segment = decl.segment.map_or_else(String::new, |segment| format!(", segment {}", segment.0));
        let len = decl.len.map_or_else(String::new, |len| format!("{len} x "));
        format!("{} ({}{unit}{segment}: {len}{})", id.0, decl.name(), decl.dtype)
    }
}

/// Checks one rank's schedule.
///
/// # Errors
/// The first [`Violation`] in program order.
pub fn check(schedule: &Schedule, spec: &ModelSpec, layout: &Layout) -> Result<(), Violation> {
    let names = Names { schedule, layout };
    shapes::check_shards(names)?;
    let mut before = HappensBefore::default();
    let mut values = values::Values::new(names, spec);
    for (index, op) in schedule.ops.iter().enumerate() {
        order::check(names, &mut before, index, op)?;
        values.apply(index, op)?;
        shapes::check(names, index, op)?;
    }
    values.end()
}

#[cfg(test)]
pub(crate) use values::Values;

#[cfg(test)]
mod tests;
