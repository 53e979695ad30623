//! What a user should know and a run goes on with.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;

use crate::data::DataWarning;

/// Something that does not end a run.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RunWarning {
    /// The file system of the output folder has no locks.
    NoLocks {
        /// The output folder.
        out_dir: PathBuf,
    },
    /// A checkpoint was passed over because it can not be read whole.
    PassedOver {
        /// The checkpoint.
        path: PathBuf,
        /// What is wrong with it.
        fault: String,
    },
    /// Something about the data.
    Data(DataWarning),
    /// Nobody can ask for metrics.
    NotListening {
        /// Where they should be able to.
        address: SocketAddr,
        /// Why not.
        fault: String,
    },
    /// There is no disk space for the next checkpoint.
    NotReserved {
        /// Why not.
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
                write!(f, "{} is damaged and is passed over: {fault}", path.display())
            }
            RunWarning::Data(warning) => warning.fmt(f),
            RunWarning::NotListening { address, fault } => {
                write!(f, "nobody can ask for metrics at run.metrics_listen = \"{address}\": {fault}")
            }
            RunWarning::NotReserved { fault } => {
                write!(f, "no disk space is set aside for the next checkpoint: {fault}")
            }
        }
    }
}
