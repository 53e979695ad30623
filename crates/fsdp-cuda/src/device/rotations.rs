//! Tables for rotary position embedding: cosines and then sines of the angles of every position.
//!
//! They are computed on the host, in the order of the host's kernel and thus with the same bits, and kept on the device
//! as long as the memory lives: a model uses one or two tables, in every layer of every step.

use fsdp_core::memory::{HostSlice, Memory, SliceMut};
use fsdp_core::{DType, Error, Queue};
use fsdp_nn::layer::Rope;

use super::buffer::CudaBuffer;
use super::lock::lock;
use super::memory::CudaMemory;

/// A table and its parameters.
#[derive(Debug)]
pub(super) struct Rotation {
    dtype: DType,
    seq: usize,
    rope: Rope,
    table: CudaBuffer,
}

impl CudaMemory {
    /// The table for positions below `seq`, in the arithmetic type `dtype`.
    pub(crate) fn rotations(&self, dtype: DType, seq: usize, rope: &Rope) -> Result<CudaBuffer, Error> {
        let mut cached = lock(&self.rotations);
        let is_match =
            |rotation: &&Rotation| rotation.dtype == dtype && rotation.seq == seq && rotation.rope == *rope;
        if let Some(rotation) = cached.iter().find(is_match) {
            return Ok(rotation.table.clone());
        }
        let values: Vec<f64> = (0..seq).flat_map(|position| rope.angles(position)).collect();
        let mut table = self.scratch(dtype, values.len())?;
        self.write(Queue::Compute, HostSlice::F64(&values), SliceMut::whole(&mut table))?;
        cached.push(Rotation { dtype, seq, rope: rope.clone(), table: table.clone() });
        Ok(table)
    }
}
