//! Operations that move columns.

use fsdp_core::memory::{Slice, SliceMut};

use super::calls::Calls;
use super::cases::{Sizes, magnitudes};
use super::kit::{Case, Kit, numbers};
use crate::backend::Backend;
use crate::op::{Op, Pointwise};

/// Concatenates two blocks of columns; the rows of the first one have a gap between them.
pub(super) fn columns<M: Backend>(sizes: Sizes) -> Case<M> {
    let Sizes { rows, inner, outer, seed } = sizes;
    let (width, both) = (inner + 2, inner + outer);
    let parts = [(inner, width, 0), (outer, outer, inner)];
    let op = move |columns, from, to| Op::Pointwise(Pointwise::CopyColumns { rows, columns, from, to });
    let strided_len = move |columns, stride| (rows - 1) * stride + columns;
    Case {
        name: "copy_columns",
        inputs: vec![numbers(seed, rows * width), numbers(seed + 1, rows * outer)],
        doutput: numbers(seed + 2, rows * both),
        forward: Box::new(move |kit, inputs| {
            let mut y = kit.result(rows * both);
            for ((columns, from, at), values) in parts.into_iter().zip(inputs) {
                let x = kit.put(values);
                let (x, y) = (x.read(), y.write());
                let x = Slice::new(x.buffer, x.offset, strided_len(columns, from));
                let y = SliceMut::new(y.buffer, y.offset + at, strided_len(columns, both));
                kit.memory.call(op(columns, from, both), &[x], [y]).unwrap();
            }
            kit.get(&y)
        }),
        backward: Box::new(move |kit, _, dy| {
            let dy = kit.put(dy);
            let gradient = |(columns, from, at)| {
                // Gaps between rows are not written.
                let mut dx = kit.put(&vec![kit.base.unwrap_or(0.0); rows * from]);
                let (dy, to) = (dy.read(), dx.write());
                let dy = Slice::new(dy.buffer, dy.offset + at, strided_len(columns, both));
                let to = SliceMut::new(to.buffer, to.offset, strided_len(columns, from));
                kit.memory.call_adding(op(columns, both, from), &[dy], to, kit.accumulates()).unwrap();
                kit.get(&dx)
            };
            parts.map(gradient).into()
        }),
        bound: Box::new(|_, y| (0.0, magnitudes(y))),
    }
}

/// Reorders blocks of columns.
pub(super) fn regroup<M: Backend>(sizes: Sizes) -> Case<M> {
    let Sizes { rows, inner: width, seed, .. } = sizes;
    let len = rows * 4 * 3 * width;
    let run = move |kit: &Kit<M>, values: &[f64], [groups, parts]: [usize; 2]| {
        let (x, mut y) = (kit.put(values), kit.result(len));
        let op = Op::Pointwise(Pointwise::Regroup { rows, groups, parts, width });
        kit.memory.call(op, &[x.read()], [y.write()]).unwrap();
        kit.get(&y)
    };
    Case {
        name: "regroup",
        inputs: vec![numbers(seed, len)],
        doutput: numbers(seed + 1, len),
        forward: Box::new(move |kit, inputs| run(kit, &inputs[0], [4, 3])),
        backward: Box::new(move |kit, _, dy| vec![run(kit, dy, [3, 4])]),
        bound: Box::new(|_, y| (0.0, magnitudes(y))),
    }
}
