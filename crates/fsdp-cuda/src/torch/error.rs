//! Errors of libtorch.

use fsdp_core::memory::{Category, Usage};
use fsdp_core::out_of_memory::in_use;
use fsdp_core::{Error, MemoryKind, OutOfMemory};
use tch::{TchError, Tensor};

use crate::ffi::library;
use crate::libtorch::{StatedVersion, VERSION};

/// A failure of libtorch, or of the memory that it works on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TorchError {
    /// An operation of libtorch failed.
    #[error("libtorch, in {operation}: {what}{}", hint(what))]
    Operation {
        /// The name of this crate's operation.
        operation: &'static str,
        /// libtorch's message, without the stack trace.
        what: String,
    },
    /// The loaded libtorch has another version than the one that this program was built with.
    #[error(
        "{} says that the loaded libtorch is {}, but this program needs {VERSION}, which it was built with; remove its \
         folder from LD_LIBRARY_PATH, install torch=={VERSION} there, or rebuild with that libtorch",
        .0.file.display(),
        .0.version
    )]
    Version(StatedVersion),
    /// libtorch's CUDA half cannot use the driver or any device.
    #[error(
        "libtorch's CUDA half: {what}; install a newer NVIDIA driver, or the build of torch 2.11.0 for a CUDA version that \
         the present driver supports, or use device = \"torch-cpu\""
    )]
    Driver {
        /// libtorch's message.
        what: String,
    },
    /// libtorch's CUDA half cannot be loaded.
    #[error(
        "libtorch's CUDA half ({library}) cannot be loaded: {what}; install the CUDA build of torch 2.11.0 (pip install \
         torch==2.11.0), or use device = \"torch-cpu\""
    )]
    Cuda {
        /// The file.
        library: String,
        /// The loader's message.
        what: String,
    },
}

impl TorchError {
    /// Whether libtorch's CUDA half is not installed; false if it is there but unusable.
    pub fn is_absent(&self) -> bool {
        matches!(self, TorchError::Cuda { library, what } if library::is_absent(library, what))
    }
}

/// Messages about exhausted memory: of libtorch's allocators, CUDA, cuBLAS and cuDNN.
const OUT_OF_MEMORY_MESSAGES: [&str; 5] =
    ["out of memory", "can't allocate memory", "not enough memory", "ALLOC_FAILED", "ALLOCATION_FAILED"];

fn is_out_of_memory(what: &str) -> bool {
    OUT_OF_MEMORY_MESSAGES.iter().any(|text| what.contains(text))
}

/// Advice for errors that a user can fix.
fn hint(what: &str) -> &'static str {
    if is_out_of_memory(what) {
        "; smaller micro-batches, activation checkpointing or offloading need less memory"
    } else {
        ""
    }
}

/// libtorch's message, without the C++ frames that follow it.
pub(crate) fn message(error: TchError) -> String {
    match error {
        TchError::Torch(what) => {
            what.split("\nException raised from").next().unwrap_or(&what).trim().to_owned()
        }
        other => other.to_string(),
    }
}

/// The failures of an operation: libtorch's errors, and errors of the memory.
#[derive(Debug, thiserror::Error)]
pub(super) enum Failure {
    #[error(transparent)]
    Tch(#[from] TchError),
    #[error(transparent)]
    Memory(#[from] Error),
}

impl Failure {
    /// Converts the failure to an [`Error`], given the rank's usage.
    pub(super) fn of(self, operation: &'static str, usage: &Usage) -> Error {
        let what = match self {
            Failure::Memory(error) => return error,
            Failure::Tch(error) => message(error),
        };
        if !is_out_of_memory(&what) {
            return Error::Device(Box::new(TorchError::Operation { operation, what }));
        }
        // libtorch allocates only temporaries within one operation.
        let in_use = format!("libtorch, in {operation}: {what}; {}", in_use(&usage.device));
        let (kind, category) = (MemoryKind::Device, Category::Workspace);
        OutOfMemory { kind, category, bytes: None, in_use }.into()
    }
}

/// For in-place operations, whose returned tensor is not needed.
pub(super) trait Done {
    /// Drops the returned tensor.
    fn done(self) -> Result<(), TchError>;
}

impl Done for Result<Tensor, TchError> {
    fn done(self) -> Result<(), TchError> {
        self.map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failed(what: &str, usage: &Usage) -> Error {
        Failure::Tch(TchError::Torch(what.into())).of("linear", usage)
    }

    #[test]
    fn allocation_failures_become_out_of_memory_with_rank_usage() {
        let mut usage = Usage::default();
        usage.device.add(Category::ParameterShard, 3 << 20);
        let what =
            "CUDA out of memory. Tried to allocate 2.00 GiB.\nException raised from malloc at x.cpp:1\n#0 ..";
        assert_eq!(
            failed(what, &usage).to_string(),
            "no room in device memory for workspace: libtorch, in linear: CUDA out of memory. Tried to allocate 2.00 \
             GiB.; in use or requested by this rank: parameter shards 3.0 MiB"
        );
        for what in [
            "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
            "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
            "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes.",
        ] {
            let error = failed(what, &usage);
            assert!(
                matches!(&error, Error::OutOfMemory(full) if full.category == Category::Workspace),
                "{error:?}"
            );
        }
    }

    #[test]
    fn other_version_error_names_file_and_versions() {
        let stated = StatedVersion { version: "2.12.1+cu130".into(), file: "torch/version.py".into() };
        let error = TorchError::Version(stated).to_string();
        for part in ["torch/version.py says", "2.12.1+cu130", VERSION, "LD_LIBRARY_PATH"] {
            assert!(error.contains(part), "{part}: {error}");
        }
    }

    #[test]
    fn cuda_library_with_missing_dependency_is_not_absent() {
        let error = |what: &str| TorchError::Cuda { library: "libtorch_cuda.so".into(), what: what.into() };
        let missing = "cannot open shared object file: No such file or directory";
        assert!(error(&format!("libtorch_cuda.so: {missing}")).is_absent());
        assert!(!error(&format!("libcudart.so.13: {missing}")).is_absent());
    }

    #[test]
    fn other_libtorch_errors_become_device_errors() {
        let error = failed("x does not have a deterministic implementation", &Usage::default());
        assert!(matches!(error, Error::Device(_)), "{error:?}");
        assert_eq!(error.to_string(), "libtorch, in linear: x does not have a deterministic implementation");
    }
}
