//! Diagnoses this machine: which of the components that GPUs need are installed, and which files will be used.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use fsdp_core::out_of_memory::Size;
use serde::Serialize;

use crate::error::DeviceError;
use crate::ffi::driver::{Gpu, gpu_count};
use crate::ffi::library::LibraryError;
use crate::ffi::versions::{self, Found};
use crate::ffi::{driver_library, nvrtc};
use crate::nccl::{Nccl, NcclError};

/// The status of a component.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// It was found and is usable.
    Found,
    /// It was not found.
    Missing,
    /// It was found but is not usable.
    Unusable,
}

/// The diagnosis of one component.
#[derive(Clone, Debug, Serialize)]
pub struct Finding {
    /// Its name.
    pub part: String,
    /// Its status.
    pub status: Status,
    /// The version that it reports; `None` if it reports none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// Its file; `None` for GPUs and for components that are missing or unusable.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<PathBuf>,
    /// Further information; for a problem, how to fix it.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub detail: String,
}

impl Finding {
    /// A usable component.
    pub fn found(part: impl Into<String>, version: Option<String>, path: Option<PathBuf>) -> Self {
        Self { part: part.into(), status: Status::Found, version, path, detail: String::new() }
    }

    /// A component that is missing or not usable.
    pub fn bad(part: impl Into<String>, status: Status, detail: impl Into<String>) -> Self {
        Self { part: part.into(), status, version: None, path: None, detail: detail.into() }
    }

    /// Whether the component is usable.
    pub fn is_good(&self) -> bool {
        self.status == Status::Found
    }
}

/// Examines everything but libtorch: looks in `folders` first, then where the system's loader looks. Reports the driver
/// and its GPUs first, then NVRTC, cuBLAS and NCCL.
pub fn examine(folders: &[PathBuf]) -> Vec<Finding> {
    let is_absent = |error: &DeviceError| matches!(error, DeviceError::NoDriver { .. });
    let mut findings = vec![component("driver", driver_library::find(), is_absent)];
    if findings[0].is_good() {
        findings.extend(gpu_findings());
    }
    findings.push(component("NVRTC", nvrtc::find(folders), LibraryError::is_absent));
    findings.push(component("cuBLAS", versions::cublas(folders), LibraryError::is_absent));
    findings.push(nccl(Nccl::open(folders)));
    findings
}

fn component<E: fmt::Display>(
    name: &str,
    found: Result<Found, E>,
    is_absent: impl Fn(&E) -> bool,
) -> Finding {
    match found {
        Ok(Found { path, version }) => Finding::found(name, version, Some(path)),
        Err(error) => {
            let status = if is_absent(&error) { Status::Missing } else { Status::Unusable };
            Finding::bad(name, status, error.to_string())
        }
    }
}

/// NCCL, from the result of opening it.
fn nccl(opened: Result<Arc<Nccl>, NcclError>) -> Finding {
    let found =
        opened.map(|nccl| Found { path: nccl.path().to_owned(), version: Some(nccl.version().to_string()) });
    component("NCCL", found, |error| matches!(error, NcclError::Library(error) if error.is_absent()))
}

fn gpu_findings() -> Vec<Finding> {
    match gpu_count() {
        Ok(0) => {
            let detail = "the driver shows no GPU; check CUDA_VISIBLE_DEVICES";
            vec![Finding::bad("GPUs", Status::Missing, detail)]
        }
        Ok(count) => (0..count).map(gpu_finding).collect(),
        Err(error) => vec![Finding::bad("GPUs", Status::Unusable, error.to_string())],
    }
}

/// One GPU; the query creates a context on it.
fn gpu_finding(number: usize) -> Finding {
    let name = format!("GPU {number}");
    let opened = Gpu::open(number).and_then(|gpu| Ok((gpu.memory()?, gpu)));
    match opened {
        Ok(((free, total), gpu)) => Finding {
            detail: format!("{}, {} of {} free", gpu.name(), Size(free), Size(total)),
            ..Finding::found(name, Some(gpu.architecture()), None)
        },
        Err(error) => Finding::bad(name, Status::Unusable, error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ffi::library::{Library, Wanted};
    use crate::nccl::Version;

    #[test]
    fn doctor_reports_each_part_found_or_how_to_install_it() {
        let folder = tempfile::tempdir().expect("a folder");
        let findings = examine(&[folder.path().to_owned()]);
        for part in ["driver", "NVRTC", "cuBLAS", "NCCL"] {
            let finding = findings.iter().find(|finding| finding.part == part).expect("every part is told");
            assert_eq!(finding.is_good(), finding.path.is_some());
            assert!(finding.is_good() || finding.detail.contains("install"), "{finding:?}");
        }
    }

    #[test]
    fn invalid_library_is_unusable_and_absent_one_missing() {
        const NONE: Wanted =
            Wanted { name: "nothing", files: &["libfsdp-nothing.so"], install: "install it" };
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join(NONE.files[0]);
        std::fs::write(&file, "no library").expect("room");
        let opened = Library::open(NONE, &[folder.path().to_owned()]).map(|library| {
            let path = library.path().to_owned();
            Found { path, version: None }
        });
        let finding = component("nothing", opened, LibraryError::is_absent);
        assert_eq!(finding.status, Status::Unusable, "it is there");
        assert!(finding.detail.contains(&file.display().to_string()), "{finding:?}");
        std::fs::remove_file(&file).expect("it is ours");
        let opened = Library::open(NONE, &[folder.path().to_owned()]).map(|_| unreachable!("there is none"));
        assert_eq!(component("nothing", opened, LibraryError::is_absent).status, Status::Missing);
    }

    #[test]
    fn too_old_nccl_is_unusable_not_missing() {
        let (path, found) = (PathBuf::from("libnccl.so.2"), Version(2_14_03));
        let finding = nccl(Err(NcclError::TooOld { path, found }));
        assert_eq!(finding.status, Status::Unusable);
        assert!(finding.detail.contains("is NCCL 2.1"), "{finding:?}");
    }
}
