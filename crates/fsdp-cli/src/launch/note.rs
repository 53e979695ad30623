//! What a launcher and its processes leave for each other to know, in a folder of the launcher's own.

use std::path::{Path, PathBuf};
use std::{env, fs, io};

use fsdp_comm::process::Verdict;

/// The variable by which processes know the folder.
pub(super) const FOLDER: &str = "FSDP_LAUNCH_DIR";

/// Something that decides how processes are started again.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Note {
    /// Of the first process: the output folder is this run's; before, what is there is another one's.
    TakenOver,
    /// Of the first process: the state of the run is somewhere else than in its output folder, and a person has to say how
    /// to go on.
    Elsewhere,
    /// Of the launcher: stop when the next checkpoint is complete.
    StopAtSave,
}

impl Note {
    fn file(self, folder: &Path) -> PathBuf {
        folder.join(match self {
            Note::TakenOver => "taken-over",
            Note::Elsewhere => "elsewhere",
            Note::StopAtSave => "stop-at-save",
        })
    }

    /// Leaves it, if this process was launched by `fsdp launch`.
    pub(crate) fn leave(self) {
        if let Some(folder) = env::var_os(FOLDER) {
            self.leave_in(Path::new(&folder));
        }
    }

    /// Whether it is there, if this process was launched by `fsdp launch`.
    pub(crate) fn is_there(self) -> bool {
        env::var_os(FOLDER).is_some_and(|folder| self.is_in(Path::new(&folder)))
    }

    /// Leaves it in a folder.
    pub(super) fn leave_in(self, folder: &Path) {
        if let Err(error) = fs::write(self.file(folder), "") {
            // Whoever would find it does what is right without it, if later or from further back.
            tracing::warn!("can not leave a note in {}: {error}", folder.display());
        }
    }

    /// Whether it was left in a folder.
    pub(super) fn is_in(self, folder: &Path) -> bool {
        self.file(folder).exists()
    }

    /// Takes it back, if it is there.
    pub(super) fn remove_from(self, folder: &Path) {
        let _ = fs::remove_file(self.file(folder));
    }
}

/// The file of what ended the processes of an attempt.
const VERDICT: &str = "verdict";

/// Leaves what ended the world of this process, if it was launched by `fsdp launch`: the launcher names it, and gives others
/// less time. All processes say the same, at the same time, so it comes in one step.
pub(crate) fn leave_verdict(verdict: &Verdict, process: usize) {
    let Some(folder) = env::var_os(FOLDER).map(PathBuf::from) else { return };
    if let Err(error) = replace(&folder, &verdict.to_string(), process) {
        // The launcher then names who has ended first.
        tracing::warn!("can not leave a note in {}: {error}", folder.display());
    }
}

fn replace(folder: &Path, text: &str, process: usize) -> io::Result<()> {
    let beside = folder.join(format!("{VERDICT}-{process}"));
    fs::write(&beside, text)?;
    fs::rename(beside, folder.join(VERDICT))
}

/// What ended the processes of this node, if they were told of something.
pub(super) fn verdict(folder: &Path) -> Option<String> {
    fs::read_to_string(folder.join(VERDICT)).ok()
}

/// Forgets what ended an earlier attempt.
pub(super) fn remove_verdict(folder: &Path) {
    // Mostly there is none.
    let _ = fs::remove_file(folder.join(VERDICT));
}
