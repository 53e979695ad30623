//! Joins of vectors, most of which are results of one loop: the loop writes to the whole, and the others are put beside.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

use super::stack::Stack;
use super::stacks::{Stacks, progression};
use crate::hlo::operation::Operation;
use crate::hlo::{Builder, Name, Value};

/// Equal operations that join vectors.
pub(super) struct Joined {
    /// Their numbers.
    pub(super) operations: Vec<usize>,
    operands: Vec<Name>,
    /// Whether each operand is a result of the loop.
    is_result: Vec<bool>,
    /// The operands among the elements of the loop's stack, which also holds results that are no operands.
    range: Range<usize>,
    /// Number of elements of the loop's stack.
    pub(super) count: usize,
}

/// Finds operations that join results of consecutive rounds with other vectors. Also returns the element of the loop's
/// stack that round 0 replaces, and the distance to that of the next round.
pub(super) fn find(
    later: &[Operation],
    results: &BTreeMap<usize, Name>,
    rounds: usize,
) -> Option<(Joined, (usize, isize))> {
    later.iter().filter(|operation| operation.joins_equal_vectors()).find_map(|operation| {
        let operands = operation.operands();
        let place = |(&round, name): (&usize, &Name)| {
            Some((round, operands.iter().position(|operand| operand == name)?))
        };
        let (joined_rounds, places): (Vec<usize>, Vec<usize>) = results.iter().filter_map(place).unzip();
        let (first, step) = progression(&places)?;
        if progression(&joined_rounds)?.1 != 1 {
            return None;
        }
        // Elements of all rounds, counted from the first operand.
        let [start, end] =
            [0, rounds - 1].map(|round| first as isize + step * (round as isize - joined_rounds[0] as isize));
        let before = start.min(end).min(0).unsigned_abs();
        let from_start = |place: isize| before.checked_add_signed(place).expect("the stack starts before it");
        let last = from_start(start.max(end).max(operands.len() as isize - 1));
        let mut is_result = vec![false; operands.len()];
        places.iter().for_each(|&place| is_result[place] = true);
        let is_equal = |other: &&Operation| other.joins_equal_vectors() && other.operands() == operands;
        let operations = later.iter().filter(is_equal).map(Operation::number).collect();
        let (range, count) = (before..before + operands.len(), last + 1);
        // Longer stacks are not vectors.
        let len = operation.shapes()[0].len() / operands.len();
        i32::try_from(len * count).ok()?;
        let joined = Joined { operations, operands, is_result, range, count };
        Some((joined, (from_start(start), step)))
    })
}

impl Builder {
    /// Completes the stack of a loop with the operands that are no results of it; returns the name of the joined vectors.
    pub(super) fn complete(
        &mut self,
        operation: &Operation,
        joined: &Joined,
        stack: &Stack,
        (names, stacks): (&mut HashMap<Name, Name>, &mut Stacks<'_>),
    ) -> Name {
        let known = names.get(&Name::Result(joined.operations[0])).copied();
        let name = known.unwrap_or_else(|| self.join(joined, stack, (names, stacks)));
        stacks.rename(operation.name(0), name);
        name
    }

    fn join(
        &mut self,
        Joined { operands, is_result, range, .. }: &Joined,
        stack: &Stack,
        (names, stacks): (&HashMap<Name, Name>, &mut Stacks<'_>),
    ) -> Name {
        let mut extended = stack.clone();
        let operands: Vec<Name> =
            operands.iter().map(|name| names.get(name).copied().unwrap_or(*name)).collect();
        for (place, &name) in operands.iter().enumerate().filter(|(place, _)| !is_result[*place]) {
            let element = Value { name, shape: stack.element.clone() };
            extended = extended.put_at(self, &element, range.start + place);
        }
        for (place, &name) in operands.iter().enumerate() {
            stacks.record(name, &extended, range.start + place);
        }
        let len = extended.element.len();
        self.range(&extended.value, range.start * len..range.end * len).name
    }
}
