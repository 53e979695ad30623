//! Finds the launcher that started the processes on this node.
//!
//! It need not be the parent: a script may run in between, for example to set rank-dependent variables. Such a script
//! has the launcher's variables in its environment; the launcher itself does not.

use std::fs;
use std::io;
use std::os::unix::process::parent_id;

use super::place::ProcessPlace;

/// A process above this one in the process tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ancestor {
    pid: u32,
    /// Start time, in clock ticks, because process ids are reused. `None` if the system does not report it.
    started: Option<u64>,
}

impl Ancestor {
    /// The launcher: the nearest ancestor that was started without the variable for the local process index. If the
    /// system does not show environments, the parent.
    pub fn launcher(place: &ProcessPlace) -> Self {
        let [_, _, local_process, _] = place.launched_by.variables();
        let mut pid = parent_id();
        while has_variable(pid, local_process)
            && let Some(parent) = stat(pid).map(|stat| stat.parent).filter(|&parent| parent > 0)
        {
            pid = parent;
        }
        Self { pid, started: stat(pid).map(|stat| stat.started) }
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Whether it is still alive.
    pub fn is_alive(&self) -> bool {
        match self.started {
            Some(started) => match read_stat(self.pid) {
                Ok(stat) => stat.is_some_and(|stat| stat.started == started && !stat.is_dead),
                Err(error) => !is_absence(&error),
            },
            None => parent_id() == self.pid,
        }
    }
}

/// Whether a process was started with a variable; false if its environment cannot be read.
fn has_variable(pid: u32, name: &str) -> bool {
    let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
    let is_match =
        |entry: &[u8]| entry.strip_prefix(name.as_bytes()).is_some_and(|rest| rest.starts_with(b"="));
    environment.split(|&byte| byte == 0).any(is_match)
}

/// Fields of Linux's `/proc/<pid>/stat`.
struct Stat {
    parent: u32,
    started: u64,
    /// Whether it has ended but was not reaped.
    is_dead: bool,
}

/// Whether an error says that there is no such process, and not, for example, that file descriptors have run out.
fn is_absence(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound
        || error.raw_os_error() == Some(rustix::io::Errno::SRCH.raw_os_error())
}

fn stat(pid: u32) -> Option<Stat> {
    read_stat(pid).ok().flatten()
}

fn read_stat(pid: u32) -> io::Result<Option<Stat>> {
    fs::read_to_string(format!("/proc/{pid}/stat")).map(|text| parse_stat(&text))
}

fn parse_stat(text: &str) -> Option<Stat> {
    // The program name, in parentheses, may contain any character.
    let (_, fields) = text.rsplit_once(") ")?;
    let fields: Vec<&str> = fields.split(' ').collect();
    Some(Stat {
        parent: fields.get(1)?.parse().ok()?,
        started: fields.get(19)?.parse().ok()?,
        is_dead: matches!(*fields.first()?, "Z" | "X"),
    })
}

#[cfg(test)]
#[cfg(target_os = "linux")]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;
    use crate::process::place::LaunchedBy;

    #[test]
    fn process_is_identified_by_start_time_until_exit() {
        let mut child = Command::new("cat").stdin(Stdio::piped()).env("LOCAL_RANK", "1").spawn().unwrap();
        // The process exists shortly before its new environment is visible.
        while !has_variable(child.id(), "LOCAL_RANK") {
            std::thread::yield_now();
        }
        assert!(!has_variable(child.id(), "LOCAL_RAN"));
        let of = |pid| Ancestor { pid, started: stat(pid).map(|stat| stat.started) };
        let here = of(child.id());
        assert_eq!(stat(child.id()).unwrap().parent, std::process::id());
        assert!(here.is_alive());
        assert!(!Ancestor { started: here.started.map(|started| started + 1), ..here }.is_alive());
        drop(child.stdin.take());
        // Dead before it is reaped, and after.
        while here.is_alive() {
            std::thread::yield_now();
        }
        child.wait().unwrap();
        assert!(!here.is_alive());
    }

    #[test]
    fn launcher_is_parent_without_wrapper_scripts() {
        let place = ProcessPlace {
            launched_by: LaunchedBy::Mvapich,
            process: 0,
            processes: 2,
            local_process: 0,
            local_processes: 2,
        };
        assert_eq!(Ancestor::launcher(&place).pid(), parent_id());
    }
}
