//! Notes that processes leave for their launcher, in a folder of it.

use std::path::{Path, PathBuf};
use std::{env, fs, io};

use fsdp_comm::process::Verdict;

/// The variable with the path of the folder.
pub(super) const FOLDER: &str = "FSDP_LAUNCH_DIR";

/// A note of a process that affects how all are restarted.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Note {
    /// From the first process: the output folder now belongs to this run; before, its contents are another run's.
    TakenOver,
    /// From the first process: the state of the run is outside of its output folder, and the user must decide how to
    /// continue.
    Elsewhere,
    /// From any process: the processes of the attempt have met.
    Met,
}

impl Note {
    fn file(self, folder: &Path) -> PathBuf {
        folder.join(match self {
            Note::TakenOver => "taken-over",
            Note::Elsewhere => "elsewhere",
            Note::Met => "met",
        })
    }

    /// Leaves the note, if this process was started by `fsdp launch`.
    pub(crate) fn leave(self) {
        let Some(folder) = env::var_os(FOLDER).map(PathBuf::from) else { return };
        if let Err(error) = fs::write(self.file(&folder), "") {
            // Without the note the outcome is still correct, but later, or from an older checkpoint.
            tracing::warn!("cannot leave a note in {}: {error}", folder.display());
        }
    }

    /// Whether the note exists in a folder.
    pub(super) fn is_in(self, folder: &Path) -> bool {
        self.file(folder).exists()
    }

    /// Removes the note, if it exists.
    pub(super) fn remove_from(self, folder: &Path) {
        let _ = fs::remove_file(self.file(folder));
    }
}

/// The file with the failure that ended the processes of an attempt.
const VERDICT: &str = "verdict";

/// Leaves the failure that ended this process's world, if it was started by `fsdp launch`: the launcher reports it, and
/// gives other processes less time. All processes write the same text at the same time, so the write is atomic.
pub(crate) fn leave_verdict(verdict: &Verdict, process: usize) {
    let Some(folder) = env::var_os(FOLDER).map(PathBuf::from) else { return };
    if let Err(error) = replace(&folder, &verdict.to_string(), process) {
        // The launcher then reports the process that ended first.
        tracing::warn!("cannot leave a note in {}: {error}", folder.display());
    }
}

fn replace(folder: &Path, text: &str, process: usize) -> io::Result<()> {
    let temporary = folder.join(format!("{VERDICT}-{process}"));
    fs::write(&temporary, text)?;
    fs::rename(temporary, folder.join(VERDICT))
}

/// The failure that ended the processes, if they were told of one.
pub(super) fn verdict(folder: &Path) -> Option<String> {
    fs::read_to_string(folder.join(VERDICT)).ok()
}

/// Removes the failure of an earlier attempt.
pub(super) fn remove_verdict(folder: &Path) {
    // Usually there is none.
    let _ = fs::remove_file(folder.join(VERDICT));
}
