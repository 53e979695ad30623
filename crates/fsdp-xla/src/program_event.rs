//! Events about programs, reported while ranks run.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// Receives the events.
pub type Listener = Arc<dyn Fn(&ProgramEvent) + Send + Sync>;

/// An event about a program.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ProgramEvent {
    /// Turning layers into loops was requested, but no layers became loops.
    NotScanned,
    /// The program was compiled.
    Compiled {
        /// Number of StableHLO operations.
        operations: usize,
        /// Compile time.
        took: Duration,
    },
    /// The program was found in the compile cache.
    Found {
        /// Number of StableHLO operations.
        operations: usize,
        /// Load time.
        took: Duration,
    },
    /// The entry in the compile cache is unusable; the program is compiled.
    Unusable {
        /// The file and the reason.
        reason: String,
    },
    /// The program is not kept in the compile cache; the next start compiles it again.
    NotKept {
        /// The reason.
        reason: String,
    },
}

impl fmt::Display for ProgramEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ProgramEvent::NotScanned => f.write_str(
                "no layers became loops (run.xla.scan_layers): there are too few of them, or they are gathered too many layers \
                 ahead (fsdp.forward_prefetch, fsdp.backward_prefetch)",
            ),
            ProgramEvent::Compiled { operations, took } => {
                write!(f, "compiled a program of {operations} operations in {:.1} s", took.as_secs_f64())
            }
            ProgramEvent::Found { operations, took } => {
                write!(f, "loaded a program of {operations} operations in {:.1} s", took.as_secs_f64())
            }
            ProgramEvent::Unusable { reason } => {
                write!(f, "a cached program is unusable, and is compiled again: {reason}")
            }
            ProgramEvent::NotKept { reason } => {
                write!(f, "a compiled program is not cached (run.xla.compile_cache): {reason}")
            }
        }
    }
}
