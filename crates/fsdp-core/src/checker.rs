//! Proves a schedule safe before any byte moves.
//!
//! The checker walks a schedule in program order. It follows what every buffer holds, symbolically, and knows for every
//! operation what has certainly happened before it: all earlier operations of its queue, and what its declared waits
//! imply (vector clocks). It accepts a schedule when
//! - every operation finds in its operands what it needs, and overwrites nothing that is not given up,
//! - lengths, dtypes and places of operands fit each other,
//! - every pair of conflicting accesses is ordered, and every collective hands its buffers over before they are used,
//! - norms and updates are of gradients that have every micro-batch exactly once,
//! - everything is given up at the end but what outlives a step, and every trained segment is updated once,
//! - all ranks issue the same collectives in the same order ([`check_ranks`]).

mod order;
mod ranks;
mod shapes;
mod values;
mod violation;

pub use ranks::check_ranks;
pub use violation::Violation;

use crate::layout::Layout;
use crate::model::ModelSpec;
use crate::schedule::{Before, BufferId, Schedule, describe};

/// How operations and buffers are called in violations.
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
    let mut before = Before::default();
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
