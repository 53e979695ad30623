//! Checks how every node sees the output folder: whether and how soon the writes of one node are visible to others, and
//! whether its locks keep others out.

use std::fs::{self, File, TryLockError};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::process_group::ProcessGroup;
use crate::error::CliError;

/// Polling interval for what another node has written.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// How long a file may stay invisible: NFS clients cache a folder for up to a minute.
const VISIBILITY_TIMEOUT: Duration = Duration::from_secs(65);

/// The effect of another node's locks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Lock {
    /// They keep this node out.
    Excludes,
    /// They are ignored: locks are local to each node.
    Ignored,
    /// Locks are not supported.
    Unsupported,
}

/// The folder as seen by a node.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct View {
    /// Free space, if the system reports it.
    pub(super) free_bytes: Option<u64>,
    /// How long it took until a write of process 0 was visible.
    pub(super) seen_after_ms: Option<f64>,
    /// The effect of process 0's lock.
    pub(super) lock: Option<Lock>,
    /// What is wrong.
    pub(super) faults: Vec<String>,
}

/// The probe that process 0 writes for others to find.
#[derive(Clone, Serialize, Deserialize)]
struct Probe {
    name: String,
    content: String,
}

impl Probe {
    fn file(&self, folder: &Path) -> PathBuf {
        folder.join(&self.name)
    }

    fn lock(&self, folder: &Path) -> PathBuf {
        folder.join(format!("{}.lock", self.name))
    }
}

/// Examines the folder from all processes with `is_examiner`. Returns their views in the first process. Removes
/// everything it writes.
///
/// # Errors
/// Those of the process group; problems of the folder are not errors.
pub(super) fn examine(
    group: &ProcessGroup,
    folder: &Path,
    is_examiner: bool,
) -> Result<Option<Vec<Option<View>>>, CliError> {
    let is_first = group.process() == 0;
    let created = if is_first { Some(CreatedFolders::create(folder)) } else { None };
    let probe = is_first.then(|| {
        let pid = std::process::id();
        Probe {
            name: format!(".fsdp-doctor-{pid}"),
            content: format!("{pid} at {:?}", std::time::SystemTime::now()),
        }
    });
    let probe = group.share("probe", probe)?;
    // A client that looked for a missing file may cache its absence, as would happen in a run.
    let _ = fs::metadata(probe.file(folder));
    group.barrier("probe looked for")?;
    let held = is_first.then(|| write(folder, &probe));
    let write_error =
        held.as_ref().map(|held| held.as_ref().err().map(|error| failure_text("write to", folder, error)));
    let write_error: Option<String> = group.share("probe written", write_error)?;
    let view = match (is_examiner, write_error) {
        (false, _) => None,
        (true, None) => Some(view(folder, &probe, group.process())),
        (true, Some(write_error)) => {
            Some(View { faults: if is_first { vec![write_error] } else { Vec::new() }, ..View::default() })
        }
    };
    let views = group.gather("views", &view)?;
    drop(held);
    if let Some(created) = created {
        let _ = fs::remove_file(probe.file(folder));
        let _ = fs::remove_file(probe.lock(folder));
        created.remove();
    }
    Ok(views)
}

/// Writes and locks the probe. The lock is held until the returned file is closed.
fn write(folder: &Path, probe: &Probe) -> io::Result<File> {
    let lock = File::create(probe.lock(folder))?;
    // If locks are not supported, others notice when they try.
    let _ = lock.try_lock();
    let mut file = File::create(probe.file(folder))?;
    file.write_all(probe.content.as_bytes())?;
    file.sync_all()?;
    Ok(lock)
}

fn view(folder: &Path, probe: &Probe, process: usize) -> View {
    let mut view = View { free_bytes: free_bytes(folder), ..View::default() };
    if folder.exists() && !folder.is_dir() {
        view.faults.push(format!("{} is not a folder", folder.display()));
        return view;
    }
    let begin = Instant::now();
    let is_visible = || fs::read_to_string(probe.file(folder)).is_ok_and(|content| content == probe.content);
    let mut is_seen = is_visible();
    while !is_seen && begin.elapsed() < VISIBILITY_TIMEOUT {
        thread::sleep(POLL_INTERVAL);
        is_seen = is_visible();
    }
    if is_seen {
        view.seen_after_ms = Some(begin.elapsed().as_secs_f64() * 1e3);
        match lock_of(&probe.lock(folder)) {
            Ok(lock) => view.lock = Some(lock),
            Err(error) => view.faults.push(failure_text("lock a file of", folder, &error)),
        }
    } else {
        let waited = VISIBILITY_TIMEOUT.as_secs();
        view.faults.push(format!(
            "a file that process 0 wrote to {} did not appear within {waited} s: it is not the same folder",
            folder.display()
        ));
    }
    let process_file = folder.join(format!("{}-{process}", probe.name));
    match File::create(&process_file).and_then(|mut file| file.write_all(b"x").and_then(|()| file.sync_all()))
    {
        Ok(()) => {}
        Err(error) => view.faults.push(failure_text("write to", folder, &error)),
    }
    let _ = fs::remove_file(process_file);
    view
}

/// The effect of a lock that another process holds.
fn lock_of(file: &Path) -> io::Result<Lock> {
    match File::open(file)?.try_lock() {
        Err(TryLockError::WouldBlock) => Ok(Lock::Excludes),
        Ok(()) => Ok(Lock::Ignored),
        Err(TryLockError::Error(error)) if is_unsupported(&error) => Ok(Lock::Unsupported),
        Err(TryLockError::Error(error)) => Err(error),
    }
}

fn is_unsupported(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::Unsupported
        || error.raw_os_error() == Some(rustix::io::Errno::NOLCK.raw_os_error())
}

fn free_bytes(folder: &Path) -> Option<u64> {
    let found = rustix::fs::statvfs(folder).ok()?;
    Some(found.f_bavail * found.f_frsize)
}

fn failure_text(action: &str, folder: &Path, error: &io::Error) -> String {
    format!("cannot {action} {}: {error}", folder.display())
}

/// Folders created for the probe.
struct CreatedFolders(Vec<PathBuf>);

impl CreatedFolders {
    /// Creates a folder and its parents. Failures show when it is written to.
    fn create(folder: &Path) -> Self {
        let missing =
            folder.ancestors().take_while(|folder| !folder.as_os_str().is_empty() && !folder.exists());
        let created = missing.map(Path::to_owned).collect();
        let _ = fs::create_dir_all(folder);
        Self(created)
    }

    /// Removes those that are empty.
    fn remove(self) {
        self.0.iter().for_each(|folder| drop(fs::remove_dir(folder)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn held_lock_excludes_and_released_lock_is_ignored() {
        let dir = tempfile::tempdir().unwrap();
        let probe = Probe { name: "probe".to_owned(), content: "x".to_owned() };
        let held = write(dir.path(), &probe).unwrap();
        let seen = view(dir.path(), &probe, 3);
        assert_eq!((seen.lock, &*seen.faults), (Some(Lock::Excludes), &[][..]));
        assert!(seen.free_bytes.is_some() && seen.seen_after_ms.is_some_and(|ms| ms < 1e3), "{seen:?}");
        drop(held);
        assert_eq!(lock_of(&probe.lock(dir.path())).unwrap(), Lock::Ignored);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2, "its own file is removed");
    }

    #[test]
    fn look_cleans_up_and_reports_unwritable_folder() {
        let dir = tempfile::tempdir().unwrap();
        let group = ProcessGroup::of(None);
        let views = examine(&group, &dir.path().join("a/b"), true).unwrap().unwrap();
        assert_eq!(views[0].as_ref().unwrap().lock, Some(Lock::Excludes));
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
        fs::write(dir.path().join("file"), "").unwrap();
        let views = examine(&ProcessGroup::of(None), &dir.path().join("file"), true).unwrap().unwrap();
        let faults = &views[0].as_ref().unwrap().faults;
        assert!(faults[0].starts_with("cannot write to ") && faults[0].contains("file"), "{faults:?}");
    }
}
