//! Opens shared libraries, by several possible names in several places.
//!
//! Nothing is linked: a machine without a library can build and run everything that does not need it, and an error
//! lists every name and place that was tried, and how to install the library.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

/// A library to be opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// Its name in messages.
    pub name: &'static str,
    /// Its file names, the preferred one first.
    pub files: &'static [&'static str],
    /// How to install it.
    pub install: &'static str,
}

/// NVIDIA's library of collectives.
pub const NCCL: Wanted = Wanted {
    name: "NCCL",
    files: &["libnccl.so.2", "libnccl.so"],
    install: "install NVIDIA's package libnccl2, or the Python wheel nvidia-nccl-cu13 (it comes with torch)",
};

/// NVIDIA's run-time compiler of kernels.
pub(super) const NVRTC: Wanted = Wanted {
    name: "NVRTC",
    files: &["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"],
    install: "install the CUDA toolkit, or the Python wheel nvidia-cuda-nvrtc (it comes with torch)",
};

/// A failed attempt to open a library.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attempt {
    /// The file, or a bare name for the system loader's search.
    pub candidate: PathBuf,
    /// Why it could not be opened.
    pub why: String,
}

/// Why a library could not be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LibraryError {
    /// No file could be opened.
    #[error("{} was not found; {}; tried{}", wanted.name, wanted.install, Tried(tried))]
    NotFound {
        /// The library.
        wanted: Wanted,
        /// The attempts, in order.
        tried: Vec<Attempt>,
    },
    /// The opened file lacks a function: it is another library, or far too old.
    #[error(
        "{} has no function {symbol}: it is not {name}, or much too old",
        path.display()
    )]
    NoSymbol {
        /// Name of the library.
        name: &'static str,
        /// The file.
        path: PathBuf,
        /// The missing function.
        symbol: &'static str,
    },
}

impl Attempt {
    /// Whether there is no such file; false if there is one that cannot be opened.
    fn is_absent(&self) -> bool {
        self.why == NO_FILE || is_absent(&self.candidate.display().to_string(), &self.why)
    }
}

impl LibraryError {
    /// Whether the library is not installed: there is no file with its name, not even one that cannot be opened or that
    /// lacks a function.
    pub fn is_absent(&self) -> bool {
        match self {
            LibraryError::NotFound { tried, .. } => tried.iter().all(Attempt::is_absent),
            LibraryError::NoSymbol { .. } => false,
        }
    }
}

/// The reason if a folder has no such file.
const NO_FILE: &str = "no such file";

/// Whether the loader's message says that it found no file with this name. (It reports a missing dependency in the same
/// way, but begins with the name of that dependency.)
pub(crate) fn is_absent(file: &str, why: &str) -> bool {
    why.strip_prefix(file)
        .is_some_and(|why| why.starts_with(": cannot open shared object file: No such file"))
}

struct Tried<'a>(&'a [Attempt]);

impl fmt::Display for Tried<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|Attempt { candidate, why }| {
            let place = if candidate.components().count() == 1 { " (where the loader looks)" } else { "" };
            write!(f, "\n  {}{place}: {why}", candidate.display())
        })
    }
}

/// A shared library that stays open until it is dropped.
#[derive(Debug)]
pub struct Library {
    wanted: Wanted,
    handle: libloading::Library,
    path: PathBuf,
}

impl Library {
    /// Opens the first candidate that can be opened: in each of `folders`, then where the system's loader looks
    /// (`LD_LIBRARY_PATH`, `/etc/ld.so.conf`, the standard folders).
    ///
    /// # Errors
    /// [`LibraryError::NotFound`].
    pub fn open(wanted: Wanted, folders: &[PathBuf]) -> Result<Self, LibraryError> {
        let inside = folders.iter().flat_map(|folder| wanted.files.iter().map(|file| folder.join(file)));
        let candidates = inside.chain(wanted.files.iter().map(PathBuf::from));
        let mut tried = Vec::new();
        for candidate in candidates {
            let is_bare = candidate.components().count() == 1;
            if !is_bare && !candidate.exists() {
                tried.push(Attempt { candidate, why: NO_FILE.to_owned() });
                continue;
            }
            // SAFETY: opening runs the initializers of the library. The candidates are libraries of NVIDIA and PyTorch,
            // whose initializers make no demands on the caller; the folders are the user's choice.
            match unsafe { libloading::Library::new(&candidate) } {
                Ok(handle) => {
                    let path = if is_bare { loaded(&candidate).unwrap_or(candidate) } else { candidate };
                    tracing::debug!(library = wanted.name, path = %path.display(), "opened");
                    return Ok(Self { wanted, handle, path });
                }
                Err(error) => tried.push(Attempt { candidate, why: reason(&error) }),
            }
        }
        Err(LibraryError::NotFound { wanted, tried })
    }

    /// The file that was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the address of a function, as a value of its type.
    ///
    /// # Safety
    /// `T` must be a function pointer of the type that the library's header gives `symbol`. The pointer must not be
    /// called after the library is dropped.
    pub(super) unsafe fn function<T: Copy>(&self, symbol: &'static str) -> Result<T, LibraryError> {
        // SAFETY: the caller guarantees the type.
        match unsafe { self.handle.get::<T>(symbol) } {
            Ok(function) => Ok(*function),
            Err(_) => {
                let (name, path) = (self.wanted.name, self.path.clone());
                Err(LibraryError::NoSymbol { name, path, symbol })
            }
        }
    }
}

/// Declares a table of a library's functions: fields, symbols, types.
macro_rules! table {
    ($($field:ident: $symbol:literal as $type:ty),* $(,)?) => {
        /// Addresses of functions, valid while the library is open.
        #[derive(Debug)]
        pub(super) struct Table { $(pub(super) $field: $type),* }

        impl Table {
            /// # Safety
            /// The types must be those of the library's header.
            unsafe fn of(library: &$crate::ffi::library::Library) -> Result<Self, $crate::ffi::library::LibraryError> {
                // SAFETY: guaranteed by the caller.
                Ok(Self { $($field: unsafe { library.function::<$type>($symbol) }?),* })
            }
        }
    };
}
pub(super) use table;

/// Library folders of NVIDIA's Python wheels in `site_packages`: `nvidia/nccl/lib` and others.
pub fn wheel_folders(site_packages: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(site_packages.join("nvidia")) else { return Vec::new() };
    let mut folders: Vec<PathBuf> =
        entries.flatten().map(|entry| entry.path().join("lib")).filter(|folder| folder.is_dir()).collect();
    folders.sort();
    folders
}

/// The loader's message, without the parts that [`Attempt`] already shows.
fn reason(error: &libloading::Error) -> String {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        text = cause.to_string();
        source = cause.source();
    }
    text
}

/// The file of a loaded library, by its name; `None` if the system does not show mapped files.
pub fn loaded(name: &Path) -> Option<PathBuf> {
    let stem = name.to_str()?.split(".so").next()?;
    let maps = fs::read_to_string("/proc/self/maps").ok()?;
    maps.lines().filter_map(|line| line.find('/').map(|at| Path::new(&line[at..]))).find_map(|path| {
        let file = path.file_name()?.to_str()?;
        file.strip_prefix(stem).is_some_and(|rest| rest.starts_with(".so")).then(|| path.to_owned())
    })
}
