//! Folders among the temporary files of a machine that nobody will remove any more: whoever made them was killed.
//!
//! Who makes such a folder holds a lock on it, which the system takes back however that process ends. So a folder of this
//! user without a lock belongs to nobody, unless it was made a moment ago.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

/// How the folder of an agent of `fsdp launch` begins.
pub const LAUNCH_PREFIX: &str = "fsdp-launch-";

/// How the folder of the processes of one node begins.
pub(super) const NODE_PREFIX: &str = "fsdp-";

/// Hexadecimal digits that follow [`NODE_PREFIX`].
pub(super) const NODE_DIGITS: usize = 16;

/// What is younger may get its lock in a moment.
const FRESH: Duration = Duration::from_secs(60);

/// Keeps a folder of this process from being removed by others, until the value is dropped.
#[derive(Debug)]
pub struct Held {
    _folder: Option<File>,
}

/// Holds a folder that this process has just made.
pub fn hold(folder: &Path) -> Held {
    let lock = || {
        let file = File::open(folder)?;
        file.try_lock_shared().map_err(io::Error::from)?;
        Ok::<_, io::Error>(file)
    };
    // Where the system has no locks, nobody gets the one that it takes to remove it.
    let folder = lock().inspect_err(|error| tracing::debug!("no lock on {}: {error}", folder.display())).ok();
    Held { _folder: folder }
}

/// Removes what was abandoned in a folder of temporary files.
pub fn remove_abandoned(temporary: &Path) {
    for entry in fs::read_dir(temporary).into_iter().flatten().flatten() {
        if entry.file_name().to_str().is_some_and(is_ours)
            && let Err(error) = remove(&entry.path())
        {
            // Another process has removed it, or it is somebody's.
            tracing::debug!("{} stays: {error}", entry.path().display());
        }
    }
}

fn is_ours(name: &str) -> bool {
    let is_digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    let is_of_node = |digits: &str| digits.len() == NODE_DIGITS && digits.bytes().all(is_digit);
    name.starts_with(LAUNCH_PREFIX) || name.strip_prefix(NODE_PREFIX).is_some_and(is_of_node)
}

fn remove(path: &Path) -> io::Result<()> {
    // Not where a link leads to: anybody can make one there.
    let found = fs::symlink_metadata(path)?;
    let is_own = found.is_dir() && found.uid() == rustix::process::geteuid().as_raw();
    if !is_own || found.modified()?.elapsed().is_ok_and(|age| age < FRESH) {
        return Ok(());
    }
    let folder = File::open(path)?;
    folder.try_lock()?;
    // Somebody else may have removed it before the lock was free, and made another one by this name.
    if fs::symlink_metadata(path)?.ino() == folder.metadata()?.ino() {
        fs::remove_dir_all(path)
    } else {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::*;

    #[test]
    fn what_nobody_holds_is_removed_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let old = SystemTime::now() - 2 * FRESH;
        let make = |name: &str, made: SystemTime| {
            let folder = dir.path().join(name);
            fs::create_dir(&folder).unwrap();
            fs::write(folder.join("note"), "").unwrap();
            File::open(&folder).unwrap().set_modified(made).unwrap();
            folder
        };
        let abandoned = ["fsdp-launch-a", "fsdp-0123456789abcdef"].map(|name| make(name, old));
        let held = ["fsdp-launch-b", "fsdp-1123456789abcdef"].map(|name| make(name, old));
        let locks = held.each_ref().map(|folder| hold(folder));
        let others = ["fsdp-state-1", "fsdp-0123456789abcde", "launch-a"].map(|name| make(name, old));
        let fresh = make("fsdp-launch-c", SystemTime::now());
        let link = dir.path().join("fsdp-launch-d");
        std::os::unix::fs::symlink(&others[0], &link).unwrap();
        remove_abandoned(dir.path());
        assert!(abandoned.iter().all(|folder| !folder.exists()));
        let kept = held.iter().chain(&others).chain([&fresh, &link]);
        kept.for_each(|folder| assert!(folder.join("note").exists(), "{}", folder.display()));
        drop(locks);
        // A process that another test is starting has them until it is another program.
        while held.iter().any(|folder| folder.exists()) {
            remove_abandoned(dir.path());
        }
    }
}
