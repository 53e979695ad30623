//! The run-time compiler of kernels.
//!
//! It is opened once, by [`Nvrtc::open`]; the doctor does so with the same folders, so it reports the compiler that is
//! used.
//!
//! Unlike the driver, NVRTC is not called through `cudarc` (0.19.10): that would prefer the system's `libnvrtc.so` to
//! the one in a chosen folder, and panics if the library or a function is missing. Its result codes are a Rust `enum`,
//! so an unknown code from a newer compiler would be undefined behavior.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::OnceLock;

use super::library::{Library, LibraryError, NVRTC, table};
use super::versions::Found;
use crate::error::DeviceError;

/// `nvrtcProgram`
type Program = *mut c_void;
type Compile = unsafe extern "C" fn(Program, c_int, *const *const c_char) -> c_int;
type Create = unsafe extern "C" fn(
    *mut Program,
    *const c_char,
    *const c_char,
    c_int,
    *const *const c_char,
    *const *const c_char,
) -> c_int;
type GetSize = unsafe extern "C" fn(Program, *mut usize) -> c_int;
type GetBytes = unsafe extern "C" fn(Program, *mut c_char) -> c_int;

table! {
    version: "nvrtcVersion" as unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int,
    error_string: "nvrtcGetErrorString" as unsafe extern "C" fn(c_int) -> *const c_char,
    create: "nvrtcCreateProgram" as Create,
    compile: "nvrtcCompileProgram" as Compile,
    destroy: "nvrtcDestroyProgram" as unsafe extern "C" fn(*mut Program) -> c_int,
    image_size: "nvrtcGetCUBINSize" as GetSize,
    image: "nvrtcGetCUBIN" as GetBytes,
    log_size: "nvrtcGetProgramLogSize" as GetSize,
    log: "nvrtcGetProgramLog" as GetBytes,
}

/// The opened compiler.
#[derive(Debug)]
struct Nvrtc {
    table: Table,
    library: Library,
}

/// The compiler of this process.
static COMPILER: OnceLock<Result<Nvrtc, LibraryError>> = OnceLock::new();

fn compiler(folders: &[PathBuf]) -> Result<&'static Nvrtc, LibraryError> {
    COMPILER.get_or_init(|| Nvrtc::open(folders)).as_ref().map_err(LibraryError::clone)
}

/// Selects the kernel compiler of this process: from `folders`, or else from where the system's loader looks.
///
/// # Errors
/// [`DeviceError::Compiler`] if it is not found, or is another library. Compiling a kernel will then fail with the same
/// error.
pub fn load_compiler(folders: &[PathBuf]) -> Result<(), DeviceError> {
    compiler(folders)?;
    Ok(())
}

/// The compiler that [`load_compiler`] selects with these folders, unless one was selected before.
pub(crate) fn find(folders: &[PathBuf]) -> Result<Found, LibraryError> {
    let nvrtc = compiler(folders)?;
    Ok(Found { path: nvrtc.library.path().to_owned(), version: nvrtc.version() })
}

/// Compiles a source for an architecture into an image for the driver.
///
/// `--fmad=false`: products and sums are fused only where a kernel says so, so that kernels round like the host's
/// kernels.
pub(crate) fn compile(
    file: &str,
    source: &str,
    arch: &str,
    macros: &[String],
) -> Result<Vec<u8>, DeviceError> {
    let nvrtc = compiler(&[])?;
    let mut options = vec![format!("--gpu-architecture={arch}")];
    // Closures cannot be annotated, so all code is device code.
    options.extend(["--std=c++17", "--fmad=false", "--device-as-default-execution-space"].map(str::to_owned));
    options.extend(macros.iter().map(|definition| format!("--define-macro={definition}")));
    let compiled = nvrtc.compile(file, source, &options);
    compiled.map_err(|log| DeviceError::Compile { file: file.to_owned(), arch: arch.to_owned(), log })
}

impl Nvrtc {
    fn open(folders: &[PathBuf]) -> Result<Self, LibraryError> {
        // The compiler opens its builtins library by name, and would not look in its own folder.
        for file in folders.iter().flat_map(|folder| files(folder, "libnvrtc-builtins.so")) {
            // SAFETY: opening runs the initializers of the library, which are NVIDIA's. It is never closed.
            match unsafe { libloading::Library::new(&file) } {
                Ok(library) => std::mem::forget(library),
                Err(error) => tracing::debug!(%error, file = %file.display(), "not loaded"),
            }
        }
        let library = Library::open(NVRTC, folders)?;
        // SAFETY: the types are those of nvrtc.h, of every version since 11.1.
        let table = unsafe { Table::of(&library) }?;
        Ok(Self { table, library })
    }

    fn version(&self) -> Option<String> {
        let (mut major, mut minor) = (0, 0);
        // SAFETY: both numbers outlive the call.
        let code = unsafe { (self.table.version)(&raw mut major, &raw mut minor) };
        (code == 0).then(|| format!("{major}.{minor}"))
    }

    /// Returns the image, or the compiler's error message and log.
    fn compile(&self, file: &str, source: &str, options: &[String]) -> Result<Vec<u8>, String> {
        let c_string = |text: &str| CString::new(text).map_err(|error| error.to_string());
        let (source, name) = (c_string(source)?, c_string(file)?);
        let options = options.iter().map(|option| c_string(option)).collect::<Result<Vec<_>, _>>()?;
        let options: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        let mut program: Program = ptr::null_mut();
        let none = ptr::null();
        // SAFETY: the texts end with a zero byte and outlive the program; there are no headers.
        let created =
            unsafe { (self.table.create)(&raw mut program, source.as_ptr(), name.as_ptr(), 0, none, none) };
        self.check(created)?;
        // SAFETY: the program is live, and there are as many options as the count says, alive in `options`.
        let compiled = unsafe { (self.table.compile)(program, options.len() as c_int, options.as_ptr()) };
        let image = match self.check(compiled) {
            Ok(()) => self.bytes(program, self.table.image_size, self.table.image),
            Err(error) => Err(format!("{error}\n{}", self.log(program))),
        };
        // SAFETY: the program is live, and not used any more.
        let destroyed = unsafe { (self.table.destroy)(&raw mut program) };
        self.check(destroyed).and(image)
    }

    /// Reads bytes of a live program through a pair of functions, one for the length and one for the contents.
    fn bytes(&self, program: Program, size: GetSize, get: GetBytes) -> Result<Vec<u8>, String> {
        let mut len_bytes = 0;
        // SAFETY: the program is live; the length outlives the call.
        self.check(unsafe { size(program, &raw mut len_bytes) })?;
        let mut bytes = vec![0_u8; len_bytes];
        // SAFETY: as above, and the buffer has the length that the compiler returned.
        self.check(unsafe { get(program, bytes.as_mut_ptr().cast()) })?;
        Ok(bytes)
    }

    fn log(&self, program: Program) -> String {
        let bytes = self.bytes(program, self.table.log_size, self.table.log).unwrap_or_default();
        CStr::from_bytes_until_nul(&bytes).map(|log| log.to_string_lossy().into_owned()).unwrap_or_default()
    }

    fn check(&self, code: c_int) -> Result<(), String> {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: it returns a string of the library's, which is never freed, or null.
        let text = unsafe { (self.table.error_string)(code) };
        if text.is_null() {
            return Err(format!("NVRTC's code {code}"));
        }
        // SAFETY: as above.
        Err(unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
    }
}

/// The files in a folder whose names begin with `prefix`.
fn files(folder: &Path, prefix: &str) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    let names = entries.flatten().filter(|entry| entry.file_name().to_string_lossy().starts_with(prefix));
    names.map(|entry| entry.path()).collect()
}
