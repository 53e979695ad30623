//! Linear attention that continues a document, from what it has left of the rows before.

use fsdp_core::Error;
use fsdp_core::memory::{Buffer, Slice, SliceMut};

use super::convolution::{by_distance, silu_row, sum_row};
use super::scan::{Inputs, of_document};
use crate::host::element::{Element, Float, for_float};
use crate::host::{HostBuffer, HostMemory};
use crate::op::{ConvolutionDims, DeltaDims};

impl HostMemory {
    /// Computes [`Delta::Convolve`](crate::op::Delta) for the rows of one sample that follow the `kernel - 1` rows of
    /// `before`, which become those before the next row.
    ///
    /// # Errors
    /// Those of the memory.
    pub(crate) fn convolve_cached(
        &self,
        dims: ConvolutionDims,
        [x, weight]: [Slice<'_, HostBuffer>; 2],
        [before, y]: [SliceMut<'_, HostBuffer>; 2],
    ) -> Result<(), Error> {
        for_float!(x.buffer.dtype(), E => {
            let (x, weight) = (self.elements::<E>(x)?, self.elements::<E>(weight)?);
            let (before, y) = (self.elements_mut::<E>(before)?, self.elements_mut::<E>(y)?);
            let (width, seen) = (dims.width, (dims.kernel - 1) * dims.width);
            let (weights, all) = (by_distance(dims, weight), [&*before, x].concat());
            let mut sums = vec![<E as Element>::Acc::ZERO; width];
            for (row, y) in y.chunks_exact_mut(width).enumerate() {
                sum_row(&all[row * width..][..seen + width], &weights, &mut sums);
                silu_row(&sums, y);
            }
            before.copy_from_slice(&all[all.len() - seen..]);
            Ok(())
        })
    }

    /// Computes [`Delta::Scan`](crate::op::Delta) for the rows of one sample that follow those that left the states of
    /// `states`, head by head, which become the states after them.
    ///
    /// # Errors
    /// Those of the memory.
    pub(crate) fn scan_cached(
        &self,
        dims: DeltaDims,
        [qkv, gates, a_log, dt_bias]: [Slice<'_, HostBuffer>; 4],
        [states, y]: [SliceMut<'_, HostBuffer>; 2],
    ) -> Result<(), Error> {
        for_float!(qkv.buffer.dtype(), E => {
            let (qkv, gates) = (self.elements::<E>(qkv)?, self.elements::<E>(gates)?);
            let (a_log, dt_bias) = (self.elements::<E>(a_log)?, self.elements::<E>(dt_bias)?);
            let inputs = Inputs { dims, qkv, gates, a_log, dt_bias };
            let (width, span) = (dims.group() * dims.value_dim, 0..dims.rows());
            let outputs = super::scan::by_document(
                self.elements_mut::<E>(y)?, dims.key_heads * width, std::slice::from_ref(&span), width,
            );
            let states = self.elements_mut::<<E as Element>::Acc>(states)?.chunks_mut(width * dims.key_dim);
            self.workers().each(states.zip(outputs).enumerate(), |(key_head, (states, y))| {
                of_document(self.workers(), inputs, (&span, key_head), states, y);
            });
            Ok(())
        })
    }
}
