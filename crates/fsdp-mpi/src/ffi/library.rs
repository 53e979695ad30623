//! Finds an MPI library, opens it and identifies its family.

use std::env;
use std::error::Error as _;
use std::ffi::{OsString, c_char, c_int, c_void};
use std::fmt;
use std::fs;
use std::mem::ManuallyDrop;
use std::os::unix::process::parent_id;
use std::path::{Path, PathBuf};

use fsdp_comm::process::ancestor::Ancestor;
use fsdp_comm::process::place::recognize;
use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};

use super::functions::{self, Constants, FunctionTable, Functions};
use crate::error::{Attempt, MpiError};

/// File names of Open MPI, of MPICH and its derivatives, and of libraries with the standard ABI.
const OPEN_MPI: &[&str] = &["libmpi.so.40"];
const MPICH: &[&str] = &["libmpi.so.12", "libmpich.so.12"];
const STANDARD: &[&str] = &["libmpi_abi.so.1"];

/// How libraries with the ABI of MPICH identify themselves in their version string.
const RELATIVES_OF_MPICH: [&str; 3] = ["MPICH", "MVAPICH", "Intel(R) MPI"];

/// `MPI_MAX_LIBRARY_VERSION_STRING`, the maximum over the families.
const VERSION_LEN: usize = 8192;

/// The ABI of a library, which defines the values of handles and constants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// Open MPI 4 and 5.
    OpenMpi,
    /// MPICH and libraries that are binary compatible with it: Intel MPI, Cray MPICH, MVAPICH.
    Mpich,
    /// The standard ABI of MPI 5.
    Standard,
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Family::OpenMpi => "Open MPI",
            Family::Mpich => "MPICH",
            Family::Standard => "standard ABI",
        })
    }
}

/// An open MPI library. It stays open until the process ends; MPI is not initialized.
pub struct MpiLibrary {
    pub(super) functions: FunctionTable,
    pub(super) constants: Constants,
    family: Family,
    path: PathBuf,
    version: String,
}

impl fmt::Debug for MpiLibrary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MpiLibrary({}, {})", self.family, self.path.display())
    }
}

impl MpiLibrary {
    /// Opens the file that the environment variable `FSDP_MPI_LIBRARY` names, or else the first library found: next to
    /// the program that started this process, then in the loader's search path. The family of the launcher, as detected
    /// from the environment, comes first, because a library that does not know the launcher sees a world of one rank.
    ///
    /// # Errors
    /// [`MpiError`]: not found, not a known MPI, or this program is a static one.
    pub fn find() -> Result<Self, MpiError> {
        if cfg!(target_feature = "crt-static") {
            return Err(MpiError::Static);
        }
        let variable = |name: &str| env::var_os(name);
        let mut tried = Vec::new();
        for candidate in candidates(&variable, launcher_libraries()) {
            match Self::open(&candidate) {
                Err(MpiError::NotFound { tried: more }) => tried.extend(more),
                other => return other,
            }
        }
        Err(MpiError::NotFound { tried })
    }

    /// Whether the environment variable `FSDP_MPI_LIBRARY` names a library.
    pub fn is_named() -> bool {
        named(&|name| env::var_os(name)).is_some()
    }

    /// Opens a library by its path, or by a bare name that the system's loader searches for.
    ///
    /// # Errors
    /// [`MpiError`]: not found, or not a known MPI.
    pub fn open(file: &Path) -> Result<Self, MpiError> {
        let library = Opened::open(file)?;
        let version = library.version()?;
        let (family, functions, constants) = library.family(&version)?;
        let path = library.path;
        tracing::debug!(path = %path.display(), %family, version, "opened MPI");
        Ok(Self { functions, constants, family, path, version })
    }

    /// The ABI of the library.
    pub fn family(&self) -> Family {
        self.family
    }

    /// The path or bare name it was opened by.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The first line of the library's version string.
    pub fn version(&self) -> &str {
        &self.version
    }
}

/// The file that the user has named in the environment.
fn named(variable: &dyn Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    variable("FSDP_MPI_LIBRARY").filter(|file| !file.is_empty()).map(PathBuf::from)
}

/// Returns the candidates in the order in which they are tried.
fn candidates(variable: &dyn Fn(&str) -> Option<OsString>, launcher_folder: Option<PathBuf>) -> Vec<PathBuf> {
    if let Some(file) = named(variable) {
        return vec![file];
    }
    let is_set = |name| variable(name).is_some();
    let by_open_mpi = is_set("OMPI_COMM_WORLD_SIZE") || is_set("PMIX_RANK");
    let families = if by_open_mpi || !is_set("PMI_RANK") {
        [OPEN_MPI, MPICH, STANDARD]
    } else {
        [MPICH, STANDARD, OPEN_MPI]
    };
    let names = || families.concat().into_iter();
    let in_launcher_folder = launcher_folder.iter().flat_map(|folder| names().map(|name| folder.join(name)));
    in_launcher_folder.filter(|file| file.exists()).chain(names().map(PathBuf::from)).collect()
}

/// Returns the library folder of the program that started this process: `/opt/mpi/lib` for
/// `/opt/mpi/bin/hydra_pmi_proxy`.
fn launcher_libraries() -> Option<PathBuf> {
    let place = recognize(&|name| env::var(name).ok()).ok().flatten();
    // The only process of a launcher has no place; the launcher is then its parent.
    let launcher = place.map_or_else(parent_id, |place| Ancestor::launcher(&place).pid());
    let program = fs::read_link(format!("/proc/{launcher}/exe")).ok()?;
    Some(program.parent()?.parent()?.join("lib"))
}

/// A file that was opened, but may not be MPI. It is never closed: MPI leaves threads running, and its functions are
/// called as long as the process lives.
pub(super) struct Opened {
    handle: ManuallyDrop<Library>,
    path: PathBuf,
}

impl Opened {
    fn open(file: &Path) -> Result<Self, MpiError> {
        // RTLD_GLOBAL because Open MPI's plugins look up its symbols in the global scope.
        //
        // SAFETY: opening runs the initializers of the library. The candidates have names of MPI libraries, whose
        // initializers require nothing of their host, or are a file of the user's choice.
        let opened = unsafe { Library::open(Some(file), RTLD_NOW | RTLD_GLOBAL) };
        let handle = opened.map_err(|error| {
            let why = error.source().map_or_else(|| error.to_string(), ToString::to_string);
            let why = why.trim_start_matches(&format!("{}: ", file.display())).to_owned();
            MpiError::NotFound { tried: vec![Attempt { candidate: file.to_owned(), why }] }
        })?;
        Ok(Self { handle: ManuallyDrop::new(handle), path: file.to_owned() })
    }

    /// Returns the address of a function as a value of its type.
    ///
    /// # Safety
    /// `T` must be the function pointer type that the library's header declares for `symbol`.
    pub(super) unsafe fn function<T: Copy>(&self, symbol: &'static str) -> Result<T, MpiError> {
        // SAFETY: the caller guarantees the type.
        match unsafe { self.handle.get::<T>(symbol.as_bytes()) } {
            Ok(function) => Ok(*function),
            Err(_) => Err(MpiError::NoSymbol { path: self.path.clone(), symbol }),
        }
    }

    fn address(&self, symbol: &'static str) -> Result<usize, MpiError> {
        // SAFETY: the address is only passed back to the library.
        unsafe { self.function::<*mut c_void>(symbol) }.map(|address| address.expose_provenance())
    }

    fn version(&self) -> Result<String, MpiError> {
        type Version = unsafe extern "C" fn(*mut c_char, *mut c_int) -> c_int;
        // SAFETY: the MPI standard defines this type since MPI 3.
        let get = unsafe { self.function::<Version>("MPI_Get_library_version") }?;
        let (mut text, mut len) = (vec![0u8; VERSION_LEN], 0);
        // SAFETY: this may be called before MPI is initialized; it writes no more bytes than `text` has.
        unsafe { get(text.as_mut_ptr().cast(), &mut len) };
        let text = String::from_utf8_lossy(text.split(|byte| *byte == 0).next().unwrap_or_default());
        Ok(text.lines().next().unwrap_or_default().split_whitespace().collect::<Vec<_>>().join(" "))
    }

    /// Major version of the standard ABI. `None` or -1 if the library uses its own values.
    fn standard_abi(&self) -> Option<c_int> {
        type Version = unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int;
        // SAFETY: the MPI standard defines this type since MPI 5.
        let get = unsafe { self.function::<Version>("MPI_Abi_get_version") }.ok()?;
        let (mut major, mut minor) = (-1, -1);
        // SAFETY: this may be called before MPI is initialized; it writes two integers.
        unsafe { get(&mut major, &mut minor) };
        Some(major)
    }

    /// Identifies the family. The standard's own query comes first: a library of Open MPI or MPICH that was built for
    /// the standard ABI answers it with 1, and one that uses the values of its own header with -1.
    fn family(&self, version: &str) -> Result<(Family, FunctionTable, Constants), MpiError> {
        if self.standard_abi() == Some(1) {
            // SAFETY: handles of the standard ABI are pointers.
            let table = unsafe { Functions::of(self) }?;
            Ok((Family::Standard, FunctionTable::Pointers(table), functions::STANDARD))
        } else if self.address("ompi_mpi_comm_world").is_ok() {
            let constants = functions::open_mpi(|name| self.address(name))?;
            // SAFETY: handles of Open MPI, which alone has this variable, are pointers.
            Ok((Family::OpenMpi, FunctionTable::Pointers(unsafe { Functions::of(self) }?), constants))
        } else if RELATIVES_OF_MPICH.iter().any(|name| version.contains(name)) {
            // SAFETY: handles of MPICH and its relatives are integers.
            let table = unsafe { Functions::of(self) }?;
            Ok((Family::Mpich, FunctionTable::Integers(table), functions::MPICH))
        } else {
            Err(MpiError::Unknown { path: self.path.clone(), version: version.to_owned() })
        }
    }
}

#[cfg(test)]
mod tests;
