//! What the first process leaves for its launcher to know, in the launch's own folder.

use std::path::{Path, PathBuf};
use std::{env, fs};

/// The variable by which processes know the folder.
pub(super) const FOLDER: &str = "FSDP_LAUNCH_DIR";

/// Something that decides how processes are started again.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Note {
    /// The output folder is this run's: before, what is there is another one's.
    TakenOver,
    /// The state of the run is somewhere else than in its output folder, and a person has to say how to go on.
    Elsewhere,
}

impl Note {
    fn file(self, folder: &Path) -> PathBuf {
        folder.join(match self {
            Note::TakenOver => "taken-over",
            Note::Elsewhere => "elsewhere",
        })
    }

    /// Leaves it, if this process was launched by `fsdp launch`.
    pub(crate) fn leave(self) {
        if let Some(folder) = env::var_os(FOLDER)
            && let Err(error) = fs::write(self.file(Path::new(&folder)), "")
        {
            // The launcher then does what is right for a run that has not begun.
            tracing::warn!("can not leave a note for the launcher: {error}");
        }
    }

    /// Whether a process has left it.
    pub(super) fn is_in(self, folder: &Path) -> bool {
        self.file(folder).exists()
    }
}
