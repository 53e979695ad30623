//! The operations of adapters: accumulating products, scaling, lengths of rows, and products by one number per column.

use super::calls::Calls;
use super::cases::{Sizes, magnitudes};
use super::kit::{Case, Kit, numbers};
use crate::backend::{Backend, BatchFacts, LinearDims, Operands, Orientation, Write};
use crate::op::{AdaptedDims, Dora, Linear, Op, Pointwise};

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

/// The lengths of rows of an adapted weight, which have no derivative.
pub(super) fn dora_norms<M: Backend>(sizes: Sizes, orientation: Orientation) -> Case<M> {
    let Sizes { inner: inputs, outer: outputs, seed, .. } = sizes;
    let rank = inputs.min(3);
    let dims = AdaptedDims { inputs, outputs, rank, scale: 0.7, orientation };
    let operands = [inputs * outputs, rank * inputs, outputs * rank];
    let [weight, down, up] = [0, 1, 2].map(|index| numbers(seed + index as u64, operands[index]));
    // The length that a row would have if no terms cancelled.
    let length = |row: usize| {
        let term = |column: usize| {
            let at = match orientation {
                Orientation::OutIn => row * inputs + column,
                Orientation::InOut => column * outputs + row,
            };
            let low = (0..rank).map(|k| (up[row * rank + k] * down[k * inputs + column]).abs());
            weight[at].abs() + 0.7 * low.sum::<f64>()
        };
        (0..inputs).map(|column| term(column).powi(2)).sum::<f64>().sqrt()
    };
    let lengths: Vec<f64> = (0..outputs).map(length).collect();
    Case {
        name: "dora_norms",
        // Norms are constants to gradients, so their operands are no inputs, but one that nothing depends on.
        inputs: vec![vec![1.0]],
        doutput: numbers(seed + 3, outputs),
        forward: Box::new(move |kit, _| {
            let [weight, down, up] = [&weight, &down, &up].map(|values| kit.put(values));
            let mut norms = kit.result(outputs);
            let op = Op::Dora(Dora::Norms { dims });
            kit.memory.call(op, &[weight.read(), down.read(), up.read()], [norms.write()]).unwrap();
            kit.get(&norms)
        }),
        backward: Box::new(|_, _, _| vec![vec![0.0]]),
        bound: Box::new(move |_, _| ((inputs + rank) as f64 + 4.0, lengths.clone())),
    }
}

pub(super) fn rescale<M: Backend>(sizes: Sizes, bias: bool) -> Case<M> {
    let Sizes { rows, inner: width, seed, .. } = sizes;
    let away_from_zero = |number: &f64| half::bf16::from_f64(1.0 + number.abs()).to_f64();
    let norms: Vec<f64> = numbers(seed + 3, width).iter().map(away_from_zero).collect();
    let of_backward = norms.clone();
    Case {
        name: "rescale",
        inputs: [rows * width, width, width]
            .into_iter()
            .take(2 + usize::from(bias))
            .zip(seed..)
            .map(|(len, seed)| numbers(seed, len))
            .collect(),
        doutput: numbers(seed + 4, rows * width),
        forward: Box::new(move |kit, inputs| {
            let (operands, norms): (Vec<_>, _) =
                (inputs.iter().map(|values| kit.put(values)).collect(), kit.put(&norms));
            let mut reads = vec![operands[0].read(), operands[1].read(), norms.read()];
            reads.extend(operands.get(2).map(|bias| bias.read()));
            let mut y = kit.result(rows * width);
            kit.memory.call(Op::Dora(Dora::Rescale { rows, width, bias }), &reads, [y.write()]).unwrap();
            kit.get(&y)
        }),
        backward: Box::new(move |kit, inputs, dy| {
            let [x, magnitude] = [0, 1].map(|i| kit.put(&inputs[i]));
            let (norms, mut dx) = (kit.put(&of_backward), kit.put(dy));
            let (mut dmagnitude, mut dbias) = (kit.slot(width), kit.slot(width));
            let sums = Op::Linear(Linear::ColumnSums { rows, columns: width, stride: width });
            kit.memory.call_adding(sums, &[dx.read()], dbias.write(), kit.accumulates()).unwrap();
            let op = Op::Dora(Dora::RescaleBackward { rows, width });
            let reads = [x.read(), magnitude.read(), norms.read()];
            let target = kit.target(&mut dmagnitude);
            let mut writes = [Write::over(dx.write()), target.into()];
            let operands = Operands { reads: &reads, writes: &mut writes, batch: BatchFacts::default() };
            kit.memory.run(&op, operands).unwrap();
            let gradients = [&dx, &dmagnitude, &dbias].into_iter().take(inputs.len());
            gradients.map(|gradient| kit.get(gradient)).collect()
        }),
        bound: Box::new(move |inputs, y| {
            let bias = |at: usize| inputs.get(2).map_or(0.0, |bias| bias[at % width]);
            let terms = |(at, y): (usize, &f64)| (y - bias(at)).abs() + bias(at).abs();
            (4.0, y.iter().enumerate().map(terms).collect())
        }),
    }
}
