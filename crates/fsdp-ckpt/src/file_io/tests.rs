//! Locked temporary files, and files that cannot be read.

use std::{os::unix::net::UnixListener, process::Command, sync::mpsc, time::Duration};

use super::*;
use crate::files::disk::Disk;
use crate::files::testing::{Fault, FaultyFiles};

const TEMPORARY: &str = "/model.tmp";

fn create_on(files: &FaultyFiles) -> Result<PathFile, Error> {
    Files::of(Arc::new(files.clone())).create_locked(Path::new(TEMPORARY), 10)
}

fn is_there(files: &FaultyFiles) -> bool {
    Files::of(Arc::new(files.with(Fault::None))).link_exists(Path::new(TEMPORARY))
}

#[test]
fn failed_creation_removes_temporary_file() {
    let whole = FaultyFiles::new();
    create_on(&whole).unwrap();
    let mut failures = 0;
    for at in 0..whole.operations() {
        let files = FaultyFiles::new().with(Fault::FailAt(at));
        // Operations that only inspect the file may fail without harm.
        match create_on(&files) {
            Ok(_) => assert!(is_there(&files)),
            Err(error) => {
                failures += 1;
                assert!(!is_there(&files), "operation {at}: {error}");
            }
        }
    }
    assert!(failures >= 4, "opening, locking and twice the length can fail, {failures} did");
}

#[test]
fn temporary_file_of_other_process_is_kept_if_locking_fails() {
    let empty = FaultyFiles::new();
    drop(create_on(&empty).unwrap());
    let failing = (0..empty.operations()).map(|at| empty.with(Fault::FailAt(at)));
    let refused =
        |files: &FaultyFiles| matches!(create_on(files), Err(Error::Io { action: FileAction::Lock, .. }));
    let unlocked: Vec<FaultyFiles> = failing.filter(refused).collect();
    assert_eq!(unlocked.len(), 1);
    assert!(is_there(&unlocked[0]));
}

#[test]
fn files_are_created_without_lock_support() {
    let files = FaultyFiles::new().with(Fault::NoLocks);
    let created = create_on(&files).unwrap();
    assert_eq!(created.len().unwrap(), 10);
}

#[test]
fn special_files_are_rejected_without_blocking() {
    let dir = tempfile::tempdir().unwrap();
    let pipe = dir.path().join("pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let socket = dir.path().join("socket");
    let _listener = UnixListener::bind(&socket).unwrap();
    let link = dir.path().join("link");
    std::os::unix::fs::symlink("/dev/zero", &link).unwrap();
    let expected = [
        (pipe, "a named pipe"),
        (socket, "a socket"),
        (link, "a device"),
        (PathBuf::from("/dev/null"), "a device"),
    ];
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        for (path, expected) in expected {
            for error in [
                Files::anywhere().open(&path).unwrap_err(),
                Files::anywhere().read_small(&path, 100).unwrap_err(),
            ] {
                sender.send((error.to_string(), expected)).unwrap();
            }
        }
    });
    for _ in 0..8 {
        let (error, expected) =
            receiver.recv_timeout(Duration::from_secs(600)).expect("nothing is waited for");
        assert!(error.contains(&format!(" is {expected}, not a regular file")), "{error}");
    }
}

#[test]
fn named_pipe_open_never_blocks() {
    let dir = tempfile::tempdir().unwrap();
    let pipe = dir.path().join("pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        let found = Disk.open(&pipe, Access::Read).unwrap().metadata().unwrap();
        sender.send((found.kind, Disk.open(&pipe, Access::Write).is_err())).unwrap();
    });
    let found = receiver.recv_timeout(Duration::from_secs(600)).expect("nothing is waited for");
    assert_eq!(found, (FileKind::Other("a named pipe"), true));
}
