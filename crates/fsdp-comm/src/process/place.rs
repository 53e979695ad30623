//! Determines this process's place among those that a launcher has started, from the variables that the launcher sets.
//!
//! A pure function of the environment, so it can be tested without one. It recognizes only worlds of more than one
//! process.
//!
//! Slurm is recognized by `SLURM_STEP_NUM_TASKS`, which only `srun` sets, for the tasks of a step. In a script of
//! `sbatch`, `SLURM_NTASKS` is the requested number and `SLURM_PROCID` is 0; a command started there without `srun`
//! runs alone.
//!
//! An `mpirun` inside a Slurm job often starts its own helpers with `srun`, one per node, and its processes inherit the
//! variables of that step. The variables of `mpirun` therefore take precedence. `PMI_RANK` alone is ambiguous, because
//! `srun --mpi=pmi2` sets it too, so Hydra (MPICH, Intel MPI) is recognized by `MPI_LOCALRANKID`. A launcher that sets
//! only `PMIX_RANK` does not provide the number of processes and is not recognized.

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

/// The variables of a launcher are inconsistent.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlaceError {
    /// A variable is missing or not a number.
    #[error("{launched_by} has set {present}, but {variable} is {}", value.as_deref().unwrap_or("not set"))]
    NoNumber {
        /// The launcher.
        launched_by: LaunchedBy,
        /// A variable that it has set.
        present: &'static str,
        /// A variable that it should have set too.
        variable: &'static str,
        /// Its value; `None` if it is not set.
        value: Option<String>,
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
    let number = |name: &str| variable(name)?.trim().parse::<usize>().ok();
    let is_several = |(launcher, [process, processes, local_process, _]): &(LaunchedBy, [&str; 4])| {
        number(process).is_some()
            && number(processes).is_some_and(|processes| processes > 1)
            // srun sets PMI_RANK too.
            && (*launcher != LaunchedBy::Hydra || variable(local_process).is_some())
    };
    let found = LAUNCHERS.into_iter().find(is_several);
    found.map(|(launched_by, names)| place(launched_by, names, variable)).transpose()
}

/// Whether a launcher has started this process as the only one; `variable` looks up an environment variable.
pub fn is_only_one(variable: &dyn Fn(&str) -> Option<String>) -> bool {
    let number = |name: &str| variable(name)?.trim().parse::<usize>().ok();
    LAUNCHERS
        .iter()
        .any(|(_, [process, processes, ..])| number(process) == Some(0) && number(processes) == Some(1))
}

fn place(
    launched_by: LaunchedBy,
    names: [&'static str; 4],
    variable: &dyn Fn(&str) -> Option<String>,
) -> Result<ProcessPlace, PlaceError> {
    let number = |name: &'static str| {
        let value = variable(name);
        let parsed = match launched_by {
            LaunchedBy::Srun if name == names[3] => {
                let node = variable("SLURM_NODEID").and_then(|node| node.trim().parse().ok());
                value.as_deref().and_then(|counts| tasks_of_node(counts, node?))
            }
            _ => value.as_deref().and_then(|value| value.trim().parse().ok()),
        };
        parsed.ok_or(PlaceError::NoNumber { launched_by, present: names[0], variable: name, value })
    };
    let check_range = |name: &'static str, process: usize, processes: usize| {
        let error = PlaceError::Range { launched_by, variable: name, process, processes };
        if process < processes { Ok(()) } else { Err(error) }
    };
    let (process, processes) = (number(names[0])?, number(names[1])?);
    let (local_process, local_processes) = (number(names[2])?, number(names[3])?);
    check_range(names[0], process, processes)?;
    check_range(names[2], local_process, local_processes)?;
    if local_processes > processes {
        return Err(PlaceError::TooManyLocal { launched_by, variable: names[3], local_processes, processes });
    }
    Ok(ProcessPlace { launched_by, process, processes, local_process, local_processes })
}

/// Number of tasks on a node, from Slurm's counts per node: `4(x2),3`.
fn tasks_of_node(counts: &str, node: usize) -> Option<usize> {
    let mut first = 0;
    for group in counts.trim().split(',') {
        let (count, times) = match group.split_once("(x") {
            Some((count, times)) => (count, times.strip_suffix(')')?.parse().ok()?),
            None => (group, 1),
        };
        first += times;
        if node < first {
            return count.parse().ok();
        }
    }
    None
}

#[cfg(test)]
mod tests;
