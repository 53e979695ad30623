//! Rotary position embedding as a `config.json` describes it.

use std::f32::consts::PI;

use crate::layer::Rope;

/// The frequencies of rotary position embedding (Su et al., 2021), and how they were scaled to longer sequences. All
/// are computed in single precision, in the order of transformers' `modeling_rope_utils`.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeConfig {
    /// The base of the frequencies.
    pub theta: f64,
    /// The part of a head that rotates: its first elements.
    pub partial: f64,
    /// What was done to the frequencies.
    pub scaling: RopeScaling,
}

/// How frequencies were scaled to sequences that are longer than those a model first saw.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    /// Not at all.
    Default,
    /// All are divided by a factor (Chen et al., 2023).
    Linear {
        /// The factor.
        factor: f64,
    },
    /// The base grows with the sequence, once that is longer than the positions the model was made for
    /// ("dynamic NTK").
    Dynamic {
        /// How many times longer sequences may become.
        factor: f64,
        /// The positions it was made for.
        positions: usize,
    },
    /// Low frequencies are divided by a factor, high ones stay, those between are mixed (Llama 3.1).
    Llama3 {
        /// The factor.
        factor: f64,
        /// Rotations within the original positions below which a frequency is low.
        low: f64,
        /// Rotations within the original positions above which a frequency is high.
        high: f64,
        /// The original positions.
        original: usize,
    },
    /// YaRN (Peng et al., 2023): as Llama 3.1 by a ramp over the elements, and a factor on cosines and sines.
    Yarn(Yarn),
    /// LongRoPE (Ding et al., 2024): a factor for each frequency.
    LongRope {
        /// The factors for sequences of at most the original positions.
        short: Vec<f64>,
        /// Those for longer ones.
        long: Vec<f64>,
        /// The original positions.
        original: usize,
        /// What cosines and sines are multiplied with.
        attention_factor: f64,
    },
}

/// The numbers of YaRN.
#[derive(Clone, Debug, PartialEq)]
pub struct Yarn {
    /// What low frequencies are divided by.
    pub factor: f64,
    /// Rotations within the original positions at the end of the ramp where frequencies are high.
    pub beta_fast: f64,
    /// Rotations at its other end.
    pub beta_slow: f64,
    /// The original positions.
    pub original: usize,
    /// Whether the ends of the ramp are whole elements.
    pub truncate: bool,
    /// What cosines and sines are multiplied with.
    pub attention_factor: f64,
}

impl RopeConfig {
    /// Elements of a head that rotate.
    pub fn rotary_dim(&self, head_dim: usize) -> usize {
        (head_dim as f64 * self.partial) as usize
    }

    /// The angles for heads of `head_dim` elements in sequences of `seq` tokens.
    pub fn rope(&self, head_dim: usize, seq: usize) -> Rope {
        let dim = self.rotary_dim(head_dim);
        let base = match self.scaling {
            RopeScaling::Dynamic { factor, positions } => stretched(self.theta, factor, positions, seq, dim),
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

/// The base for a sequence beyond the positions that a model was made for.
fn stretched(theta: f64, factor: f64, positions: usize, seq: usize, dim: usize) -> f32 {
    if seq <= positions {
        return theta as f32;
    }
    let growth = factor as f32 * seq as f32 / positions as f32 - (factor - 1.0) as f32;
    theta as f32 * growth.powf((dim as f64 / (dim as f64 - 2.0)) as f32)
}

/// A frequency of Llama 3.1.
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
        // A ramp of no length is a step.
        let high = if low == high { high + 0.001 } else { high };
        let slow = ((i as f32 - low as f32) / (high - low) as f32).clamp(0.0, 1.0);
        let fast = 1.0 - slow;
        interpolated * (1.0 - fast) + extrapolated * fast
    }

    /// The pairs of elements between which frequencies go over from high to low.
    fn ramp(&self, theta: f64, dim: usize) -> [f64; 2] {
        let pair = |rotations: f64| {
            let turns = self.original as f64 / (rotations * 2.0 * std::f64::consts::PI);
            dim as f64 * turns.ln() / (2.0 * theta.ln())
        };
        let (low, high) = (pair(self.beta_fast), pair(self.beta_slow));
        let (low, high) = if self.truncate { (low.floor(), high.ceil()) } else { (low, high) };
        [low.max(0.0), high.min(dim as f64 - 1.0)]
    }
}
