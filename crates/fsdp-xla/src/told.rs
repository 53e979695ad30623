//! What is told of programs while ranks run.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// Who is told.
pub type Listener = Arc<dyn Fn(&Told) + Send + Sync>;

/// What there is to tell of a program.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Told {
    /// None of its layers became loops, as was asked for.
    NotScanned,
    /// It was compiled.
    Compiled {
        /// Operations of StableHLO.
        operations: usize,
        /// How long it took.
        took: Duration,
    },
    /// It was found in the folder of compiled programs.
    Found {
        /// Operations of StableHLO.
        operations: usize,
        /// How long it took to load.
        took: Duration,
    },
    /// What is in the folder of compiled programs is of no use: the program is compiled.
    Unusable {
        /// The file, and why.
        reason: String,
    },
    /// The program is not kept in the folder of compiled programs: the next start compiles it again.
    NotKept {
        /// Why.
        reason: String,
    },
}

impl fmt::Display for Told {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Told::NotScanned => f.write_str(
                "no layers became loops (run.xla.scan_layers): there are too few of them, or they are gathered too many layers \
                 ahead (fsdp.forward_prefetch, fsdp.backward_prefetch)",
            ),
            Told::Compiled { operations, took } => {
                write!(f, "compiled a program of {operations} operations in {:.1} s", took.as_secs_f64())
            }
            Told::Found { operations, took } => {
                write!(f, "loaded a program of {operations} operations in {:.1} s", took.as_secs_f64())
            }
            Told::Unusable { reason } => {
                write!(f, "a compiled program is of no use, and is compiled again: {reason}")
            }
            Told::NotKept { reason } => {
                write!(f, "a compiled program is not kept (run.xla.compile_cache): {reason}")
            }
        }
    }
}
