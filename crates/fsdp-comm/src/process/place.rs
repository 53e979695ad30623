//! Determines this process's place among those that a launcher has started, from the variables that the launcher sets.
//!
//! A pure function of the environment, so it can be tested without one.
//!
//! The innermost launcher decides, even if it has started only one process: the variables of the launchers around it
//! count that launcher, not this process. Variables that no launcher would leave like this (some of a set, a value
//! that is not a number) are errors. If they were ignored, every process would run alone, all into the same folder.
//!
//! Slurm is recognized by `SLURM_STEP_NUM_TASKS`, which only `srun` sets, for the tasks of a step. In a script of
//! `sbatch`, `SLURM_NTASKS` is the requested number and `SLURM_PROCID` is 0; a command started there without `srun`
//! runs alone.
//!
//! An `mpirun` inside a Slurm job often starts its own helpers with `srun`, one per node, and its processes inherit the
//! variables of that step. The variables of `mpirun` therefore take precedence. `PMI_RANK` alone is ambiguous, because
//! `srun --mpi=pmi2` sets it too, so Hydra (MPICH, Intel MPI) is recognized by `MPI_LOCALRANKID`, and by `PMI_RANK` only
//! if there is no other launcher. A launcher that sets only `PMIX_RANK` does not provide the number of processes and is
//! not recognized.

use std::fmt;

/// The launcher that started the processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LaunchedBy {
    /// `fsdp launch`.
    Fsdp,
    /// torchrun.
    Torchrun,
    /// mpirun of Open MPI.
    OpenMpi,
    /// mpirun of MPICH or Intel MPI.
    Hydra,
    /// mpirun of MVAPICH.
    Mvapich,
    /// srun of Slurm.
    Srun,
}

impl LaunchedBy {
    /// Every launcher, the innermost first: the first one whose variables are set decides.
    pub const ALL: [LaunchedBy; 6] = {
        let [a, b, c, d, e, f] = &LAUNCHERS;
        [a.0, b.0, c.0, d.0, e.0, f.0]
    };

    /// The variables that must be set together.
    fn needed(self) -> Vec<&'static str> {
        let node = (self == LaunchedBy::Srun).then_some(SRUN_NODE);
        self.variables().into_iter().chain(node).collect()
    }

    /// The variables that identify it: process index, number of processes, and both again within the node.
    pub fn variables(self) -> [&'static str; 4] {
        let entry = LAUNCHERS.into_iter().find(|(launcher, _)| *launcher == self);
        entry.expect("every launcher has variables").1
    }

    /// Whether its processes can initialize MPI.
    pub fn has_mpi(self) -> bool {
        matches!(self, LaunchedBy::OpenMpi | LaunchedBy::Hydra | LaunchedBy::Mvapich)
    }
}

impl fmt::Display for LaunchedBy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            LaunchedBy::Fsdp => "fsdp launch",
            LaunchedBy::Torchrun => "torchrun",
            LaunchedBy::OpenMpi => "mpirun (Open MPI)",
            LaunchedBy::Hydra => "mpirun (MPICH, Intel MPI)",
            LaunchedBy::Mvapich => "mpirun (MVAPICH)",
            LaunchedBy::Srun => "srun",
        })
    }
}

/// The place of a process in a world of several.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessPlace {
    /// The launcher.
    pub launched_by: LaunchedBy,
    /// Index of the process, from 0. Processes of one node have consecutive indices.
    pub process: usize,
    /// Number of processes.
    pub processes: usize,
    /// Index on its node, from 0.
    pub local_process: usize,
    /// Number of processes on its node.
    pub local_processes: usize,
}

impl ProcessPlace {
    /// Number of nodes; 1 if they have different numbers of processes, which this process cannot count.
    pub fn nodes(self) -> usize {
        match self.processes.is_multiple_of(self.local_processes) {
            true => self.processes / self.local_processes,
            false => 1,
        }
    }

    /// Whether all processes are on this node.
    pub fn is_one_node(&self) -> bool {
        self.local_processes == self.processes
    }
}

/// The variables of each launcher, the innermost launcher first: torchrun is often started by srun or mpirun.
const LAUNCHERS: [(LaunchedBy, [&str; 4]); 6] = [
    (LaunchedBy::Fsdp, ["FSDP_PROCESS", "FSDP_PROCESSES", "FSDP_LOCAL_PROCESS", "FSDP_LOCAL_PROCESSES"]),
    (LaunchedBy::Torchrun, ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"]),
    (
        LaunchedBy::OpenMpi,
        [
            "OMPI_COMM_WORLD_RANK",
            "OMPI_COMM_WORLD_SIZE",
            "OMPI_COMM_WORLD_LOCAL_RANK",
            "OMPI_COMM_WORLD_LOCAL_SIZE",
        ],
    ),
    (LaunchedBy::Hydra, ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"]),
    (
        LaunchedBy::Mvapich,
        [
            "MV2_COMM_WORLD_RANK",
            "MV2_COMM_WORLD_SIZE",
            "MV2_COMM_WORLD_LOCAL_RANK",
            "MV2_COMM_WORLD_LOCAL_SIZE",
        ],
    ),
    (
        LaunchedBy::Srun,
        ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"],
    ),
];

/// The node of a task of srun, from 0: its entry in the tasks of each node.
const SRUN_NODE: &str = "SLURM_NODEID";

/// The variables of a launcher are inconsistent.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlaceError {
    /// A variable is missing.
    #[error(
        "of the variables of {launched_by}, {present} is set, but {missing} is not: set {}, or none of them",
        launched_by.needed().join(", ")
    )]
    Missing {
        /// The launcher.
        launched_by: LaunchedBy,
        /// A variable that is set.
        present: &'static str,
        /// A variable that must then be set too.
        missing: &'static str,
    },
    /// A value is not a number.
    #[error("{variable} of {launched_by} is {value:?}; expected {expected}")]
    NoNumber {
        /// The launcher.
        launched_by: LaunchedBy,
        /// The variable.
        variable: &'static str,
        /// Its value.
        value: String,
        /// What it should be.
        expected: &'static str,
    },
    /// An index is out of range.
    #[error(
        "according to {variable} of {launched_by}, this is process {process} of {processes}, counted from 0"
    )]
    Range {
        /// The launcher.
        launched_by: LaunchedBy,
        /// The variable.
        variable: &'static str,
        /// The index, from 0.
        process: usize,
        /// The number of processes.
        processes: usize,
    },
    /// A node has more processes than there are.
    #[error(
        "according to {variable} of {launched_by}, this node has {local_processes} of {processes} processes"
    )]
    TooManyLocal {
        /// The launcher.
        launched_by: LaunchedBy,
        /// The variable.
        variable: &'static str,
        /// The number of processes of the node.
        local_processes: usize,
        /// The number of all processes.
        processes: usize,
    },
}

/// Returns the place of this process if it is one of several, `None` otherwise; `variable` looks up an environment
/// variable.
///
/// # Errors
/// [`PlaceError`].
pub fn recognize(variable: &dyn Fn(&str) -> Option<String>) -> Result<Option<ProcessPlace>, PlaceError> {
    let Some(launched_by) = innermost(variable) else { return Ok(None) };
    let place = Variables { launched_by, variable }.place()?;
    Ok(Some(place).filter(|place| place.processes > 1))
}

/// Whether a launcher has started this process as the only one; `variable` looks up an environment variable.
pub fn is_only_one(variable: &dyn Fn(&str) -> Option<String>) -> bool {
    let place = innermost(variable).map(|launched_by| Variables { launched_by, variable }.place());
    matches!(place, Some(Ok(ProcessPlace { processes: 1, .. })))
}

/// The innermost launcher that has left any of its variables.
fn innermost(variable: &dyn Fn(&str) -> Option<String>) -> Option<LaunchedBy> {
    let is_set = |name: &&str| variable(name).is_some();
    let has_started = |(launcher, names): &(LaunchedBy, [&str; 4])| match launcher {
        LaunchedBy::Hydra => names[2..].iter().any(is_set),
        // In a script of sbatch, the number of this process is 0.
        LaunchedBy::Srun => {
            [names[1], names[3]].iter().any(is_set)
                || variable(names[0]).is_some_and(|number| number.trim() != "0")
        }
        _ => names.iter().any(is_set),
    };
    let found = LAUNCHERS.iter().find(|entry| has_started(entry)).map(|(launcher, _)| *launcher);
    let is_pmi = || LaunchedBy::Hydra.variables()[..2].iter().any(is_set);
    found.or_else(|| is_pmi().then_some(LaunchedBy::Hydra))
}

/// The variables of the launcher that decides.
struct Variables<'a> {
    launched_by: LaunchedBy,
    variable: &'a dyn Fn(&str) -> Option<String>,
}

impl Variables<'_> {
    fn place(&self) -> Result<ProcessPlace, PlaceError> {
        let launched_by = self.launched_by;
        let names @ [process, processes, local_process, local_processes] = launched_by.variables();
        let check_range = |name: &'static str, process: usize, processes: usize| {
            let error = PlaceError::Range { launched_by, variable: name, process, processes };
            if process < processes { Ok(()) } else { Err(error) }
        };
        let [process, processes] = [self.number(process)?, self.number(processes)?];
        check_range(names[0], process, processes)?;
        // Some operators for Kubernetes number their pods, but not the processes of a pod.
        let is_implied = |name| processes == 1 && (self.variable)(name).is_none();
        let local_process = if is_implied(local_process) { 0 } else { self.number(local_process)? };
        let local_processes = match local_processes {
            name if is_implied(name) => 1,
            name if launched_by == LaunchedBy::Srun => self.tasks_here(name)?,
            name => self.number(name)?,
        };
        check_range(names[2], local_process, local_processes)?;
        if local_processes > processes {
            return Err(PlaceError::TooManyLocal {
                launched_by,
                variable: names[3],
                local_processes,
                processes,
            });
        }
        Ok(ProcessPlace { launched_by, process, processes, local_process, local_processes })
    }

    fn text(&self, name: &'static str) -> Result<String, PlaceError> {
        let launched_by = self.launched_by;
        (self.variable)(name).ok_or_else(|| {
            let is_set = |name: &&str| (self.variable)(name).is_some();
            let present = launched_by.variables().into_iter().find(is_set);
            let present = present.expect("a launcher is recognized by its variables");
            PlaceError::Missing { launched_by, present, missing: name }
        })
    }

    fn number(&self, name: &'static str) -> Result<usize, PlaceError> {
        let value = self.text(name)?;
        value.trim().parse().map_err(|_| self.no_number(name, value, "a number"))
    }

    /// The number of tasks of srun on this node.
    fn tasks_here(&self, name: &'static str) -> Result<usize, PlaceError> {
        let (counts, node) = (self.text(name)?, self.number(SRUN_NODE)?);
        let expected =
            "the number of tasks on each node, such as 4(x2),3, that of node SLURM_NODEID included";
        tasks_of_node(&counts, node).ok_or_else(|| self.no_number(name, counts, expected))
    }

    fn no_number(&self, variable: &'static str, value: String, expected: &'static str) -> PlaceError {
        PlaceError::NoNumber { launched_by: self.launched_by, variable, value, expected }
    }
}

/// Number of tasks on a node, from Slurm's counts per node: `4(x2),3`.
fn tasks_of_node(counts: &str, node: usize) -> Option<usize> {
    let mut first = 0;
    for group in counts.trim().split(',') {
        let (count, times) = match group.split_once("(x") {
            Some((count, times)) => (count, times.strip_suffix(')')?.parse().ok()?),
            None => (group, 1),
        };
        first = usize::saturating_add(first, times);
        if node < first {
            return count.parse().ok();
        }
    }
    None
}

#[cfg(test)]
mod tests;
