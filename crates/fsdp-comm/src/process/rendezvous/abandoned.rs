//! Removes temporary folders whose creators were killed.
//!
//! The creator of such a folder holds a lock on it, which the system releases however the process ends. A folder of
//! this user without a lock is therefore abandoned, unless it was created a moment ago.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

/// Name prefix of the folder of `fsdp launch`.
pub const LAUNCH_PREFIX: &str = "fsdp-launch-";

/// Name prefix of the folder of the processes of one node.
pub(super) const NODE_PREFIX: &str = "fsdp-";

/// Number of hexadecimal digits that follow [`NODE_PREFIX`].
pub(super) const NODE_DIGITS: usize = 16;

/// A younger folder may be about to be locked.
const FRESH: Duration = Duration::from_secs(60);

/// Protects a folder of this process from removal by others, until it is dropped.
#[derive(Debug)]
pub struct Held {
    _folder: Option<File>,
}

/// Locks a folder that this process has just created.
pub fn hold(folder: &Path) -> Held {
    let lock = || {
        let file = File::open(folder)?;
        file.try_lock_shared().map_err(io::Error::from)?;
        Ok::<_, io::Error>(file)
    };
    // Where the system has no locks, others cannot get the lock required for removal either.
    let folder =
        lock().inspect_err(|error| tracing::debug!("cannot lock {}: {error}", folder.display())).ok();
    Held { _folder: folder }
}

/// Removes the abandoned folders among temporary files.
pub fn remove_abandoned(temporary: &Path) {
    for entry in fs::read_dir(temporary).into_iter().flatten().flatten() {
        if entry.file_name().to_str().is_some_and(is_ours)
            && let Err(error) = remove(&entry.path())
        {
            // Another process has removed it, or it is in use.
            tracing::debug!("{} was not removed: {error}", entry.path().display());
        }
    }
}

fn is_ours(name: &str) -> bool {
    let is_digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    let is_of_node = |digits: &str| digits.len() == NODE_DIGITS && digits.bytes().all(is_digit);
    name.starts_with(LAUNCH_PREFIX) || name.strip_prefix(NODE_PREFIX).is_some_and(is_of_node)
}

fn remove(path: &Path) -> io::Result<()> {
    // Do not follow links: anyone can create one there.
    let found = fs::symlink_metadata(path)?;
    let is_own = found.is_dir() && found.uid() == rustix::process::geteuid().as_raw();
    if !is_own || found.modified()?.elapsed().is_ok_and(|age| age < FRESH) {
        return Ok(());
    }
    let folder = File::open(path)?;
    folder.try_lock()?;
    // Before the lock was free, another process may have removed the folder and created one with the same name.
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
    fn only_stale_unlocked_folders_are_removed() {
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
        // A process being forked by another test holds copies of the locks until it executes its program.
        while held.iter().any(|folder| folder.exists()) {
            remove_abandoned(dir.path());
        }
    }
}
