//! Keeps collectives from running beside loops that contain collectives.
//!
//! XLA for processors runs what does not depend on each other's data in parallel. It starts collectives in the order of
//! the program, and a collective has ended before the next one starts. But a loop counts as started when its first
//! operation waits for another thread, and then the collective after it starts too. It meets those of the loop, which
//! other ranks execute at that time: they exchange the wrong data, or the plugin ends the process (`Unexpected number of
//! participants`), unless there are too few threads for both. Barriers do not help, since they are removed before.

use std::collections::{BTreeSet, HashMap};

use super::listing::Listing;
use crate::hlo::Element;
use crate::hlo::operation::Operation;
use crate::hlo::{Builder, Name, Shape, Value};

/// A collective, or a loop with collectives.
struct Exchange {
    is_loop: bool,
    /// A result, from which others can be made to depend on it.
    value: Value,
}

/// The collectives since the last loop with collectives, which is the first entry if there was one.
#[derive(Default)]
struct Recent {
    exchanges: Vec<Exchange>,
    /// For each value, the indices of the exchanges that it depends on.
    reached: HashMap<Name, BTreeSet<usize>>,
}

impl Recent {
    /// The exchanges that one of the operands depends on.
    fn before(&self, operands: &[Name]) -> BTreeSet<usize> {
        operands.iter().filter_map(|name| self.reached.get(name)).flatten().copied().collect()
    }

    /// The results that an operation with these operands must be made to depend on.
    fn missing(&self, operation: &Operation, operands: &[Name]) -> Vec<Value> {
        let reached = self.before(operands);
        let needed =
            |exchange: &Exchange| operation.is_loop() || operation.is_collective() && exchange.is_loop;
        let all = self.exchanges.iter().enumerate();
        let missing = all.filter(|(index, exchange)| needed(exchange) && !reached.contains(index));
        missing.map(|(_, exchange)| exchange.value.clone()).collect()
    }

    /// Adds an operation, which depends on all that it must.
    fn add(&mut self, operation: &Operation, operands: &[Name]) {
        let mut results = operation.results();
        if operation.is_barrier() {
            for (result, operand) in results.iter().zip(operands) {
                self.reached.insert(result.name, self.before(&[*operand]));
            }
            return;
        }
        let mut reached = self.before(operands);
        if operation.has_collectives() {
            let is_loop = operation.is_loop();
            if is_loop {
                *self = Self::default();
                reached.clear();
            }
            reached.insert(self.exchanges.len());
            results.sort_by_key(|value| value.shape.byte_len());
            let floats = results.iter().find(|value| value.element().is_float() && value.len() > 0);
            let value = floats.unwrap_or(&results[0]).clone();
            self.exchanges.push(Exchange { is_loop, value });
        }
        if !reached.is_empty() {
            self.reached.extend(results.into_iter().map(|result| (result.name, reached.clone())));
        }
    }
}

impl Operation {
    fn has_collectives(&self) -> bool {
        !self.collectives().is_empty()
    }

    /// Whether it is a loop with collectives.
    pub(super) fn is_loop(&self) -> bool {
        self.has_collectives() && self.count() > 1
    }

    fn is_collective(&self) -> bool {
        self.has_collectives() && self.count() == 1
    }
}

impl Builder {
    /// Makes each collective depend, by data, on the last loop with collectives before it, and each such loop on all
    /// collectives before it. Values do not change. No loop may contain another one with collectives.
    pub(super) fn sequence_collectives(&mut self, arguments: &[Shape]) {
        if !self.operations.iter().any(Operation::is_loop) {
            return;
        }
        let operations = std::mem::take(&mut self.operations);
        let (listing, mut recent) = (Listing::new(&operations, arguments, &[]), Recent::default());
        for (operation, operands) in operations.iter().zip(&listing.operands) {
            let missing = recent.missing(operation, operands);
            recent.add(operation, operands);
            let sequenced = if missing.is_empty() {
                operation.clone()
            } else {
                let operand = cheapest(&listing, operands);
                let after = self.depend(&operand, &missing).name;
                let renamed = |name| if name == operand.name { after } else { name };
                operation.renumbered(operation.number(), |index| renamed(operands[index]))
            };
            self.operations.push(sequenced);
        }
    }

    /// Returns `value`, computed from all of `others` too, in a way that compilers do not see through.
    fn depend(&mut self, value: &Value, others: &[Value]) -> Value {
        let mut sum = self.float(0.0, &[], Element::F32);
        for other in others {
            let flat = self.reshape(other, &[other.len()]);
            let first = self.range(&flat, 0..1);
            let first = self.convert(&first, Element::F32);
            let first = self.reshape(&first, &[]);
            sum = self.add(&sum, &first);
        }
        // Zero or not a number, but compilers may not assume that.
        let zero = self.with("multiply", &sum, 0.0);
        let one = self.float(1.0, &[], Element::F32);
        let never = self.compare("EQ", &zero, &one);
        let never = self.fill(&never, value.dims());
        // Anything but a constant, which a compiler might find to be equal to the value.
        let sum = self.convert(&sum, value.element());
        let sums = self.fill(&sum, value.dims());
        self.select(&never, &sums, value)
    }
}

/// The smallest operand with elements and dimensions: it is copied. (The index of the first round, which is a scalar, has to
/// remain a constant.)
fn cheapest(listing: &Listing<'_>, operands: &[Name]) -> Value {
    let is_tensor = |value: &Value| !value.dims().is_empty() && value.len() > 0;
    let values = operands.iter().map(|&name| listing.value(name)).filter(is_tensor);
    values.min_by_key(|value| value.shape.byte_len()).expect("collectives and loops over layers read tensors")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hlo::Groups;

    /// A loop of two rounds, each of which gathers `own` and changes `carried`.
    fn gathers_in_loop(hlo: &mut Builder, groups: &Groups, own: &Value, carried: &Value) -> Value {
        let open = hlo.begin_loop(2, std::slice::from_ref(carried));
        let gathered = hlo.all_gather(own, groups, "inside");
        let own = hlo.range(&gathered, 0..carried.len());
        let end = hlo.add(&open.values()[0].clone(), &own);
        hlo.end_loop(open, &[end]).swap_remove(0)
    }

    /// All operations whose data an operation depends on, found by searching from it; barriers pass values through.
    fn ancestors(operations: &[Operation], from: usize) -> BTreeSet<usize> {
        let (mut found, mut open) = (BTreeSet::new(), operations[from].operands());
        while let Some(name) = open.pop() {
            let producer = operations.iter().position(|one| Some(one.number()) == name.number());
            match (producer, name) {
                (Some(place), Name::Part(_, part)) if operations[place].is_barrier() => {
                    open.push(operations[place].operands()[part]);
                }
                (Some(place), _) if found.insert(place) => open.extend(operations[place].operands()),
                _ => {}
            }
        }
        found
    }

    /// The pairs of a loop with collectives and another operation with some, of which the later one does not depend on
    /// the earlier one.
    fn unordered(operations: &[Operation]) -> usize {
        let exchanges = |place: &usize| operations[*place].has_collectives();
        let all: Vec<usize> = (0..operations.len()).filter(exchanges).collect();
        let pairs = all.iter().flat_map(|&later| all.iter().map(move |&earlier| (earlier, later)));
        pairs
            .filter(|&(earlier, later)| {
                earlier < later && (operations[earlier].is_loop() || operations[later].is_loop())
            })
            .filter(|&(earlier, later)| !ancestors(operations, later).contains(&earlier))
            .count()
    }

    #[test]
    fn collectives_are_sequenced_around_loops_with_collectives() {
        let groups = Groups::new(vec![vec![0, 1]]);
        let shapes = vec![Shape::new(&[6], Element::F32); 4];
        let argument = |number: usize| Value { name: Name::Argument(number), shape: shapes[number].clone() };
        let mut hlo = Builder::default();
        let before = hlo.all_gather(&argument(0), &groups, "before");
        let first = gathers_in_loop(&mut hlo, &groups, &argument(1), &argument(2));
        // Behind the loop by a barrier only, as in a schedule.
        let own = hlo.after(&argument(3), &first);
        let between = hlo.all_gather(&own, &groups, "between");
        let other = hlo.all_reduce(&argument(1), &groups, "between");
        // Depends on some of what comes before.
        let carried = hlo.range(&between, 0..6);
        gathers_in_loop(&mut hlo, &groups, &argument(0), &carried);
        hlo.reduce_scatter(&before, &groups, "after");
        hlo.all_gather(&other, &groups, "after");
        assert!(unordered(&hlo.operations) > 5);

        let numbers = |hlo: &Builder| -> Vec<usize> {
            let met = hlo.operations.iter().filter(|one| one.has_collectives());
            met.map(Operation::number).collect()
        };
        let (traced, written) = (numbers(&hlo), hlo.collectives());
        hlo.sequence_collectives(&shapes);
        assert_eq!(unordered(&hlo.operations), 0);
        assert_eq!((numbers(&hlo), hlo.collectives()), (traced, written), "the collectives are the same");
        let once = hlo.body();
        hlo.sequence_collectives(&shapes);
        assert_eq!(hlo.body(), once, "what is in sequence stays as it is");
    }
}
