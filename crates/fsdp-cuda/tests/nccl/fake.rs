//! The fake NCCL: compiled once, and copied and opened for every test, so that tests share no state.
#![expect(unsafe_code, reason = "it calls the C functions of the stand-in")]

use std::ffi::{c_char, c_int, c_void};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use fsdp_cuda::nccl::Nccl;

use crate::memory;

/// Environment variable of a child process: the folder of the fake NCCL that its test uses.
pub(crate) const FOLDER: &str = "FSDP_TEST_NCCL";

/// An open fake NCCL.
pub(crate) struct Fake {
    pub(crate) nccl: Arc<Nccl>,
    library: libloading::Library,
}

impl Fake {
    /// Opens a fake whose operations run on the streams of [`memory::StreamMemory`].
    pub(crate) fn new() -> Self {
        let fake = Self::without_streams();
        // SAFETY: this is the type of `fake_set_enqueue`.
        let set = unsafe { fake.function::<unsafe extern "C" fn(memory::Enqueue)>(b"fake_set_enqueue") };
        // SAFETY: `enqueue` takes streams of `StreamMemory`, and its communicators pass no others.
        unsafe { set(memory::enqueue) };
        fake
    }

    /// Opens a fake whose operations run on their own threads, after `finish` has waited for earlier work in their
    /// stream. A call is in progress until its operation is done.
    pub(crate) fn beside_streams(finish: unsafe extern "C" fn(*mut c_void) -> c_int) -> Self {
        type Finish = unsafe extern "C" fn(*mut c_void) -> c_int;
        let fake = Self::without_streams();
        // SAFETY: this is the type of `fake_set_finish`, which calls `finish` only with streams of the caller's memory.
        unsafe { fake.function::<unsafe extern "C" fn(Finish)>(b"fake_set_finish")(finish) };
        fake
    }

    /// Opens a fake whose operations run on their own threads. A call is in progress until its operation is done.
    pub(crate) fn without_streams() -> Self {
        let folder = std::env::var_os(FOLDER).map_or_else(|| fresh(&[]), PathBuf::from);
        let nccl = Nccl::open(std::slice::from_ref(&folder)).expect("the stand-in has all functions");
        assert_eq!(nccl.path(), folder.join("libnccl.so.2"));
        // SAFETY: the fake has no initializers.
        let open = || unsafe { libloading::Library::new(folder.join("libnccl.so.2")) };
        // Leaked, because threads may still run its code when a test ends.
        std::mem::forget(open());
        Self { nccl, library: open().expect("it was just opened") }
    }

    /// Returns a function of the fake.
    ///
    /// # Safety
    /// `T` is the type of the function.
    unsafe fn function<T: Copy>(&self, name: &[u8]) -> T {
        // SAFETY: guaranteed by the caller.
        *unsafe { self.library.get::<T>(name) }.expect("the stand-in has it")
    }

    /// Returns the calls so far, one per line.
    pub(crate) fn log(&self) -> Vec<String> {
        let mut text = vec![0u8; 1 << 22];
        // SAFETY: this is the type of `fake_log`, which writes at most as many bytes as its second argument.
        let len = unsafe {
            self.function::<unsafe extern "C" fn(*mut c_char, usize) -> usize>(b"fake_log")(
                text.as_mut_ptr().cast(),
                text.len(),
            )
        };
        text.truncate(len);
        String::from_utf8(text).unwrap().lines().map(str::to_owned).collect()
    }

    /// Checks that no rule of NCCL was broken, and that no communicator is left.
    #[track_caller]
    pub(crate) fn assert_clean(&self) {
        let broken: Vec<_> = self.log().into_iter().filter(|line| line.contains("VIOLATION")).collect();
        assert!(broken.is_empty(), "{broken:?}");
        // SAFETY: this is the type of `fake_live_comms`.
        let live = unsafe { self.function::<unsafe extern "C" fn() -> c_int>(b"fake_live_comms")() };
        assert_eq!(live, 0, "communicators were neither destroyed nor aborted: {:?}", self.log());
    }

    /// Makes all communicators of a rank report this code as their asynchronous error from now on.
    pub(crate) fn async_error(&self, rank: usize, code: c_int) {
        // SAFETY: this is the type of `fake_async_error`.
        unsafe {
            self.function::<unsafe extern "C" fn(c_int, c_int)>(b"fake_async_error")(rank as c_int, code)
        }
    }

    /// Makes all collectives fail with this code from now on.
    pub(crate) fn refuse_calls(&self, code: c_int) {
        // SAFETY: this is the type of `fake_refuse_calls`.
        unsafe { self.function::<unsafe extern "C" fn(c_int)>(b"fake_refuse_calls")(code) }
    }
}

/// Returns a new folder with its own copy of the fake, compiled with these definitions.
pub(crate) fn fresh(defines: &[&str]) -> PathBuf {
    static COMPILED: OnceLock<PathBuf> = OnceLock::new();
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let root = || {
        let root = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("fake-nccl-{}", std::process::id()));
        fs::create_dir_all(&root).unwrap();
        root
    };
    let folder = root().join(COUNT.fetch_add(1, Ordering::Relaxed).to_string());
    fs::create_dir_all(&folder).unwrap();
    let file = folder.join("libnccl.so.2");
    if defines.is_empty() {
        let compiled = COMPILED.get_or_init(|| {
            let compiled = root().join("compiled.so");
            compile(&[], &compiled);
            compiled
        });
        fs::copy(compiled, file).unwrap();
    } else {
        compile(defines, &file);
    }
    folder
}

fn compile(defines: &[&str], out: &Path) {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fake_nccl/fake_nccl.c");
    let compiler = std::env::var_os("CC").unwrap_or_else(|| "cc".into());
    let mut command = Command::new(compiler);
    command.args(["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread", "-o"]).arg(out);
    command.args(defines.iter().map(|define| format!("-D{define}"))).arg(source);
    let output = command.output().expect("a C compiler is there, because Rust links with it");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Checks at compile time that [`memory::Enqueue`] is the C function type.
const _: fn(memory::Enqueue) -> unsafe extern "C" fn(*mut c_void, memory::Work, *mut c_void) -> c_int =
    |enqueue| enqueue;
