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

use super::limits::Limits;
use crate::chat::fault::EncodeFault;
use crate::chat::setup::Setup;
use crate::error::DataError;

/// A running worker.
#[derive(Debug)]
pub(in crate::chat) struct Process {
    child: Child,
    stream: BufReader<UnixStream>,
    limits: Limits,
    /// The memory that it has for templates; `None` until it says so.
    memory_bytes: Option<u64>,
}

impl Process {
    /// Starts a process that compiles the templates.
    ///
    /// # Errors
    /// [`EncodeFault::Template`] if they do not compile within the limits, [`EncodeFault::Data`] if there is no process.
    pub(super) fn start(
        arguments: &[OsString],
        limits: Limits,
        setup: &Setup,
    ) -> Result<Process, EncodeFault> {
        let mut process =
            Process::spawn(arguments, limits).map_err(|source| DataError::ChatProcess { source })?;
        let limits = serde_json::to_vec(&limits).expect("it is a struct");
        let setup = serde_json::to_vec(setup).expect("it has only texts as keys");
        process.ask(&[&limits, &setup])?;
        process.memory_bytes = Some(process.answer()?);
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
    fn spawn(arguments: &[OsString], limits: Limits) -> io::Result<Process> {
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
        Ok(Process { child, stream: BufReader::new(stream), limits, memory_bytes: None })
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
        let Limits { memory_bytes: most, time } = self.limits;
        let other = |kind, reason| DataError::ChatProcess { source: io::Error::new(kind, reason) }.into();
        match (signal, self.memory_bytes) {
            (_, None) => other(
                io::ErrorKind::OutOfMemory,
                format!("it ended with {status} before it was ready; is there enough memory (ulimit -v)?"),
            ),
            (Some(Signal::XCPU), _) => EncodeFault::Template(format!(
                "the chat template takes more than {} s for one conversation, or for several that fail",
                time.as_secs_f64()
            )),
            (Some(Signal::ABORT | Signal::BUS | Signal::ILL | Signal::SEGV), Some(left)) if left < most => {
                let reason = format!(
                    "it ended with {status}: it has {} MB of memory, but a chat template may need {} MB for one conversation; \
                     raise the limit (ulimit -v)",
                    left >> 20,
                    most >> 20
                );
                other(io::ErrorKind::OutOfMemory, reason)
            }
            (Some(Signal::ABORT | Signal::BUS | Signal::ILL | Signal::SEGV), _) => {
                EncodeFault::Template(format!(
                    "the chat template nests too deeply, or needs more memory for one conversation than it may have ({} MB)",
                    most >> 20
                ))
            }
            _ => other(io::ErrorKind::ConnectionReset, format!("it ended with {status} ({fault})")),
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
