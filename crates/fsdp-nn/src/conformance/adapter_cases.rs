//! The operations of adapters: accumulating products, and scaling.

use super::calls::Calls;
use super::cases::{Sizes, magnitudes};
use super::kit::{Case, Kit, numbers};
use crate::backend::{Backend, LinearDims, Orientation};
use crate::op::{Linear, Op, Pointwise};

/// A product that is added to a block of columns of existing values.
pub(super) fn linear_add<M: Backend>(sizes: Sizes) -> Case<M> {
    let Sizes { rows, inner, outer, seed } = sizes;
    let y_stride = outer + 2;
    let dims = LinearDims { rows, inputs: inner, outputs: outer, y_stride, orientation: Orientation::OutIn };
    let columns = move |values: &[f64]| -> Vec<f64> {
        values.chunks(y_stride).flat_map(|row| row[..outer].to_vec()).collect()
    };
    let spread = move |values: &[f64]| -> Vec<f64> {
        values.chunks(outer).flat_map(|row| [row, &[7.0, -7.0]].concat()).collect()
    };
    let sums = move |x: &[f64], weight: &[f64], y: &[f64]| -> Vec<f64> {
        let sum = |row: usize, col: usize| -> f64 {
            let products = (0..inner).map(|k| (x[row * inner + k] * weight[col * inner + k]).abs());
            products.sum::<f64>() + y[row * outer + col].abs()
        };
        (0..rows).flat_map(|row| (0..outer).map(move |col| sum(row, col))).collect()
    };
    Case {
        name: "linear_add",
        inputs: vec![
            numbers(seed, rows * inner),
            numbers(seed + 1, inner * outer),
            numbers(seed + 2, rows * outer),
        ],
        doutput: numbers(seed + 3, rows * outer),
        forward: Box::new(move |kit, inputs| {
            let [x, weight] = [0, 1].map(|i| kit.put(&inputs[i]));
            let mut y = kit.put(&spread(&inputs[2]));
            let op = Op::Linear(Linear::Forward { dims, bias: false });
            kit.memory.call_adding(op, &[x.read(), weight.read()], y.write(), true).unwrap();
            columns(&kit.get(&y))
        }),
        backward: Box::new(move |kit, inputs, dy| {
            let [x, weight] = [0, 1].map(|i| kit.put(&inputs[i]));
            let passed = dy.to_vec();
            let dy = kit.put(&spread(dy));
            let (mut dx, mut dweight) = (kit.input_gradient(rows * inner), kit.slot(inner * outer));
            let memory = &kit.memory;
            memory
                .linear_backward_input(dims, dy.read(), weight.read(), dx.write(), kit.accumulates())
                .unwrap();
            memory.linear_backward_weight(dims, x.read(), dy.read(), kit.target(&mut dweight)).unwrap();
            vec![kit.get(&dx), kit.get(&dweight), passed]
        }),
        bound: Box::new(move |inputs, _| (inner as f64 + 3.0, sums(&inputs[0], &inputs[1], &inputs[2]))),
    }
}

pub(super) fn scale<M: Backend>(sizes: Sizes) -> Case<M> {
    let len = sizes.rows * sizes.inner;
    let run = move |kit: &Kit<M>, values: &[f64]| {
        let mut x = kit.put(values);
        kit.memory.call(Op::Pointwise(Pointwise::Scale { len, factor: 0.7 }), &[], [x.write()]).unwrap();
        kit.get(&x)
    };
    Case {
        name: "scale",
        inputs: vec![numbers(sizes.seed, len)],
        doutput: numbers(sizes.seed + 1, len),
        forward: Box::new(move |kit, inputs| run(kit, &inputs[0])),
        backward: Box::new(move |kit, _, dy| vec![run(kit, dy)]),
        bound: Box::new(|_, y| (2.0, magnitudes(y))),
    }
}
