//! Reads files that users name: only regular files, and only up to a sensible size.
//!
//! A FIFO would block until a writer appears, and a device such as `/dev/zero` never ends. The file type is taken from
//! the open file, so that it cannot change in between; opening does not block.

use std::fs::{File, FileType, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::OFlags;

/// Size limit of a run file, `config.json` or `fsdp_config.json`: files written by hand have a few kilobytes.
pub const CONFIG_BYTES_MAX: u64 = 1 << 20;
/// Size limit of a measurement file: a calibration of a machine with hundreds of threads has a few megabytes.
pub const MEASUREMENT_BYTES_MAX: u64 = 64 << 20;
/// Size limit of a `tokenizer.json`: the largest published ones have some 30 MiB.
pub const TOKENIZER_BYTES_MAX: u64 = 256 << 20;

/// The reason why a file is refused. It is wrapped in an [`io::Error`], like all other reasons why a file cannot be
/// read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InputFault {
    /// It is not a regular file.
    #[error("it is {what}, not a regular file")]
    NotRegular {
        /// Its actual type.
        what: &'static str,
    },
    /// It exceeds the size limit.
    #[error("it has more than {bytes_max} bytes, the maximum for such a file")]
    TooLong {
        /// The limit in bytes.
        bytes_max: u64,
    },
}

/// Opens a regular file, following links.
///
/// # Errors
/// Errors of the file system, and [`InputFault::NotRegular`].
pub fn open(path: &Path) -> io::Result<File> {
    let file =
        OpenOptions::new().read(true).custom_flags(OFlags::NONBLOCK.bits().cast_signed()).open(path)?;
    let kind_of = file.metadata()?.file_type();
    if kind_of.is_file() {
        Ok(file)
    } else {
        Err(io::Error::other(InputFault::NotRegular { what: kind(kind_of) }))
    }
}

/// Reads a regular file, following links, up to `bytes_max` bytes.
///
/// # Errors
/// Errors of the file system, and [`InputFault`].
pub fn read(path: &Path, bytes_max: u64) -> io::Result<Vec<u8>> {
    let file = open(path)?;
    let metadata = file.metadata()?;
    let too_long = || io::Error::other(InputFault::TooLong { bytes_max });
    if metadata.len() > bytes_max {
        return Err(too_long());
    }
    // Some regular files (those of /proc) report a length of 0 and are not empty.
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(usize::try_from(metadata.len()).unwrap_or(usize::MAX))?;
    file.take(bytes_max.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > bytes_max { Err(too_long()) } else { Ok(bytes) }
}

/// Reads a regular file as text.
///
/// # Errors
/// As [`read`]; [`io::ErrorKind::InvalidData`] when it is not UTF-8.
pub fn read_text(path: &Path, bytes_max: u64) -> io::Result<String> {
    let text = String::from_utf8(read(path, bytes_max)?);
    text.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error.utf8_error()))
}

fn kind(kind: FileType) -> &'static str {
    if kind.is_dir() {
        "a directory"
    } else if kind.is_fifo() {
        "a FIFO"
    } else if kind.is_char_device() || kind.is_block_device() {
        "a device"
    } else if kind.is_socket() {
        "a socket"
    } else {
        "a special file"
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;
    use std::os::unix::net::UnixListener;

    use rustix::fs::{CWD, FileType as NodeType, Mode, mknodat};

    use super::*;

    fn fault(path: &Path) -> InputFault {
        let error = read(path, 100).unwrap_err();
        *error.get_ref().and_then(|inner| inner.downcast_ref()).unwrap_or_else(|| panic!("{error}"))
    }

    #[test]
    fn non_regular_file_is_rejected_without_blocking() {
        let dir = tempfile::tempdir().unwrap();
        let [fifo, socket, link] = ["fifo", "socket", "link"].map(|name| dir.path().join(name));
        mknodat(CWD, &fifo, NodeType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        symlink(&fifo, &link).unwrap();
        let _listener = UnixListener::bind(&socket).unwrap();
        assert_eq!(fault(&fifo), InputFault::NotRegular { what: "a FIFO" });
        assert_eq!(fault(&link), InputFault::NotRegular { what: "a FIFO" });
        assert_eq!(fault(dir.path()), InputFault::NotRegular { what: "a directory" });
        assert_eq!(fault(Path::new("/dev/zero")), InputFault::NotRegular { what: "a device" });
        // A socket cannot even be opened.
        assert!(read(&socket, 100).is_err());
    }

    #[test]
    fn regular_file_is_read_through_links_up_to_limit() {
        let dir = tempfile::tempdir().unwrap();
        let [file, link] = ["file", "link"].map(|name| dir.path().join(name));
        symlink(&file, &link).unwrap();
        for len in [0, 99, 100] {
            fs::write(&file, vec![b'x'; len]).unwrap();
            assert_eq!(read_text(&link, 100).unwrap(), "x".repeat(len));
        }
        fs::write(&file, [b'x'; 101]).unwrap();
        assert_eq!(fault(&file), InputFault::TooLong { bytes_max: 100 });
        // Its metadata reports a length of 0.
        assert_eq!(fault(Path::new("/proc/self/mountinfo")), InputFault::TooLong { bytes_max: 100 });
        assert!(!read(Path::new("/proc/self/status"), u64::MAX).unwrap().is_empty());
    }

    #[test]
    fn non_utf8_text_error_names_byte_index() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        fs::write(&file, b"ab\xffc").unwrap();
        let error = read_text(&file, 100).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        assert!(error.to_string().contains("index 2"), "{error}");
    }
}
