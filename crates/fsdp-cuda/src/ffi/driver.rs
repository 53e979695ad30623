//! The driver: devices, their contexts, and memory.
//!
//! `cudarc` loads the library at the first call, and panics if it is missing: nothing here is called before
//! [`initialize`] has checked it. Handles are kept as integers, because they only name objects of the driver, which any
//! thread may use if the device's context is current.
//!
//! Not covered: stream-ordered allocation, graphs, several contexts per device. Memory is allocated once and lives
//! long, and the primary context is also the one that libtorch and NCCL use.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::marker::PhantomData;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::{DriverError, result, sys};
use fsdp_nn::host::HostBlock;

use super::driver_library::initialize;
use crate::error::DeviceError;

/// Number of GPUs that the driver shows.
///
/// # Errors
/// [`DeviceError`] if there is no driver, or it is too old.
pub fn gpu_count() -> Result<usize, DeviceError> {
    match initialize() {
        // Without a device, the driver does not initialize.
        Err(DeviceError::Call { code, .. }) if code == "CUDA_ERROR_NO_DEVICE" => return Ok(0),
        started => started?,
    }
    let count = result::device::get_count().map_err(|error| failure("cuDeviceGetCount", 0, error))?;
    Ok(usize::try_from(count).unwrap_or(0))
}

/// The driver's handle of a device.
fn device(ordinal: usize) -> Result<sys::CUdevice, DeviceError> {
    let count = gpu_count()?;
    if ordinal >= count {
        return Err(DeviceError::NoDevice { device: ordinal, count });
    }
    result::device::get(ordinal as i32).map_err(|error| failure("cuDeviceGet", ordinal, error))
}

/// NVIDIA's UUID of a device, which does not depend on its number in this process.
pub(crate) fn device_uuid(ordinal: usize) -> Result<[u8; 16], DeviceError> {
    let uuid = result::device::get_uuid(device(ordinal)?);
    let uuid = uuid.map_err(|error| failure("cuDeviceGetUuid_v2", ordinal, error))?;
    Ok(uuid.bytes.map(|byte| byte as u8))
}

/// Creates an error with the driver's name and description.
pub(super) fn failure(call: &'static str, device: usize, error: DriverError) -> DeviceError {
    let text = |text: Result<&std::ffi::CStr, DriverError>| {
        text.map_or_else(|_| format!("code {}", error.0 as u32), |text| text.to_string_lossy().into_owned())
    };
    DeviceError::Call { call, device, code: text(error.error_name()), what: text(error.error_string()) }
}

/// A device with its primary context, which lives as long as the process.
#[derive(Debug)]
pub(crate) struct Gpu {
    ordinal: usize,
    context: usize,
    name: String,
    capability: (i32, i32),
    processors: u32,
    total_bytes: usize,
}

impl Gpu {
    /// Opens the device with this number; each is opened once per process.
    pub(crate) fn open(ordinal: usize) -> Result<Arc<Self>, DeviceError> {
        static OPEN: Mutex<BTreeMap<usize, Arc<Gpu>>> = Mutex::new(BTreeMap::new());
        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(gpu) = open.get(&ordinal) {
            return Ok(Arc::clone(gpu));
        }
        let gpu = Arc::new(Self::retain(ordinal)?);
        open.insert(ordinal, Arc::clone(&gpu));
        Ok(gpu)
    }

    fn retain(ordinal: usize) -> Result<Self, DeviceError> {
        use sys::CUdevice_attribute as Attribute;
        let fail = |call| move |error| failure(call, ordinal, error);
        let device = device(ordinal)?;
        let attribute = |attribute| {
            // SAFETY: `device` is valid: the driver has just returned it.
            unsafe { result::device::get_attribute(device, attribute) }.map_err(fail("cuDeviceGetAttribute"))
        };
        let major = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        let processors = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        let name = result::device::get_name(device).map_err(fail("cuDeviceGetName"))?;
        // SAFETY: as above.
        let total_bytes = unsafe { result::device::total_mem(device) }.map_err(fail("cuDeviceTotalMem"))?;
        // SAFETY: as above. The context is never released, so it outlives everything made in it.
        let context = unsafe { result::primary_ctx::retain(device) };
        let context = context.map_err(fail("cuDevicePrimaryCtxRetain"))? as usize;
        let processors = u32::try_from(processors).unwrap_or(1);
        Ok(Self { ordinal, context, name, capability: (major, minor), processors, total_bytes })
    }

    /// Its number.
    pub(crate) fn ordinal(&self) -> usize {
        self.ordinal
    }

    /// Its name.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Its architecture, as the compiler names it.
    pub(crate) fn architecture(&self) -> String {
        format!("sm_{}{}", self.capability.0, self.capability.1)
    }

    /// Number of streaming multiprocessors.
    pub(crate) fn processors(&self) -> u32 {
        self.processors
    }

    /// Makes its context current on this thread.
    pub(crate) fn bind(&self) -> Result<(), DeviceError> {
        // SAFETY: the context was retained by `retain` and is never released.
        unsafe { result::ctx::set_current(self.context as sys::CUcontext) }
            .map_err(|error| self.failure("cuCtxSetCurrent", error))
    }

    /// Calls the driver with this device's context current.
    pub(super) fn call<T>(
        &self,
        call: &'static str,
        run: impl FnOnce() -> Result<T, DriverError>,
    ) -> Result<T, DeviceError> {
        self.bind()?;
        run().map_err(|error| self.failure(call, error))
    }

    /// Waits for all work of this process on the device.
    pub(crate) fn synchronize(&self) -> Result<(), DeviceError> {
        self.call("cuCtxSynchronize", result::ctx::synchronize)
    }

    /// Free and total bytes of the device.
    pub(crate) fn memory(&self) -> Result<(usize, usize), DeviceError> {
        self.call("cuMemGetInfo", result::mem_get_info)
    }

    /// Allocates device memory; its contents are unspecified.
    pub(crate) fn allocate(self: &Arc<Self>, bytes: usize) -> Result<DeviceBlock, DeviceError> {
        self.bind()?;
        // SAFETY: the context is current; the memory is not read as any type before it is written.
        let address = unsafe { result::malloc_sync(bytes) };
        let address = address.map_err(|error| self.allocation_error(bytes, error))?;
        Ok(DeviceBlock { gpu: Arc::clone(self), address, bytes })
    }

    /// Allocates page-locked host memory that every device can copy from and to, filled with zeros.
    pub(crate) fn allocate_pinned(self: &Arc<Self>, bytes: usize) -> Result<PinnedBlock, DeviceError> {
        self.bind()?;
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: the context is current.
        let start = unsafe { result::malloc_host(bytes, flags) };
        let start = start.map_err(|error| match error.0 {
            sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => DeviceError::OutOfPinnedMemory { bytes },
            _ => self.failure("cuMemHostAlloc", error),
        })?;
        // SAFETY: the driver has just allocated these bytes for this block alone; zeros are valid bytes.
        unsafe { std::ptr::write_bytes(start.cast::<u8>(), 0, bytes) };
        Ok(PinnedBlock { gpu: Arc::clone(self), address: start as usize, bytes })
    }

    /// Loads a compiled module and returns its functions `names`. The module stays loaded, like the context.
    pub(crate) fn load(&self, image: &[u8], names: &[&str]) -> Result<Vec<Function>, DeviceError> {
        // SAFETY: the context is current; the image is what NVRTC made, whose length is in its header.
        let load = || unsafe { result::module::load_data(image.as_ptr().cast::<c_void>()) };
        let module = self.call("cuModuleLoadData", load)?;
        let function = |name: &&str| {
            let name = std::ffi::CString::new(*name).expect("names of kernels have no zero byte");
            // SAFETY: the module was loaded above and is never unloaded.
            let get = || unsafe { result::module::get_function(module, name) };
            self.call("cuModuleGetFunction", get).map(|function| Function(function as usize))
        };
        names.iter().map(function).collect()
    }

    /// An error of this device.
    pub(super) fn failure(&self, call: &'static str, error: DriverError) -> DeviceError {
        failure(call, self.ordinal, error)
    }

    /// The error of a failed allocation of device memory.
    fn allocation_error(&self, bytes: usize, error: DriverError) -> DeviceError {
        if error.0 != sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY {
            return self.failure("cuMemAlloc", error);
        }
        let (free, total) = self.memory().unwrap_or((0, self.total_bytes));
        DeviceError::OutOfMemory { bytes, free, total }
    }
}

/// A kernel.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Function(pub(super) usize);

/// Bytes of a live block that a device can access.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Range<'a> {
    address: u64,
    bytes: usize,
    block: PhantomData<&'a ()>,
}

impl Range<'_> {
    /// An empty range.
    pub(crate) fn empty() -> Self {
        Self { address: 0, bytes: 0, block: PhantomData }
    }

    /// Pinned bytes of a live host buffer.
    pub(crate) fn pinned(bytes: &[u8]) -> Range<'_> {
        Range { address: bytes.as_ptr() as u64, bytes: bytes.len(), block: PhantomData }
    }

    /// Start address.
    pub(crate) fn address(&self) -> u64 {
        self.address
    }

    /// Length in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }
}

/// Logs the failure to free something; a drop cannot report it.
pub(super) fn log_failed_free(freed: Result<(), DeviceError>) {
    if let Err(error) = freed {
        tracing::debug!(%error, "could not be freed");
    }
}

fn range(address: u64, block_bytes: usize, offset: usize, bytes: usize) -> Range<'static> {
    assert!(offset + bytes <= block_bytes, "{bytes} bytes at {offset} of a block of {block_bytes}");
    Range { address: address + offset as u64, bytes, block: PhantomData }
}

/// Device memory. Dropping it waits for the device, so that no work can still use it.
#[derive(Debug)]
pub(crate) struct DeviceBlock {
    gpu: Arc<Gpu>,
    address: u64,
    bytes: usize,
}

impl DeviceBlock {
    /// Start address on the device.
    pub(crate) fn address(&self) -> u64 {
        self.address
    }

    /// Length in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// A part of the block.
    pub(crate) fn range(&self, offset: usize, bytes: usize) -> Range<'_> {
        range(self.address, self.bytes, offset, bytes)
    }
}

impl Drop for DeviceBlock {
    fn drop(&mut self) {
        log_failed_free(self.gpu.synchronize());
        // SAFETY: the block came from `malloc_sync`, is freed once, and nothing is running that could use it. A device
        // that failed runs nothing any more.
        log_failed_free(self.gpu.call("cuMemFree", || unsafe { result::memory_free(self.address) }));
    }
}

/// Page-locked host memory. Dropping it waits for the device, so that no copy can still use it.
#[derive(Debug)]
pub(crate) struct PinnedBlock {
    gpu: Arc<Gpu>,
    address: usize,
    bytes: usize,
}

impl PinnedBlock {
    /// A part of the block, as the device sees it.
    pub(crate) fn range(&self, offset: usize, bytes: usize) -> Range<'_> {
        range(self.address as u64, self.bytes, offset, bytes)
    }
}

/// Code that enqueues copies from or into a block must wait for them before it accesses the bytes.
impl HostBlock for PinnedBlock {
    fn bytes(&self) -> &[u8] {
        // SAFETY: `bytes` initialized bytes at `address` belong to this block until it is dropped, and are written
        // through `&mut self` or by copies that the caller has waited for.
        unsafe { std::slice::from_raw_parts(self.address as *const u8, self.bytes) }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as for `bytes`, and `&mut self` is the only access of the host.
        unsafe { std::slice::from_raw_parts_mut(self.address as *mut u8, self.bytes) }
    }
}

impl Drop for PinnedBlock {
    fn drop(&mut self) {
        log_failed_free(self.gpu.synchronize());
        // SAFETY: the block came from `malloc_host`, is freed once, and no copy is running that could use it.
        log_failed_free(
            self.gpu.call("cuMemFreeHost", || unsafe { result::free_host(self.address as *mut c_void) }),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_driver_error_names_library_and_fix() {
        // SAFETY: as in `examine`.
        if unsafe { sys::is_culib_present() } {
            return;
        }
        let message = Gpu::open(0).expect_err("there is no driver").to_string();
        assert!(message.contains("libcuda.so") && message.contains("install it"), "{message}");
        assert_eq!(message.matches("libcuda.so.12,").count(), 1, "every name is told once: {message}");
    }
}
