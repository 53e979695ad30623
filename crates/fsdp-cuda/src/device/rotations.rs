//! Tables of angles for rotary position embedding: cosines and then sines of every position.
//!
//! They are computed on the host, in the order of the host's kernel and so with the same bits, and kept on the device
//! for as long as the memory lives: a model asks for one or two of them, in every layer of every step.

use fsdp_core::memory::{HostSlice, Memory, SliceMut};
use fsdp_core::{DType, Error, Queue};

use super::buffer::CudaBuffer;
use super::lock::lock;
use super::memory::CudaMemory;

/// A table and what it is for.
#[derive(Debug)]
pub(super) struct Rotation {
    dtype: DType,
    seq: usize,
    frequencies: Vec<u32>,
    table: CudaBuffer,
}

impl CudaMemory {
    /// The table for positions up to `seq`, in the type of arithmetic.
    pub(crate) fn rotations(
        &self,
        dtype: DType,
        seq: usize,
        frequencies: &[f32],
    ) -> Result<CudaBuffer, Error> {
        let bits: Vec<u32> = frequencies.iter().map(|frequency| frequency.to_bits()).collect();
        let mut known = lock(&self.rotations);
        let fits = |known: &&Rotation| known.dtype == dtype && known.seq == seq && known.frequencies == bits;
        if let Some(rotation) = known.iter().find(fits) {
            return Ok(rotation.table.clone());
        }
        let values = angles(seq, frequencies);
        let mut table = self.scratch(dtype, values.len())?;
        self.write(Queue::Compute, HostSlice::F64(&values), SliceMut::whole(&mut table))?;
        known.push(Rotation { dtype, seq, frequencies: bits, table: table.clone() });
        Ok(table)
    }
}

fn angles(seq: usize, frequencies: &[f32]) -> Vec<f64> {
    let mut values = Vec::with_capacity(seq * 2 * frequencies.len());
    for position in 0..seq {
        // The product is rounded to single precision, as Hugging Face computes it.
        let angle = |&frequency: &f32| f64::from(position as f32 * frequency);
        values.extend(frequencies.iter().map(|frequency| angle(frequency).cos()));
        values.extend(frequencies.iter().map(|frequency| angle(frequency).sin()));
    }
    values
}
