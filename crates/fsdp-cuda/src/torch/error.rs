//! What libtorch can fail with.

use fsdp_core::Error;
use fsdp_core::memory::Category;
use tch::{TchError, Tensor};

use crate::ffi::torch::ShimError;

/// A failure of libtorch, or of the memory below it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TorchError {
    /// An operation of libtorch failed.
    #[error("libtorch, in {operation}: {what}{}", way_out(what))]
    Operation {
        /// The operation of ours.
        operation: &'static str,
        /// libtorch's words, without the trace of its calls.
        what: String,
    },
    /// libtorch's CUDA half finds no driver or device that it can use.
    #[error(
        "libtorch's CUDA half: {what}; install a newer driver of NVIDIA, or the build of torch 2.11.0 for the CUDA version of \
         this one, or use device = \"torch-cpu\""
    )]
    Driver {
        /// libtorch's words.
        what: String,
    },
    /// libtorch's CUDA half can not be used.
    #[error(
        "libtorch's CUDA half ({library}) can not be loaded: {what}; install the CUDA build of torch 2.11.0 (pip install \
         torch==2.11.0), or use device = \"torch-cpu\""
    )]
    Cuda {
        /// The file.
        library: String,
        /// The loader's words.
        what: String,
    },
}

/// libtorch's words for a full device.
const FULL: &str = "out of memory";

/// What to do about errors that a user can mend.
fn way_out(what: &str) -> &'static str {
    if what.contains(FULL) {
        "; smaller micro-batches, fsdp.activation_checkpointing or fsdp.offload need less"
    } else if what.contains("deterministic") {
        "; run.deterministic = false allows it"
    } else {
        ""
    }
}

/// What an operation of ours can meet: libtorch's failures, and those of the memory.
#[derive(Debug, thiserror::Error)]
pub(super) enum Failure {
    #[error(transparent)]
    Tch(#[from] TchError),
    #[error(transparent)]
    Shim(#[from] ShimError),
    #[error(transparent)]
    Memory(#[from] Error),
}

impl Failure {
    /// The error of the contracts.
    pub(super) fn of(self, operation: &'static str) -> Error {
        let what = match self {
            Failure::Memory(error) => return error,
            Failure::Tch(TchError::Torch(what)) => what,
            Failure::Tch(error) => error.to_string(),
            Failure::Shim(error) => error.to_string(),
        };
        let what = without_trace(&what);
        // What libtorch allocates is temporary within one operation.
        let category = what.contains(FULL).then_some(Category::Workspace);
        Error::Memory { category, what: TorchError::Operation { operation, what }.to_string() }
    }
}

/// For operations that write where they were told: what they return is not needed.
pub(super) trait Done {
    /// Drops the returned tensor.
    fn done(self) -> Result<(), TchError>;
}

impl Done for Result<Tensor, TchError> {
    fn done(self) -> Result<(), TchError> {
        self.map(drop)
    }
}

/// The text of an exception without the C++ frames that follow it.
pub(super) fn without_trace(what: &str) -> String {
    let end = what.find("\nException raised from").unwrap_or(what.len());
    what[..end].trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn traces_are_cut_and_ways_out_are_named() {
        let what =
            "CUDA out of memory. Tried to allocate 2.00 GiB.\nException raised from malloc at x.cpp:1\n#0 ..";
        let error = Failure::Tch(TchError::Torch(what.into())).of("linear");
        assert_eq!(
            error.to_string(),
            "memory for workspace: libtorch, in linear: CUDA out of memory. Tried to allocate 2.00 GiB.; smaller micro-batches, \
             fsdp.activation_checkpointing or fsdp.offload need less"
        );
    }
}
