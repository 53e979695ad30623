//! Decodes quantized weights.

use fsdp_core::Error;

use crate::backend::Outcome;
use crate::host::HostMemory;
use crate::host::backend::Call;
use crate::host::element::Element;
use crate::host::workers::{Workers, task_rows};
use crate::quantized::Packed;

impl HostMemory {
    pub(in crate::host) fn dequantize<E: Element>(
        &self,
        matrix: Packed,
        operands: Call<'_, '_>,
    ) -> Result<Outcome, Error> {
        let ([bytes], [weight], _) = operands.split();
        let bytes = self.elements::<u8>(bytes)?;
        decode(self.workers(), matrix, bytes, self.elements_mut::<E>(weight.slice)?);
        Ok(Outcome::Done)
    }
}

/// Rounds each element of the matrix once, from `f32`.
pub(super) fn decode<E: Element>(workers: &Workers, matrix: Packed, bytes: &[u8], weight: &mut [E]) {
    let (row_bytes, columns, rows) = (matrix.stored().row_bytes, matrix.columns, task_rows(matrix.columns));
    let tasks = bytes.chunks(rows * row_bytes).zip(weight.chunks_mut(rows * columns)).enumerate();
    workers.each(tasks, |(task, (bytes, weight))| {
        let of_task = bytes.chunks_exact(row_bytes).zip(weight.chunks_exact_mut(columns)).enumerate();
        for (row, (bytes, weight)) in of_task {
            matrix.decode_with(task * rows + row, bytes, weight, |value| E::from_f64(f64::from(value)));
        }
    });
}
