//! Factors of dropout for parts of samples: for operations of others that multiply with them block by block.

use fsdp_core::memory::{HostSlice, Memory, Slice, SliceMut};
use fsdp_core::{DType, Error, Queue};
use fsdp_nn::backend::Dropout;
use fsdp_nn::lengths;

use super::{POINTWISE, Word};
use crate::device::{CudaBuffer, CudaMemory};

impl CudaMemory {
    /// A buffer with the factors of dropout for runs of `run_len` elements, side by side: run `i` has the elements from
    /// `firsts[i]` of the sample whose key is `runs.keys[i]`. Work goes to the compute queue.
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
        // The words of a 64-bit integer are those of a key, and of a first element.
        let numbers: Vec<i64> = runs.keys.iter().chain(firsts).map(|&number| number as i64).collect();
        let mut on_device = self.scratch(DType::I64, numbers.len())?;
        self.write(Queue::Compute, HostSlice::I64(&numbers), SliceMut::whole(&mut on_device))?;
        let mut factors = self.scratch(dtype, count * run_len)?;
        let words = [
            self.output(SliceMut::whole(&mut factors))?,
            self.input(Slice::new(&on_device, 0, count))?,
            self.input(Slice::new(&on_device, count, count))?,
            Word::Len(run_len),
            Word::Len(count),
            Word::Int(runs.threshold()),
            Word::Real(runs.kept()),
        ];
        self.same(&POINTWISE, dtype).elements("dropout_factors", count * run_len, &words)?;
        Ok(factors)
    }
}
