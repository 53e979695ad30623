//! The behavior that every file system must have, disk and object stores alike.

use std::{ffi::OsString, io::ErrorKind, path::Path};

use super::{Access, FileKind, FileSystem, OpenFile, disk::Disk};

/// Runs all checks in a new directory, whose parent must exist.
pub(crate) fn check(files: &dyn FileSystem, dir: &Path) {
    files.create_directory(dir).unwrap();
    a_file_is_read_as_it_was_written(files, dir);
    bytes_are_written_in_any_order_by_any_thread(files, dir);
    what_is_not_there_is_not_found(files, dir);
    names_are_listed_and_told_apart(files, dir);
    a_new_file_is_refused_where_one_is(files, dir);
    what_is_removed_is_gone(files, dir);
}

fn write(files: &dyn FileSystem, path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let file = files.open(path, Access::CreateNew)?;
    write_all(&*file, bytes, 0);
    file.sync()?;
    files.sync_directory(path.parent().unwrap())
}

fn write_all(file: &dyn OpenFile, mut bytes: &[u8], mut offset: u64) {
    while !bytes.is_empty() {
        let count = file.write_at(bytes, offset).unwrap();
        (bytes, offset) = (&bytes[count..], offset + count as u64);
    }
}

fn read(files: &dyn FileSystem, path: &Path, offset: u64, len: usize) -> Vec<u8> {
    let file = files.open(path, Access::Read).unwrap();
    let (mut bytes, mut done) = (vec![0; len], 0);
    while done < len {
        match file.read_at(&mut bytes[done..], offset + done as u64).unwrap() {
            0 => break,
            count => done += count,
        }
    }
    bytes.truncate(done);
    bytes
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|index| (index * 31 + index / 251) as u8).collect()
}

fn a_file_is_read_as_it_was_written(files: &dyn FileSystem, dir: &Path) {
    let path = dir.join("plain");
    let bytes = pattern(300_001);
    write(files, &path, &bytes).unwrap();
    assert_eq!(files.metadata(&path).unwrap().len, bytes.len() as u64);
    assert_eq!(files.open(&path, Access::Read).unwrap().metadata().unwrap().len, bytes.len() as u64);
    for (offset, len) in [(0, 300_001), (0, 8), (7, 1), (262_100, 100), (100_000, 200_001), (299_990, 11)] {
        assert_eq!(read(files, &path, offset, len), bytes[offset as usize..offset as usize + len]);
    }
    assert_eq!(read(files, &path, 300_000, 10), bytes[300_000..]);
    assert!(read(files, &path, 300_001, 10).is_empty() && read(files, &path, 1 << 40, 10).is_empty());
    write(files, &dir.join("empty"), b"").unwrap();
    assert_eq!(files.metadata(&dir.join("empty")).unwrap().len, 0);
}

fn bytes_are_written_in_any_order_by_any_thread(files: &dyn FileSystem, dir: &Path) {
    const PIECE: usize = 1000;
    for (name, len) in [("short", 5), ("long", 100 * PIECE), ("odd", 99 * PIECE + 1)] {
        let (path, bytes) = (dir.join(name), pattern(len));
        let file = files.open(&path, Access::CreateNew).unwrap();
        file.set_len(len as u64).unwrap();
        // The last piece is not written, so it stays zeros.
        let pieces: Vec<&[u8]> = bytes.chunks(PIECE).collect();
        let written = pieces.len() - 1;
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let (pieces, path) = (&pieces, &path);
                scope.spawn(move || {
                    let same = files.open(path, Access::Write).unwrap();
                    for index in (0..written).rev().filter(|index| index % 4 == thread) {
                        write_all(&*same, pieces[index], (index * PIECE) as u64);
                    }
                });
            }
        });
        file.sync().unwrap();
        let mut expected = bytes.clone();
        expected[written * PIECE..].fill(0);
        assert_eq!(read(files, &path, 0, len + 1), expected, "{name}");
    }
}

fn what_is_not_there_is_not_found(files: &dyn FileSystem, dir: &Path) {
    let path = dir.join("not-there");
    assert_eq!(files.metadata(&path).unwrap_err().kind(), ErrorKind::NotFound);
    for access in [Access::Read, Access::Write] {
        assert_eq!(files.open(&path, access).unwrap_err().kind(), ErrorKind::NotFound);
    }
}

fn names_are_listed_and_told_apart(files: &dyn FileSystem, dir: &Path) {
    let inner = dir.join("inner");
    files.create_directory(&inner).unwrap();
    files.create_directory(&inner.join("deep")).unwrap();
    for name in ["b", "a", "a.b", "deep/c"] {
        write(files, &inner.join(name), name.as_bytes()).unwrap();
    }
    let mut names = files.list(&inner).unwrap();
    names.sort();
    assert_eq!(names, ["a", "a.b", "b", "deep"].map(OsString::from));
    let kind = |name: &str| files.metadata(&inner.join(name)).unwrap().kind;
    assert_eq!(
        [kind("a"), kind("deep"), kind("deep/c")],
        [FileKind::File, FileKind::Directory, FileKind::File]
    );
}

fn a_new_file_is_refused_where_one_is(files: &dyn FileSystem, dir: &Path) {
    let path = dir.join("first");
    write(files, &path, b"first").unwrap();
    assert_eq!(write(files, &path, b"second").unwrap_err().kind(), ErrorKind::AlreadyExists);
    assert_eq!(read(files, &path, 0, 10), b"first");
}

fn what_is_removed_is_gone(files: &dyn FileSystem, dir: &Path) {
    let (gone, stays) = (dir.join("gone/file"), dir.join("stays"));
    files.create_directory(&dir.join("gone")).unwrap();
    [&gone, &stays].into_iter().for_each(|path| write(files, path, b"x").unwrap());
    files.remove_file(&gone).unwrap();
    files.remove_directory(&dir.join("gone")).unwrap();
    for path in [&gone, &dir.join("gone")] {
        assert_eq!(files.metadata(path).unwrap_err().kind(), ErrorKind::NotFound);
    }
    assert_eq!(read(files, &stays, 0, 1), b"x");
}

#[test]
fn disk_passes_conformance_checks() {
    let dir = tempfile::tempdir().unwrap();
    check(&Disk, &dir.path().join("dir"));
}
