//! Launchers that start several processes, recognised by the variables that they set.
//!
//! A function of the environment alone, so that it can be tested without one. It looks for worlds of more than one
//! process; ranks of this program are threads of one process, so each of these processes would train by itself and
//! write over the others' files.
//!
//! Slurm is recognised by `SLURM_STEP_NUM_TASKS`, which only `srun` sets for the tasks of a step. In a script of `sbatch`
//! `SLURM_NTASKS` is what was asked for, and `SLURM_PROCID` is 0; a command that is started there without `srun` is alone.
//!
//! An `mpirun` inside of Slurm often starts its own helpers by `srun`, one per node, and its processes inherit the
//! variables of that step. So those of `mpirun` come first; `PMI_RANK` alone says nothing, because `srun --mpi=pmi2` sets
//! it too, and Hydra (MPICH, Intel MPI) is known by `MPI_LOCALRANKID`. A launcher that sets `PMIX_RANK` only does not say
//! how many processes there are, and is not recognised.

use std::env;

use crate::error::CliError;

/// A world of processes that something else has started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ProcessWorld {
    /// What started it.
    pub(crate) launcher: &'static str,
    /// The variable that says so.
    pub(crate) variable: &'static str,
    /// How many processes.
    pub(crate) processes: usize,
}

/// A launcher, the variable that numbers its processes, and the one that counts them. When several are set, the
/// innermost comes first: torchrun is often started by srun or mpirun.
const LAUNCHERS: [(&str, &str, &str); 6] = [
    ("torchrun", "RANK", "WORLD_SIZE"),
    ("mpirun (Open MPI)", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("mpirun (MPICH, Intel MPI)", "MPI_LOCALRANKID", "PMI_SIZE"),
    ("mpirun (MVAPICH)", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("an MPI launcher", "PMI_RANK", "PMI_SIZE"),
];

/// The world of more than one process that this one belongs to, as the variables say.
fn recognise(variable: impl Fn(&str) -> Option<String>) -> Option<ProcessWorld> {
    let number = |name| variable(name)?.trim().parse::<usize>().ok();
    LAUNCHERS.into_iter().find_map(|(launcher, rank, size)| {
        number(rank)?;
        let processes = number(size).filter(|&processes| processes > 1)?;
        Some(ProcessWorld { launcher, variable: size, processes })
    })
}

/// Refuses to run ranks when this process is one of several.
pub(crate) fn refuse_process_worlds() -> Result<(), CliError> {
    match recognise(|name| env::var(name).ok()) {
        Some(world) => Err(CliError::ProcessWorld { world }),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn world(variables: &[(&str, &str)]) -> Option<ProcessWorld> {
        recognise(|name| {
            let found = variables.iter().find(|(variable, _)| *variable == name);
            found.map(|(_, value)| (*value).to_owned())
        })
    }

    fn launcher(variables: &[(&str, &str)]) -> Option<(&'static str, usize)> {
        world(variables).map(|world| (world.launcher, world.processes))
    }

    #[test]
    fn every_launcher_is_recognised() {
        assert_eq!(launcher(&[("RANK", "0"), ("WORLD_SIZE", "4")]), Some(("torchrun", 4)));
        let open_mpi = [("OMPI_COMM_WORLD_RANK", "1"), ("OMPI_COMM_WORLD_SIZE", "2")];
        assert_eq!(launcher(&open_mpi), Some(("mpirun (Open MPI)", 2)));
        assert_eq!(launcher(&[("SLURM_PROCID", "7"), ("SLURM_STEP_NUM_TASKS", "8")]), Some(("srun", 8)));
        let hydra =
            [("PMI_RANK", "4"), ("PMI_SIZE", "5"), ("MPI_LOCALRANKID", "1"), ("MPI_LOCALNRANKS", "2")];
        assert_eq!(launcher(&hydra), Some(("mpirun (MPICH, Intel MPI)", 5)));
        let mvapich = [("MV2_COMM_WORLD_RANK", "1"), ("MV2_COMM_WORLD_SIZE", "4")];
        assert_eq!(launcher(&mvapich), Some(("mpirun (MVAPICH)", 4)));
        assert_eq!(launcher(&[("PMI_RANK", "0"), ("PMI_SIZE", "3")]), Some(("an MPI launcher", 3)));
    }

    /// What Slurm sets in a script of `sbatch --ntasks=8`: the script is process 0 of its own.
    const BATCH: [(&str, &str); 6] = [
        ("SLURM_JOB_ID", "200505"),
        ("SLURM_NTASKS", "8"),
        ("SLURM_NPROCS", "8"),
        ("SLURM_TASKS_PER_NODE", "4(x2)"),
        ("SLURM_PROCID", "0"),
        ("SLURM_LOCALID", "0"),
    ];

    fn in_batch(more: &[(&str, &str)]) -> Option<(&'static str, usize)> {
        launcher(&[&BATCH[..], more].concat())
    }

    #[test]
    fn a_batch_script_is_alone_until_it_says_srun_or_mpirun() {
        assert_eq!(in_batch(&[]), None, "whatever was asked for");
        // A shell of `salloc`, where that is a step of its own.
        assert_eq!(in_batch(&[("SLURM_STEP_ID", "4294967290"), ("SLURM_STEP_NUM_TASKS", "1")]), None);
        let step = [("SLURM_STEP_ID", "0"), ("SLURM_STEP_NUM_TASKS", "8"), ("SLURM_STEP_NUM_NODES", "2")];
        assert_eq!(in_batch(&step), Some(("srun", 8)));
        let pmi2 = [&step[..], &[("PMI_RANK", "3"), ("PMI_SIZE", "8")]].concat();
        assert_eq!(in_batch(&pmi2), Some(("srun", 8)), "srun --mpi=pmi2");
    }

    #[test]
    fn mpirun_is_named_and_not_the_step_of_its_helpers() {
        // One helper per node, each of which starts four processes.
        let helpers = [("SLURM_STEP_ID", "0"), ("SLURM_STEP_NUM_TASKS", "2")];
        let open_mpi = [("OMPI_COMM_WORLD_RANK", "5"), ("OMPI_COMM_WORLD_SIZE", "8"), ("PMIX_RANK", "5")];
        let found = in_batch(&[&helpers[..], &open_mpi].concat());
        assert_eq!(found, Some(("mpirun (Open MPI)", 8)));
        let hydra =
            [("PMI_RANK", "5"), ("PMI_SIZE", "8"), ("MPI_LOCALRANKID", "1"), ("MPI_LOCALNRANKS", "4")];
        let found = in_batch(&[&helpers[..], &hydra].concat());
        assert_eq!(found, Some(("mpirun (MPICH, Intel MPI)", 8)));
    }

    #[test]
    fn the_innermost_launcher_is_named() {
        let both =
            [("SLURM_PROCID", "0"), ("SLURM_STEP_NUM_TASKS", "2"), ("RANK", "3"), ("WORLD_SIZE", "16")];
        let found = world(&both).unwrap();
        assert_eq!((found.launcher, found.variable, found.processes), ("torchrun", "WORLD_SIZE", 16));
        let alone =
            [("SLURM_PROCID", "0"), ("SLURM_STEP_NUM_TASKS", "2"), ("RANK", "0"), ("WORLD_SIZE", "1")];
        assert_eq!(
            launcher(&alone),
            Some(("srun", 2)),
            "a world of one says nothing about the one around it"
        );
    }

    #[test]
    fn one_process_is_nobodys_world() {
        assert_eq!(launcher(&[]), None);
        assert_eq!(launcher(&[("RANK", "0"), ("WORLD_SIZE", "1")]), None);
        assert_eq!(launcher(&[("WORLD_SIZE", "4")]), None, "without a rank, nobody numbered this process");
        assert_eq!(launcher(&[("RANK", "0"), ("WORLD_SIZE", "many")]), None);
        let batch = [("SLURM_PROCID", "0"), ("SLURM_NTASKS", "8"), ("SLURM_JOB_ID", "17")];
        assert_eq!(launcher(&batch), None, "a batch script is one process, whatever was asked for");
        assert_eq!(launcher(&[("OMPI_COMM_WORLD_RANK", "0"), ("OMPI_UNIVERSE_SIZE", "64")]), None);
    }
}
