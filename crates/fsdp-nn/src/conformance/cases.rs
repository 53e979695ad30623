//! The operations under test, at sizes chosen by the caller.

use std::ops::Range;

use super::adapter_cases::{dora_norms, linear_add, rescale, scale};
use super::calls::Calls;
use super::copy_cases::{columns, pack_latent, regroup, unpack_latent};
use super::kit::{Case, Kit, integers, numbers};
use super::{delta_cases, expert_cases};
use crate::backend::{
    AttentionDims, Backend, BatchFacts, Dropout, HeadDims, IGNORED_TARGET, LinearDims, Operands, Orientation,
    Write,
};
use crate::layer::Rope;
use crate::op::{Activation, Attention, CLAMP, Function, LossTerms, Op, Pass, Scores};

/// Sizes of a case; each case defines their roles.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Number of rows: tokens or positions.
    pub rows: usize,
    /// Number of columns of an input.
    pub inner: usize,
    /// Number of columns of an output, or of classes.
    pub outer: usize,
    /// Seed of the inputs.
    pub seed: u64,
}

/// Returns all operations at these sizes.
pub(crate) fn all<M: Backend>(sizes: Sizes) -> Vec<Case<M>> {
    vec![
        linear(sizes, Orientation::OutIn, 0),
        linear(sizes, Orientation::InOut, 3),
        linear_add(sizes),
        embedding(sizes, false),
        embedding(sizes, true),
        rms_norm(sizes, 0.0),
        rms_norm(sizes, 1.0),
        layer_norm(sizes, true),
        layer_norm(sizes, false),
        rope(sizes, 1.0, false),
        rope(sizes, 0.4, false),
        rope(sizes, 1.0, true),
        attention(sizes, 1, 1, Scores::default()),
        attention(sizes, 2, 3, Scores::default()),
        attention(sizes, 1, 2, Scores::dropping(0.3)),
        attention(sizes, 2, 2, Scores { softcap: Some(1.5), ..Scores::default() }),
        attention(sizes, 1, 3, Scores { dropout: 0.2, softcap: Some(0.7), ..Scores::default() }),
        attention(sizes, 2, 2, Scores { window: Some(1), ..Scores::default() }),
        attention(sizes, 1, 2, Scores { window: Some(40), scale: Some(0.2), ..Scores::default() }),
        attention(
            sizes,
            2,
            1,
            Scores { dropout: 0.2, softcap: Some(0.7), window: Some(3), ..Scores::default() },
        ),
        attention(sizes, 2, 1, Scores { packed: true, ..Scores::default() }),
        attention(sizes, 1, 2, Scores { packed: true, window: Some(4), ..Scores::dropping(0.3) }),
        attention_with((sizes, 2, 2), Scores { window: Some(3), ..Scores::dropping(0.2) }, true),
        attention_with((sizes, 1, 2), Scores { packed: true, ..Scores::default() }, true),
        columns(sizes),
        regroup(sizes),
        pack_latent(sizes, false),
        pack_latent(sizes, true),
        unpack_latent(sizes),
        scale(sizes),
        dora_norms(sizes, Orientation::OutIn),
        dora_norms(sizes, Orientation::InOut),
        rescale(sizes, true),
        rescale(sizes, false),
        dropout(sizes),
        head(sizes, None, LossTerms::default()),
        head(sizes, Some(2.0), LossTerms::default()),
        head(sizes, None, LossTerms { label_smoothing: 0.2, z_loss: 0.0, ..LossTerms::default() }),
        head(sizes, None, LossTerms { label_smoothing: 0.0, z_loss: 0.03, ..LossTerms::default() }),
        head(sizes, Some(2.0), LossTerms { label_smoothing: 0.1, z_loss: 0.01, ..LossTerms::default() }),
    ]
    .into_iter()
    .chain(activations(sizes))
    .chain(expert_cases::all(sizes))
    .chain(delta_cases::all(sizes))
    .collect()
}

pub(super) fn magnitudes(values: &[f64]) -> Vec<f64> {
    values.iter().map(|value| value.abs()).collect()
}

fn largest(values: &[f64]) -> f64 {
    values.iter().fold(0.0, |a, b| b.abs().max(a))
}

fn linear<M: Backend>(sizes: Sizes, orientation: Orientation, gap: usize) -> Case<M> {
    let Sizes { rows, inner, outer, seed } = sizes;
    let dims = LinearDims { rows, inputs: inner, outputs: outer, y_stride: outer + gap, orientation };
    let y_len = (rows - 1) * dims.y_stride + outer;
    let gather = move |strided: Vec<f64>| -> Vec<f64> {
        strided.chunks(dims.y_stride).flat_map(|row| row[..outer].to_vec()).collect()
    };
    let forward = move |kit: &Kit<M>, inputs: &[Vec<f64>]| {
        let [x, weight, bias] = [0, 1, 2].map(|i| kit.put(&inputs[i]));
        let mut y = kit.put(&vec![0.0; y_len]);
        kit.memory.linear(dims, x.read(), weight.read(), Some(bias.read()), y.write()).unwrap();
        gather(kit.get(&y))
    };
    let backward = move |kit: &Kit<M>, inputs: &[Vec<f64>], dy: &[f64]| {
        let [x, weight] = [0, 1].map(|i| kit.put(&inputs[i]));
        let mut strided = vec![f64::NAN; y_len];
        for (to, from) in strided.chunks_mut(dims.y_stride).zip(dy.chunks(outer)) {
            to[..outer].copy_from_slice(from);
        }
        let dy = kit.put(&strided);
        let mut dx = kit.input_gradient(rows * inner);
        let (mut dweight, mut dbias) = (kit.slot(inner * outer), kit.slot(outer));
        let memory = &kit.memory;
        memory.linear_backward_input(dims, dy.read(), weight.read(), dx.write(), kit.accumulates()).unwrap();
        memory.linear_backward_weight(dims, x.read(), dy.read(), kit.target(&mut dweight)).unwrap();
        memory.linear_backward_bias(dims, dy.read(), kit.target(&mut dbias)).unwrap();
        vec![kit.get(&dx), kit.get(&dweight), kit.get(&dbias)]
    };
    let absolute = move |[x, weight, bias]: [&[f64]; 3]| -> Vec<f64> {
        let entry = |row: usize, col: usize| match orientation {
            Orientation::OutIn => weight[col * inner + row],
            Orientation::InOut => weight[row * outer + col],
        };
        let sum = |row: usize, col: usize| -> f64 {
            let products = (0..inner).map(|k| (x[row * inner + k] * entry(k, col)).abs());
            products.sum::<f64>() + bias[col].abs()
        };
        (0..rows).flat_map(|row| (0..outer).map(move |col| sum(row, col))).collect()
    };
    Case {
        name: "linear",
        inputs: vec![numbers(seed, rows * inner), numbers(seed + 1, inner * outer), numbers(seed + 2, outer)],
        doutput: numbers(seed + 3, rows * outer),
        forward: Box::new(forward),
        backward: Box::new(backward),
        bound: Box::new(move |inputs, _| {
            (inner as f64 + 2.0, absolute([0, 1, 2].map(|i| inputs[i].as_slice())))
        }),
    }
}

/// With padding, the row of the first id is a constant: changing it changes nothing.
fn embedding<M: Backend>(sizes: Sizes, is_padded: bool) -> Case<M> {
    let Sizes { rows, inner: width, outer: vocab, seed } = sizes;
    let ids = integers(seed, rows, vocab);
    let padding = is_padded.then(|| ids[0] as usize);
    let backward_ids = ids.clone();
    Case {
        name: "embedding",
        inputs: vec![numbers(seed, vocab * width)],
        doutput: numbers(seed + 1, rows * width),
        forward: Box::new(move |kit, inputs| {
            let mut table = inputs[0].clone();
            if let Some(row) = padding {
                table[row * width..][..width].fill(0.25);
            }
            let (ids, table, mut y) = (kit.ids(&ids), kit.put(&table), kit.result(rows * width));
            kit.memory.embedding(width, ids.read(), table.read(), y.write(), false).unwrap();
            kit.get(&y)
        }),
        backward: Box::new(move |kit, _, dy| {
            let (ids, dy, mut dtable) = (kit.ids(&backward_ids), kit.put(dy), kit.slot(vocab * width));
            let sizes = (width, padding);
            kit.memory.embedding_backward(sizes, ids.read(), dy.read(), kit.target(&mut dtable)).unwrap();
            vec![kit.get(&dtable)]
        }),
        bound: Box::new(|_, y| (0.0, magnitudes(y))),
    }
}

fn rms_norm<M: Backend>(sizes: Sizes, offset: f64) -> Case<M> {
    let Sizes { rows, inner: width, seed, .. } = sizes;
    const EPS: f64 = 1e-3;
    Case {
        name: "rms_norm",
        inputs: vec![numbers(seed, rows * width), numbers(seed + 1, width)],
        doutput: numbers(seed + 2, rows * width),
        forward: Box::new(move |kit, inputs| {
            let [x, weight] = [0, 1].map(|i| kit.put(&inputs[i]));
            let (mut y, mut rstd) = (kit.result(rows * width), kit.statistics(rows));
            kit.memory
                .rms_norm(width, [EPS, offset], x.read(), weight.read(), y.write(), rstd.write())
                .unwrap();
            kit.get(&y)
        }),
        backward: Box::new(move |kit, inputs, dy| {
            let [x, weight] = [0, 1].map(|i| kit.put(&inputs[i]));
            let (mut y, mut rstd, dy) = (kit.result(rows * width), kit.statistics(rows), kit.put(dy));
            kit.memory
                .rms_norm(width, [EPS, offset], x.read(), weight.read(), y.write(), rstd.write())
                .unwrap();
            let (mut dx, mut dweight) = (kit.input_gradient(rows * width), kit.slot(width));
            let target = Some(kit.target(&mut dweight));
            let (x, weight, rstd, dy) = (x.read(), weight.read(), rstd.read(), dy.read());
            let add = kit.accumulates();
            kit.memory
                .rms_norm_backward((width, offset), x, weight, rstd, dy, dx.write(), add, target)
                .unwrap();
            vec![kit.get(&dx), kit.get(&dweight)]
        }),
        // A sum of `width` squares, and six operations on it. Adding the offset has a rounding error relative to the
        // sum.
        bound: Box::new(move |_, y| (width as f64 + 6.0 + offset, magnitudes(y))),
    }
}

fn layer_norm<M: Backend>(sizes: Sizes, has_bias: bool) -> Case<M> {
    let Sizes { rows, inner: width, seed, .. } = sizes;
    const EPS: f64 = 1e-2;
    let lengths = [rows * width, width, width];
    let inputs = lengths.into_iter().zip(seed..).map(|(len, seed)| numbers(seed, len));
    let run = move |kit: &Kit<M>, inputs: &[Vec<f64>]| {
        let inputs: Vec<_> = inputs.iter().map(|values| kit.put(values)).collect();
        let (mut y, mut stats) = (kit.result(rows * width), kit.statistics(2 * rows));
        let (x, weight, bias) = (inputs[0].read(), inputs[1].read(), inputs.get(2).map(|bias| bias.read()));
        kit.memory.layer_norm(width, EPS, x, weight, bias, y.write(), stats.write()).unwrap();
        (inputs, y, stats)
    };
    Case {
        name: "layer_norm",
        inputs: inputs.take(2 + usize::from(has_bias)).collect(),
        doutput: numbers(seed + 3, rows * width),
        forward: Box::new(move |kit, inputs| kit.get(&run(kit, inputs).1)),
        backward: Box::new(move |kit, inputs, dy| {
            let ((inputs, _, stats), dy) = (run(kit, inputs), kit.put(dy));
            let (x, weight, stats, dy) = (inputs[0].read(), inputs[1].read(), stats.read(), dy.read());
            let (mut dx, mut dweight) = (kit.input_gradient(rows * width), kit.slot(width));
            let (memory, add) = (&kit.memory, kit.accumulates());
            memory.layer_norm_backward_input(width, x, weight, stats, dy, dx.write(), add).unwrap();
            memory.layer_norm_backward_weight(width, x, stats, dy, kit.target(&mut dweight)).unwrap();
            let mut gradients = vec![kit.get(&dx), kit.get(&dweight)];
            if has_bias {
                let mut dbias = kit.slot(width);
                let orientation = Orientation::OutIn;
                let dims = LinearDims { rows, inputs: 1, outputs: width, y_stride: width, orientation };
                memory.linear_backward_bias(dims, dy, kit.target(&mut dbias)).unwrap();
                gradients.push(kit.get(&dbias));
            }
            gradients
        }),
        // The error of the mean is width * u * max |x|; deviations are scaled by at most 1 / sqrt(eps).
        bound: Box::new(move |inputs, y| {
            let per_row = largest(&inputs[0]) * largest(&inputs[1]) / EPS.sqrt();
            (3.0 * width as f64 + 12.0, y.iter().map(|y| y.abs() + per_row).collect())
        }),
    }
}

fn attention_dims(sizes: Sizes, kv_heads: usize, group: usize) -> AttentionDims {
    let head_dim = 2 * sizes.inner.div_ceil(4);
    AttentionDims { batch: 2, seq: sizes.rows, heads: kv_heads * group, kv_heads, head_dim }
}

/// Returns the rows of documents of two samples: two in the first, unless it is short, and one in the second.
pub(super) fn documents(seq: usize) -> Vec<Range<usize>> {
    let cut = seq.div_ceil(3);
    [0..cut, cut..seq, seq..2 * seq].into_iter().filter(|rows| !rows.is_empty()).collect()
}

/// Rotates `part` of a head, with a factor unless it is all. If `packed`, the second sample continues a longer text.
fn rope<M: Backend>(sizes: Sizes, part: f64, packed: bool) -> Case<M> {
    let dims = attention_dims(sizes, 2, 2);
    let pairs = (dims.head_dim as f64 / 2.0 * part).ceil() as i32;
    let factor = if part < 1.0 { 1.25 } else { 1.0 };
    let rope = Rope { inverse_frequencies: (0..pairs).map(|i| 0.3_f32.powi(i)).collect(), factor };
    let of = |rows: Range<usize>| if rows.start < dims.seq { 0..rows.len() } else { rows };
    let positions: Vec<u32> = documents(dims.seq).into_iter().flat_map(of).map(|row| row as u32).collect();
    let run = move |kit: &Kit<M>, values: &[f64], backward: bool| {
        let (mut qkv, positions) = (kit.put(values), kit.ids(&positions));
        let reads = if packed { vec![positions.read()] } else { Vec::new() };
        let positions = packed.then_some(2 * dims.seq);
        let op = Op::Attention(Attention::Rope { dims, rope: rope.clone(), positions, backward });
        kit.memory.call(op, &reads, [qkv.write()]).unwrap();
        kit.get(&qkv)
    };
    let (backward_run, len) = (run.clone(), dims.rows() * dims.packed());
    Case {
        name: "rope",
        inputs: vec![numbers(sizes.seed, len)],
        doutput: numbers(sizes.seed + 1, len),
        forward: Box::new(move |kit, inputs| run(kit, &inputs[0], false)),
        backward: Box::new(move |kit, _, dy| vec![backward_run(kit, dy, true)]),
        bound: Box::new(move |inputs, y| (5.0, vec![2.0 * factor * largest(&inputs[0]); y.len()])),
    }
}

fn attention<M: Backend>(sizes: Sizes, kv_heads: usize, group: usize, scores: Scores) -> Case<M> {
    attention_with((sizes, kv_heads, group), scores, false)
}

/// Attention, with a sink for every head if `sinks`: the scores of sinks are the second input.
fn attention_with<M: Backend>(
    (sizes, kv_heads, group): (Sizes, usize, usize),
    scores: Scores,
    sinks: bool,
) -> Case<M> {
    let dims = attention_dims(sizes, kv_heads, group);
    let all_keys = [sizes.seed, sizes.seed + 9];
    let keys = if scores.dropout > 0.0 { 2 } else { 0 };
    let (len, y_len, lse_len) = (dims.rows() * dims.packed(), dims.output_len(), dims.rows() * dims.heads);
    let documents = documents(dims.seq);
    let of_backward = documents.clone();
    let run = move |kit: &Kit<M>, inputs: &[Vec<f64>], documents: &[Range<usize>]| {
        let (qkv, mut y, mut lse) = (kit.put(&inputs[0]), kit.result(y_len), kit.statistics(lse_len));
        let writes = &mut [y.write(), lse.write()].map(Write::over);
        let operands = Operands {
            reads: &[qkv.read()],
            writes,
            batch: BatchFacts { keys: &all_keys[..keys], documents, ..BatchFacts::default() },
        };
        kit.memory.run(&Op::Attention(Attention::Forward { dims, scores }), operands).unwrap();
        if let Some(sinks) = inputs.get(1) {
            let (op, sinks) = (Op::Attention(Attention::Sink { dims }), kit.put(sinks));
            kit.memory.call(op, &[sinks.read()], [y.write(), lse.write()]).unwrap();
        }
        [qkv, y, lse]
    };
    Case {
        name: match scores {
            _ if sinks => "attention with sinks",
            Scores { packed: true, .. } => "attention of documents",
            Scores { window: Some(_), .. } => "attention with a window",
            Scores { softcap: Some(_), .. } => "attention with a cap",
            Scores { dropout, .. } if dropout > 0.0 => "attention with dropout",
            _ => "attention",
        },
        inputs: std::iter::once(numbers(sizes.seed, len))
            .chain(sinks.then(|| numbers(sizes.seed + 2, lse_len)))
            .collect(),
        doutput: numbers(sizes.seed + 1, y_len),
        forward: Box::new(move |kit, inputs| kit.get(&run(kit, inputs, &documents)[1])),
        backward: Box::new(move |kit, inputs, dy| {
            let [qkv, y, lse] = run(kit, inputs, &of_backward);
            let (dy, mut dqkv) = (kit.put(dy), kit.result(len));
            let reads = &[qkv.read(), y.read(), lse.read(), dy.read()];
            let writes = &mut [Write::over(dqkv.write())];
            let batch =
                BatchFacts { keys: &all_keys[..keys], documents: &of_backward, ..BatchFacts::default() };
            let operands = Operands { reads, writes, batch };
            kit.memory.run(&Op::Attention(Attention::Backward { dims, scores }), operands).unwrap();
            let sinks = inputs.get(1).map(|sinks| {
                let (sinks, mut dsinks) = (kit.put(sinks), kit.result(lse_len));
                let reads = &[sinks.read(), y.read(), lse.read(), dy.read()];
                kit.memory
                    .call(Op::Attention(Attention::SinkBackward { dims }), reads, [dsinks.write()])
                    .unwrap();
                kit.get(&dsinks)
            });
            std::iter::once(kit.get(&dqkv)).chain(sinks).collect()
        }),
        // Scores of magnitude head_dim * max^2 * scale have an error of head_dim + 3 roundings, and some more if they
        // are capped, which makes none larger. This is the relative error of probabilities; a sum of `seq` of them
        // weights values of at most max.
        bound: Box::new(move |inputs, y| {
            let max = largest(&inputs[0]);
            let (dim, capped) = (dims.head_dim as f64, if scores.softcap.is_some() { 8.0 } else { 0.0 });
            let score = max * max * dim * scores.scale(dims.head_dim);
            (2.0 * (dim + 4.0 + capped) * score + 2.0 * dims.seq as f64 + 8.0, vec![2.0 * max; y.len()])
        }),
    }
}

fn activations<M: Backend>(sizes: Sizes) -> impl Iterator<Item = Case<M>> {
    let functions = [Function::Silu, Function::GeluTanh, Function::Gelu, Function::Relu, Function::Logistic];
    let clamped = [Function::ClampedSwish, Function::ClampedPlusOne];
    (functions.into_iter().chain(clamped))
        .flat_map(move |function| [false, true].map(move |gated| activation(sizes, function, gated)))
}

fn activation<M: Backend>(sizes: Sizes, function: Function, gated: bool) -> Case<M> {
    let len = sizes.rows * sizes.inner;
    let op = move |pass| Op::Activation(Activation { function, gated, len, pass });
    let inputs = 1 + u64::from(gated);
    // A function with a corner has no derivative there, so its inputs are away from it, on both sides.
    let beside_corner = |x: f64| match function {
        Function::Relu => x.abs().max(0.0625).copysign(x),
        Function::ClampedSwish | Function::ClampedPlusOne if x.abs() > 1.0 => {
            (CLAMP + x.abs().round()).copysign(x)
        }
        _ => x,
    };
    let input = |i| numbers(sizes.seed + i, len).into_iter().map(beside_corner).collect();
    Case {
        name: op(Pass::Forward).name(),
        inputs: (0..inputs).map(input).collect(),
        doutput: numbers(sizes.seed + inputs, len),
        forward: Box::new(move |kit, inputs| {
            let inputs: Vec<_> = inputs.iter().map(|values| kit.put(values)).collect();
            let reads: Vec<_> = inputs.iter().map(|input| input.read()).collect();
            let mut y = kit.result(len);
            kit.memory.call(op(Pass::Forward), &reads, [y.write()]).unwrap();
            kit.get(&y)
        }),
        backward: Box::new(move |kit, inputs, dy| {
            let inputs: Vec<_> = inputs.iter().map(Vec::as_slice).chain([dy]).map(|v| kit.put(v)).collect();
            let reads: Vec<_> = inputs.iter().map(|input| input.read()).collect();
            let (mut first, mut second) = (kit.result(len), kit.result(len));
            let op = op(Pass::Backward);
            if gated {
                kit.memory.call(op, &reads, [first.write(), second.write()]).unwrap();
                return vec![kit.get(&first), kit.get(&second)];
            }
            kit.memory.call(op, &reads, [first.write()]).unwrap();
            vec![kit.get(&first)]
        }),
        bound: Box::new(move |inputs, y| {
            let x = largest(&inputs[0]);
            let roundings = match function {
                Function::Silu | Function::Logistic => 10.0,
                // The exponent has a relative error of five roundings.
                Function::GeluTanh => 9.0 + 5.0 * 1.6 * (x + 0.05 * x * x * x),
                // The exponent has a relative error of two roundings; the series has some for each relevant term.
                Function::Gelu => 32.0 + x * x,
                Function::Relu => 2.0,
                // As for SiLU, with a scaled exponent.
                Function::ClampedSwish => 12.0 + 2.0 * 1.702 * CLAMP,
                Function::ClampedPlusOne => 4.0,
            };
            (roundings, magnitudes(y))
        }),
    }
}

fn dropout<M: Backend>(sizes: Sizes) -> Case<M> {
    let keys = [sizes.seed, sizes.seed + 1, sizes.seed + 2];
    let len = keys.len() * sizes.rows * sizes.inner;
    let run = move |kit: &Kit<M>, values: &[f64]| {
        let mut x = kit.put(values);
        kit.memory.dropout(Dropout { p: 0.25, keys: &keys }, x.write()).unwrap();
        kit.get(&x)
    };
    Case {
        name: "dropout",
        inputs: vec![numbers(sizes.seed, len)],
        doutput: numbers(sizes.seed + 1, len),
        forward: Box::new(move |kit, inputs| run(kit, &inputs[0])),
        backward: Box::new(move |kit, _, dy| vec![run(kit, dy)]),
        bound: Box::new(|_, y| (2.0, magnitudes(y))),
    }
}

fn head<M: Backend>(sizes: Sizes, softcap: Option<f64>, terms: LossTerms) -> Case<M> {
    let Sizes { rows, inner: hidden, outer: vocab, seed } = sizes;
    let dims = HeadDims { softcap, terms, ..HeadDims::new([rows, hidden, vocab], rows.div_ceil(3)) };
    let z_rows = if terms.z_loss > 0.0 { rows } else { 0 };
    let mut targets = integers(seed + 5, rows, vocab);
    if rows > 2 {
        targets[1] = IGNORED_TARGET;
    }
    let backward_targets = targets.clone();
    Case {
        name: "head_loss",
        inputs: vec![numbers(seed, rows * hidden), numbers(seed + 1, vocab * hidden)],
        // Losses, and their z-loss part.
        doutput: [vec![1.0; rows], vec![0.0; z_rows]].concat(),
        forward: Box::new(move |kit, inputs| {
            let [x, weight] = [0, 1].map(|i| kit.put(&inputs[i]));
            let (targets, mut losses) = (kit.ids(&targets), kit.allocate(fsdp_core::DType::F64, rows));
            let mut z_losses = kit.allocate(fsdp_core::DType::F64, z_rows.max(1));
            let mut logits = kit.statistics(dims.chunk_rows * vocab);
            let (x, weight, targets) = (x.read(), weight.read(), targets.read());
            let written = (losses.write(), (z_rows > 0).then(|| z_losses.write()));
            kit.memory.head_loss(dims, x, weight, targets, written, logits.write()).unwrap();
            let z_losses = if z_rows > 0 { kit.get(&z_losses) } else { Vec::new() };
            [kit.get(&losses), z_losses].concat()
        }),
        backward: Box::new(move |kit, inputs, _| {
            let [x, weight] = [0, 1].map(|i| kit.put(&inputs[i]));
            let (targets, mut losses) =
                (kit.ids(&backward_targets), kit.allocate(fsdp_core::DType::F64, rows));
            let mut z_losses = kit.allocate(fsdp_core::DType::F64, z_rows.max(1));
            let mut logits = kit.statistics(dims.chunk_rows * vocab);
            let (mut dx, mut dweight) = (kit.result(rows * hidden), kit.slot(vocab * hidden));
            let (x, weight, targets) = (x.read(), weight.read(), targets.read());
            let losses = (losses.write(), (z_rows > 0).then(|| z_losses.write()));
            let (logits, target) = (logits.write(), Some(kit.target(&mut dweight)));
            let mut dlogits = kit.result(dims.chunk_rows * vocab);
            let dlogits = kit.memory.head_chunks().round(kit.dtype).then(|| dlogits.write());
            kit.memory
                .head_loss_backward(dims, x, weight, targets, losses, logits, dlogits, dx.write(), target)
                .unwrap();
            vec![kit.get(&dx), kit.get(&dweight)]
        }),
        // A logit is a sum of `hidden` products; the log-sum-exp is at least as precise as the worst of these.
        bound: Box::new(move |inputs, y| {
            let logit = hidden as f64 * largest(&inputs[0]) * largest(&inputs[1]);
            (2.0 * hidden as f64 + vocab as f64 + 16.0, vec![logit + 1.0; y.len()])
        }),
    }
}
