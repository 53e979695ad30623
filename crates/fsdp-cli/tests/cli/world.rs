//! Several processes of one run, started as by a launcher.

use std::cell::RefCell;
use std::net::{Ipv4Addr, TcpListener};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

use crate::support::{Ran, Sandbox};

/// The variables of a launcher: process number, process count, local process number, local process count.
pub(crate) type Variables = [&'static str; 4];

pub(crate) const FSDP: Variables =
    ["FSDP_PROCESS", "FSDP_PROCESSES", "FSDP_LOCAL_PROCESS", "FSDP_LOCAL_PROCESSES"];
pub(crate) const TORCHRUN: Variables = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"];
pub(crate) const OPEN_MPI: Variables = [
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
];
pub(crate) const HYDRA: Variables = ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"];
pub(crate) const SRUN: Variables =
    ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"];

/// Running processes.
pub(crate) struct World {
    children: RefCell<Vec<Option<Child>>>,
}

/// Returns the command of one process of a world.
pub(crate) fn process(sandbox: &Sandbox, variables: Variables, process: usize, processes: usize) -> Command {
    let mut command = sandbox.command();
    let [number, count, local, locals] = variables;
    command
        .env(number, process.to_string())
        .env(count, processes.to_string())
        .env(local, process.to_string())
        .env(locals, processes.to_string())
        .env("SLURM_NODEID", "0")
        .env("TMPDIR", sandbox.path(""))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

impl World {
    /// Starts processes with the same arguments.
    pub(crate) fn start(sandbox: &Sandbox, variables: Variables, processes: usize, args: &str) -> Self {
        Self::start_each(sandbox, variables, processes, |_| args.to_owned())
    }

    /// Starts processes with individual arguments.
    pub(crate) fn start_each(
        sandbox: &Sandbox,
        variables: Variables,
        processes: usize,
        args: impl Fn(usize) -> String,
    ) -> Self {
        Self::of((0..processes).map(|number| {
            let mut command = process(sandbox, variables, number, processes);
            command.args(args(number).split_whitespace());
            command
        }))
    }

    /// Starts processes from their commands.
    pub(crate) fn of(commands: impl Iterator<Item = Command>) -> Self {
        let children = commands.map(|mut command| Some(command.spawn().unwrap()));
        Self { children: RefCell::new(children.collect()) }
    }

    /// Returns the process ID of a process.
    pub(crate) fn id(&self, process: usize) -> u32 {
        self.children.borrow()[process].as_ref().unwrap().id()
    }

    pub(crate) fn signal(&self, process: usize, signal: &str) {
        send(signal, self.id(process));
    }

    /// Returns the exit code of a process; `None` while it runs, `Some(None)` if a signal ended it.
    pub(crate) fn try_wait(&self, process: usize) -> Option<Option<i32>> {
        let mut children = self.children.borrow_mut();
        Some(children[process].as_mut().unwrap().try_wait().unwrap()?.code())
    }

    /// Waits for the end of all processes.
    pub(crate) fn end(self) -> Vec<Ran> {
        let end = |child: &mut Option<Child>| Ran::of(child.take().unwrap().wait_with_output().unwrap());
        self.children.borrow_mut().iter_mut().map(end).collect()
    }

    /// Runs processes that must succeed; returns the output of the first one.
    pub(crate) fn succeed(sandbox: &Sandbox, variables: Variables, processes: usize, args: &str) -> Ran {
        let mut ran = Self::start(sandbox, variables, processes, args).end();
        for (process, ran) in ran.iter().enumerate() {
            assert_eq!(ran.code, Some(0), "process {process} of {processes}: {}", ran.stderr);
        }
        ran.swap_remove(0)
    }
}

impl Drop for World {
    fn drop(&mut self) {
        // A failed test leaves no processes behind.
        for child in self.children.get_mut().iter_mut().flatten() {
            let _ = child.kill().and_then(|()| child.wait());
        }
    }
}

/// Returns a port of this machine on which no process listens, to be assigned to a process.
///
/// A port chosen by the system could be chosen again for another connection before that process listens on it. This one
/// is outside that range (`net.ipv4.ip_local_port_range`), and every call returns another one.
pub(crate) fn free_port() -> u16 {
    const FIRST: u16 = 20_000;
    const COUNT: u16 = 10_000;
    static TAKEN: AtomicU16 = AtomicU16::new(0);
    // Concurrent test processes start at other ports.
    let begin = (std::process::id() % u32::from(COUNT)) as u16;
    let is_free = |port: &u16| TcpListener::bind((Ipv4Addr::UNSPECIFIED, *port)).is_ok();
    let mut ports = std::iter::repeat_with(|| TAKEN.fetch_add(1, Ordering::Relaxed))
        .map(|number| FIRST + (begin + number % COUNT) % COUNT);
    ports.find(is_free).expect("the ports do not end")
}

pub(crate) fn send(signal: &str, pid: u32) {
    let kill = format!("kill -{signal} {pid}");
    assert!(Command::new("sh").args(["-c", &kill]).status().unwrap().success(), "{kill}");
}

/// A condition that takes longer never holds, on any machine and under any load.
const HANGS_AFTER: Duration = Duration::from_secs(600);

/// Waits until a condition holds; panics after [`HANGS_AFTER`].
pub(crate) fn wait_until(what: &str, holds: impl Fn() -> bool) {
    let begin = Instant::now();
    while !holds() {
        assert!(begin.elapsed() < HANGS_AFTER, "{what} does not come");
        std::thread::sleep(Duration::from_millis(10));
    }
}
