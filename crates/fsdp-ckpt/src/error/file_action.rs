//! Names of file operations for messages, and advice for when one fails.

use std::{fmt, io};

/// A file operation, named so that it completes "failed to ...".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FileAction {
    /// Open a file for reading or writing.
    Open,
    /// List a directory.
    List,
    /// Read from a file.
    Read,
    /// Create a file.
    Create,
    /// Set the length of a file.
    Resize,
    /// Allocate disk space for a file before it is written.
    Allocate,
    /// Query the free space of a disk.
    Measure,
    /// Write to a file.
    Write,
    /// Make a file or a directory durable.
    Sync,
    /// Give a file its final name.
    Rename,
    /// Remove a file.
    Remove,
    /// Lock a file against other processes.
    Lock,
    /// Copy an object to this machine.
    Copy,
}

impl fmt::Display for FileAction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            FileAction::Open => "open",
            FileAction::List => "list",
            FileAction::Read => "read",
            FileAction::Create => "create",
            FileAction::Resize => "set the length of",
            FileAction::Allocate => "allocate disk space for",
            FileAction::Measure => "ask for the free disk space of",
            FileAction::Write => "write",
            FileAction::Sync => "sync",
            FileAction::Rename => "rename",
            FileAction::Remove => "remove",
            FileAction::Lock => "lock",
            FileAction::Copy => "copy",
        })
    }
}

/// Advice for the user about an error of the operating system.
pub(super) fn advice(cause: &io::Error) -> &'static str {
    match cause.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            "; free space or choose a directory on another disk"
        }
        io::ErrorKind::NotFound => "; check that the path exists",
        io::ErrorKind::PermissionDenied => "; check the permissions of the file and its directory",
        io::ErrorKind::ReadOnlyFilesystem => "; choose a directory on a file system that can be written",
        io::ErrorKind::UnexpectedEof => {
            "; the file became shorter while it was read: fetch or export it again"
        }
        io::ErrorKind::IsADirectory | io::ErrorKind::NotADirectory => "; check which file the path names",
        io::ErrorKind::FileTooLarge => "; choose a smaller shard size or another file system",
        _ => "",
    }
}
