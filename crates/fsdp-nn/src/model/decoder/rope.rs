//! Rotary position embedding as described by a `config.json`.

use std::f32::consts::PI;

use crate::layer::Rope;

/// The frequencies of rotary position embedding (Su et al., 2021) and their scaling to longer sequences. All are
/// computed in single precision, in the order of transformers' `modeling_rope_utils`.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeConfig {
    /// The base of the frequencies.
    pub theta: f64,
    /// The fraction of a head that rotates: its first elements.
    pub partial: f64,
    /// How the frequencies are scaled.
    pub scaling: RopeScaling,
}

/// Scaling of frequencies to sequences longer than those seen in pretraining.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    /// No scaling.
    Default,
    /// Divides all frequencies by a factor (Chen et al., 2023).
    Linear {
        /// The factor.
        factor: f64,
    },
    /// Grows the base with the sequence, once that is longer than the positions the model was made for ("dynamic
    /// NTK"); up to there, the base may be grown once for all ("NTK-alpha", HunYuan).
    Dynamic {
        /// Factor by which sequences may become longer.
        factor: f64,
        /// Number of positions the model was made for.
        positions: usize,
        /// Growth within these positions; 1 for none.
        alpha: f64,
    },
    /// Divides low frequencies by a factor, keeps high ones, and interpolates between (Llama 3.1).
    Llama3 {
        /// The factor.
        factor: f64,
        /// Number of rotations within the original positions below which a frequency is low.
        low: f64,
        /// Number of rotations within the original positions above which a frequency is high.
        high: f64,
        /// Number of original positions.
        original: usize,
    },
    /// YaRN (Peng et al., 2023): as Llama 3.1, with a ramp over the elements, and a factor on cosines and sines.
    Yarn(Yarn),
    /// LongRoPE (Ding et al., 2024): one factor per frequency.
    LongRope {
        /// Factors for sequences of at most the original positions.
        short: Vec<f64>,
        /// Factors for longer sequences.
        long: Vec<f64>,
        /// Number of original positions.
        original: usize,
        /// Factor of cosines and sines.
        attention_factor: f64,
    },
}

/// The parameters of YaRN.
#[derive(Clone, Debug, PartialEq)]
pub struct Yarn {
    /// Divisor of low frequencies.
    pub factor: f64,
    /// Number of rotations within the original positions at the high-frequency end of the ramp.
    pub beta_fast: f64,
    /// Number of rotations at the low-frequency end.
    pub beta_slow: f64,
    /// Number of original positions.
    pub original: usize,
    /// Whether the ends of the ramp are rounded to whole elements.
    pub truncate: bool,
    /// Factor of cosines and sines.
    pub attention_factor: f64,
}

impl RopeConfig {
    /// Number of rotating elements per head.
    pub fn rotary_dim(&self, head_dim: usize) -> usize {
        (head_dim as f64 * self.partial) as usize
    }

    /// Returns the angles for heads of `head_dim` elements in sequences of `seq` tokens.
    pub fn rope(&self, head_dim: usize, seq: usize) -> Rope {
        let dim = self.rotary_dim(head_dim);
        let base = match self.scaling {
            RopeScaling::Dynamic { factor, positions, .. } if seq > positions => {
                grown_base(self.theta, factor, positions, seq, dim)
            }
            RopeScaling::Dynamic { alpha, .. } => (self.theta * alpha.powf(growth_power(dim))) as f32,
            _ => self.theta as f32,
        };
        let plain = |i: usize| 1.0 / power(base, i, dim);
        let frequency = |i: usize| match &self.scaling {
            RopeScaling::Default | RopeScaling::Dynamic { .. } => plain(i),
            RopeScaling::Linear { factor } => plain(i) / *factor as f32,
            RopeScaling::Llama3 { factor, low, high, original } => {
                by_wavelength(plain(i), *factor as f32, [*low as f32, *high as f32], *original as f32)
            }
            RopeScaling::Yarn(yarn) => yarn.frequency(self.theta, i, dim),
            RopeScaling::LongRope { short, long, original, .. } => {
                let factors = if seq > *original { long } else { short };
                1.0 / (factors[i] as f32 * power(base, i, dim))
            }
        };
        let factor = match &self.scaling {
            RopeScaling::Yarn(yarn) => yarn.attention_factor,
            RopeScaling::LongRope { attention_factor, .. } => *attention_factor,
            _ => 1.0,
        };
        Rope { inverse_frequencies: (0..dim / 2).map(frequency).collect(), factor }
    }
}

/// The reciprocal of an unscaled frequency.
fn power(base: f32, i: usize, dim: usize) -> f32 {
    base.powf((2 * i) as f32 / dim as f32)
}

/// Returns the base for a sequence that exceeds the positions that the model was made for.
fn grown_base(theta: f64, factor: f64, positions: usize, seq: usize, dim: usize) -> f32 {
    let growth = factor as f32 * seq as f32 / positions as f32 - (factor - 1.0) as f32;
    theta as f32 * growth.powf(growth_power(dim) as f32)
}

/// The power of the growth of the slowest frequency that grows the base.
fn growth_power(dim: usize) -> f64 {
    dim as f64 / (dim as f64 - 2.0)
}

/// Scales a frequency as in Llama 3.1.
fn by_wavelength(frequency: f32, factor: f32, [low, high]: [f32; 2], original: f32) -> f32 {
    let wavelength = 2.0 * PI / frequency;
    if wavelength < original / high {
        return frequency;
    }
    if wavelength > original / low {
        return frequency / factor;
    }
    let smooth = (original / wavelength - low) / (high - low);
    (1.0 - smooth) * frequency / factor + smooth * frequency
}

impl Yarn {
    fn frequency(&self, theta: f64, i: usize, dim: usize) -> f32 {
        let power = power(theta as f32, i, dim);
        let (extrapolated, interpolated) = (1.0 / power, 1.0 / (self.factor as f32 * power));
        let [low, high] = self.ramp(theta, dim);
        // A ramp of length zero would divide by zero.
        let high = if low == high { high + 0.001 } else { high };
        let slow = ((i as f32 - low as f32) / (high - low) as f32).clamp(0.0, 1.0);
        let fast = 1.0 - slow;
        interpolated * (1.0 - fast) + extrapolated * fast
    }

    /// Returns the pairs of elements at which the transition from high to low frequencies begins and ends.
    fn ramp(&self, theta: f64, dim: usize) -> [f64; 2] {
        let pair = |rotations: f64| {
            let positions_per_radian = self.original as f64 / (rotations * 2.0 * std::f64::consts::PI);
            dim as f64 * positions_per_radian.ln() / (2.0 * theta.ln())
        };
        let (low, high) = (pair(self.beta_fast), pair(self.beta_slow));
        let (low, high) = if self.truncate { (low.floor(), high.ceil()) } else { (low, high) };
        [low.max(0.0), high.min(dim as f64 - 1.0)]
    }
}
