//! Dropout factors for parts of samples, for operations elsewhere that multiply by them block by block.

use fsdp_core::memory::{HostSlice, Memory, Slice, SliceMut};
use fsdp_core::{DType, Error, Queue};
use fsdp_nn::backend::Dropout;
use fsdp_nn::lengths;

use super::{Arg, POINTWISE};
use crate::device::{CudaBuffer, CudaMemory};

impl CudaMemory {
    /// Returns a buffer with the dropout factors of runs of `run_len` elements, one after the other: run `i` has the
    /// elements from `firsts[i]` on of the sample whose key is `runs.keys[i]`. The work is enqueued on the compute
    /// queue.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub fn dropout_factors(
        &self,
        runs: Dropout<'_>,
        firsts: &[u64],
        dtype: DType,
        run_len: usize,
    ) -> Result<CudaBuffer, Error> {
        let count = runs.keys.len();
        lengths::expect("first elements of runs under dropout", firsts.len(), count);
        if !dtype.is_float() {
            lengths::not_a_float(dtype);
        }
        // The kernel reads keys and first elements as unsigned 64-bit integers with the same bits.
        let numbers: Vec<i64> = runs.keys.iter().chain(firsts).map(|&number| number as i64).collect();
        let mut device_numbers = self.scratch(DType::I64, numbers.len())?;
        self.write(Queue::Compute, HostSlice::I64(&numbers), SliceMut::whole(&mut device_numbers))?;
        let mut factors = self.scratch(dtype, count * run_len)?;
        let args = [
            self.output(SliceMut::whole(&mut factors))?,
            self.input(Slice::new(&device_numbers, 0, count))?,
            self.input(Slice::new(&device_numbers, count, count))?,
            Arg::Len(run_len),
            Arg::Len(count),
            Arg::Int(runs.threshold()),
            Arg::Real(runs.kept()),
        ];
        self.same_dtype_kernels(&POINTWISE, dtype).elements("dropout_factors", count * run_len, &args)?;
        Ok(factors)
    }
}
