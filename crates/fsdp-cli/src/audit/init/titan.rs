//! The settings of a job of torchtitan, which it writes beside its folder of checkpoints.

use std::path::{Path, PathBuf};

use super::folder::{Settings, above};
use crate::output;

/// Endings of files to which torchtitan writes its settings, or from which it reads them.
const ENDINGS: [&str; 2] = ["json", "toml"];

/// Maximum length of such a file; weights and logs beside it may have the same ending.
const BYTES_MAX: u64 = 1 << 20;

/// The job of torchtitan, whose checkpoints are folders `step-N`: beside the checkpoint, or in the folder that has the folder
/// of checkpoints.
pub(super) fn job(dir: &Path) -> Option<Settings> {
    // Other programs' folders may have anything around them.
    let name = dir.file_name()?.to_str()?;
    name.strip_prefix("step-")?.parse::<u64>().ok()?;
    for dir in [dir, above(dir), above(above(dir))] {
        let mut files: Vec<PathBuf> =
            std::fs::read_dir(dir).ok()?.filter_map(|entry| Some(entry.ok()?.path())).collect();
        files.retain(|path| is_small(path));
        files.sort();
        let read = files.iter().filter_map(|path| Some((path, Settings::of_file(path).ok()?)));
        let mut jobs: Vec<(&PathBuf, Settings)> = read.filter(|(_, settings)| is_titan(settings)).collect();
        if let [(first, _), (second, _), ..] = &jobs[..] {
            output::warning(&format!(
                "{} and {} are both jobs of torchtitan, and nothing says which of them made the checkpoint: both are left out",
                first.display(),
                second.display()
            ));
            return None;
        }
        if let Some((_, job)) = jobs.pop() {
            return Some(job);
        }
    }
    None
}

/// Whether a file may be torchtitan's settings, by its name and size.
fn is_small(path: &Path) -> bool {
    let ending = path.extension().and_then(|ending| ending.to_str());
    ending.is_some_and(|ending| ENDINGS.contains(&ending))
        && path.metadata().is_ok_and(|file| file.is_file() && file.len() <= BYTES_MAX)
}

fn is_titan(settings: &Settings) -> bool {
    settings.has("training.max_norm") && settings.has("lr_scheduler.warmup_steps")
}
