//! Turns operations that are repeated layer by layer into loops.
//!
//! A traced program lists the operations of every layer one after the other, so compile time grows with depth. This
//! module finds ranges that repeat equal operations ([`runs`]), traces each operand to its source ([`flow`]), and
//! writes a loop whose body is one of the rounds ([`write`](mod@write)). It knows nothing of layers: work that a
//! schedule does early or late, such as the gather of the next unit, is carried from one round to the next as
//! before.
//!
//! Values of a single round are elements of one value for all rounds, a *stack* ([`stacks`]). Arguments, such as the
//! parameters and the optimizer state of layers, are passed as stacks, and stacks of new parameters reuse their storage.
//!
//! LLVM calls this loop rerolling; models for JAX and PyTorch/XLA are written with a `scan` over layers to the same
//! end.

mod finish;
mod flow;
mod joined;
mod listing;
mod runs;
mod sequence;
mod signature;
mod stack;
mod stacks;
mod write;

use std::collections::HashSet;

use super::{Builder, Shape, Value};
pub(crate) use signature::{ArgumentStack, OutputKind, Signature, Stacked};

use flow::Flow;
use listing::Listing;
use runs::{Stretch, stretches};
use stacks::Stacks;

impl Builder {
    /// Turns repeated operations into loops. Returns their number, and the arguments and results that are stacks now;
    /// arguments that are already stored `together` stay so. Results are renamed to their new names. With `in_parallel`, a
    /// device may run operations beside a loop, so collectives are kept from that.
    pub(crate) fn scan(
        &mut self,
        signature: &mut Signature,
        together: &[Vec<usize>],
        in_parallel: bool,
    ) -> (usize, Stacked) {
        let (mut stacks, mut loops) = (Stacks::new(signature, together), 0);
        while let Some(flow) = self.next_run(&stacks.shapes, &signature.results, in_parallel) {
            self.write_loop(&flow, &mut stacks, &mut signature.results);
            loops += 1;
        }
        let stacked = self.finish_stacks(&stacks, signature);
        self.sweep(signature.outputs(&stacked).into_iter().map(|(value, _)| value));
        if in_parallel {
            let of_stacks = stacked.arguments.iter().map(|stack| stack.value.shape.clone());
            let shapes: Vec<Shape> = signature.arguments.iter().cloned().chain(of_stacks).collect();
            self.sequence_collectives(&shapes);
        }
        (loops, stacked)
    }

    /// Tries the shortest rounds first, since longer ones may contain them, but those without matrix products before
    /// others: updates visit the parameters of all layers, so the stacks of these are complete.
    fn next_run(&self, arguments: &[Shape], results: &[Value], in_parallel: bool) -> Option<Flow> {
        let listing = Listing::new(&self.operations, arguments, results);
        let mut found = stretches(&listing.kinds());
        // Collectives are kept in sequence with loops that are in no other loop only.
        let may_be_loop = |stretch: &Stretch| !(in_parallel && stretch.has_loop(&listing));
        found.retain(|stretch| stretch.is_of_layers(&listing) && may_be_loop(stretch));
        found.sort_by_key(|stretch| stretch.has_product(&listing));
        found.into_iter().map(|stretch| stretch.run(&listing)).find_map(|run| Flow::of(&listing, run))
    }

    /// Removes operations whose results are not read. Collectives stay: all ranks issue the same ones.
    fn sweep<'a>(&mut self, results: impl Iterator<Item = &'a Value>) {
        let mut read: HashSet<usize> = results.filter_map(|value| value.name.number()).collect();
        let mut kept = Vec::new();
        for operation in std::mem::take(&mut self.operations).into_iter().rev() {
            if read.contains(&operation.number()) || !operation.collectives().is_empty() {
                read.extend(operation.operands().iter().filter_map(|name| name.number()));
                kept.push(operation);
            }
        }
        kept.reverse();
        self.operations = kept;
    }
}
