//! What can go wrong with a plugin.

use std::path::PathBuf;

use fsdp_comm::assembly::AssemblyError;
use fsdp_core::{Error, FailureKind, Rank};

use crate::store::{DEADLINE_EXCEEDED, UNAVAILABLE};

/// Why a PJRT plugin can not be used, or what it has said.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum XlaError {
    /// No plugin was named.
    #[error(
        "no PJRT plugin is named: set `run.xla.plugin` to a plugin's shared library, or to \"cpu\", \"tpu\" or \"cuda\" for \
         that of a Python package, or set PJRT_PLUGIN_LIBRARY_PATH"
    )]
    NoPlugin,
    /// No Python package has a plugin of the kind that was named.
    #[error(
        "no Python package has a PJRT plugin for \"{word}\", below {}: `pip install {package}`, or name the plugin's shared \
         library",
        list(prefixes)
    )]
    NoWheel {
        /// The kind.
        word: &'static str,
        /// A package that would have one.
        package: &'static str,
        /// Where packages were looked for.
        prefixes: Vec<PathBuf>,
    },
    /// The library can not be opened.
    #[error("the PJRT plugin {} can not be opened: {reason}", path.display())]
    Open {
        /// The library.
        path: PathBuf,
        /// What the system says.
        reason: String,
    },
    /// The library is for other processors.
    #[error(
        "the PJRT plugin {} is for {architecture}, and this machine is {}: take the package for this one",
        path.display(),
        std::env::consts::ARCH
    )]
    Architecture {
        /// The library.
        path: PathBuf,
        /// What it is for.
        architecture: String,
    },
    /// There is no topology of a name.
    #[error(
        "the plugin {} has no topology \"{name}\". Names that were tried: v4:2x2x1, v5e:2x2, v5p:2x2x1 and v6e:2x2 of libtpu, \
         cpu:4 of plugins for processors, h100:1x1x8 of that for CUDA (docs/xla.md). The plugin says: {message}",
        path.display()
    )]
    Topology {
        /// The library.
        path: PathBuf,
        /// The name.
        name: String,
        /// What the plugin says, with what it takes if it says that.
        message: String,
    },
    /// The compiler has found that a program does not fit.
    #[error("the step does not fit into the memory of a {device}: {message}")]
    Memory {
        /// What kind of device it is.
        device: String,
        /// Bytes of its memory that programs may use, if the plugin says so.
        bytes: Option<u64>,
        /// What the compiler says.
        message: String,
    },
    /// The compiler does not take a program.
    #[error(
        "the plugin {}{} does not take the program: {message}{}",
        path.display(),
        of_version(*stablehlo),
        asked_for(flags)
    )]
    Compile {
        /// The library.
        path: PathBuf,
        /// The newest version of StableHLO that it reads, if it says so.
        stablehlo: Option<[u64; 3]>,
        /// The flags that it was asked for.
        flags: Vec<&'static str>,
        /// What the compiler says.
        message: String,
    },
    /// The library is no plugin.
    #[error("{} is no PJRT plugin: it has no function GetPjrtApi, or that gives nothing", path.display())]
    NoApi {
        /// The library.
        path: PathBuf,
    },
    /// The plugin's API is another one than that which is called here.
    #[error(
        "the plugin {} has version {}.{} of the PJRT API, and {}.{} to {}.x are known: take {} plugin",
        path.display(),
        version.0,
        version.1,
        OLDEST.0,
        OLDEST.1,
        OLDEST.0,
        if *version < OLDEST { "a newer" } else { "an older" }
    )]
    Version {
        /// The library.
        path: PathBuf,
        /// Major and minor version of its API.
        version: (i32, i32),
    },
    /// The plugin's API lacks what is needed.
    #[error(
        "the plugin {} has version {}.{} of the PJRT API, without {function}: take another plugin, or a newer one",
        path.display(),
        version.0,
        version.1
    )]
    Lacks {
        /// The library.
        path: PathBuf,
        /// Major and minor version of its API.
        version: (i32, i32),
        /// What it lacks.
        function: &'static str,
    },
    /// There are fewer devices than ranks.
    #[error(
        "{ranks} ranks need as many devices, and the plugin {} has {devices} ({platform}): set `run.ranks` to at most {devices}",
        path.display()
    )]
    Devices {
        /// The library.
        path: PathBuf,
        /// Its platform.
        platform: String,
        /// How many devices this process can use.
        devices: usize,
        /// How many ranks the run has.
        ranks: usize,
    },
    /// A process has other devices than ranks.
    #[error(
        "process {process} of {processes} holds {ranks} ranks, which need a device each, and the plugin {} ({platform}) gives it \
         {devices}: if it is as many in every process, set `run.ranks` to {}",
        path.display(),
        devices * processes
    )]
    OwnDevices {
        /// The library.
        path: PathBuf,
        /// Its platform.
        platform: String,
        /// The number of the process.
        process: usize,
        /// How many there are.
        processes: usize,
        /// How many devices this process can use.
        devices: usize,
        /// How many ranks it holds.
        ranks: usize,
    },
    /// The plugin can not run a program on the devices of several processes.
    #[error(
        "the plugin {} ({platform}) has no collectives between processes: start one process, with all ranks in it",
        path.display()
    )]
    Unconnected {
        /// The library.
        path: PathBuf,
        /// Its platform.
        platform: String,
    },
    /// Processes have other compilers, or ask them for something else.
    #[error(
        "{rank} has {what} {got}, and {} has {expected}: each process compiles the program, and these would not be the same; give \
         all processes one version of the plugin and the same flags",
        Rank(0)
    )]
    OtherCompiler {
        /// The first rank with another one.
        rank: Rank,
        /// What is another one: the plugin, or a variable with flags.
        what: &'static str,
        /// That of rank 0.
        expected: String,
        /// That of the rank.
        got: String,
    },
    /// The plugin has left each process by itself.
    #[error(
        "{} and {} would both have device {id} of the plugin {} ({platform}), which has not joined their processes: TPUs of \
         several hosts have to be one slice, which libtpu finds by itself on Google Cloud, and elsewhere by TPU_WORKER_ID and \
         TPU_WORKER_HOSTNAMES",
        ranks[0],
        ranks[1],
        path.display()
    )]
    SameDevice {
        /// The library.
        path: PathBuf,
        /// Its platform.
        platform: String,
        /// The ranks.
        ranks: [Rank; 2],
        /// The number of the device.
        id: u64,
    },
    /// The plugin runs a program elsewhere than it was asked to.
    #[error(
        "the plugin {} runs the program on its devices {got:?}, and the ranks of this process have {expected:?}: it can not be \
         used for this run",
        path.display()
    )]
    Placement {
        /// The library.
        path: PathBuf,
        /// The devices of the ranks of this process, by number.
        expected: Vec<u64>,
        /// Those of the program.
        got: Vec<u64>,
    },
    /// Other processes have not said which plugin and devices they have.
    #[error("other processes have not said which plugin and devices they have: {0}")]
    NotHeard(#[from] AssemblyError),
    /// A program can not be written to a file.
    #[error("a program can not be written to {}: {source}", path.display())]
    Dump {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The folder of compiled programs can not be made.
    #[error("the folder for compiled programs, {}, can not be made (run.xla.compile_cache): {source}", path.display())]
    Cache {
        /// The folder.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A call failed.
    #[error("{function} failed: {message} (code {code})")]
    Call {
        /// The function of the API.
        function: &'static str,
        /// The code of `PJRT_Error_Code`: that of gRPC and abseil.
        code: i32,
        /// What the plugin says.
        message: String,
    },
}

/// `RESOURCE_EXHAUSTED` of `PJRT_Error_Code`.
pub(crate) const EXHAUSTED: i32 = 8;

/// Major and minor number of the oldest PJRT API whose structs are laid out as they are filled here, and which all later ones of
/// the same major number keep.
pub(crate) const OLDEST: (i32, i32) = (0, 50);

/// Versions of StableHLO whose plugins have taken programs as they are written here. Text of StableHLO has no promise of
/// compatibility, and no version in it.
const TRIED: &str = "1.7 to 1.24";

/// Which StableHLO a plugin reads, beside what was tried.
fn of_version(stablehlo: Option<[u64; 3]>) -> String {
    stablehlo.map_or_else(String::new, |[major, minor, patch]| {
        format!(", which reads StableHLO {major}.{minor}.{patch} (tried: {TRIED}),")
    })
}

/// Flags that an older compiler may not know.
fn asked_for(flags: &[&str]) -> String {
    match flags {
        [] => String::new(),
        flags => format!(" (it was asked for {}, which newer ones know)", flags.join(", ")),
    }
}

fn list(folders: &[PathBuf]) -> String {
    let folders: Vec<String> = folders.iter().map(|folder| folder.display().to_string()).collect();
    folders.join(", ")
}

impl XlaError {
    /// What this failure calls for, where ranks have not begun: what a plugin lacks it lacks the next time too; others may
    /// only have been late, and a device may still be held by a process that is ending.
    pub fn kind(&self) -> FailureKind {
        /// `ABORTED` of `PJRT_Error_Code`.
        const ABORTED: i32 = 10;
        match self {
            XlaError::Call { code: EXHAUSTED | ABORTED | DEADLINE_EXCEEDED | UNAVAILABLE, .. }
            | XlaError::NotHeard(_) => FailureKind::Temporary,
            XlaError::Dump { source, .. } | XlaError::Cache { source, .. } => FailureKind::of_io(source),
            _ => FailureKind::Input,
        }
    }

    /// Whether the plugin has no such function, or one that does nothing.
    pub(crate) fn is_unimplemented(&self) -> bool {
        /// `UNIMPLEMENTED` of `PJRT_Error_Code`.
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
