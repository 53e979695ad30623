//! The cost of an operation, computed from its sizes.

use std::iter::Sum;
use std::ops::{Add, AddAssign, Mul};

use fsdp_core::DType;

use super::{Access, Kind, Op, Role};

/// The work of one or more operations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    /// Floating-point operations of matrix products: two per multiply-add. For attention, those of the causal part;
    /// in backward, including the recomputation of the probabilities.
    pub product_flops: u64,
    /// Other floating-point operations, approximately: one per arithmetic function of an element.
    pub other_flops: u64,
    /// Bytes of operands read, each counted once.
    pub bytes_read: u64,
    /// Bytes of operands written, each counted once.
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

    /// Floating-point operations per byte.
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
    /// Returns the cost with activations of dtype `values` and parameter gradients of dtype `gradients`. Reads by
    /// accumulating writes are not counted, because accumulation is a property of the call.
    pub fn cost(&self, values: DType, gradients: DType) -> Cost {
        let description = self.describe();
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
            description.writes.iter().filter(|role| matches!(role.access, Access::Update | Access::Scratch));
        Cost {
            product_flops: description.product_flops,
            other_flops: description.other_flops,
            bytes_read: description.reads.iter().chain(updated).map(bytes).sum(),
            bytes_written: description.writes.iter().map(bytes).sum(),
        }
    }
}
