//! Programs that are compiled but never run.

use std::sync::{Mutex, MutexGuard, PoisonError};

use super::Trace;
use crate::hlo::Collective;

/// The program of a step.
#[derive(Clone, Debug)]
pub struct Program {
    /// The StableHLO text.
    pub text: String,
    /// Number of operations; those in a loop count once.
    pub operations: usize,
    /// Number of matrix products among the operations.
    pub products: usize,
    /// The collectives, in the order of the schedule; a loop contributes those of one iteration.
    pub collectives: Vec<Collective>,
    /// Number of loops.
    pub loops: usize,
    /// Whether layers became loops.
    pub is_scanned: bool,
    pub(crate) replicas: usize,
}

/// Collects programs that are compiled but never run.
pub(crate) struct TraceSink {
    pub(crate) replicas: usize,
    pub(crate) scan_layers: bool,
    pub(crate) in_parallel: bool,
    pub(crate) program: Mutex<Option<Program>>,
}

impl TraceSink {
    pub(crate) fn program(&self) -> MutexGuard<'_, Option<Program>> {
        self.program.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records a program. Its results are dropped.
    pub(crate) fn write(&self, trace: Trace) {
        let traced = trace.finish(self.replicas).module;
        let scanned = self.scan_layers.then(|| traced.scanned(&[], self.in_parallel)).flatten();
        let is_scanned = scanned.is_some();
        let module = scanned.unwrap_or(traced);
        let (text, operations, collectives) = (module.text(), module.operations(), module.collectives());
        let count = |kind| text.matches(kind).count();
        let (products, loops) = (count("stablehlo.dot_general "), count("stablehlo.while("));
        let replicas = self.replicas;
        *self.program() =
            Some(Program { text, operations, products, collectives, loops, is_scanned, replicas });
    }
}
