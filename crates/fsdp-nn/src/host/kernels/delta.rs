//! Linear attention by the gated delta rule, and short convolutions. Both run over documents one by one, so that a document
//! has the bits that it has alone.

mod cached;
mod chunk;
mod convolution;
mod gradient;
mod scan;
#[cfg(test)]
mod tests;

use std::ops::Range;

use fsdp_core::Error;

use self::gradient::Recorded;
use self::scan::Inputs;
use crate::backend::{BatchFacts, Outcome};
use crate::host::HostMemory;
use crate::host::backend::Call;
use crate::host::element::Element;
use crate::op::Delta;

impl HostMemory {
    pub(in crate::host) fn delta<E: Element>(
        &self,
        op: &Delta,
        operands: Call<'_, '_>,
    ) -> Result<Outcome, Error> {
        let (workers, batch) = (self.workers(), operands.batch);
        match *op {
            Delta::Convolve(dims) => {
                let ([x, weight], [y], _) = operands.split();
                let (x, weight) = (self.elements::<E>(x)?, self.elements(weight)?);
                let spans = spans(dims.rows(), dims.seq, dims.packed, batch);
                convolution::forward(workers, dims, &spans, x, weight, self.elements_mut(y.slice)?);
            }
            Delta::ConvolveBackward { dims, .. } => {
                let ([x, weight, dy], [dx], mut more) = operands.split();
                let (x, weight, dy) = (self.elements::<E>(x)?, self.elements(weight)?, self.elements(dy)?);
                let spans = spans(dims.rows(), dims.seq, dims.packed, batch);
                let dweight = more.next().map(|dweight| self.target(dweight)).transpose()?;
                convolution::backward(workers, dims, &spans, [x, weight, dy], (self.target(dx)?, dweight));
            }
            Delta::Scan(dims) => {
                let ([qkv, gates, a_log, dt_bias], [y], _) = operands.split();
                let (qkv, gates) = (self.elements::<E>(qkv)?, self.elements(gates)?);
                let (a_log, dt_bias) = (self.elements(a_log)?, self.elements(dt_bias)?);
                let inputs = Inputs { dims, qkv, gates, a_log, dt_bias };
                let spans = spans(dims.rows(), dims.seq, dims.packed, batch);
                scan::forward(workers, inputs, &spans, self.elements_mut(y.slice)?);
            }
            Delta::ScanBackward { dims, .. } => {
                let ([qkv, gates, a_log, dt_bias, dy], [dqkv, dgates, states], mut more) = operands.split();
                let (qkv, gates) = (self.elements::<E>(qkv)?, self.elements(gates)?);
                let (a_log, dt_bias) = (self.elements(a_log)?, self.elements(dt_bias)?);
                let inputs =
                    Recorded { inputs: Inputs { dims, qkv, gates, a_log, dt_bias }, dy: self.elements(dy)? };
                let (dqkv, dgates) = (self.elements_mut(dqkv.slice)?, self.elements_mut(dgates.slice)?);
                let states = self.elements_mut::<E::Acc>(states.slice)?;
                let spans = spans(dims.rows(), dims.seq, dims.packed, batch);
                let sums = gradient::backward(workers, inputs, &spans, states, [dqkv, dgates]);
                if let Some(da_log) = more.next() {
                    self.target(da_log)?.put(0, &sums);
                }
            }
        }
        Ok(Outcome::Done)
    }
}

/// The rows of each document, or of each sample if they do not pack several.
fn spans(rows: usize, seq: usize, packed: bool, batch: BatchFacts<'_>) -> Vec<Range<usize>> {
    if packed {
        return batch.documents.to_vec();
    }
    (0..rows).step_by(seq.max(1)).map(|start| start..start + seq).collect()
}
