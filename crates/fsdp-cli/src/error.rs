//! Errors that stop a command, and their exit codes.

use std::io;
use std::path::{Path, PathBuf};

use fsdp_comm::assembly::AssemblyError;
use fsdp_comm::process::Verdict;
use fsdp_comm::process::cluster::ClusterError;
use fsdp_comm::process::place::PlaceError;
use fsdp_comm::process::rendezvous::RendezvousError;
use fsdp_config::ConfigError;
use fsdp_core::FailureKind;
use fsdp_cuda::DeviceError;
use fsdp_cuda::nccl::NcclError;
use fsdp_data::DataError;
use fsdp_mpi::MpiError;
use fsdp_train::TrainError;

use crate::exit_code::Exit;

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum CliError {
    /// Training could not start, or failed.
    #[error(transparent)]
    Train(#[from] TrainError),
    /// A checkpoint cannot be read or written.
    #[error(transparent)]
    Checkpoint(#[from] fsdp_ckpt::Error),
    /// A file named by the user cannot be read.
    #[error("cannot read {}{advice}", file.display())]
    Read {
        file: PathBuf,
        /// What to give instead, after a `;` or `:`.
        advice: &'static str,
        source: io::Error,
    },
    /// A `config.json` does not describe a model that can be run.
    #[error("{origin}: {source}")]
    Model {
        /// The file, or the options it was derived from.
        origin: String,
        source: fsdp_nn::hf::ConfigError,
    },
    /// A launcher has given this process a contradictory place.
    #[error(transparent)]
    Place(#[from] PlaceError),
    /// Processes that were started together could not join each other.
    #[error("{}", cluster_message(.0))]
    Cluster(#[from] ClusterError),
    /// Other processes did not answer.
    #[error("waiting for other processes: {0}")]
    NoAnswer(#[from] AssemblyError),
    /// MPI has failed.
    #[error(transparent)]
    Mpi(#[from] MpiError),
    /// The arguments to launch are not a command.
    #[error("the arguments after -- are not a command that can be launched: {0}")]
    Launched(Box<clap::Error>),
    /// A part of a launch cannot be started.
    #[error("cannot start {what}: {source}")]
    Start {
        /// Names the part.
        what: String,
        source: io::Error,
    },
    /// The limit on open files is too low for several processes.
    #[error(
        "a process of this run of {processes} needs at least {needed} file descriptors, and the limit is {limit}: Too many \
         open files; raise it (ulimit -n)"
    )]
    Descriptors { limit: u64, needed: u64, processes: usize },
    /// Another process has failed.
    #[error("{verdict}{}", resume_hint(verdict))]
    World {
        /// The failure that ended the world.
        verdict: Box<Verdict>,
    },
    /// What is asked for is impossible: says why, and what to do.
    #[error("{0}")]
    Input(String),
    /// An option, or a key of the run file, does not fit.
    #[error("{option}: {what}")]
    Option {
        /// The option or key, as written.
        option: &'static str,
        /// What is wrong and what to do.
        what: String,
    },
    /// A file of the user's choice cannot be created.
    #[error("{option} {}: cannot create the file", file.display())]
    Create {
        /// The option that named it.
        option: &'static str,
        file: PathBuf,
        source: io::Error,
    },
    /// There is no usable PJRT plugin.
    #[cfg(feature = "xla")]
    #[error("device \"xla\" cannot be used: {0}")]
    Xla(#[from] fsdp_xla::XlaError),
    /// XLA cannot compile a step.
    #[cfg(feature = "xla")]
    #[error("the step cannot be compiled for {topology}")]
    Compile {
        /// The target devices.
        topology: String,
        source: fsdp_xla::XlaError,
    },
    /// There is no usable GPU.
    #[error("device \"cuda\" cannot be used (`fsdp doctor` shows what is missing): {0}")]
    Gpu(#[from] DeviceError),
    /// NCCL is missing or unusable.
    #[error(
        "device \"cuda\" cannot be used with one rank per GPU (several ranks on one GPU, run.share_gpu = true, need no \
         NCCL): {0}"
    )]
    Nccl(#[from] NcclError),
    /// There are fewer GPUs than ranks.
    #[error(
        "{0}; ranks are set by run.ranks, --ranks or --world-sizes, and shared GPUs by run.share_gpu = true"
    )]
    Ranks(#[from] fsdp_cuda::device::TooManyRanks),
    /// libtorch cannot be used.
    #[cfg(feature = "torch")]
    #[error(transparent)]
    Libtorch(#[from] fsdp_cuda::torch::TorchError),
    /// A cluster description is wrong.
    #[error(transparent)]
    ClusterDescription(#[from] fsdp_plan::cluster::ClusterError),
    /// `RUST_LOG` is not a filter.
    #[error("RUST_LOG: {source}; expected something like fsdp=debug")]
    LogFilter { source: tracing_subscriber::filter::ParseError },
    /// Output cannot be written.
    #[error("cannot write {what}")]
    Write {
        /// The file or stream being written.
        what: String,
        source: io::Error,
    },
    /// Signal handlers cannot be installed.
    #[error("cannot handle SIGINT and SIGTERM")]
    Signal { source: io::Error },
}

/// What to do when another process has failed.
fn resume_hint(verdict: &Verdict) -> &'static str {
    match verdict.failure.kind {
        FailureKind::Temporary => "; start the command again (`train` with --resume)",
        FailureKind::Permanent | FailureKind::Input | FailureKind::Interrupted => "",
    }
}

impl CliError {
    /// The exit code of a command that fails with this error.
    pub(crate) fn exit(&self) -> Exit {
        self.kind().into()
    }

    /// Classifies the failure. There is no wildcard: a new variant does not compile before it is classified.
    pub(crate) fn kind(&self) -> FailureKind {
        match self {
            CliError::Train(error) => error.kind(),
            CliError::Checkpoint(error) => error.kind(),
            CliError::Cluster(error) => error.kind(),
            CliError::Mpi(error) => error.kind(),
            CliError::NoAnswer(AssemblyError::Failed(error)) => error.kind(),
            CliError::NoAnswer(AssemblyError::Late { .. }) => FailureKind::Temporary,
            CliError::NoAnswer(AssemblyError::GivenUp) => FailureKind::Permanent,
            CliError::World { verdict } => verdict.failure.kind,
            CliError::Read { source, .. }
            | CliError::Create { source, .. }
            | CliError::Start { source, .. }
            | CliError::Write { source, .. } => FailureKind::of_io(source),
            CliError::Descriptors { .. } => FailureKind::Temporary,
            CliError::Signal { .. } => FailureKind::Permanent,
            // A failed call may succeed next time; a missing library or GPU stays missing.
            CliError::Gpu(DeviceError::Call { .. }) | CliError::Nccl(NcclError::Call { .. }) => {
                FailureKind::Temporary
            }
            CliError::Gpu(_)
            | CliError::Nccl(_)
            | CliError::Ranks(_)
            | CliError::Model { .. }
            | CliError::Place(_)
            | CliError::Launched(_)
            | CliError::ClusterDescription(_)
            | CliError::Input(_)
            | CliError::Option { .. }
            | CliError::LogFilter { .. } => FailureKind::Input,
            #[cfg(feature = "xla")]
            CliError::Xla(error) => error.kind(),
            #[cfg(feature = "xla")]
            CliError::Compile { .. } => FailureKind::Input,
            #[cfg(feature = "torch")]
            CliError::Libtorch(_) => FailureKind::Input,
        }
    }

    /// Wraps a failure to read a file.
    pub(crate) fn read(file: &Path) -> impl FnOnce(io::Error) -> CliError {
        let file = file.to_owned();
        move |source| CliError::Read { file, advice: "", source }
    }

    /// Wraps a failure to create the file that an option names.
    pub(crate) fn create(option: &'static str, file: &Path) -> impl FnOnce(io::Error) -> CliError {
        let file = file.to_owned();
        move |source| CliError::Create { option, file, source }
    }

    /// Wraps a failure to write to a file.
    pub(crate) fn write(file: &Path) -> impl FnOnce(io::Error) -> CliError {
        let what = file.display().to_string();
        move |source| CliError::Write { what, source }
    }
}

impl From<RendezvousError> for CliError {
    fn from(error: RendezvousError) -> Self {
        CliError::Cluster(error.into())
    }
}

/// The message of the error, with advice specific to this command.
fn cluster_message(error: &ClusterError) -> String {
    match error {
        ClusterError::NoToken => format!("{error} (run.out_dir), or --insecure-network"),
        other => other.to_string(),
    }
}

impl From<ConfigError> for CliError {
    fn from(error: ConfigError) -> Self {
        CliError::Train(error.into())
    }
}

impl From<DataError> for CliError {
    fn from(error: DataError) -> Self {
        CliError::Train(error.into())
    }
}

impl From<fsdp_core::Error> for CliError {
    fn from(error: fsdp_core::Error) -> Self {
        CliError::Train(error.into())
    }
}

#[cfg(test)]
mod tests;
