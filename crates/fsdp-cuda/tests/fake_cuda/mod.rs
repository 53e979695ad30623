//! A fake CUDA driver, with fake devices, and a fake kernel compiler.
//!
//! Both libraries are built with the C++ compiler of the machine, and loaded before libcuda and libnvrtc are opened:
//! the loader identifies loaded libraries by their sonames. Every test takes its own device, so that seeds, limits and
//! failures do not affect other tests.

#![allow(dead_code, unsafe_code)]

use std::ffi::{CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use fsdp_cuda::device::StreamHandle;
use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};

/// A device of the fake driver.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FakeDevice {
    /// Device ordinal, as passed to the driver.
    pub(crate) ordinal: usize,
}

/// Returns a device that no other test uses.
pub(crate) fn device() -> FakeDevice {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    libraries();
    FakeDevice { ordinal: NEXT.fetch_add(1, Ordering::Relaxed) }
}

impl FakeDevice {
    /// Seeds the order in which work of different streams runs.
    pub(crate) fn seed(self, seed: u64) -> Self {
        type Seed = unsafe extern "C" fn(c_int, u64);
        // SAFETY: the fake has this function with these parameters.
        unsafe { libraries().get::<Seed>(b"fake_cuda_seed").expect("the fake has it")(self.number(), seed) };
        self
    }

    /// Sets the size of the device memory, in bytes.
    pub(crate) fn capacity(self, bytes: usize) -> Self {
        type Capacity = unsafe extern "C" fn(c_int, usize);
        // SAFETY: as for `seed`.
        unsafe {
            libraries().get::<Capacity>(b"fake_cuda_capacity").expect("the fake has it")(
                self.number(),
                bytes,
            );
        }
        self
    }

    /// Makes a call of this name fail with `code`, after `skip` further ones that do not.
    pub(crate) fn fail(self, call: &str, skip: usize, code: c_int) {
        type Fail = unsafe extern "C" fn(c_int, *const c_char, c_int, c_int);
        let call = CString::new(call).expect("no zero byte");
        // SAFETY: as for `seed`; the fake copies the name.
        unsafe {
            let fail = libraries().get::<Fail>(b"fake_cuda_fail").expect("the fake has it");
            fail(self.number(), call.as_ptr(), skip as c_int, code);
        }
    }

    /// Returns the number of calls of a driver function on this device.
    pub(crate) fn calls(self, call: &str) -> usize {
        type Calls = unsafe extern "C" fn(c_int, *const c_char) -> c_int;
        let call = CString::new(call).expect("no zero byte");
        // SAFETY: as for `seed`.
        let count = unsafe {
            libraries().get::<Calls>(b"fake_cuda_calls").expect("the fake has it")(
                self.number(),
                call.as_ptr(),
            )
        };
        count as usize
    }

    /// Returns a digest of the device addresses passed to copies and kernels, in order, since the previous call.
    pub(crate) fn addresses(self) -> u64 {
        type Addresses = unsafe extern "C" fn(c_int) -> u64;
        // SAFETY: as for `seed`.
        unsafe {
            libraries().get::<Addresses>(b"fake_cuda_addresses").expect("the fake has it")(self.number())
        }
    }

    fn number(self) -> c_int {
        self.ordinal as c_int
    }
}

/// Returns the priority of a live stream; smaller numbers are higher priorities, and 0 is the lowest.
pub(crate) fn priority(stream: StreamHandle) -> c_int {
    type Priority = unsafe extern "C" fn(*mut c_void) -> c_int;
    // SAFETY: as for `seed`; the handle is of a stream that the fake has created and not destroyed.
    unsafe { libraries().get::<Priority>(b"fake_cuda_priority").expect("the fake has it")(stream.as_ptr()) }
}

/// Loads both libraries once, and returns the fake driver.
fn libraries() -> &'static Library {
    static DRIVER: OnceLock<Library> = OnceLock::new();
    DRIVER.get_or_init(|| {
        let folder = temporary().join("fake_cuda");
        std::fs::create_dir_all(&folder).expect("a folder for the fake");
        let driver = load(&build("driver.cpp", "libcuda.so", &folder));
        let nvrtc = load(&build("nvrtc.cpp", "libnvrtc.so.13", &folder));
        set_up(&nvrtc, &folder);
        std::mem::forget(nvrtc);
        driver
    })
}

/// Returns a folder that outlives the tests: `CARGO_TARGET_TMPDIR`, which Cargo sets only for integration tests, or
/// else the folder of the test binary.
fn temporary() -> PathBuf {
    let beside = || std::env::current_exe().ok().and_then(|test| Some(test.parent()?.to_owned()));
    option_env!("CARGO_TARGET_TMPDIR").map(PathBuf::from).or_else(beside).expect("tests lie in a folder")
}

fn set_up(nvrtc: &Library, folder: &Path) {
    type Setup = unsafe extern "C" fn(*const c_char, *const c_char, *const c_char);
    let text = |path: &Path| CString::new(path.to_string_lossy().into_owned()).expect("no zero byte");
    let (folder, header) = (text(folder), text(&sources().join("device.h")));
    let compiler = CString::new(compiler()).expect("no zero byte");
    // SAFETY: the fake has this function with these parameters, and copies them.
    unsafe {
        let setup = nvrtc.get::<Setup>(b"fake_nvrtc_setup").expect("the fake has it");
        setup(folder.as_ptr(), header.as_ptr(), compiler.as_ptr());
    }
}

fn sources() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../fsdp-cuda/tests/fake_cuda")
}

fn compiler() -> String {
    std::env::var("CXX").unwrap_or_else(|_| "g++".into())
}

/// Builds a library with soname `name`, unless it was already built from the same source.
fn build(source: &str, name: &str, folder: &Path) -> PathBuf {
    let source = sources().join(source);
    let text = std::fs::read_to_string(&source).expect("the source of the fake");
    let hash = text
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3));
    let library = folder.join(format!("{hash:016x}-{name}"));
    if library.exists() {
        return library;
    }
    let own = folder.join(format!("{}-{name}", std::process::id()));
    let mut command = Command::new(compiler());
    command.args(["-std=c++17", "-O1", "-shared", "-fPIC", "-o"]).arg(&own).arg(&source);
    command.arg(format!("-Wl,-soname,{name}"));
    let output = command.output().unwrap_or_else(|error| {
        panic!("these tests build a fake driver with a C++ compiler, and `{}` does not start: {error}; install g++, or set CXX", compiler())
    });
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    std::fs::rename(&own, &library).expect("the library gets its name");
    library
}

fn load(path: &Path) -> Library {
    // SAFETY: the libraries were built from the sources next to this file; their initializers only set their own
    // variables.
    unsafe { Library::open(Some(path), RTLD_NOW | RTLD_GLOBAL) }
        .unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}
