//! The driver's library: checks that it is installed, recent enough, and has every function.
//!
//! `cudarc` opens it, looks up each function when it is called, and panics if one is missing. So all of them are looked
//! up here, in the library that `cudarc` has opened, before the first is called.

use std::collections::BTreeSet;
use std::ffi::c_void;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use cudarc::driver::{result, sys};

use super::driver::failure;
use super::library::loaded;
use super::versions::Found;
use crate::error::DeviceError;

/// A CUDA version: 1000 times the major number plus 10 times the minor number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd)]
pub struct CudaVersion(i32);

impl CudaVersion {
    /// The version of the oldest driver that has every function called here.
    pub(crate) const NEEDED: Self = Self(12_080);
}

impl fmt::Display for CudaVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CUDA {}.{}", self.0 / 1000, self.0 % 1000 / 10)
    }
}

/// Every driver function that this crate calls, by its symbol; the functions needed to report errors come first.
const FUNCTIONS: &[&str] = &[
    "cuDriverGetVersion",
    "cuGetErrorName",
    "cuGetErrorString",
    "cuInit",
    "cuDeviceGetCount",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDeviceGetName",
    "cuDeviceGetUuid_v2",
    "cuDeviceTotalMem_v2",
    "cuDevicePrimaryCtxRetain",
    "cuCtxSetCurrent",
    "cuCtxSynchronize",
    "cuMemGetInfo_v2",
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuMemHostAlloc",
    "cuMemFreeHost",
    "cuCtxGetStreamPriorityRange",
    "cuStreamCreateWithPriority",
    "cuStreamDestroy_v2",
    "cuStreamSynchronize",
    "cuStreamWaitEvent",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuEventQuery",
    "cuEventElapsedTime_v2",
    "cuMemcpyAsync",
    "cuMemsetD8Async",
    "cuModuleLoadData",
    "cuModuleGetFunction",
    "cuLaunchKernel",
];

/// Finds and initializes the driver, once per process.
pub(crate) fn initialize() -> Result<(), DeviceError> {
    static STARTED: OnceLock<Result<(), DeviceError>> = OnceLock::new();
    STARTED.get_or_init(start).clone()
}

fn start() -> Result<(), DeviceError> {
    let (path, found) = examine(FUNCTIONS)?;
    tracing::debug!(path = %path.display(), version = %found, "opened the driver");
    result::init().map_err(|error| failure("cuInit", 0, error))
}

/// The driver used by [`initialize`], and its version.
///
/// # Errors
/// [`DeviceError::NoDriver`], [`DeviceError::OldDriver`], [`DeviceError::NoFunction`].
pub(crate) fn find() -> Result<Found, DeviceError> {
    let (path, version) = examine(FUNCTIONS)?;
    Ok(Found { path, version: Some(version.to_string()) })
}

/// Checks the library that `cudarc` uses before anything in it is called: `cudarc` would panic at the first missing
/// function.
fn examine(functions: &[&'static str]) -> Result<(PathBuf, CudaVersion), DeviceError> {
    // SAFETY: this only makes the loader open the library, whose initializers are NVIDIA's.
    if !unsafe { sys::is_culib_present() } {
        let mut tried = cudarc::get_lib_name_candidates("cuda");
        let mut seen = BTreeSet::new();
        tried.retain(|name| seen.insert(name.clone()));
        return Err(DeviceError::NoDriver { tried });
    }
    let path = || loaded(Path::new("libcuda.so")).unwrap_or_else(|| PathBuf::from("libcuda.so"));
    let lacks = |function: &&&'static str| {
        // SAFETY: the library is open, as just checked. The address is only looked up; nothing is called.
        unsafe { sys::culib().get::<*const c_void>(function.as_bytes()) }.is_err()
    };
    let no_function = |function| DeviceError::NoFunction { path: path(), function };
    let missing = functions.iter().find(lacks).copied();
    if let Some(function @ "cuDriverGetVersion") = missing {
        return Err(no_function(function));
    }
    let mut found = CudaVersion(0);
    // SAFETY: the function exists: it is the first in the list, and not the missing one. It may be called before
    // `cuInit`; `found` outlives the call.
    let code = unsafe { sys::cuDriverGetVersion(&raw mut found.0) };
    code.result().map_err(|error| failure("cuDriverGetVersion", 0, error))?;
    if found < CudaVersion::NEEDED {
        return Err(DeviceError::OldDriver { found });
    }
    missing.map_or_else(|| Ok((path(), found)), |function| Err(no_function(function)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The fake driver implements the functions that the tests call, and they call all of them.
    #[test]
    fn required_driver_functions_match_fake_driver() {
        let fake_driver = include_str!("../../tests/fake_cuda/driver.cpp");
        let name = |line: &'static str| line.strip_prefix("int ")?.split_once('(').map(|(name, _)| name);
        let mut called: Vec<&str> =
            fake_driver.lines().filter_map(name).filter(|name| name.starts_with("cu")).collect();
        let mut listed = FUNCTIONS.to_vec();
        called.sort_unstable();
        listed.sort_unstable();
        assert_eq!(listed, called);
    }
}
