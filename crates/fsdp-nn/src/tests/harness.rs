//! Common code for tests of models: runs the models of the conformance suite on the host.

use fsdp_core::model::ModelSpec;

pub(super) use crate::conformance::decoders::llama;
pub(super) use crate::conformance::host;
use crate::conformance::models::Outcome;
pub(super) use crate::conformance::models::{Sample as Subject, batch, gpt2, hf_models, packed_batch, small};
use crate::model::{Architecture, Batch};
use fsdp_core::program::Pass;

impl<A: Architecture + Clone> Subject<A> {
    /// Runs one micro-batch on the host.
    pub(super) fn run(&self, batch: &Batch, pass: Pass) -> Outcome {
        self.run_on(&host(), batch, pass)
    }
}

/// Freezes the parameters whose name contains one of `parts`.
pub(super) fn freeze(spec: &mut ModelSpec, parts: &[&str]) {
    for param in &mut spec.params {
        let names = || std::iter::once(&param.fqn).chain(&param.aliases);
        if names().any(|name| parts.iter().any(|part| name.contains(part))) {
            param.trainable = false;
        }
    }
}
