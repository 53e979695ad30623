//! Linear attention: short convolutions, and the gated delta rule.

use std::ops::Range;

use super::cases::{Sizes, documents, magnitudes};
use super::kit::{Case, Kit, Operand, numbers};
use crate::backend::{Backend, BatchFacts, Operands, Write};
use crate::op::{CHUNK, ConvolutionDims, Delta, DeltaDims, Linear, Op};

pub(super) fn all<M: Backend>(sizes: Sizes) -> Vec<Case<M>> {
    // A few heads of these sizes are enough work. The norm of a few elements is hardly ever near zero, where it bends.
    let sizes = Sizes { inner: sizes.inner.clamp(4, 24), outer: sizes.outer.min(20), ..sizes };
    vec![
        convolve(sizes, 4, false),
        convolve(sizes, 3, true),
        scan(sizes, [2, 1], false),
        scan(sizes, [1, 3], false),
        scan(sizes, [2, 2], true),
    ]
}

/// Runs an operation over documents.
fn run<'a, M: Backend>(
    kit: &Kit<M>,
    op: Delta,
    documents: &[Range<usize>],
    reads: &[&'a Operand<M::Buffer>],
    writes: &mut [Write<'a, M::Buffer>],
) {
    let reads: Vec<_> = reads.iter().map(|read| read.read()).collect();
    let batch = BatchFacts { documents, ..BatchFacts::default() };
    kit.memory.run(&Op::Delta(op), Operands { reads: &reads, writes, batch }).unwrap();
}

fn convolve<M: Backend>(sizes: Sizes, kernel: usize, packed: bool) -> Case<M> {
    let Sizes { rows: seq, inner: width, seed, .. } = sizes;
    let dims = ConvolutionDims { batch: 2, seq, width, kernel, packed };
    let (len, documents) = (dims.rows() * width, documents(seq));
    let of_backward = documents.clone();
    Case {
        name: "short convolution",
        inputs: vec![numbers(seed, len), numbers(seed + 1, width * kernel)],
        doutput: numbers(seed + 2, len),
        forward: Box::new(move |kit, inputs| {
            let ([x, weight], mut y) = ([0, 1].map(|i| kit.put(&inputs[i])), kit.result(len));
            run(kit, Delta::Convolve(dims), &documents, &[&x, &weight], &mut [Write::over(y.write())]);
            kit.get(&y)
        }),
        backward: Box::new(move |kit, inputs, dy| {
            let ([x, weight], dy) = ([0, 1].map(|i| kit.put(&inputs[i])), kit.put(dy));
            let (mut dx, mut dweight) = (kit.input_gradient(len), kit.slot(width * kernel));
            let op = Delta::ConvolveBackward { dims, weight: true };
            let into = Write { slice: dx.write(), accumulate: kit.accumulates() };
            let writes = &mut [into, kit.target(&mut dweight).into()];
            run(kit, op, &of_backward, &[&x, &weight, &dy], writes);
            vec![kit.get(&dx), kit.get(&dweight)]
        }),
        // The logistic function has an error of four roundings, and one in proportion to its argument.
        bound: Box::new(move |inputs, y| {
            let largest = |values: &[f64]| magnitudes(values).into_iter().fold(0.0, f64::max);
            let sum = kernel as f64 * largest(&inputs[0]) * largest(&inputs[1]);
            (2.0 * kernel as f64 + 6.0, vec![sum * (1.0 + sum); y.len()])
        }),
    }
}

/// The inputs are packed rows, gates, `a_log` and `dt_bias`.
fn scan<M: Backend>(sizes: Sizes, [key_heads, group]: [usize; 2], packed: bool) -> Case<M> {
    let Sizes { rows: seq, inner: key_dim, outer: value_dim, seed } = sizes;
    let value_heads = key_heads * group;
    let dims = DeltaDims { batch: 2, seq, key_heads, value_heads, key_dim, value_dim, packed };
    let lens = [dims.rows() * dims.width(), 2 * dims.rows() * value_heads, value_heads, value_heads];
    let (y_len, documents) = (dims.rows() * value_heads * value_dim, documents(seq));
    let of_backward = documents.clone();
    Case {
        name: "delta rule",
        inputs: lens.iter().zip(seed..).map(|(&len, seed)| numbers(seed, len)).collect(),
        doutput: numbers(seed + 4, y_len),
        forward: Box::new(move |kit, inputs| {
            let (inputs, mut y) = ([0, 1, 2, 3].map(|i| kit.put(&inputs[i])), kit.result(y_len));
            let writes = &mut [Write::over(y.write())];
            run(kit, Delta::Scan(dims), &documents, &inputs.each_ref(), writes);
            kit.get(&y)
        }),
        backward: Box::new(move |kit, inputs, dy| {
            let ([qkv, gates, a_log, dt_bias], dy) = ([0, 1, 2, 3].map(|i| kit.put(&inputs[i])), kit.put(dy));
            let (mut dqkv, mut dgates) = (kit.result(lens[0]), kit.result(lens[1]));
            let (mut da_log, mut dt_slot) = (kit.slot(value_heads), kit.slot(value_heads));
            let op = Delta::ScanBackward { dims, weight: true };
            let mut states = kit.statistics(dims.states().iter().product());
            let [rows, of_gates, of_states] =
                [&mut dqkv, &mut dgates, &mut states].map(|place| Write::over(place.write()));
            let writes = &mut [rows, of_gates, of_states, kit.target(&mut da_log).into()];
            run(kit, op, &of_backward, &[&qkv, &gates, &a_log, &dt_bias, &dy], writes);
            let sums =
                Linear::ColumnSums { rows: dims.rows(), columns: value_heads, stride: 2 * value_heads };
            let all = dgates.read();
            let da =
                fsdp_core::memory::Slice::new(all.buffer, all.offset + value_heads, all.len - value_heads);
            let target = Write::from(kit.target(&mut dt_slot));
            let operands = Operands { reads: &[da], writes: &mut [target], batch: BatchFacts::default() };
            kit.memory.run(&Op::Linear(sums), operands).unwrap();
            [dqkv, dgates, da_log, dt_slot].iter().map(|gradient| kit.get(gradient)).collect()
        }),
        // Values of magnitude `v` are corrected in a state whose keys have norms of at most one: what it returns for a key is
        // at most the largest value, and what it returns for other queries grows with the tokens of a chunk.
        bound: Box::new(move |inputs, y| {
            let values = magnitudes(&inputs[0]).into_iter().fold(0.0, f64::max);
            let tokens = CHUNK.min(seq) as f64;
            (8.0 * (key_dim as f64 + tokens + 8.0), vec![values * tokens; y.len()])
        }),
    }
}
