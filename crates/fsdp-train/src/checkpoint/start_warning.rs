//! What a user should know of how a run begins.

use std::fmt;
use std::path::PathBuf;

/// Something that does not keep a run from beginning.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum StartWarning {
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
}

impl fmt::Display for StartWarning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StartWarning::NoLocks { out_dir } => write!(
                f,
                "run.out_dir {} is on a file system without locks: a second run there would not be noticed",
                out_dir.display()
            ),
            StartWarning::PassedOver { path, fault } => {
                write!(f, "{} is damaged and is passed over: {fault}", path.display())
            }
        }
    }
}
