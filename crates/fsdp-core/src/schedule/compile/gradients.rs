//! What happens to the gradients of a micro-batch: slots, reductions, sums, norms, and the way to the host.

use super::super::OpKind;
use super::super::policy::{Accumulation, Offload, Policy};
use super::Build;
use crate::checker::Violation;

/// A reduction under way.
#[derive(Clone, Copy)]
pub(super) struct Reduction {
    pub(super) unit: usize,
    /// The gradient slot that is reduced.
    pub(super) gradient: usize,
    /// The slot of the result, if it has none of its own.
    pub(super) reduced: Option<usize>,
}

impl Build<'_> {
    pub(super) fn open_gradient(&mut self, unit: usize) -> Result<(), Violation> {
        let trainable = self.compiler.layout.units[unit].trainable_segments();
        let lens: Vec<usize> = trainable.map(|segment| segment.unsharded_len()).collect();
        let slot = self.gradients.take(&lens);
        self.push(OpKind::OpenGradient { unit, slot })
    }

    /// What happens to the complete gradient of one micro-batch.
    pub(super) fn close_gradient(&mut self, unit: usize, round: usize) -> Result<(), Violation> {
        let policy = self.compiler.policy;
        let last = round + 1 == self.rounds;
        self.push(OpKind::CloseGradient { unit })?;
        let gradient = self.emit.tenancy.gradient_slot(unit).expect("a closed gradient has a slot");
        if policy.accumulation == Accumulation::Unsharded && self.rounds > 1 {
            self.push(OpKind::FoldUnsharded { unit, last })?;
            if !last {
                self.gradients.give_back(gradient);
                return Ok(());
            }
        }
        let reduced = self.passes_through(unit);
        self.push(OpKind::ReduceScatter { unit, slot: reduced })?;
        self.fold(round)?;
        self.unfolded = Some(Reduction { unit, gradient, reduced });
        Ok(())
    }

    /// The slot through which the reduced gradient of a unit passes on its way to the host; `None` when it stays,
    /// or is added up.
    fn passes_through(&mut self, unit: usize) -> Option<usize> {
        let Policy { offload, accumulation, .. } = *self.compiler.policy;
        let is_added = accumulation == Accumulation::Reduce && self.rounds > 1;
        if offload == Offload::None || is_added {
            return None;
        }
        let trainable = self.compiler.layout.units[unit].trainable_segments();
        Some(self.reduced.take(&trainable.map(|segment| segment.shard_len()).collect::<Vec<_>>()))
    }

    /// Folds the unit whose reduction was issued before the present one.
    pub(super) fn fold(&mut self, round: usize) -> Result<(), Violation> {
        let Some(reduction) = self.unfolded.take() else { return Ok(()) };
        let (unit, last) = (reduction.unit, round + 1 == self.rounds);
        self.push(OpKind::Fold { unit, last })?;
        self.gradients.give_back(reduction.gradient);
        if !last {
            return Ok(());
        }
        if self.compiler.mesh.replicas() > 1 {
            self.push(OpKind::AllReduceReplicas { unit })?;
            self.measure()?;
            self.unmeasured = Some(reduction);
            return Ok(());
        }
        // There is no sum over replicas to wait for.
        self.unmeasured = Some(reduction);
        self.measure()
    }

    /// Measures the unit whose sum over replicas was issued before the present one, and sends it on its way to the
    /// host.
    pub(super) fn measure(&mut self) -> Result<(), Violation> {
        let Some(Reduction { unit, reduced, .. }) = self.unmeasured.take() else { return Ok(()) };
        self.push(OpKind::SquareNorm { unit })?;
        if self.offload() == Offload::None {
            return Ok(());
        }
        self.push(OpKind::Download { unit, slot: reduced })?;
        if let Some(slot) = reduced {
            self.reduced.give_back(slot);
        }
        Ok(())
    }
}
