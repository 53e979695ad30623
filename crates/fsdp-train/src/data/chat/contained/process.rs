//! A worker, seen from the process that started it.

use std::ffi::OsString;
use std::io::{self, BufRead, BufReader, BufWriter, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use rustix::process::Signal;
use serde::de::DeserializeOwned;

use super::limits::{MEMORY_BYTES, TIME};
use crate::data::chat::setup::Setup;
use crate::data::encoder::EncodeFault;
use crate::data::error::DataError;

/// A running worker.
#[derive(Debug)]
pub(in crate::data::chat) struct Process {
    child: Child,
    stream: BufReader<UnixStream>,
}

impl Process {
    /// Starts a process that compiles the templates.
    ///
    /// # Errors
    /// [`EncodeFault::Template`] if they do not compile within the limits, [`EncodeFault::Data`] if there is no process.
    pub(super) fn start(arguments: &[OsString], setup: &Setup) -> Result<Process, EncodeFault> {
        let mut process = Process::spawn(arguments).map_err(|source| DataError::ChatProcess { source })?;
        let setup = serde_json::to_vec(setup).expect("it has only texts as keys");
        process.ask(&[&setup])?;
        process.answer::<Result<(), String>>()?.map_err(EncodeFault::Template)?;
        Ok(process)
    }

    /// Sends a batch of questions.
    ///
    /// # Errors
    /// As for [`answer`](Process::answer).
    pub(super) fn ask(&mut self, questions: &[&[u8]]) -> Result<(), EncodeFault> {
        let mut output = BufWriter::new(self.stream.get_ref());
        let mut write_line = |line: &[u8]| output.write_all(line).and_then(|()| output.write_all(b"\n"));
        let mut lines = questions.iter().copied().chain([&[][..]]);
        let sent = lines.try_for_each(&mut write_line).and_then(|()| output.flush());
        // What is left in it cannot be sent.
        drop(output.into_parts());
        sent.map_err(|fault| self.end(fault))
    }

    /// Returns the next answer.
    ///
    /// # Errors
    /// [`EncodeFault::Template`] if the process has exceeded a limit, [`EncodeFault::Data`] if it has ended otherwise.
    pub(super) fn answer<A: DeserializeOwned>(&mut self) -> Result<A, EncodeFault> {
        let mut line = Vec::new();
        let answer =
            self.stream.read_until(b'\n', &mut line).and_then(|_| Ok(serde_json::from_slice(&line)?));
        answer.map_err(|fault| self.end(fault))
    }

    /// Starts this executable. Its standard input is a socket, for both directions. It is in a process group of its
    /// own, because Ctrl-C is for this process to answer, and ends when the socket is closed.
    fn spawn(arguments: &[OsString]) -> io::Result<Process> {
        let (stream, theirs) = UnixStream::pair()?;
        // On Linux the same executable starts even if its file was replaced.
        let own = PathBuf::from("/proc/self/exe");
        let executable = if own.exists() { own } else { std::env::current_exe()? };
        let child = Command::new(executable)
            .args(arguments)
            .stdin(OwnedFd::from(theirs))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()?;
        Ok(Process { child, stream: BufReader::new(stream) })
    }

    #[cfg(all(test, feature = "tokenizers"))]
    pub(super) fn kill(&mut self) {
        self.child.kill().expect("it runs");
    }

    /// Explains the end of a process that does not answer.
    fn end(&mut self, fault: io::Error) -> EncodeFault {
        // It has ended, or is of no use.
        let _ = self.child.kill();
        let status = match self.child.wait() {
            Ok(status) => status,
            Err(source) => return DataError::ChatProcess { source }.into(),
        };
        let signal = status.signal().and_then(Signal::from_named_raw);
        match signal {
            Some(Signal::XCPU) => EncodeFault::Template(format!(
                "the chat template takes more than {} s for one conversation, or for several that fail",
                TIME.as_secs()
            )),
            Some(Signal::ABORT | Signal::BUS | Signal::ILL | Signal::SEGV) => EncodeFault::Template(format!(
                "the chat template nests too deeply, or needs more memory for one conversation than it may have ({} MB, \
                 unless ulimit -v allows less)",
                MEMORY_BYTES >> 20
            )),
            _ => {
                let reason = format!("it ended with {status} ({fault})");
                DataError::ChatProcess { source: io::Error::new(io::ErrorKind::ConnectionReset, reason) }
                    .into()
            }
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Without an effect if it has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
