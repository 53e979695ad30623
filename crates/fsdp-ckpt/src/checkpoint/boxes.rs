//! Cuts a range of a tensor in C order into boxes.

use std::ops::Range;

/// Callback for the start and the sizes of a box.
type EachBox<'a, E> = dyn FnMut(&[u64], &[u64]) -> Result<(), E> + 'a;

/// Calls `each` with (start, sizes) of the boxes that make up the elements `range` of a tensor in C order, intersected
/// with the box at `offsets` of `sizes`.
pub(crate) fn for_each_box<E>(
    shape: &[u64],
    (offsets, sizes): (&[u64], &[u64]),
    range: Range<u64>,
    each: &mut EachBox<'_, E>,
) -> Result<(), E> {
    let cut = Cut { shape, offsets, sizes };
    cut.descend(0, &mut offsets.to_vec(), &mut sizes.to_vec(), range, each)
}

struct Cut<'a> {
    shape: &'a [u64],
    offsets: &'a [u64],
    sizes: &'a [u64],
}

impl Cut<'_> {
    /// Handles `range` of the sub-tensor of dimensions `dim..` at a fixed index of the dimensions before it, which
    /// `start` and `extent` contain. From `dim` on, both contain the chunk's box, before and after the call.
    fn descend<E>(
        &self,
        dim: usize,
        start: &mut Vec<u64>,
        extent: &mut Vec<u64>,
        range: Range<u64>,
        each: &mut EachBox<'_, E>,
    ) -> Result<(), E> {
        if range.is_empty() {
            return Ok(());
        }
        if dim == self.shape.len() {
            return each(start, extent);
        }
        let row: u64 = self.shape[dim + 1..].iter().product();
        let (first, last) = (range.start / row, (range.end - 1) / row);
        let is_inside =
            |index: u64| index >= self.offsets[dim] && index - self.offsets[dim] < self.sizes[dim];
        let (head, tail) = (range.start % row, range.end - last * row);
        let mut whole = first..last + 1;
        if head != 0 || (first == last && tail != row) {
            whole.start += 1;
            if is_inside(first) {
                (start[dim], extent[dim]) = (first, 1);
                let end = if first == last { tail } else { row };
                self.descend(dim + 1, start, extent, head..end, each)?;
            }
        }
        if last > first && tail != row {
            whole.end -= 1;
        }
        let (from, to) =
            (whole.start.max(self.offsets[dim]), whole.end.min(self.offsets[dim] + self.sizes[dim]));
        if from < to {
            (start[dim], extent[dim]) = (from, to - from);
            each(start, extent)?;
        }
        if last > first && tail != row && is_inside(last) {
            (start[dim], extent[dim]) = (last, 1);
            self.descend(dim + 1, start, extent, 0..tail, each)?;
        }
        (start[dim], extent[dim]) = (self.offsets[dim], self.sizes[dim]);
        Ok(())
    }
}
