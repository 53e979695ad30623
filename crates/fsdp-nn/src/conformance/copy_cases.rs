//! Operations that move columns.

use fsdp_core::memory::{Slice, SliceMut};

use super::calls::Calls;
use super::cases::{Sizes, magnitudes};
use super::kit::{Case, Kit, numbers};
use crate::backend::Backend;
use crate::op::{Latent, LatentDims, Op, Pointwise};

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

/// Packs heads of latent attention, whose values are narrower or wider than queries.
pub(super) fn pack_latent<M: Backend>(sizes: Sizes, interleaved: bool) -> Case<M> {
    let Sizes { rows, inner: fixed, outer: value, seed } = sizes;
    let dims = LatentDims { rows, heads: 3, fixed, rotating: 6, value, interleaved };
    let lens = [rows * 3 * (fixed + 6), rows * 6, rows * 3 * (fixed + value)];
    let packed = rows * 9 * dims.head_dim();
    Case {
        name: "latent_pack",
        inputs: lens.iter().zip(seed..).map(|(&len, seed)| numbers(seed, len)).collect(),
        doutput: numbers(seed + 3, packed),
        forward: Box::new(move |kit, inputs| {
            let (heads, mut y) = ([0, 1, 2].map(|i| kit.put(&inputs[i])), kit.result(packed));
            let reads = heads.each_ref().map(|heads| heads.read());
            kit.memory.call(Op::Latent(Latent::Pack(dims)), &reads, [y.write()]).unwrap();
            kit.get(&y)
        }),
        backward: Box::new(move |kit, _, dy| {
            let (dy, [mut q, mut shared, mut kv]) = (kit.put(dy), lens.map(|len| kit.result(len)));
            let writes = [q.write(), shared.write(), kv.write()];
            kit.memory.call(Op::Latent(Latent::PackBackward(dims)), &[dy.read()], writes).unwrap();
            [q, shared, kv].iter().map(|gradient| kit.get(gradient)).collect()
        }),
        // The gradient of shared elements has one term per head.
        bound: Box::new(|_, y| (2.0, magnitudes(y))),
    }
}

/// Drops the zeros after heads.
pub(super) fn unpack_latent<M: Backend>(sizes: Sizes) -> Case<M> {
    let Sizes { rows, inner: value, seed, .. } = sizes;
    let dims = LatentDims { rows, heads: 3, fixed: value, rotating: 2, value, interleaved: false };
    let lens = [rows * 3 * dims.head_dim(), rows * 3 * value];
    let run = move |kit: &Kit<M>, op: Latent, values: &[f64], len: usize| {
        let (x, mut y) = (kit.put(values), kit.result(len));
        kit.memory.call(Op::Latent(op), &[x.read()], [y.write()]).unwrap();
        kit.get(&y)
    };
    Case {
        name: "latent_unpack",
        inputs: vec![numbers(seed, lens[0])],
        doutput: numbers(seed + 1, lens[1]),
        forward: Box::new(move |kit, inputs| run(kit, Latent::Unpack(dims), &inputs[0], lens[1])),
        backward: Box::new(move |kit, _, dy| vec![run(kit, Latent::UnpackBackward(dims), dy, lens[0])]),
        bound: Box::new(|_, y| (0.0, magnitudes(y))),
    }
}
