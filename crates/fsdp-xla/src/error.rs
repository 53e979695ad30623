//! Errors of PJRT plugins.

use std::fmt::Display;
use std::path::{Path, PathBuf};

use fsdp_comm::assembly::AssemblyError;
use fsdp_core::{Error, FailureKind};

use crate::store::{DEADLINE_EXCEEDED, UNAVAILABLE};

/// Why a PJRT plugin cannot be used, or an error that it reported.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum XlaError {
    /// No plugin is configured.
    #[error(
        "no PJRT plugin is named: set `run.xla.plugin` to a plugin's shared library, or to \"cpu\", \"tpu\" or \"cuda\" for \
         that of a Python package, or set PJRT_PLUGIN_LIBRARY_PATH"
    )]
    NoPlugin,
    /// A plugin that cannot be used for a run, which is told from other such plugins by the message alone.
    #[error("{0}")]
    Unusable(String),
    /// The plugin has no topology of this name.
    #[error(
        "the plugin {} has no topology \"{name}\"; {}. The plugin says: {message}",
        path.display(),
        known_topologies(known)
    )]
    Topology {
        /// Path of the plugin's library.
        path: PathBuf,
        /// The requested name.
        name: String,
        /// Names that the plugin knows, among those of small topologies.
        known: Vec<&'static str>,
        /// The plugin's message.
        message: String,
    },
    /// The plugin knows the topology, but not with these options.
    #[error(
        "the plugin {} does not accept these options of \"{name}\", which it has without them. It says: {message}",
        path.display()
    )]
    TopologyOptions {
        /// Path of the plugin's library.
        path: PathBuf,
        /// The name of the topology.
        name: String,
        /// The plugin's message.
        message: String,
    },
    /// The compiler found that a program does not fit into memory.
    #[error("the step does not fit into the memory of a {device}: {message}")]
    Memory {
        /// The device kind.
        device: String,
        /// Bytes available to programs on a device; `None` if the plugin does not report it.
        bytes: Option<u64>,
        /// The compiler's message.
        message: String,
    },
    /// The compiler rejected a program.
    #[error(
        "the plugin {}{} rejected the program: {message}{}",
        path.display(),
        stablehlo_versions(*stablehlo),
        requested_flags(flags)
    )]
    Compile {
        /// Path of the plugin's library.
        path: PathBuf,
        /// The newest StableHLO version it supports; `None` if it does not report one.
        stablehlo: Option<[u64; 3]>,
        /// The compiler flags that were requested.
        flags: Vec<&'static str>,
        /// The compiler's message.
        message: String,
    },
    /// The version of the plugin's API is not supported here.
    #[error(
        "the plugin {} has version {}.{} of the PJRT API, but {}.{} to {}.x are supported: use {} plugin",
        path.display(),
        version.0,
        version.1,
        OLDEST.0,
        OLDEST.1,
        OLDEST.0,
        if *version < OLDEST { "a newer" } else { "an older" }
    )]
    Version {
        /// Path of the plugin's library.
        path: PathBuf,
        /// Major and minor version of its API.
        version: (i32, i32),
    },
    /// The plugin's API lacks a required function.
    #[error(
        "the plugin {} has version {}.{} of the PJRT API, without {function}: use another plugin, or a newer one",
        path.display(),
        version.0,
        version.1
    )]
    Lacks {
        /// Path of the plugin's library.
        path: PathBuf,
        /// Major and minor version of its API.
        version: (i32, i32),
        /// The missing function.
        function: &'static str,
    },
    /// There are fewer devices than ranks.
    #[error(
        "{ranks} ranks need as many devices, but the plugin {} has {devices} ({platform}): set `run.ranks` to at most {devices}",
        path.display()
    )]
    Devices {
        /// Path of the plugin's library.
        path: PathBuf,
        /// Its platform.
        platform: String,
        /// Number of devices that this process can use.
        devices: usize,
        /// Number of ranks of the run.
        ranks: usize,
    },
    /// The plugin places a program on other devices than requested.
    #[error(
        "the plugin {} runs the program on its devices {got:?}, but the ranks of this process have {expected:?}: it cannot be \
         used for this run",
        path.display()
    )]
    Placement {
        /// Path of the plugin's library.
        path: PathBuf,
        /// The device IDs of this process's ranks.
        expected: Vec<u64>,
        /// The device IDs of the program.
        got: Vec<u64>,
    },
    /// Other processes have not announced their plugin and devices.
    #[error("other processes have not reported their plugin and devices: {0}")]
    NoAnswer(#[from] AssemblyError),
    /// A program's text cannot be written to a file.
    #[error("cannot write a program to {}: {source}", path.display())]
    Dump {
        /// The file.
        path: PathBuf,
        /// The I/O error.
        source: std::io::Error,
    },
    /// The folder of the compile cache cannot be created.
    #[error("cannot create the folder for compiled programs, {} (run.xla.compile_cache): {source}", path.display())]
    Cache {
        /// The folder.
        path: PathBuf,
        /// The I/O error.
        source: std::io::Error,
    },
    /// A call of the API failed.
    #[error("{function} failed: {message} (code {code})")]
    Call {
        /// The function of the API.
        function: &'static str,
        /// The `PJRT_Error_Code`, which uses the codes of gRPC and Abseil.
        code: i32,
        /// The plugin's message.
        message: String,
    },
}

/// `RESOURCE_EXHAUSTED` of `PJRT_Error_Code`.
pub(crate) const EXHAUSTED: i32 = 8;

/// Major and minor version of the oldest PJRT API whose struct layouts are those used here; all later versions of the
/// same major version keep them.
pub(crate) const OLDEST: (i32, i32) = (0, 50);

/// The StableHLO versions of plugins that have accepted our programs. The StableHLO text format carries no version and
/// promises no compatibility.
const TRIED: &str = "1.7 to 1.24";

/// Describes the StableHLO version that a plugin supports, and those that were tried.
fn stablehlo_versions(stablehlo: Option<[u64; 3]>) -> String {
    stablehlo.map_or_else(String::new, |[major, minor, patch]| {
        format!(", which reads StableHLO {major}.{minor}.{patch} (tried: {TRIED}),")
    })
}

/// Names the requested flags, which an older compiler may not know.
fn requested_flags(flags: &[&str]) -> String {
    match flags {
        [] => String::new(),
        flags => format!(" (flags {} were requested, which only newer plugins know)", flags.join(", ")),
    }
}

/// Names the topologies that a plugin knows.
fn known_topologies(known: &[&str]) -> String {
    if known.is_empty() {
        return "it has none of the names that fsdp knows (plugins for processors have cpu:4, docs/xla.md)"
            .to_owned();
    }
    format!("other names that it has are {}, also with more chips", known.join(", "))
}

impl XlaError {
    /// The error for a library that cannot be opened, with the loader's message.
    pub(crate) fn open(path: &Path, reason: impl Display) -> Self {
        XlaError::Unusable(format!("cannot open the PJRT plugin {}: {reason}", path.display()))
    }

    /// Classifies the failure before ranks have started: a function that a plugin lacks is still missing on the next
    /// try, but other processes may only have been late, and a device may still be held by a process that is exiting.
    pub fn kind(&self) -> FailureKind {
        /// `PJRT_Error_Code`: `ABORTED`.
        const ABORTED: i32 = 10;
        match self {
            XlaError::Call { code: EXHAUSTED | ABORTED | DEADLINE_EXCEEDED | UNAVAILABLE, .. }
            | XlaError::NoAnswer(_) => FailureKind::Temporary,
            XlaError::Dump { source, .. } | XlaError::Cache { source, .. } => FailureKind::of_io(source),
            _ => FailureKind::Input,
        }
    }

    /// Whether the plugin lacks the function, or does not implement it.
    pub(crate) fn is_unimplemented(&self) -> bool {
        /// `PJRT_Error_Code`: `UNIMPLEMENTED`.
        const UNIMPLEMENTED: i32 = 12;
        matches!(self, XlaError::Lacks { .. } | XlaError::Call { code: UNIMPLEMENTED, .. })
    }
}

impl From<XlaError> for Error {
    fn from(error: XlaError) -> Self {
        match error {
            XlaError::Compile { .. }
            | XlaError::Memory { .. }
            | XlaError::Version { .. }
            | XlaError::Lacks { .. }
            | XlaError::Placement { .. } => Error::Refused(Box::new(error)),
            other => Error::Device(Box::new(other)),
        }
    }
}
