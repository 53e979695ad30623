//! What an operation costs, from its sizes alone.

use std::iter::Sum;
use std::ops::{Add, AddAssign, Mul};

use fsdp_core::DType;

use super::{Access, Kind, Op, Role};

/// Work of an operation, or of several.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    /// Floating-point operations of its products: two for each multiplication with addition. Of attention those that
    /// causality leaves, and in backward those that make its probabilities again.
    pub product_flops: u64,
    /// Other floating-point operations, about: one for each arithmetic function of a number.
    pub other_flops: u64,
    /// Bytes of operands that are read, once each.
    pub bytes_read: u64,
    /// Bytes of operands that are written, once each.
    pub bytes_written: u64,
}

impl Cost {
    /// All floating-point operations.
    pub fn flops(&self) -> u64 {
        self.product_flops + self.other_flops
    }

    /// All bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes_read + self.bytes_written
    }

    /// Floating-point operations for each byte.
    pub fn intensity(&self) -> f64 {
        self.flops() as f64 / self.bytes().max(1) as f64
    }
}

impl Add for Cost {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            product_flops: self.product_flops + other.product_flops,
            other_flops: self.other_flops + other.other_flops,
            bytes_read: self.bytes_read + other.bytes_read,
            bytes_written: self.bytes_written + other.bytes_written,
        }
    }
}

impl AddAssign for Cost {
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}

impl Mul<u64> for Cost {
    type Output = Self;

    fn mul(self, times: u64) -> Self {
        Self {
            product_flops: self.product_flops * times,
            other_flops: self.other_flops * times,
            bytes_read: self.bytes_read * times,
            bytes_written: self.bytes_written * times,
        }
    }
}

impl Sum for Cost {
    fn sum<I: Iterator<Item = Self>>(costs: I) -> Self {
        costs.fold(Self::default(), Add::add)
    }
}

impl Op {
    /// What it costs with values of one dtype and gradients of parameters of another. What is added to is not counted as
    /// read: the operation does not say it.
    pub fn cost(&self, values: DType, gradients: DType) -> Cost {
        let signature = self.signature();
        let bytes = |role: &Role| {
            let dtype = match role.kind {
                Kind::Value => values,
                Kind::Statistic => values.master(),
                Kind::Gradient => gradients,
                Kind::Of(dtype) => dtype,
            };
            (role.touched * dtype.size_bytes()) as u64
        };
        let updated =
            signature.writes.iter().filter(|role| matches!(role.access, Access::Update | Access::Scratch));
        Cost {
            product_flops: self.product_flops(),
            other_flops: self.other_flops(),
            bytes_read: signature.reads.iter().chain(updated).map(bytes).sum(),
            bytes_written: signature.writes.iter().map(bytes).sum(),
        }
    }

    /// The product that it is or is made of, as rows, columns and terms of each sum: `[m, n, k]`.
    pub fn matmul(&self) -> Option<[usize; 3]> {
        match *self {
            Op::Linear { dims, .. } => Some([dims.rows, dims.outputs, dims.inputs]),
            Op::LinearBackwardInput { dims } => Some([dims.rows, dims.inputs, dims.outputs]),
            Op::LinearBackwardWeight { dims } => Some([dims.inputs, dims.outputs, dims.rows]),
            Op::HeadLoss { dims } | Op::HeadLossBackward { dims, .. } | Op::HeadLogits { dims } => {
                Some([dims.rows, dims.vocab, dims.hidden])
            }
            _ => None,
        }
    }

    fn product_flops(&self) -> u64 {
        let products = match *self {
            Op::HeadLossBackward { weight, .. } => 2 + u64::from(weight),
            // Scores and the output; scores again, and gradients of probabilities, queries, keys and values.
            Op::Attention { dims, .. } => return 2 * 2 * (dims.scores() * dims.head_dim) as u64,
            Op::AttentionBackward { dims, .. } => return 5 * 2 * (dims.scores() * dims.head_dim) as u64,
            _ => 1,
        };
        self.matmul().map_or(0, |[m, n, k]| products * 2 * (m * n * k) as u64)
    }

    fn other_flops(&self) -> u64 {
        let flops = match *self {
            Op::Linear { dims, bias: true } => dims.rows * dims.outputs,
            Op::ColumnSums { rows, columns, .. } => rows * columns,
            Op::EmbeddingBackward { rows, width, .. } => rows * width,
            Op::RmsNorm { rows, width, .. } => 4 * rows * width,
            Op::RmsNormBackward { rows, width, weight } => (7 + 3 * usize::from(weight)) * rows * width,
            Op::LayerNorm { rows, width, .. } => 7 * rows * width,
            Op::LayerNormBackwardInput { rows, width } => 10 * rows * width,
            Op::LayerNormBackwardWeight { rows, width } => 4 * rows * width,
            Op::Rope { dims, .. } => 3 * dims.rows() * (dims.heads + dims.kv_heads) * dims.head_dim,
            // Scaled, shifted, exponentiated, added, divided.
            Op::Attention { dims, .. } => 5 * dims.scores(),
            Op::AttentionBackward { dims, .. } => 6 * dims.scores() + 2 * dims.output_len(),
            Op::Swiglu { len } => 5 * len,
            Op::SwigluBackward { len } | Op::SwigluBackwardAgain { len } => 10 * len,
            Op::Gelu { len } => 9 * len,
            Op::GeluBackward { len } | Op::GeluBackwardAgain { len } => 16 * len,
            Op::Add { len } | Op::Accumulate { len } | Op::Dropout { len, .. } => len,
            Op::HeadLoss { dims } => 4 * dims.rows * dims.vocab,
            Op::HeadLossBackward { dims, .. } => 6 * dims.rows * dims.vocab,
            Op::CrossEntropy { rows, vocab } => 4 * rows * vocab,
            Op::CrossEntropyBackward { rows, vocab, .. } => 6 * rows * vocab,
            _ => 0,
        };
        flops as u64
    }
}
