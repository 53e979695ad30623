//! Bounds the size of a compile cache: the least recently used entries are deleted.
//!
//! Several processes may do so at once. A process that has opened an entry reads it to the end even if another deletes
//! it; an entry deleted before is compiled again.

use std::fs::{self, File, Metadata};
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// The suffix of an entry's name, after the 64 digits of its key.
pub(super) const ENDING: &str = ".program";

/// The prefix of the name of a file that is still being written.
pub(super) const UNFINISHED: &str = ".fsdp-program-";

/// Writing an entry never takes this long: the process that began an older file is dead.
const ABANDONED_AFTER: Duration = Duration::from_secs(24 * 60 * 60);

/// Marks an entry as used now, if permitted: it may be in a shared read-only folder.
pub(super) fn note_use(entry: &Path) {
    let _ = File::open(entry).and_then(|file| file.set_modified(SystemTime::now()));
}

/// Deletes the least recently used entries of a folder until at most `max_bytes` are left. The entry just `written`
/// stays, however large, and so do files that are not entries.
///
/// # Errors
/// The folder cannot be read, or the first file that cannot be deleted; the others are deleted nevertheless.
pub(super) fn enforce(folder: &Path, written: &Path, max_bytes: u64) -> io::Result<()> {
    let mut entries: Vec<(bool, SystemTime, PathBuf, u64)> = Vec::new();
    let mut outcome = Ok(());
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        // A file that another process has just deleted has no metadata.
        let Some((metadata, modified)) = entry.metadata().ok().and_then(with_time) else { continue };
        let (path, name) = (entry.path(), entry.file_name());
        match name.to_str() {
            Some(name) if is_entry(name) => entries.push((path == written, modified, path, metadata.len())),
            Some(name) if name.starts_with(UNFINISHED) && is_abandoned(modified) => {
                outcome = outcome.and(delete(&path));
            }
            _ => {}
        }
    }
    entries.sort();
    let mut total = 0;
    for (is_written, _, path, bytes) in entries.into_iter().rev() {
        total += bytes;
        if !is_written && total > max_bytes {
            outcome = outcome.and(delete(&path));
        }
    }
    outcome
}

fn with_time(metadata: Metadata) -> Option<(Metadata, SystemTime)> {
    let modified = metadata.modified().ok().filter(|_| metadata.is_file())?;
    Some((metadata, modified))
}

fn is_entry(name: &str) -> bool {
    let digits = name.strip_suffix(ENDING).unwrap_or_default();
    digits.len() == 64 && digits.bytes().all(|byte| byte.is_ascii_hexdigit())
}

fn is_abandoned(modified: SystemTime) -> bool {
    modified.elapsed().is_ok_and(|age| age > ABANDONED_AFTER)
}

/// Deletes a file, unless another process already has.
fn delete(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    /// Creates a file of `bytes` bytes, last used `hours` hours ago.
    fn file(folder: &Path, name: &str, bytes: usize, hours: u64) -> PathBuf {
        let path = folder.join(name);
        let used = SystemTime::now() - Duration::from_secs(3600 * hours);
        // It appears with its time: others would take a file without it for one that was just used.
        let mut file = tempfile::NamedTempFile::new_in(folder).unwrap();
        file.write_all(&vec![0; bytes]).unwrap();
        file.as_file().set_modified(used).unwrap();
        file.persist(&path).unwrap();
        path
    }

    fn entry(folder: &Path, digit: char, bytes: usize, hours: u64) -> PathBuf {
        let digits: String = std::iter::repeat_n(digit, 64).collect();
        file(folder, &format!("{digits}{ENDING}"), bytes, hours)
    }

    #[test]
    fn least_recently_used_entries_are_deleted() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        let [old, older, oldest] =
            [('a', 1), ('b', 2), ('c', 3)].map(|(digit, hours)| entry(folder, digit, 10, hours));
        let written = entry(folder, 'd', 10, 0);
        enforce(folder, &written, 40).unwrap();
        assert!(
            [&old, &older, &oldest, &written].into_iter().all(|path| path.exists()),
            "40 bytes are allowed"
        );
        note_use(&oldest);
        enforce(folder, &written, 39).unwrap();
        assert!(!older.exists(), "it is now the one that was used longest ago");
        assert!([&old, &oldest, &written].into_iter().all(|path| path.exists()));
        // An entry larger than the bound stays, since the next start needs it.
        enforce(folder, &written, 5).unwrap();
        assert!(written.exists() && !old.exists() && !oldest.exists());
    }

    #[test]
    fn foreign_files_are_kept() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        let ours = [entry(folder, 'a', 10, 1), file(folder, &format!("{UNFINISHED}dead"), 10, 25)];
        let others = [
            file(folder, &format!("{UNFINISHED}living"), 10, 23),
            file(folder, "notes.program", 10, 9999),
            file(folder, &"a".repeat(64), 10, 9999),
            file(folder, ".hidden", 10, 9999),
        ];
        let written = entry(folder, 'b', 10, 0);
        enforce(folder, &written, 0).unwrap();
        assert!(ours.iter().all(|path| !path.exists()));
        assert!(others.iter().chain([&written]).all(|path| path.exists()));
    }

    #[test]
    fn concurrent_eviction_succeeds() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        let own = std::thread::scope(|scope| {
            let threads: Vec<_> = ('0'..='7')
                .map(|digit| {
                    scope.spawn(move || {
                        let own = entry(folder, digit, 10, 0);
                        for hours in 1..50 {
                            entry(folder, 'e', 10, hours);
                            enforce(folder, &own, 25).unwrap();
                        }
                        own
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
        });
        let left = own.iter().filter(|path| path.exists()).count();
        assert!((1..=3).contains(&left), "{left} are left");
    }
}
