//! Warnings that do not end a run.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;

use crate::data::DataWarning;

/// A condition that the user should know, and despite which the run continues.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RunWarning {
    /// The file system of the output folder has no locks.
    NoLocks {
        /// The output folder.
        out_dir: PathBuf,
    },
    /// A checkpoint was skipped because it cannot be read completely.
    PassedOver {
        /// The checkpoint.
        path: PathBuf,
        /// What is wrong with it.
        fault: String,
    },
    /// A warning about the data.
    Data(DataWarning),
    /// The metrics endpoint could not be opened.
    NotListening {
        /// The address to listen on.
        address: SocketAddr,
        /// The error.
        fault: String,
    },
    /// No disk space could be reserved for the next checkpoint.
    NotReserved {
        /// The error.
        fault: String,
    },
}

impl fmt::Display for RunWarning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RunWarning::NoLocks { out_dir } => write!(
                f,
                "run.out_dir {} is on a file system without locks: a second run there would not be noticed",
                out_dir.display()
            ),
            RunWarning::PassedOver { path, fault } => {
                write!(f, "{} is damaged and was skipped: {fault}", path.display())
            }
            RunWarning::Data(warning) => warning.fmt(f),
            RunWarning::NotListening { address, fault } => {
                write!(f, "metrics are not served at run.metrics_listen = \"{address}\": {fault}")
            }
            RunWarning::NotReserved { fault } => {
                write!(f, "no disk space is reserved for the next checkpoint: {fault}")
            }
        }
    }
}
