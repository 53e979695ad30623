//! The code books of 8-bit moments, kept on the device as long as the memory lives.

use fsdp_core::memory::{HostSlice, Memory, SliceMut};
use fsdp_core::{DType, Error, Queue};
use fsdp_nn::quantized::CodeBook;

use super::buffer::CudaBuffer;
use super::lock::lock;
use super::memory::CudaMemory;

impl CudaMemory {
    /// Values and bounds, 256 numbers each, for first and then for second moments.
    pub(crate) fn code_books(&self) -> Result<CudaBuffer, Error> {
        let mut cached = lock(&self.code_books);
        if let Some(books) = &*cached {
            return Ok(books.clone());
        }
        let numbers = |book: &CodeBook| [book.values, book.bounds].concat();
        let values = [CodeBook::signed(), CodeBook::unsigned()].map(numbers).concat();
        let mut books = self.scratch(DType::F32, values.len())?;
        self.write(Queue::Compute, HostSlice::F32(&values), SliceMut::whole(&mut books))?;
        Ok(cached.insert(books).clone())
    }
}
