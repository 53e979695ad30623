//! Ranges that should add up to a whole: which parts are missing, and which are there twice.

use std::ops::Range;

/// A part of a whole that is wrong, with the two runs that both hold it; without, where none does.
pub(crate) type Uneven<T> = (Range<u64>, Option<(T, T)>);

/// The first part of `0..len` that is not in exactly one of the runs, which may be empty and do not run backwards.
/// Runs do not reach beyond `len`.
pub(crate) fn first_uneven<T: Copy + Ord>(
    len: u64,
    runs: impl IntoIterator<Item = (Range<u64>, T)>,
) -> Option<Uneven<T>> {
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

/// A range of rows as one of numbers that files have.
pub(crate) fn wide(rows: &Range<usize>) -> Range<u64> {
    rows.start as u64..rows.end as u64
}
