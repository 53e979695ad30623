use super::*;

mod oracle;

fn recognized(variables: &[(&str, &str)]) -> Result<Option<ProcessPlace>, PlaceError> {
    recognize(&|name| {
        let found = variables.iter().find(|(variable, _)| *variable == name);
        found.map(|(_, value)| (*value).to_owned())
    })
}

fn place(variables: &[(&str, &str)]) -> Option<(LaunchedBy, [usize; 4])> {
    let found = recognized(variables).unwrap()?;
    let ProcessPlace { launched_by, process, processes, local_process, local_processes } = found;
    Some((launched_by, [process, processes, local_process, local_processes]))
}

const TORCHRUN: [(&str, &str); 4] =
    [("RANK", "5"), ("WORLD_SIZE", "8"), ("LOCAL_RANK", "1"), ("LOCAL_WORLD_SIZE", "4")];
const HYDRA: [(&str, &str); 4] =
    [("PMI_RANK", "5"), ("PMI_SIZE", "8"), ("MPI_LOCALRANKID", "1"), ("MPI_LOCALNRANKS", "4")];
const OPEN_MPI: [(&str, &str); 5] = [
    ("OMPI_COMM_WORLD_RANK", "5"),
    ("OMPI_COMM_WORLD_SIZE", "8"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "4"),
    ("PMIX_RANK", "5"),
];
const STEP: [(&str, &str); 6] = [
    ("SLURM_STEP_ID", "0"),
    ("SLURM_PROCID", "5"),
    ("SLURM_STEP_NUM_TASKS", "8"),
    ("SLURM_LOCALID", "1"),
    ("SLURM_NODEID", "1"),
    ("SLURM_STEP_TASKS_PER_NODE", "4(x2)"),
];
const MVAPICH: [(&str, &str); 4] = [
    ("MV2_COMM_WORLD_RANK", "5"),
    ("MV2_COMM_WORLD_SIZE", "8"),
    ("MV2_COMM_WORLD_LOCAL_RANK", "1"),
    ("MV2_COMM_WORLD_LOCAL_SIZE", "4"),
];
const FSDP: [(&str, &str); 4] = [
    ("FSDP_PROCESS", "5"),
    ("FSDP_PROCESSES", "8"),
    ("FSDP_LOCAL_PROCESS", "1"),
    ("FSDP_LOCAL_PROCESSES", "4"),
];

#[test]
fn every_launcher_is_recognized() {
    let numbers = [5, 8, 1, 4];
    assert_eq!(place(&FSDP), Some((LaunchedBy::Fsdp, numbers)));
    assert_eq!(place(&TORCHRUN), Some((LaunchedBy::Torchrun, numbers)));
    assert_eq!(place(&OPEN_MPI), Some((LaunchedBy::OpenMpi, numbers)));
    assert_eq!(place(&HYDRA), Some((LaunchedBy::Hydra, numbers)));
    assert_eq!(place(&MVAPICH), Some((LaunchedBy::Mvapich, numbers)));
    assert_eq!(place(&STEP), Some((LaunchedBy::Srun, numbers)));
}

#[test]
fn nodes_follow_from_processes_per_node() {
    let nodes = |processes, local_processes| {
        let launched_by = LaunchedBy::Torchrun;
        ProcessPlace { launched_by, process: 0, processes, local_process: 0, local_processes }.nodes()
    };
    assert_eq!([nodes(8, 4), nodes(8, 8), nodes(8, 1), nodes(3, 2)], [2, 1, 8, 1]);
}

/// Slurm's variables in a script of `sbatch --ntasks=8`: the script is the only process of its own step.
const BATCH: [(&str, &str); 6] = [
    ("SLURM_JOB_ID", "200505"),
    ("SLURM_NTASKS", "8"),
    ("SLURM_NPROCS", "8"),
    ("SLURM_TASKS_PER_NODE", "4(x2)"),
    ("SLURM_PROCID", "0"),
    ("SLURM_LOCALID", "0"),
];

#[test]
fn batch_script_without_srun_has_no_place() {
    assert_eq!(place(&BATCH), None, "whatever was asked for");
    // A shell of `salloc` that runs as its own step.
    let shell = [&BATCH[..], &[("SLURM_STEP_ID", "4294967290"), ("SLURM_STEP_NUM_TASKS", "1")]].concat();
    assert_eq!(place(&shell), None);
    let pmi2 = [&STEP[..], &[("PMI_RANK", "5"), ("PMI_SIZE", "8")]].concat();
    assert_eq!(place(&pmi2).unwrap().0, LaunchedBy::Srun, "srun --mpi=pmi2");
}

#[test]
fn innermost_launcher_wins() {
    // mpirun starts one helper per node with srun; either may start torchrun.
    assert_eq!(place(&[&STEP[..], &OPEN_MPI].concat()).unwrap().0, LaunchedBy::OpenMpi);
    assert_eq!(place(&[&STEP[..], &HYDRA].concat()).unwrap().0, LaunchedBy::Hydra);
    assert_eq!(place(&[&STEP[..], &OPEN_MPI, &TORCHRUN].concat()).unwrap().0, LaunchedBy::Torchrun);
    // torchrun of one process in each task of a step: every task is a run of its own.
    let alone = [&STEP[..], &[("RANK", "0"), ("WORLD_SIZE", "1")]].concat();
    assert_eq!(place(&alone), None);
    let alone = [&TORCHRUN[..], &[("FSDP_PROCESS", "0"), ("FSDP_PROCESSES", "1")]].concat();
    assert_eq!(place(&alone), None);
}

#[test]
fn single_process_has_no_place() {
    assert_eq!(place(&[]), None);
    assert_eq!(place(&[("RANK", "0"), ("WORLD_SIZE", "1")]), None);
    assert_eq!(place(&[("PMI_RANK", "0"), ("PMI_SIZE", "1")]), None);
    assert_eq!(place(&[("OMPI_UNIVERSE_SIZE", "64"), ("PMIX_RANK", "3")]), None);
}

#[test]
fn contradictory_launcher_variables_are_rejected() {
    let error = recognized(&[("RANK", "1"), ("WORLD_SIZE", "2")]).unwrap_err();
    assert_eq!(
        error.to_string(),
        "of the variables of torchrun, RANK is set, but LOCAL_RANK is not: set RANK, WORLD_SIZE, LOCAL_RANK, \
         LOCAL_WORLD_SIZE, or none of them"
    );
    let mut torchrun = TORCHRUN;
    torchrun[0].1 = "x";
    assert_eq!(
        recognized(&torchrun).unwrap_err().to_string(),
        "RANK of torchrun is \"x\"; expected a number"
    );
    let mut step = STEP;
    step[5].1 = "8";
    let expected = "SLURM_STEP_TASKS_PER_NODE of srun is \"8\"; expected the number of tasks on each node, such as \
                    4(x2),3, that of node SLURM_NODEID included";
    assert_eq!(recognized(&step).unwrap_err().to_string(), expected);
    let mut torchrun = TORCHRUN;
    torchrun[0].1 = "8";
    let error = recognized(&torchrun).unwrap_err();
    assert_eq!(error.to_string(), "according to RANK of torchrun, this is process 8 of 8, counted from 0");
    let mut torchrun = TORCHRUN;
    torchrun[3].1 = "9";
    let error = recognized(&torchrun).unwrap_err();
    let expected = "according to LOCAL_WORLD_SIZE of torchrun, this node has 9 of 8 processes";
    assert_eq!(error.to_string(), expected);
}

#[test]
fn slurm_tasks_per_node_are_parsed() {
    let tasks = |counts, nodes| (0..nodes).map(|node| tasks_of_node(counts, node)).collect::<Vec<_>>();
    assert_eq!(tasks("1(x4)", 5), [Some(1), Some(1), Some(1), Some(1), None]);
    assert_eq!(tasks("4(x2),3", 4), [Some(4), Some(4), Some(3), None]);
    assert_eq!(tasks("8", 2), [Some(8), None]);
    assert_eq!(tasks("4(x2", 1), [None]);
    assert_eq!(tasks("", 1), [None]);
}

#[test]
fn sole_launched_process_is_distinguished_from_unlaunched() {
    let is_only_one = |variables: &[(&str, &str)]| {
        let of = |name: &str| variables.iter().find(|(variable, _)| *variable == name);
        super::is_only_one(&|name| of(name).map(|(_, value)| (*value).to_owned()))
    };
    assert!(is_only_one(&[("RANK", "0"), ("WORLD_SIZE", "1")]));
    assert!(is_only_one(&[("SLURM_PROCID", "0"), ("SLURM_STEP_NUM_TASKS", "1")]));
    assert!(is_only_one(&[("FSDP_PROCESS", "0"), ("FSDP_PROCESSES", "1")]));
    assert!(!is_only_one(&[]) && !is_only_one(&FSDP) && !is_only_one(&TORCHRUN));
    assert!(!is_only_one(&BATCH), "a script of sbatch has no step of its own");
}
