//! Decodes quantized weights.

use fsdp_core::Error;

use crate::backend::Outcome;
use crate::host::HostMemory;
use crate::host::backend::Call;
use crate::host::element::Element;
use crate::host::workers::{Workers, task_rows};
use crate::quantized::{BLOCK, Nf4, VALUES};

impl HostMemory {
    pub(in crate::host) fn dequantize<E: Element>(
        &self,
        matrix: Nf4,
        operands: Call<'_, '_>,
    ) -> Result<Outcome, Error> {
        let ([bytes], [weight], _) = operands.split();
        let bytes = self.elements::<u8>(bytes)?;
        decode(self.workers(), matrix, bytes, self.elements_mut::<E>(weight.slice)?);
        Ok(Outcome::Done)
    }
}

/// Rounds each element of the matrix once, from `f32`.
fn decode<E: Element>(workers: &Workers, matrix: Nf4, bytes: &[u8], weight: &mut [E]) {
    let (row_bytes, columns, rows) = (matrix.stored().row_bytes, matrix.columns, task_rows(matrix.columns));
    let tasks = bytes.chunks(rows * row_bytes).zip(weight.chunks_mut(rows * columns)).enumerate();
    workers.each(tasks, |(task, (bytes, weight))| {
        let of_task = bytes.chunks_exact(row_bytes).zip(weight.chunks_exact_mut(columns)).enumerate();
        for (row, (bytes, weight)) in of_task {
            let codes = bytes[..columns / 2].chunks_exact(BLOCK / 2);
            let scales = matrix.row_scales(task * rows + row, bytes);
            for ((scale, codes), weight) in scales.zip(codes).zip(weight.chunks_exact_mut(BLOCK)) {
                // The 16 elements that a block may have.
                let elements = VALUES.map(|value| E::from_f64(f64::from(value * scale)));
                for (code, pair) in codes.iter().zip(weight.chunks_exact_mut(2)) {
                    pair[0] = elements[usize::from(code >> 4)];
                    pair[1] = elements[usize::from(code & 15)];
                }
            }
        }
    });
}
