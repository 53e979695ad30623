//! When queues were busy, and how much of it was hidden: sums over time intervals.

/// A time interval, in milliseconds from a common start.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Interval {
    pub(crate) start: f64,
    pub(crate) end: f64,
}

/// The union of intervals, as disjoint intervals in order.
fn union(intervals: &[Interval]) -> Vec<Interval> {
    let mut sorted: Vec<Interval> = intervals.iter().copied().filter(|span| span.end > span.start).collect();
    sorted.sort_by(|a, b| a.start.total_cmp(&b.start));
    let mut disjoint: Vec<Interval> = Vec::with_capacity(sorted.len());
    for span in sorted {
        match disjoint.last_mut() {
            Some(last) if span.start <= last.end => last.end = last.end.max(span.end),
            _ => disjoint.push(span),
        }
    }
    disjoint
}

/// The total time covered by at least one interval.
pub(crate) fn busy(intervals: &[Interval]) -> f64 {
    union(intervals).iter().fold(0.0, |sum, span| sum + (span.end - span.start))
}

/// The total time covered by `intervals` but not by `cover`.
pub(crate) fn exposed(intervals: &[Interval], cover: &[Interval]) -> f64 {
    let all: Vec<Interval> = intervals.iter().chain(cover).copied().collect();
    busy(&all) - busy(cover)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn spans(ends: &[(f64, f64)]) -> Vec<Interval> {
        ends.iter().map(|&(start, end)| Interval { start, end }).collect()
    }

    #[test]
    fn busy_time_counts_overlaps_once() {
        assert_eq!(busy(&spans(&[(0.0, 2.0), (1.0, 3.0), (5.0, 6.0), (5.5, 5.6)])), 4.0);
        assert_eq!(busy(&[]), 0.0);
    }

    #[test]
    fn time_covered_by_compute_is_not_exposed() {
        let compute = spans(&[(0.0, 4.0), (6.0, 9.0)]);
        assert_eq!(exposed(&spans(&[(1.0, 3.0)]), &compute), 0.0);
        assert_eq!(exposed(&spans(&[(3.0, 7.0)]), &compute), 2.0);
        assert_eq!(exposed(&spans(&[(10.0, 11.5)]), &[]), 1.5);
    }

    proptest! {
        #[test]
        fn busy_and_exposed_match_brute_force_count(
            ours in prop::collection::vec((0u8..40, 0u8..9), 0..9),
            theirs in prop::collection::vec((0u8..40, 0u8..9), 0..9),
        ) {
            let covers = |spans: &[(u8, u8)], at: u8| spans.iter().any(|&(s, len)| s <= at && at < s + len);
            let intervals = |of: &[(u8, u8)]| {
                spans(&of.iter().map(|&(s, len)| (f64::from(s), f64::from(s + len))).collect::<Vec<_>>())
            };
            let count = |predicate: &dyn Fn(u8) -> bool| (0..60).filter(|&at| predicate(at)).count() as f64;
            prop_assert_eq!(busy(&intervals(&ours)), count(&|at| covers(&ours, at)));
            let alone = count(&|at| covers(&ours, at) && !covers(&theirs, at));
            prop_assert_eq!(exposed(&intervals(&ours), &intervals(&theirs)), alone);
        }
    }
}
