//! Output of processes with `--log-dir`: files in `LOG/attempt-A/rank-R/`; the first process also writes to the
//! console.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;

use crate::cluster::LOG_DIR;

/// The number of the next attempt, after those with logs in the folder.
pub(super) fn next(dir: &Path) -> u32 {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let number =
        |entry: fs::DirEntry| entry.file_name().to_str()?.strip_prefix("attempt-")?.parse::<u32>().ok();
    entries.filter_map(number).max().map_or(0, |last| last + 1)
}

/// The folder of a process of an attempt.
pub(super) fn folder(dir: &Path, attempt: u32, process: usize) -> PathBuf {
    dir.join(format!("attempt-{attempt}")).join(format!("rank-{process}"))
}

/// Starts a process whose output goes to files in a folder, and also to the console if it `is_shown`.
pub(super) fn spawn(command: &mut Command, folder: &Path, is_shown: bool) -> io::Result<Child> {
    fs::create_dir_all(folder)?;
    // The path is absolute, since a process may change its directory before it writes there.
    command.env(LOG_DIR, folder.canonicalize()?);
    let [out, err] = ["stdout.log", "stderr.log"].map(|name| File::create(folder.join(name)));
    let (out, err) = (out?, err?);
    if !is_shown {
        return command.stdout(out).stderr(err).spawn();
    }
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    if let (Some(stdout), Some(stderr)) = (child.stdout.take(), child.stderr.take()) {
        copy("stdout of process 0", stdout, out, io::stdout())?;
        copy("stderr of process 0", stderr, err, io::stderr())?;
    }
    Ok(child)
}

/// Copies a stream to a file and to the console, until it ends.
fn copy(
    name: &str,
    mut from: impl Read + Send + 'static,
    mut file: File,
    mut console: impl Write + Send + 'static,
) -> io::Result<()> {
    let copy = move || {
        let mut bytes = [0; 4096];
        while let Ok(count) = from.read(&mut bytes)
            && count > 0
        {
            // A console or disk that fails must not stop the process.
            let _ = file.write_all(&bytes[..count]);
            let _ = console.write_all(&bytes[..count]).and_then(|()| console.flush());
        }
    };
    thread::Builder::new().name(name.to_owned()).spawn(copy).map(drop)
}
