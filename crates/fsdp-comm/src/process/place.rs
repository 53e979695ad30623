//! Who this process is among those that a launcher has started, by the variables that the launcher sets.
//!
//! A pure function of the environment, so that it is tested without one. It looks for worlds of more than one process.
//!
//! Slurm is recognised by `SLURM_STEP_NUM_TASKS`, which only `srun` sets for the tasks of a step. In a script of `sbatch`
//! `SLURM_NTASKS` is what was asked for, and `SLURM_PROCID` is 0; a command that is started there without `srun` is alone.
//!
//! An `mpirun` inside of Slurm often starts its own helpers by `srun`, one per node, and its processes inherit the
//! variables of that step. So those of `mpirun` come first; `PMI_RANK` alone says nothing, because `srun --mpi=pmi2` sets
//! it too, and Hydra (MPICH, Intel MPI) is known by `MPI_LOCALRANKID`. A launcher that sets `PMIX_RANK` only does not say
//! how many processes there are, and is not recognised.

use std::fmt;

/// What has started the processes.
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
    /// The variables by which it is recognised: the number of a process, how many there are, and the same on its node.
    pub fn variables(self) -> [&'static str; 4] {
        let of = LAUNCHERS.into_iter().find(|(launcher, _)| *launcher == self);
        of.expect("every launcher has variables").1
    }

    /// Whether its processes can begin MPI.
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
pub struct Place {
    /// Who started it.
    pub launched_by: LaunchedBy,
    /// Its number, from 0. Processes of one node have numbers that follow each other.
    pub process: usize,
    /// How many there are.
    pub processes: usize,
    /// Its number on its node.
    pub local_process: usize,
    /// How many there are on its node.
    pub local_processes: usize,
}

impl Place {
    /// Whether all processes are on this node.
    pub fn is_one_node(&self) -> bool {
        self.local_processes == self.processes
    }
}

/// The variables of each launcher. When several are set, the innermost comes first: torchrun is often started by srun or mpirun.
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

/// A launcher has set variables that contradict each other.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlaceError {
    /// A variable is missing, or no number.
    #[error("{launched_by} has set {present}, but {variable} is {}", value.as_deref().unwrap_or("not set"))]
    NoNumber {
        /// The launcher.
        launched_by: LaunchedBy,
        /// A variable that it has set.
        present: &'static str,
        /// One that it should have set too.
        variable: &'static str,
        /// What that is.
        value: Option<String>,
    },
    /// A number is beyond its range.
    #[error("{launched_by} says that this is process {process} of {processes}, by {variable}")]
    Range {
        /// The launcher.
        launched_by: LaunchedBy,
        /// The variable.
        variable: &'static str,
        /// The number, from 0.
        process: usize,
        /// How many there are.
        processes: usize,
    },
}

/// The place of this process, if it is one of several; `variable` looks a variable of the environment up.
///
/// # Errors
/// [`PlaceError`].
pub fn recognise(variable: &dyn Fn(&str) -> Option<String>) -> Result<Option<Place>, PlaceError> {
    let number = |name: &str| variable(name)?.trim().parse::<usize>().ok();
    let is_several = |(launcher, [process, processes, local_process, _]): &(LaunchedBy, [&str; 4])| {
        number(process).is_some()
            && number(processes).is_some_and(|processes| processes > 1)
            // PMI_RANK is set by srun too.
            && (*launcher != LaunchedBy::Hydra || variable(local_process).is_some())
    };
    let found = LAUNCHERS.into_iter().find(is_several);
    found.map(|(launched_by, names)| place(launched_by, names, variable)).transpose()
}

/// Whether a launcher has started this process as the only one; `variable` looks a variable of the environment up.
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
) -> Result<Place, PlaceError> {
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
    let within = |name: &'static str, process: usize, processes: usize| {
        let error = PlaceError::Range { launched_by, variable: name, process, processes };
        if process < processes { Ok(()) } else { Err(error) }
    };
    let (process, processes) = (number(names[0])?, number(names[1])?);
    let (local_process, local_processes) = (number(names[2])?, number(names[3])?);
    within(names[0], process, processes)?;
    within(names[2], local_process, local_processes)?;
    within(names[3], local_processes - 1, processes)?;
    Ok(Place { launched_by, process, processes, local_process, local_processes })
}

/// Tasks of a node, of Slurm's counts per node: `4(x2),3`.
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
