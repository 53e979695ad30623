//! The driver's library: whether it is there, whether it is new enough, and whether it has every function.
//!
//! `cudarc` opens it and looks functions up one by one, and panics when one is not there. So all of them are looked for
//! here, in the library that `cudarc` has opened, before the first is called.

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

/// A version of CUDA: 1000 times the major number, plus 10 times the minor one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd)]
pub struct CudaVersion(i32);

impl CudaVersion {
    /// That of the oldest driver with every function that is called here.
    pub(crate) const NEEDED: Self = Self(12_080);
}

impl fmt::Display for CudaVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CUDA {}.{}", self.0 / 1000, self.0 % 1000 / 10)
    }
}

/// Every function of the driver that this crate calls, by the names in the library; those that say what is wrong with it
/// come first.
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

/// Finds and starts the driver, once per process.
pub(crate) fn library() -> Result<(), DeviceError> {
    static STARTED: OnceLock<Result<(), DeviceError>> = OnceLock::new();
    STARTED.get_or_init(start).clone()
}

fn start() -> Result<(), DeviceError> {
    let (path, found) = examine(FUNCTIONS)?;
    tracing::debug!(path = %path.display(), version = %found, "opened the driver");
    result::init().map_err(|error| failure("cuInit", 0, error))
}

/// The driver that [`library`] takes, and its version.
///
/// # Errors
/// [`DeviceError::NoDriver`], [`DeviceError::OldDriver`], [`DeviceError::NoFunction`].
pub(crate) fn find() -> Result<Found, DeviceError> {
    let (path, version) = examine(FUNCTIONS)?;
    Ok(Found { path, version: Some(version.to_string()) })
}

/// Looks at the file that `cudarc` calls, before it is called: `cudarc` would panic at the first function that is not
/// there.
fn examine(functions: &[&'static str]) -> Result<(PathBuf, CudaVersion), DeviceError> {
    // SAFETY: this only asks the loader for the library, whose initialisers are those of NVIDIA's driver.
    if !unsafe { sys::is_culib_present() } {
        let mut tried = cudarc::get_lib_name_candidates("cuda");
        let mut told = BTreeSet::new();
        tried.retain(|name| told.insert(name.clone()));
        return Err(DeviceError::NoDriver { tried });
    }
    let path = || loaded(Path::new("libcuda.so")).unwrap_or_else(|| PathBuf::from("libcuda.so"));
    let lacks = |function: &&&'static str| {
        // SAFETY: the library is there, as was just asked. The address is only looked for; nothing is called.
        unsafe { sys::culib().get::<*const c_void>(function.as_bytes()) }.is_err()
    };
    let no_function = |function| DeviceError::NoFunction { path: path(), function };
    let missing = functions.iter().find(lacks).copied();
    if let Some(function @ "cuDriverGetVersion") = missing {
        return Err(no_function(function));
    }
    let mut found = CudaVersion(0);
    // SAFETY: the function is there, because it comes first in the list and is not the one that is missing; it may be
    // called before `cuInit`; `found` outlives the call.
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

    /// The stand-in has what our tests call, and they call everything.
    #[test]
    fn every_function_of_the_driver_is_looked_for_before_it_is_called() {
        let stand_in = include_str!("../../tests/fake_cuda/driver.cpp");
        let name = |line: &'static str| line.strip_prefix("int ")?.split_once('(').map(|(name, _)| name);
        let mut called: Vec<&str> =
            stand_in.lines().filter_map(name).filter(|name| name.starts_with("cu")).collect();
        let mut listed = FUNCTIONS.to_vec();
        called.sort_unstable();
        listed.sort_unstable();
        assert_eq!(listed, called);
    }
}
