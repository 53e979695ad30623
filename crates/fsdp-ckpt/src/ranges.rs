//! Finds gaps and overlaps in ranges that should add up to a whole.

use std::ops::Range;

/// A part of a whole that is not covered exactly once: the two runs that both contain it, or `None` if no run does.
pub(crate) type CoverageFault<T> = (Range<u64>, Option<(T, T)>);

/// Returns the first part of `0..len` that is not in exactly one of the runs. Runs may be empty, must not run
/// backwards, and must not extend beyond `len`.
pub(crate) fn first_coverage_fault<T: Copy + Ord>(
    len: u64,
    runs: impl IntoIterator<Item = (Range<u64>, T)>,
) -> Option<CoverageFault<T>> {
    let mut runs: Vec<(Range<u64>, T)> = runs.into_iter().filter(|(range, _)| !range.is_empty()).collect();
    runs.sort_unstable_by_key(|(range, holder)| (range.start, range.end, *holder));
    let (mut covered, mut last) = (0, None);
    for (range, holder) in runs {
        if range.start > covered {
            return Some((covered..range.start, None));
        }
        if let Some(last) = last.filter(|_| range.start < covered) {
            return Some((range.start..range.end.min(covered), Some((last, holder))));
        }
        (covered, last) = (range.end, Some(holder));
    }
    (covered < len).then_some((covered..len, None))
}

/// Converts a range of rows to 64-bit numbers.
pub(crate) fn wide(rows: &Range<usize>) -> Range<u64> {
    rows.start as u64..rows.end as u64
}
