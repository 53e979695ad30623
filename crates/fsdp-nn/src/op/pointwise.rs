//! Element-wise sums, copies, scaling and dropout.

use std::collections::{BTreeMap, BTreeSet};

use fsdp_core::Error;
use fsdp_core::model::ParamId;

use super::describe::{Description, Role};
use crate::graph::{Backward, Builder, Call, Node, Operand, Tensor};
use crate::lengths;
use crate::op::{Linear, Op};

/// A counter-based dropout mask: element `i` of sample `s` is dropped if the generator keyed by `keys[s]` says so at
/// counter `i`; kept elements are scaled by `1 / (1 - p)`.
#[derive(Clone, Copy, Debug)]
pub struct Dropout<'a> {
    /// Dropout rate, `0 <= p < 1`.
    pub p: f64,
    /// One key per sample, derived from (seed, step, sample, site).
    pub keys: &'a [u64],
}

impl Dropout<'_> {
    /// Threshold in units of 2^-32: an element is dropped if its 32 random bits are below it.
    pub fn threshold(&self) -> u32 {
        (self.p * 4_294_967_296.0) as u32
    }

    /// The factor of kept elements.
    pub fn kept(&self) -> f64 {
        1.0 / (1.0 - self.p)
    }
}

/// Element-wise operations.
#[derive(Clone, Copy, Debug, PartialEq)]
#[expect(missing_docs, reason = "sizes are what they are called")]
pub enum Pointwise {
    /// `y = a + b`.
    Add { len: usize },
    /// `y += x`.
    Accumulate { len: usize },
    /// `y = x`.
    Copy { len: usize },
    /// `y = x`, rounded to the dtype of `y`.
    Convert { len: usize },
    /// Copies (or adds) rows of `columns` elements; row starts are `from` elements apart in `x` and `to` elements apart in `y`.
    CopyColumns { rows: usize, columns: usize, from: usize, to: usize },
    /// Treats every row as `groups * parts` blocks of `width` columns and transposes their order: `x` is ordered by
    /// group, then part; `y` by part, then group. Exchanging the two numbers gives the backward.
    Regroup { rows: usize, groups: usize, parts: usize, width: usize },
    /// Copies `x`, a parameter, to every row.
    Repeat { rows: usize, width: usize },
    /// `x *= factor`; applied to a gradient, it is its own backward.
    Scale { len: usize, factor: f64 },
    /// Dropout in place; applied to a gradient, it is its own backward.
    Dropout { len: usize, samples: usize, p: f64 },
}

impl Pointwise {
    pub(super) fn describe(&self) -> Description {
        let value = Role::value;
        match *self {
            Pointwise::Add { len } => Description::new("add")
                .read([value("a", len), value("b", len)])
                .write([value("y", len)])
                .flops(len),
            Pointwise::Accumulate { len } => Description::new("accumulate")
                .read([value("x", len)])
                .write([value("y", len).updated()])
                .flops(len),
            Pointwise::Copy { len } => {
                Description::new("copy").read([value("x", len)]).write([value("y", len)])
            }
            Pointwise::Convert { len } => {
                Description::new("convert").read([value("x", len)]).write([value("y", len)]).recomputed()
            }
            Pointwise::CopyColumns { rows, columns, from, to } => {
                let strided = |name, stride| {
                    assert!(stride >= columns, "rows of {columns} elements do not lie {stride} apart");
                    let len = rows.saturating_sub(1) * stride + columns;
                    value(name, len).or_more(rows * columns)
                };
                Description::new("copy_columns").read([strided("x", from)]).write([strided("y", to).adds()])
            }
            Pointwise::Regroup { rows, groups, parts, width } => {
                let len = rows * groups * parts * width;
                Description::new("regroup").read([value("x", len)]).write([value("y", len)])
            }
            Pointwise::Repeat { rows, width } => {
                Description::new("repeat").read([value("x", width)]).write([value("y", rows * width)])
            }
            Pointwise::Scale { len, factor } => {
                Description::new("scale").write([value("x", len).updated()]).constant(factor).flops(len)
            }
            Pointwise::Dropout { len, samples, p } => {
                lengths::expect_rows("elements of samples under dropout", samples, len);
                let of = Description::new("dropout").write([value("x", len).updated()]);
                of.flops(len).drops(p, samples)
            }
        }
    }

    pub(super) fn derive(&self, b: &mut Backward<'_>, node: &Node, output: usize) {
        match self {
            // All inputs share the gradient of the output.
            Pointwise::Add { .. } => {
                let Some(gradient) = b.gradients[output].take() else { return };
                node.reads().for_each(|input| b.put(input, gradient));
            }
            Pointwise::CopyColumns { .. } if is_split(node) => derive_split(b, node),
            Pointwise::CopyColumns { .. } if is_rearranged(b, node) => derive_rearranged(b, node, output),
            Pointwise::CopyColumns { .. } => derive_concat(b, node, output),
            Pointwise::Convert { .. } => {
                let Some(dy) = b.take(output) else { return };
                let input = node.main().reads[0].local().expect("a value is converted");
                let Some(place) = b.overwrite(input) else { return };
                b.draft.call(node.op().clone(), vec![b.draft.whole(dy)], vec![(b.draft.whole(place), false)]);
                b.put(input, place);
            }
            Pointwise::Regroup { rows, groups, parts, width } => {
                let Some(dy) = b.take(output) else { return };
                let input = node.main().reads[0].local().expect("a value is regrouped");
                let Some(place) = b.overwrite(input) else { return };
                let op = Op::Pointwise(Pointwise::Regroup {
                    rows: *rows,
                    groups: *parts,
                    parts: *groups,
                    width: *width,
                });
                b.draft.call(op, vec![b.draft.whole(dy)], vec![(b.draft.whole(place), false)]);
                b.put(input, place);
            }
            Pointwise::Repeat { rows, width } => {
                let Some(dy) = b.take(output) else { return };
                let Some(target) = b.target(node.main().reads[0]) else { return };
                let op = Op::Linear(Linear::ColumnSums { rows: *rows, columns: *width, stride: *width });
                b.draft.call(op, vec![b.draft.whole(dy)], vec![target]);
            }
            Pointwise::Scale { .. } | Pointwise::Dropout { .. } => {
                b.in_place(node, output, node.op().clone())
            }
            _ => unreachable!("{} is not an operation of forward", self.describe().name),
        }
    }
}

/// Whether column copies split one value, rather than concatenating several.
fn is_split(node: &Node) -> bool {
    let mut writes = node.writes();
    let first = writes.next();
    writes.any(|other| Some(other) != first)
}

/// Whether column copies move every element of one value to other places, each to one or several.
fn is_rearranged(b: &Backward<'_>, node: &Node) -> bool {
    let copied = |call: &Call| match (&call.op, call.reads[0]) {
        (Op::Pointwise(Pointwise::CopyColumns { rows, columns, .. }), Operand::Local { offset, .. }) => {
            Some((offset, rows * columns))
        }
        _ => None,
    };
    let mut inputs = node.reads();
    let input = inputs.next();
    // Copies from one place have one size.
    let distinct: BTreeMap<usize, usize> = node.calls.iter().filter_map(copied).collect();
    inputs.all(|other| Some(other) == input)
        && input.is_some_and(|id| b.draft.places[id].len() == distinct.values().sum::<usize>())
}

/// Moves every element of the output's gradient back, adding those that were copied to several places.
fn derive_rearranged(b: &mut Backward<'_>, node: &Node, output: usize) {
    let Some(dy) = b.take(output) else { return };
    let input = node.main().reads[0].local().expect("a value is rearranged");
    let Some(place) = b.overwrite(input) else { return };
    let mut seen = BTreeSet::new();
    for call in &node.calls {
        let (
            Op::Pointwise(Pointwise::CopyColumns { rows, columns, from, to }),
            Operand::Local { offset: first, len, .. },
            Operand::Local { offset: start, len: written, .. },
        ) = (&call.op, call.reads[0], call.writes[0].0)
        else {
            continue;
        };
        let op =
            Op::Pointwise(Pointwise::CopyColumns { rows: *rows, columns: *columns, from: *to, to: *from });
        let read = Operand::Local { id: dy, offset: start, len: written };
        let write = Operand::Local { id: place, offset: first, len };
        b.draft.call(op, vec![read], vec![(write, !seen.insert(first))]);
    }
    b.put(input, place);
}

/// Copies to every input the columns of the output's gradient that belong to it.
fn derive_concat(b: &mut Backward<'_>, node: &Node, output: usize) {
    let Some(gradient) = b.take(output) else { return };
    for call in &node.calls {
        let Op::Pointwise(Pointwise::CopyColumns { rows, columns, from, to }) = call.op else {
            continue;
        };
        let (Some(input), Operand::Local { offset, len, .. }) = (call.reads[0].local(), call.writes[0].0)
        else {
            continue;
        };
        let Some(place) = b.overwrite(input) else { continue };
        let op = Op::Pointwise(Pointwise::CopyColumns { rows, columns, from: to, to: from });
        let dy = Operand::Local { id: gradient, offset, len };
        b.draft.call(op, vec![dy], vec![(b.draft.whole(place), false)]);
        b.put(input, place);
    }
}

/// Concatenates the gradients of all outputs.
fn derive_split(b: &mut Backward<'_>, node: &Node) {
    let outputs: Vec<usize> = node.writes().collect();
    let gradients: Vec<Option<usize>> = outputs.into_iter().map(|output| b.take(output)).collect();
    if gradients.iter().all(Option::is_none) {
        return;
    }
    let input = node.main().reads[0].local().expect("a value is split");
    let Some(place) = b.overwrite(input) else { return };
    for (call, gradient) in node.calls.iter().zip(gradients) {
        let gradient = gradient.expect("the block uses every part of a value that it splits");
        let (
            Op::Pointwise(Pointwise::CopyColumns { rows, columns, from, to }),
            Operand::Local { offset, len, .. },
        ) = (&call.op, call.reads[0])
        else {
            continue;
        };
        let op =
            Op::Pointwise(Pointwise::CopyColumns { rows: *rows, columns: *columns, from: *to, to: *from });
        let dx = Operand::Local { id: place, offset, len };
        b.draft.call(op, vec![b.draft.whole(gradient)], vec![(dx, false)]);
    }
    b.put(input, place);
}

impl Builder<'_> {
    /// `a + b`.
    ///
    /// # Errors
    /// If the widths differ.
    pub fn add(&mut self, a: Tensor, b: Tensor) -> Result<Tensor, Error> {
        self.check("add", a, b.width())?;
        let y = self.rows(a.width());
        let op = Op::Pointwise(Pointwise::Add { len: self.row_count() * y.width() });
        let reads = vec![self.whole(a), self.whole(b)];
        self.node(vec![Call::new(op, reads, [(self.whole(y), false)])], None);
        Ok(y)
    }

    /// The same rows, rounded to the dtype of values.
    pub(crate) fn convert(&mut self, x: Tensor) -> Tensor {
        let y = self.rows(x.width());
        let op = Op::Pointwise(Pointwise::Convert { len: self.row_count() * x.width() });
        self.node(vec![Call::new(op, vec![self.whole(x)], [(self.whole(y), false)])], None);
        y
    }

    /// Concatenates the rows of several values, such as queries, keys and values that were processed separately.
    pub fn concat(&mut self, inputs: &[Tensor]) -> Tensor {
        self.concat_pieces(inputs, 1)
    }

    /// As [`Builder::concat`], for each of the equal `pieces` of a row, such as heads.
    fn concat_pieces(&mut self, inputs: &[Tensor], pieces: usize) -> Tensor {
        let y = self.rows(inputs.iter().map(|x| x.width()).sum());
        let (rows, to, mut offset) = (self.row_count() * pieces, y.width() / pieces, 0);
        let mut calls = Vec::new();
        for &x in inputs {
            let columns = x.width() / pieces;
            let op = Op::Pointwise(Pointwise::CopyColumns { rows, columns, from: columns, to });
            let write = y.columns(offset, rows.saturating_sub(1) * to + columns);
            calls.push(Call::new(op, vec![self.whole(x)], [(write, false)]));
            offset += columns;
        }
        self.node(calls, None);
        y
    }

    /// Reorders packed queries, keys and values from head by head to all queries, all keys, all values: in every row,
    /// `groups` groups of `parts` blocks become the blocks of the first part, then those of the second, and so on.
    ///
    /// # Errors
    /// If a row is not a whole number of blocks.
    pub fn regroup(&mut self, x: Tensor, groups: usize, parts: usize) -> Result<Tensor, Error> {
        let (rows, width) = (self.row_count(), x.width() / (groups * parts).max(1));
        self.check("regroup", x, groups * parts * width)?;
        let (y, read) = (self.rows(x.width()), self.whole(x));
        let op = Op::Pointwise(Pointwise::Regroup { rows, groups, parts, width });
        self.node(vec![Call::new(op, vec![read], [(self.whole(y), false)])], None);
        Ok(y)
    }

    /// Gives every row a copy of a parameter of `width` elements.
    ///
    /// # Errors
    /// If the parameter does not belong to the block.
    pub fn repeat(&mut self, param: ParamId, width: usize) -> Result<Tensor, Error> {
        let (read, y) = (self.param(param)?, self.rows(width));
        let op = Op::Pointwise(Pointwise::Repeat { rows: self.row_count(), width });
        self.node(vec![Call::new(op, vec![read], [(self.whole(y), false)])], None);
        Ok(y)
    }

    /// Moves the even elements among the first `rotating` of every head before the odd ones. Where queries and keys
    /// rotate in pairs of neighbors, this makes the pairs those of [`Builder::rope`]; scores do not depend on the order of
    /// elements.
    ///
    /// # Errors
    /// If a row is not a whole number of heads of which an even number of elements rotates.
    pub fn part_neighbors(&mut self, x: Tensor, head_dim: usize, rotating: usize) -> Result<Tensor, Error> {
        let heads = x.width() / head_dim.max(1);
        self.check("part_neighbors", x, heads * (head_dim - rotating % 2))?;
        if rotating < head_dim {
            let [first, rest] = self.split_pieces(x, heads, [rotating, head_dim - rotating]);
            let first = self.part_neighbors(first, rotating, rotating)?;
            return Ok(self.concat_pieces(&[first, rest], heads));
        }
        let (y, read, rows) = (self.rows(x.width()), self.whole(x), self.row_count() * heads);
        let op = Op::Pointwise(Pointwise::Regroup { rows, groups: rotating / 2, parts: 2, width: 1 });
        self.node(vec![Call::new(op, vec![read], [(self.whole(y), false)])], None);
        Ok(y)
    }

    /// `factor * x`.
    pub fn scale(&mut self, x: Tensor, factor: f64) -> Tensor {
        if factor == 1.0 {
            return x;
        }
        let len = self.row_count() * x.width();
        self.in_place(x, Op::Pointwise(Pointwise::Scale { len, factor }), vec![], None)
    }

    /// Splits every row into parts of these widths (gate and up of one linear map, for example). All must be used.
    ///
    /// # Errors
    /// If the widths do not add up to that of a row.
    pub fn split<const N: usize>(&mut self, x: Tensor, widths: [usize; N]) -> Result<[Tensor; N], Error> {
        self.check("split", x, widths.iter().sum())?;
        Ok(self.split_pieces(x, 1, widths))
    }

    /// As [`Builder::split`], where a row of `x` is several rows of these parts, one after the other.
    ///
    /// # Errors
    /// If a row of `x` is not a whole number of such rows.
    pub fn split_rows<const N: usize>(
        &mut self,
        x: Tensor,
        widths: [usize; N],
    ) -> Result<[Tensor; N], Error> {
        let from: usize = widths.iter().sum();
        let pieces = x.width() / from.max(1);
        self.check("split", x, pieces * from)?;
        Ok(self.split_pieces(x, pieces, widths))
    }

    /// As [`Builder::split`], for each of the equal `pieces` of a row, such as heads.
    fn split_pieces<const N: usize>(&mut self, x: Tensor, pieces: usize, widths: [usize; N]) -> [Tensor; N] {
        let (rows, from) = (self.row_count() * pieces, x.width() / pieces);
        let outputs = widths.map(|columns| self.rows(columns * pieces));
        let mut offset = 0;
        let copy = |(y, columns): (&Tensor, usize)| {
            let op = Op::Pointwise(Pointwise::CopyColumns { rows, columns, from, to: columns });
            let read = x.columns(offset, rows.saturating_sub(1) * from + columns);
            offset += columns;
            Call::new(op, vec![read], [(self.whole(*y), false)])
        };
        let calls = outputs.iter().zip(widths).map(copy).collect();
        self.node(calls, None);
        outputs
    }

    /// Drops elements with probability `p` in training.
    pub fn dropout(&mut self, x: Tensor, p: f64) -> Tensor {
        let Some(site) = self.site(p) else { return x };
        let (len, (samples, _)) = (self.row_count() * x.width(), self.batch());
        self.in_place(x, Op::Pointwise(Pointwise::Dropout { len, samples, p }), vec![], Some(site))
    }
}

#[cfg(test)]
mod tests {
    use fsdp_core::DType;

    use super::*;

    #[test]
    fn column_copy_costs_only_copied_bytes() {
        let cost = Op::Pointwise(Pointwise::CopyColumns { rows: 3, columns: 4, from: 7, to: 9 })
            .cost(DType::Bf16, DType::F32);
        assert_eq!((cost.flops(), cost.bytes_read, cost.bytes_written), (0, 2 * 12, 2 * 12));
    }
}
