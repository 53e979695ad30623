//! Compares fused operations to the host's kernels: bit for bit where the order of operations is the same, otherwise
//! within rounding bounds.

use fsdp_core::memory::{Memory, Slice, SliceMut};
use fsdp_core::program::GradientTarget;
use fsdp_core::{DType, Error, Queue};
use fsdp_nn::backend::{AttentionDims, Dropout, LinearDims, Orientation};
use fsdp_nn::conformance::Calls;
use fsdp_nn::layer::Rope;
use fsdp_nn::op::{Activation, Function, Op, Pass};

use crate::operands::{assert_alike, rounded};
use crate::subject::subject;
use crate::values::*;

/// Runs the same call on a device and on the host, with an output of `$len` elements at an offset of one element.
macro_rules! both {
    ($dtype:expr, $len:expr, |$memory:ident, $out:ident| $call:expr) => {{
        fn run<M: Memory>(
            memory: &M,
            dtype: DType,
            len: usize,
            call: impl FnOnce(&M, SliceMut<'_, M::Buffer>) -> Result<(), Error>,
        ) -> Vec<f64> {
            let mut out = room(memory, dtype, len + 1);
            call(memory, SliceMut::new(&mut out, 1, len)).unwrap();
            range(memory, &out, 1, len)
        }
        let got = run(&*subject(), $dtype, $len, |$memory, $out| $call);
        let expected = run(&host(), $dtype, $len, |$memory, $out| $call);
        (got, expected)
    }};
}

/// Inputs near the limits where exponentials and their reciprocals leave the normal range, and beyond.
const FAR: [f64; 14] = [
    86.9,
    -87.0,
    -87.4,
    88.0,
    -88.5,
    -95.0,
    -103.9,
    -104.5,
    120.0,
    -1e30,
    1e30,
    f64::INFINITY,
    f64::NEG_INFINITY,
    f64::NAN,
];

#[test]
fn activations_match_host() {
    for dtype in FLOATS {
        for (len, shift) in [(1, 0), (33, 1), (1000, 0), (4099, 3)] {
            let scale = |key| normal(key, len).iter().map(|value| 8.0 * value).collect::<Vec<f64>>();
            let (mut a, b, c) = (scale(1), scale(2), scale(3));
            // Not in f64, whose results may be compared within bounds: no bound holds for NaN.
            if dtype != DType::F64 && len > 100 {
                a[20..20 + FAR.len()].copy_from_slice(&FAR);
            }
            for function in [Function::Silu, Function::GeluTanh, Function::Gelu, Function::Relu] {
                for gated in [false, true] {
                    let op = |pass| Op::Activation(Activation { function, gated, len, pass });
                    let inputs = if gated { vec![&a, &b, &c] } else { vec![&a, &c] };
                    activation(op, dtype, shift, &inputs);
                }
            }
        }
    }
}

/// Checks all outputs of an activation and its backward. The last input is the gradient of the activation's output.
fn activation(op: impl Fn(Pass) -> Op, dtype: DType, shift: usize, inputs: &[&Vec<f64>]) {
    let (len, count) = (inputs[0].len(), inputs.len() - 1);
    let what = |of: &str| format!("{of} of {} of {len} x {dtype} from {shift}", op(Pass::Forward).name());
    let (got, expected) = both!(dtype, len, |m, y| {
        let buffers: Vec<_> = inputs[..count].iter().map(|input| shifted(m, dtype, shift, input)).collect();
        let reads: Vec<_> = buffers.iter().map(|buffer| Slice::new(buffer, shift, len)).collect();
        m.call(op(Pass::Forward), &reads, [y])
    });
    assert_alike(dtype, &got, &expected, &what("output"));
    for index in 0..count {
        let (got, expected) = both!(dtype, len, |m, slope| {
            let buffers: Vec<_> = inputs.iter().map(|input| shifted(m, dtype, shift, input)).collect();
            let reads: Vec<_> = buffers.iter().map(|buffer| Slice::new(buffer, shift, len)).collect();
            let mut other = room(m, dtype, len);
            let other = SliceMut::whole(&mut other);
            match (count, index) {
                (1, _) => m.call(op(Pass::Backward), &reads, [slope]),
                (_, 0) => m.call(op(Pass::Backward), &reads, [slope, other]),
                _ => m.call(op(Pass::Backward), &reads, [other, slope]),
            }
        });
        assert_alike(dtype, &got, &expected, &what("gradient"));
    }
}

#[test]
fn dropout_matches_host_bitwise() {
    for dtype in FLOATS {
        for (samples, len) in [(1, 1), (2, 36), (3, 1001), (5, 64)] {
            let keys: Vec<u64> = (0..samples as u64).map(|sample| u64::MAX - 7 * sample).collect();
            let dropout = Dropout { p: 0.3, keys: &keys };
            let numbers = normal(9, samples * len);
            let (got, expected) = both!(dtype, samples * len, |m, x| {
                let src = filled(m, dtype, &numbers);
                let mut x = x;
                m.copy(fsdp_core::Queue::Compute, Slice::whole(&src), x.reborrow())?;
                m.dropout(dropout, x)
            });
            assert_bits(&got, &expected, &format!("{samples} samples of {len} x {dtype}"));
            assert!(len < 30 || got.contains(&0.0), "something is dropped");
        }
    }
}

#[test]
fn rope_matches_host_bitwise() {
    for dtype in FLOATS {
        for (heads, kv_heads, head_dim, rotary_dim) in
            [(1, 1, 2, 2), (4, 2, 6, 6), (2, 1, 16, 16), (2, 1, 16, 8), (3, 1, 10, 8), (2, 2, 6, 2)]
        {
            let dims = AttentionDims { batch: 2, seq: 7, heads, kv_heads, head_dim };
            let factor = if rotary_dim < head_dim { 1.25 } else { 1.0 };
            let inverse_frequencies = (0..rotary_dim / 2).map(|i| 0.7_f32.powi(i as i32)).collect();
            let rope = Rope { inverse_frequencies, factor };
            let numbers = normal(4, dims.rows() * dims.packed());
            for backward in [false, true] {
                let (got, expected) = both!(dtype, numbers.len(), |m, qkv| {
                    let src = filled(m, dtype, &numbers);
                    let mut qkv = qkv;
                    m.copy(fsdp_core::Queue::Compute, Slice::whole(&src), qkv.reborrow())?;
                    m.rope(dims, &rope, qkv, backward)
                });
                assert_bits(
                    &got,
                    &expected,
                    &format!("{dims:?} of {rotary_dim} x {dtype}, backward {backward}"),
                );
            }
        }
    }
}

/// Widths and numbers of rows, around the sizes of vectors, blocks and partial sums.
const NORMS: [(usize, usize); 7] = [(1, 1), (7, 3), (64, 5), (33, 129), (768, 2), (1000, 3), (20_480, 2)];

/// Inputs of a norm and its backward.
struct Norm {
    width: usize,
    dtype: DType,
    x: Vec<f64>,
    weight: Vec<f64>,
    bias: Vec<f64>,
    dy: Vec<f64>,
}

impl Norm {
    fn cases() -> impl Iterator<Item = Self> {
        FLOATS.into_iter().flat_map(|dtype| {
            NORMS.into_iter().map(move |(width, rows)| {
                let numbers = |key, len| rounded(dtype, normal(key, len));
                let x = numbers(1, width * rows).iter().map(|x| 0.5 + x).collect();
                let x = rounded(dtype, x);
                let (weight, bias, dy) = (numbers(2, width), numbers(3, width), numbers(4, width * rows));
                Norm { width, dtype, x, weight, bias, dy }
            })
        })
    }

    fn rows(&self) -> usize {
        self.x.len() / self.width
    }

    fn what(&self, of: &str) -> String {
        format!("{of} of {} rows of {} x {}", self.rows(), self.width, self.dtype)
    }

    /// Relative errors of a sum over a row, in any order, with the few operations after it; and of rounding a result.
    fn errors(&self) -> (f64, f64) {
        ((self.width as f64 + 16.0) * unit(self.dtype.master()), 2.0 * unit(self.dtype))
    }
}

/// Returns the outputs and statistics of a forward.
fn forward<M: Memory>(
    memory: &M,
    case: &Norm,
    per_row: usize,
    call: impl FnOnce(
        &M,
        [Slice<'_, M::Buffer>; 3],
        SliceMut<'_, M::Buffer>,
        SliceMut<'_, M::Buffer>,
    ) -> Result<(), Error>,
) -> [Vec<f64>; 2] {
    let [x, weight, bias] =
        [&case.x, &case.weight, &case.bias].map(|values| filled(memory, case.dtype, values));
    let mut y = room(memory, case.dtype, case.x.len());
    let mut stats = room(memory, case.dtype.master(), case.rows() * per_row);
    let inputs = [&x, &weight, &bias].map(Slice::whole);
    call(memory, inputs, SliceMut::whole(&mut y), SliceMut::whole(&mut stats)).unwrap();
    [values(memory, &y), values(memory, &stats)]
}

#[test]
fn norms_match_host_within_error_bound() {
    for case in Norm::cases() {
        let (width, (sum, last)) = (case.width, case.errors());
        let [y, rstd] = forward(&*subject(), &case, 1, |m, [x, w, _], y, stats| {
            m.rms_norm(width, [1e-5, 0.0], x, w, y, stats)
        });
        let [expected, expected_rstd] = forward(&host(), &case, 1, |m, [x, w, _], y, stats| {
            m.rms_norm(width, [1e-5, 0.0], x, w, y, stats)
        });
        let relative =
            |values: &[f64], error: f64| values.iter().map(|v| error * v.abs()).collect::<Vec<_>>();
        assert_within(&rstd, &expected_rstd, &relative(&expected_rstd, 2.0 * sum), &case.what("rstd"));
        assert_within(&y, &expected, &relative(&expected, 2.0 * sum + last), &case.what("rms norm"));

        let [y, stats] = forward(&*subject(), &case, 2, |m, [x, w, b], y, stats| {
            m.layer_norm(width, 1e-5, x, w, Some(b), y, stats)
        });
        let [expected, expected_stats] = forward(&host(), &case, 2, |m, [x, w, b], y, stats| {
            m.layer_norm(width, 1e-5, x, w, Some(b), y, stats)
        });
        // The error of the mean is up to `sum` times the mean of absolute values, and is scaled by rstd.
        let mut stats_bounds = Vec::new();
        let mut bounds = Vec::new();
        for (row, x) in case.x.chunks(width).enumerate() {
            let (mean, rstd) = (expected_stats[2 * row], expected_stats[2 * row + 1]);
            let off = sum * x.iter().map(|x| x.abs()).sum::<f64>() / width as f64;
            let slack = 4.0 * sum + 4.0 * (off * rstd).powi(2);
            stats_bounds.extend([2.0 * off, slack * rstd]);
            for (i, x) in x.iter().enumerate() {
                let normal = (x - mean).abs() * rstd;
                let weight = case.weight[i].abs();
                let size = normal * weight + case.bias[i].abs();
                bounds.push(2.0 * off * rstd * weight + (slack + sum) * size + last * size);
            }
        }
        assert_within(&stats, &expected_stats, &stats_bounds, &case.what("mean and rstd"));
        assert_within(&y, &expected, &bounds, &case.what("layer norm"));
    }
}

/// Returns the gradient of an input, added to the earlier contents if `accumulate`.
fn backward<M: Memory>(
    memory: &M,
    case: &Norm,
    stats: &[f64],
    accumulate: bool,
    call: impl FnOnce(&M, [Slice<'_, M::Buffer>; 4], SliceMut<'_, M::Buffer>) -> Result<(), Error>,
) -> Vec<f64> {
    let [x, weight, dy] = [&case.x, &case.weight, &case.dy].map(|values| filled(memory, case.dtype, values));
    let stats = filled(memory, case.dtype.master(), stats);
    let start = if accumulate { case.dy.clone() } else { vec![f64::NAN; case.dy.len()] };
    let mut dx = filled(memory, case.dtype, &start);
    call(memory, [&x, &weight, &stats, &dy].map(Slice::whole), SliceMut::whole(&mut dx)).unwrap();
    values(memory, &dx)
}

/// Returns error bounds of the gradient of an input, from the absolute values of all terms. The mean is 0 for RMS norm.
fn backward_bounds(case: &Norm, mean_and_rstd: impl Fn(usize) -> (f64, f64), accumulate: bool) -> Vec<f64> {
    let (sum, last) = case.errors();
    let mut bounds = Vec::new();
    for (row, (x, dy)) in case.x.chunks(case.width).zip(case.dy.chunks(case.width)).enumerate() {
        let (mean, rstd) = mean_and_rstd(row);
        let normal = |i: usize| ((x[i] - mean) * rstd).abs();
        let slope = |i: usize| (dy[i] * case.weight[i]).abs();
        let count = case.width as f64;
        let offset = (0..case.width).map(slope).sum::<f64>() / count;
        let slant = (0..case.width).map(|i| slope(i) * normal(i)).sum::<f64>() / count;
        for (i, dy) in dy.iter().enumerate() {
            let before = if accumulate { dy.abs() } else { 0.0 };
            let size = before + rstd * (slope(i) + offset + normal(i) * slant);
            bounds.push((4.0 * sum + last) * size);
        }
    }
    bounds
}

#[test]
fn norm_input_gradients_match_host_within_error_bound() {
    for case in Norm::cases() {
        let width = case.width;
        let [_, rstd] = forward(&host(), &case, 1, |m, [x, w, _], y, stats| {
            m.rms_norm(width, [1e-5, 0.0], x, w, y, stats)
        });
        let [_, stats] = forward(&host(), &case, 2, |m, [x, w, b], y, stats| {
            m.layer_norm(width, 1e-5, x, w, Some(b), y, stats)
        });
        for accumulate in [false, true] {
            let got = backward(&*subject(), &case, &rstd, accumulate, |m, [x, w, stats, dy], dx| {
                m.rms_norm_backward((width, 0.0), x, w, stats, dy, dx, accumulate, None)
            });
            let expected = backward(&host(), &case, &rstd, accumulate, |m, [x, w, stats, dy], dx| {
                m.rms_norm_backward((width, 0.0), x, w, stats, dy, dx, accumulate, None)
            });
            let bounds = backward_bounds(&case, |row| (0.0, rstd[row]), accumulate);
            assert_within(&got, &expected, &bounds, &case.what("gradient of rms norm"));
            let got = backward(&*subject(), &case, &stats, accumulate, |m, [x, w, stats, dy], dx| {
                m.layer_norm_backward_input(width, x, w, stats, dy, dx, accumulate)
            });
            let expected = backward(&host(), &case, &stats, accumulate, |m, [x, w, stats, dy], dx| {
                m.layer_norm_backward_input(width, x, w, stats, dy, dx, accumulate)
            });
            let bounds = backward_bounds(&case, |row| (stats[2 * row], stats[2 * row + 1]), accumulate);
            assert_within(&got, &expected, &bounds, &case.what("gradient of layer norm"));
        }
    }
}

/// Returns the gradient of a weight in a slot of dtype `slots`, added to the earlier contents if `accumulate`.
fn weights<M: Memory>(
    memory: &M,
    case: &Norm,
    per_row: usize,
    (slots, accumulate): (DType, bool),
    call: impl FnOnce(&M, [Slice<'_, M::Buffer>; 4], GradientTarget<'_, M::Buffer>) -> Result<(), Error>,
) -> Vec<f64> {
    let [x, weight, dy] = [&case.x, &case.weight, &case.dy].map(|values| filled(memory, case.dtype, values));
    let stats = filled(memory, case.dtype.master(), &normal(6, case.rows() * per_row));
    let mut target = filled(memory, slots, &normal(7, case.width));
    let slice = SliceMut::whole(&mut target);
    let inputs = [&x, &weight, &stats, &dy].map(Slice::whole);
    call(memory, inputs, GradientTarget { slice, accumulate }).unwrap();
    values(memory, &target)
}

#[test]
fn norm_weight_gradients_match_host_bitwise() {
    fn rms<M: Memory>(
        memory: &M,
        case: &Norm,
        how: (DType, bool),
        call: impl FnOnce(
            &M,
            [Slice<'_, M::Buffer>; 4],
            SliceMut<'_, M::Buffer>,
            GradientTarget<'_, M::Buffer>,
        ) -> Result<(), Error>,
    ) -> Vec<f64> {
        weights(memory, case, 1, how, |memory, inputs, target| {
            let mut dx = room(memory, case.dtype, case.x.len());
            call(memory, inputs, SliceMut::whole(&mut dx), target)
        })
    }
    for case in Norm::cases() {
        let width = case.width;
        for slots in FLOATS {
            for accumulate in [false, true] {
                let how = (slots, accumulate);
                let what = case.what(&format!("gradient (to {slots}, added {accumulate}) of the weight"));
                let got = rms(&*subject(), &case, how, |m, [x, w, stats, dy], dx, target| {
                    m.rms_norm_backward((width, 0.0), x, w, stats, dy, dx, false, Some(target))
                });
                let expected = rms(&host(), &case, how, |m, [x, w, stats, dy], dx, target| {
                    m.rms_norm_backward((width, 0.0), x, w, stats, dy, dx, false, Some(target))
                });
                assert_bits(&got, &expected, &what);
                let got = weights(&*subject(), &case, 2, how, |m, [x, _, stats, dy], target| {
                    m.layer_norm_backward_weight(width, x, stats, dy, target)
                });
                let expected = weights(&host(), &case, 2, how, |m, [x, _, stats, dy], target| {
                    m.layer_norm_backward_weight(width, x, stats, dy, target)
                });
                assert_bits(&got, &expected, &what);
            }
        }
    }
}

#[test]
fn bias_gradients_match_host_bitwise() {
    fn sums<M: Memory + fsdp_nn::Backend>(
        memory: &M,
        (dims, dtype): (LinearDims, DType),
        (slots, accumulate): (DType, bool),
        numbers: &[f64],
    ) -> Vec<f64> {
        let dy = filled(memory, dtype, numbers);
        let mut target = filled(memory, slots, &normal(7, dims.outputs));
        let slice = SliceMut::whole(&mut target);
        memory.linear_backward_bias(dims, Slice::whole(&dy), GradientTarget { slice, accumulate }).unwrap();
        values(memory, &target)
    }
    for dtype in FLOATS {
        for (rows, outputs, y_stride) in
            [(1, 1, 1), (3, 7, 9), (129, 64, 64), (400, 33, 40), (36 * 128 + 5, 4, 8)]
        {
            let dims = LinearDims { rows, inputs: 1, outputs, y_stride, orientation: Orientation::InOut };
            let numbers = rounded(dtype, normal(4, (rows - 1) * y_stride + outputs));
            for how in [(dtype, false), (dtype, true), (DType::F32, true), (DType::Bf16, false)] {
                let got = sums(&*subject(), (dims, dtype), how, &numbers);
                let expected = sums(&host(), (dims, dtype), how, &numbers);
                assert_bits(&got, &expected, &format!("sums of {dims:?} x {dtype} (slot, added: {how:?})"));
            }
        }
    }
}

#[test]
fn many_partial_sums_match_host_bitwise() {
    for (dtype, parts) in FLOATS.into_iter().map(|dtype| (dtype, 36)).chain([(DType::F32, 300)]) {
        let (width, rows) = (3, parts * 128 + 5);
        let numbers = |key| rounded(dtype, normal(key, width * rows));
        let (x, dy) = (numbers(1), numbers(4));
        let case = Norm { width, dtype, x, weight: vec![1.0; width], bias: vec![0.0; width], dy };
        for how in [(dtype, false), (DType::F32, true)] {
            let got = weights(&*subject(), &case, 2, how, |m, [x, _, stats, dy], target| {
                m.layer_norm_backward_weight(width, x, stats, dy, target)
            });
            let expected = weights(&host(), &case, 2, how, |m, [x, _, stats, dy], target| {
                m.layer_norm_backward_weight(width, x, stats, dy, target)
            });
            assert_bits(&got, &expected, &case.what("gradient of the weight"));
        }
    }
}

#[test]
fn activation_backward_recomputes_output() {
    for dtype in FLOATS {
        for (len, shift) in [(1, 0), (33, 1), (1000, 0), (4099, 3)] {
            let (a, b, c) = (normal(1, len), normal(2, len), normal(3, len));
            let what = format!("{len} x {dtype} from {shift}");
            for inner in [false, true] {
                let (got, expected) = both!(dtype, len, |m, y| {
                    let [gate, up, dy] = [&a, &b, &c].map(|values| shifted(m, dtype, shift, values));
                    let part = |buffer| Slice::new(buffer, shift, len);
                    let (mut again, mut dgate, mut dup) = (dy, room(m, dtype, len), room(m, dtype, len));
                    let dy = SliceMut::new(&mut again, shift, len);
                    let (to_gate, to_up) = (SliceMut::whole(&mut dgate), SliceMut::whole(&mut dup));
                    m.swiglu_backward_again(part(&gate), part(&up), dy, to_gate, to_up)?;
                    let from = if inner { Slice::whole(&dup) } else { Slice::new(&again, shift, len) };
                    m.copy(Queue::Compute, from, y)
                });
                assert_alike(dtype, &got, &expected, &format!("swiglu, {what}"));
                let (got, expected) = both!(dtype, len, |m, y| {
                    let [x, dy] = [&a, &c].map(|values| shifted(m, dtype, shift, values));
                    let (mut again, mut dx) = (dy, room(m, dtype, len));
                    let dy = SliceMut::new(&mut again, shift, len);
                    m.gelu_backward_again(Slice::new(&x, shift, len), dy, SliceMut::whole(&mut dx))?;
                    let from = if inner { Slice::whole(&dx) } else { Slice::new(&again, shift, len) };
                    m.copy(Queue::Compute, from, y)
                });
                assert_alike(dtype, &got, &expected, &format!("gelu, {what}"));
            }
        }
    }
}
