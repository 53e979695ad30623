//! Kernels of activations, alone and as gates.

use fsdp_core::Error;

use crate::backend::Outcome;
use crate::host::HostMemory;
use crate::host::backend::Call;
use crate::host::element::{Element, Float};
use crate::host::raw::vectorized;
use crate::host::workers::TASK_ELEMS;
use crate::op::{Activation, CLAMP, Function, Pass, SWISH_SCALE};

/// `sqrt(2 / pi)` and the cubic coefficient of the tanh form of GELU.
const GELU_SCALE: f64 = 0.797_884_560_802_865_4;
const GELU_CUBIC: f64 = 0.044_715;

/// A function as a type parameter of kernels.
trait Curve {
    /// Returns the value of the function.
    fn value<A: Float>(x: A) -> A;

    /// Returns the value and the derivative.
    fn both<A: Float>(x: A) -> (A, A);
}

struct Silu;

impl Curve for Silu {
    #[inline(always)]
    fn value<A: Float>(x: A) -> A {
        x * x.logistic()
    }

    #[inline(always)]
    fn both<A: Float>(x: A) -> (A, A) {
        let s = x.logistic();
        let y = x * s;
        (y, s + y * (A::ONE - s))
    }
}

/// Computed as `x * logistic(2 u)`, because `(1 + tanh u) / 2 = logistic(2 u)`.
struct GeluTanh;

impl Curve for GeluTanh {
    #[inline(always)]
    fn value<A: Float>(x: A) -> A {
        let (scale, cubic) = (A::of(2.0 * GELU_SCALE), A::of(GELU_CUBIC));
        x * (scale * (x + cubic * x * x * x)).logistic()
    }

    #[inline(always)]
    fn both<A: Float>(x: A) -> (A, A) {
        let (scale, cubic) = (A::of(2.0 * GELU_SCALE), A::of(GELU_CUBIC));
        let cubic_slope = A::of(3.0 * GELU_CUBIC);
        let s = (scale * (x + cubic * x * x * x)).logistic();
        let slope = scale * (A::ONE + cubic_slope * x * x);
        (x * s, s + x * s * (A::ONE - s) * slope)
    }
}

/// Coefficients of a Chebyshev series in `2 t - 1` with `t = 4 / (4 + a)`, of `tail(a) e^(a^2 / 2) / t`, where
/// `tail(a)` is the standard normal probability above `a >= 0`. Fitted by interpolation with 40 digits.
const TAIL: [f64; 26] = [
    0.242_612_801_141_519_15,
    0.187_927_204_209_892_65,
    0.055_548_388_918_812_76,
    0.012_129_438_315_111_521,
    0.001_731_480_124_060_620_2,
    8.014_961_859_953_749e-5,
    -2.513_684_790_802_669_7e-5,
    -4.725_842_254_926_741e-6,
    2.525_892_213_686_577_4e-7,
    1.536_333_687_349_456e-7,
    -8.452_550_300_172_939e-10,
    -5.171_627_015_435_708e-9,
    -2.820_650_908_117_376_7e-11,
    1.943_503_807_097_173_7e-10,
    -2.485_356_047_851_177e-12,
    -7.936_207_374_645_758e-12,
    4.606_201_711_176_235e-13,
    3.282_154_116_677_741_3e-13,
    -4.353_840_663_163_702_6e-14,
    -1.226_818_507_926_106_9e-14,
    3.232_846_081_541_398_3e-15,
    3.045_165_880_431_601e-16,
    -2.013_036_843_155_294_2e-16,
    7.151_235_360_661_802e-18,
    1.014_266_106_083_215_2e-17,
    -1.751_600_193_201_231e-18,
];

/// The number of terms of [`TAIL`] that affect single precision.
const TERMS_SINGLE: usize = 12;

/// `1 / sqrt(2 pi)`.
const DENSITY: f64 = 0.398_942_280_401_432_7;

/// The standard normal distribution function and its density. Small results keep full relative precision.
#[inline(always)]
fn normal<A: Float>(x: A) -> (A, A) {
    let is_negative = x < A::ZERO;
    let a = if is_negative { -x } else { x };
    let power = (A::of(-0.5) * a * a).exp();
    let t = A::of(4.0) / (A::of(4.0) + a);
    let s = t + t - A::ONE;
    let terms = if size_of::<A>() == size_of::<f32>() { TERMS_SINGLE } else { TAIL.len() };
    let (mut sum, mut before) = (A::ZERO, A::ZERO);
    for &term in TAIL[1..terms].iter().rev() {
        (sum, before) = (A::of(term) + (s + s) * sum - before, sum);
    }
    let tail = power * t * (A::of(TAIL[0]) + s * sum - before);
    (if is_negative { tail } else { A::ONE - tail }, A::of(DENSITY) * power)
}

struct Gelu;

impl Curve for Gelu {
    #[inline(always)]
    fn value<A: Float>(x: A) -> A {
        x * normal(x).0
    }

    #[inline(always)]
    fn both<A: Float>(x: A) -> (A, A) {
        let (below, density) = normal(x);
        (x * below, below + x * density)
    }
}

struct Relu;

impl Curve for Relu {
    #[inline(always)]
    fn value<A: Float>(x: A) -> A {
        // NaN stays.
        if x < A::ZERO { A::ZERO } else { x }
    }

    #[inline(always)]
    fn both<A: Float>(x: A) -> (A, A) {
        (Self::value(x), if x > A::ZERO { A::ONE } else { A::ZERO })
    }
}

struct ClampedSwish;

impl Curve for ClampedSwish {
    #[inline(always)]
    fn value<A: Float>(x: A) -> A {
        let z = if x > A::of(CLAMP) { A::of(CLAMP) } else { x };
        z * (A::of(SWISH_SCALE) * z).logistic()
    }

    #[inline(always)]
    fn both<A: Float>(x: A) -> (A, A) {
        let is_clamped = x > A::of(CLAMP);
        let z = if is_clamped { A::of(CLAMP) } else { x };
        let s = (A::of(SWISH_SCALE) * z).logistic();
        let slope = s + A::of(SWISH_SCALE) * z * s * (A::ONE - s);
        (z * s, if is_clamped { A::ZERO } else { slope })
    }
}

struct ClampedPlusOne;

impl Curve for ClampedPlusOne {
    #[inline(always)]
    fn value<A: Float>(x: A) -> A {
        let (low, high) = (A::of(-CLAMP), A::of(CLAMP));
        let z = if x > high { high } else { x };
        (if z < low { low } else { z }) + A::ONE
    }

    #[inline(always)]
    fn both<A: Float>(x: A) -> (A, A) {
        let is_clamped = x > A::of(CLAMP) || x < A::of(-CLAMP);
        (Self::value(x), if is_clamped { A::ZERO } else { A::ONE })
    }
}

struct Logistic;

impl Curve for Logistic {
    #[inline(always)]
    fn value<A: Float>(x: A) -> A {
        x.logistic()
    }

    #[inline(always)]
    fn both<A: Float>(x: A) -> (A, A) {
        let s = x.logistic();
        (s, s * (A::ONE - s))
    }
}

impl HostMemory {
    pub(in crate::host) fn activation<E: Element>(
        &self,
        op: Activation,
        operands: Call<'_, '_>,
    ) -> Result<Outcome, Error> {
        match op.function {
            Function::Silu => self.run_curve::<E, Silu>(op, operands),
            Function::GeluTanh => self.run_curve::<E, GeluTanh>(op, operands),
            Function::Gelu => self.run_curve::<E, Gelu>(op, operands),
            Function::Relu => self.run_curve::<E, Relu>(op, operands),
            Function::ClampedSwish => self.run_curve::<E, ClampedSwish>(op, operands),
            Function::ClampedPlusOne => self.run_curve::<E, ClampedPlusOne>(op, operands),
            Function::Logistic => self.run_curve::<E, Logistic>(op, operands),
        }
    }

    fn run_curve<E: Element, C: Curve>(
        &self,
        op: Activation,
        operands: Call<'_, '_>,
    ) -> Result<Outcome, Error> {
        let workers = self.workers();
        let inputs = operands.reads.iter().map(|read| self.elements::<E>(*read));
        let inputs = inputs.collect::<Result<Vec<&[E]>, Error>>()?;
        match (op.pass, &inputs[..]) {
            (Pass::Forward, inputs) => {
                let ([], [y], _) = operands.split();
                let tasks = self.elements_mut(y.slice)?.chunks_mut(TASK_ELEMS).enumerate();
                workers.each(tasks, |(task, y)| match inputs {
                    [x] => value_range::<E, C>(part(x, task), y),
                    _ => gated_range::<E, C>(part(inputs[0], task), part(inputs[1], task), y),
                });
            }
            (Pass::Backward, &[x, dy]) => {
                let ([], [dx], _) = operands.split();
                let tasks = self.elements_mut(dx.slice)?.chunks_mut(TASK_ELEMS).enumerate();
                workers.each(tasks, |(task, dx)| slope_range::<E, C>(part(x, task), part(dy, task), dx));
            }
            (Pass::Backward, &[gate, up, dy]) => {
                let ([], [dgate, dup], _) = operands.split();
                let dgate = self.elements_mut(dgate.slice)?.chunks_mut(TASK_ELEMS);
                let tasks = dgate.zip(self.elements_mut(dup.slice)?.chunks_mut(TASK_ELEMS)).enumerate();
                workers.each(tasks, |(task, (dgate, dup))| {
                    let [gate, up, dy] = [gate, up, dy].map(|input| part(input, task));
                    gated_slope_range::<E, C>(gate, up, dy, dgate, dup);
                });
            }
            _ => return Ok(Outcome::Unsupported),
        }
        Ok(Outcome::Done)
    }
}

/// Returns the elements of a task.
fn part<E>(elements: &[E], task: usize) -> &[E] {
    &elements[task * TASK_ELEMS..elements.len().min((task + 1) * TASK_ELEMS)]
}

vectorized! {
    fn value_range<E: Element, C: Curve>(x: &[E], y: &mut [E]) {
        for (y, x) in y.iter_mut().zip(x) {
            *y = E::store(C::value(x.load()));
        }
    }
}

vectorized! {
    fn gated_range<E: Element, C: Curve>(gate: &[E], up: &[E], y: &mut [E]) {
        for ((y, gate), up) in y.iter_mut().zip(gate).zip(up) {
            *y = E::store(C::value(gate.load()) * up.load());
        }
    }
}

vectorized! {
    fn slope_range<E: Element, C: Curve>(x: &[E], dy: &[E], dx: &mut [E]) {
        for ((dx, x), dy) in dx.iter_mut().zip(x).zip(dy) {
            let (_, slope) = C::both(x.load());
            *dx = E::store(dy.load() * slope);
        }
    }
}

vectorized! {
    fn gated_slope_range<E: Element, C: Curve>(gate: &[E], up: &[E], dy: &[E], dgate: &mut [E], dup: &mut [E]) {
        let inputs = gate.iter().zip(up).zip(dy);
        for ((dgate, dup), ((gate, up), dy)) in dgate.iter_mut().zip(dup).zip(inputs) {
            let (dy, (value, slope)) = (dy.load(), C::both(gate.load()));
            *dgate = E::store(dy * up.load() * slope);
            *dup = E::store(dy * value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `x`, GELU and its derivative, computed by mpmath with 40 digits.
    const GELU: [[f64; 3]; 7] = [
        [-6.0, -5.919_525_870_226_188_5e-9, -3.546_870_945_390_201_5e-8],
        [-2.5, -0.015_524_163_314_440_337, -0.037_611_085_908_145_21],
        [-0.75, -0.169_970_514_282_651_14, 0.000_774_278_260_764_895_7],
        [-0.001, -0.000_499_601_057_786_089, 0.499_202_115_705_158_6],
        [0.3, 0.185_373_426_656_685_8, 0.732_327_766_827_109_9],
        [1.0, 0.841_344_746_068_542_9, 1.083_315_470_587_686_4],
        [4.0, 3.999_873_315_032_667_5, 1.000_503_649_661_226_3],
    ];

    #[test]
    fn exact_gelu_is_precise_in_f32_and_f64() {
        for [x, value, slope] in GELU {
            let near = |got: f64, exact: f64, units: f64, unit: f64| {
                // The argument of the exponential has an error of some units in the last place.
                let error = (got - exact).abs() / exact.abs();
                assert!(error < (units + 2.0 * x * x) * unit, "GELU at {x}: {got} for {exact}");
            };
            let (single, double) = (Gelu::both(x as f32), Gelu::both(x));
            for (got, unit) in [
                ([double.0, double.1], f64::EPSILON),
                ([single.0, single.1].map(f64::from), f64::from(f32::EPSILON)),
            ] {
                near(got[0], value, 16.0, unit);
                // Terms of the derivative cancel near its zero at -0.75.
                near(got[1], slope, 1000.0, unit);
            }
            assert_eq!((Gelu::value(x), Gelu::value(x as f32)), (double.0, single.0));
        }
        assert_eq!(Gelu::both(0.0_f32), (0.0, 0.5));
    }

    #[test]
    fn relu_is_zero_below_zero_and_keeps_nan() {
        for (x, expected) in
            [(-2.5, (0.0, 0.0)), (0.0, (0.0, 0.0)), (0.5, (0.5, 1.0)), (f32::INFINITY, (f32::INFINITY, 1.0))]
        {
            assert_eq!((Relu::both(x), Relu::value(x)), (expected, expected.0));
        }
        assert!(Relu::value(f32::NAN).is_nan());
    }
}
