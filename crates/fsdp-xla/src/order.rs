//! Checks whether a compiler has kept collectives in the order of the schedule.

use std::fmt;

use crate::hlo::Collective;

/// Compares the collectives of a compiled program with the traced ones. Each kind on each queue is compared by itself,
/// since only waits order the others. Collectives of one unit count as one, as in the schedule: its segments have no
/// order, and compilers merge them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Order {
    /// Units are in the order of the schedule, each with at least one collective wherever the schedule has one.
    Same,
    /// The first collective of a kind that is out of place. At least one of the two fields is set.
    Differs {
        /// The collective in the schedule; `None` past its last one.
        expected: Option<Collective>,
        /// The compiled collective; `None` past the last one. Its name lists all collectives it was merged from.
        found: Option<Collective>,
    },
}

impl Order {
    /// Compares the traced collectives with those left by the compiler.
    pub fn of(written: &[Collective], left: &[Collective]) -> Self {
        let lists = Collective::KINDS.into_iter().flat_map(|kind| [(kind, false), (kind, true)]);
        for (kind, for_gradients) in lists {
            let [mut expected, mut found] =
                [written, left].map(|all| units(all, kind, for_gradients).into_iter());
            loop {
                match (expected.next(), found.next()) {
                    (None, None) => break,
                    (Some(expected), Some(found)) if expected.of() == found.of() => {}
                    (expected, found) => {
                        return Order::Differs { expected: expected.cloned(), found: found.cloned() };
                    }
                }
            }
        }
        Order::Same
    }
}

/// The first collective of each run of one unit, among those of one kind that are for gradients (if `for_gradients`) or
/// for anything else.
fn units<'a>(all: &'a [Collective], kind: &str, for_gradients: bool) -> Vec<&'a Collective> {
    let is_selected = |collective: &&Collective| {
        collective.kind == kind && collective.of().starts_with("gradient") == for_gradients
    };
    let mut units: Vec<&Collective> = all.iter().filter(is_selected).collect();
    units.dedup_by(|collective, previous| collective.of() == previous.of());
    units
}

impl fmt::Display for Order {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Order::Same => f.write_str("that of the schedule"),
            Order::Differs { expected: Some(expected), found: Some(found) } => {
                write!(f, "differs from the schedule's: {found} in place of {expected}")
            }
            Order::Differs { expected: Some(expected), found: None } => {
                write!(f, "differs from the schedule's: {expected} is missing")
            }
            Order::Differs { found, .. } => {
                let found = found.as_ref().map_or_else(String::new, Collective::to_string);
                write!(f, "differs from the schedule's: {found} is extra")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn collective(kind: &'static str, of: &str, number: usize) -> Collective {
        Collective { kind, elements: 8, name: format!("{of}/{kind} {number}") }
    }

    fn written() -> [Collective; 4] {
        [
            collective("all-gather", "forward/unit 1", 0),
            collective("all-gather", "forward/unit 1", 1),
            collective("all-gather", "forward/unit 2", 2),
            collective("reduce-scatter", "gradient/unit 2", 3),
        ]
    }

    /// The message if a compiler leaves these collectives.
    fn message_for(places: &[usize]) -> String {
        let left: Vec<Collective> = places.iter().map(|&place| written()[place].clone()).collect();
        Order::of(&written(), &left).to_string()
    }

    #[test]
    fn unit_reordering_is_detected_and_segment_order_ignored() {
        assert_eq!(message_for(&[0, 1, 2, 3]), "that of the schedule");
        assert_eq!(message_for(&[1, 0, 2, 3]), "that of the schedule", "segments of one unit");
        assert_eq!(message_for(&[3, 0, 1, 2]), "that of the schedule", "another kind");
        assert_eq!(
            message_for(&[2, 0, 1, 3]),
            "differs from the schedule's: forward/unit 2/all-gather 2 (8 elements) in place of \
             forward/unit 1/all-gather 0 (8 elements)"
        );
        assert!(message_for(&[0, 2, 1, 3]).contains("unit 1/all-gather 1 (8 elements) is extra"));
    }

    /// With replicas and the tree reduction, gradients are gathered too, on another queue than parameters.
    #[test]
    fn gradient_and_parameter_gathers_are_unordered() {
        let [parameters, gradients] =
            ["backward/unit 1", "gradient/unit 4"].map(|of| collective("all-gather", of, 0));
        let written = [parameters.clone(), gradients.clone()];
        assert_eq!(Order::of(&written, &[gradients.clone(), parameters.clone()]), Order::Same);
        assert_ne!(Order::of(&written, &[gradients]), Order::Same);
    }

    #[test]
    fn missing_and_duplicate_collectives_are_reported() {
        assert!(message_for(&[0, 1, 3]).contains("forward/unit 2/all-gather 2 (8 elements) is missing"));
        assert!(message_for(&[0, 1, 2]).contains("gradient/unit 2/reduce-scatter 3 (8 elements) is missing"));
        assert!(message_for(&[0, 2, 0, 3]).contains("forward/unit 1/all-gather 0 (8 elements) is extra"));
    }

    #[test]
    fn segments_may_be_merged_but_units_may_not() {
        let joined = |name: &str| Collective { kind: "all-gather", elements: 16, name: name.to_owned() };
        let [first, _, third, reduced] = written();
        let segments = joined("forward/unit 1/(all-gather 0:all-gather 1)");
        assert_eq!(Order::of(&written(), &[segments, third, reduced.clone()]), Order::Same);
        let units = joined("forward/(unit 1/all-gather 1:unit 2/all-gather 2)");
        let found = Order::of(&written(), &[first, units.clone(), reduced]);
        let expected = written()[2].clone();
        assert_eq!(found, Order::Differs { expected: Some(expected), found: Some(units) });
    }
}
