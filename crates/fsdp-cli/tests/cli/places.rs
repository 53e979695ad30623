//! The variables of launchers decide which processes form a run.

use crate::support::{Ran, Sandbox};
use crate::world::free_port;

/// Runs `fsdp` with variables, separated by spaces.
fn ran(sandbox: &Sandbox, variables: &str, args: &str) -> Ran {
    let mut command = sandbox.command();
    command.envs(variables.split_whitespace().map(|entry| entry.split_once('=').unwrap()));
    Ran::of(command.args(args.split_whitespace()).output().unwrap())
}

#[test]
fn innermost_launcher_of_one_process_runs_alone() {
    let sandbox = Sandbox::new();
    sandbox.edit("run.toml", "ranks = 2\n", "");
    let step = "SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2 SLURM_LOCALID=1 \
                SLURM_NODEID=0 SLURM_STEP_TASKS_PER_NODE=2";
    let inner = [
        "RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=29511",
        "RANK=0 WORLD_SIZE=1",
        "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1 OMPI_COMM_WORLD_LOCAL_RANK=0 OMPI_COMM_WORLD_LOCAL_SIZE=1",
        "PMI_RANK=0 PMI_SIZE=1 MPI_LOCALRANKID=0 MPI_LOCALNRANKS=1",
    ];
    for (number, inner) in inner.into_iter().enumerate() {
        // It would otherwise wait for the other task of the step.
        let args = format!("train run.toml --set run.out_dir=out{number} --set run.timeout_s=5");
        let ran = ran(&sandbox, &format!("{step} {inner}"), &args);
        assert_eq!(ran.code, Some(0), "{inner}: {}", ran.stderr);
        assert_eq!(sandbox.starts(&format!("out{number}"))[0]["ranks"], 1, "{inner}");
    }
}

#[test]
fn incomplete_launcher_variables_are_input_errors() {
    let sandbox = Sandbox::new();
    for (variables, expected) in [
        ("WORLD_SIZE=4", "WORLD_SIZE is set, but RANK is not"),
        (
            "RANK=x WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=2",
            "RANK of torchrun is \"x\"; expected a number",
        ),
        ("RANK= WORLD_SIZE= LOCAL_RANK= LOCAL_WORLD_SIZE=", "RANK of torchrun is \"\"; expected a number"),
        ("LOCAL_RANK=0", "LOCAL_RANK is set, but RANK is not"),
        ("OMPI_COMM_WORLD_SIZE=2", "OMPI_COMM_WORLD_SIZE is set, but OMPI_COMM_WORLD_RANK is not"),
        ("PMI_RANK=0", "PMI_RANK is set, but PMI_SIZE is not"),
        ("FSDP_PROCESS=0", "FSDP_PROCESS is set, but FSDP_PROCESSES is not"),
        ("SLURM_PROCID=3 SLURM_NTASKS=8", "SLURM_PROCID is set, but SLURM_STEP_NUM_TASKS is not"),
    ] {
        let ran = ran(&sandbox, variables, "train run.toml");
        assert_eq!(ran.code, Some(2), "{variables}: {}", ran.stderr);
        assert!(ran.stderr.contains(expected), "{variables}: {}", ran.stderr);
    }
    assert!(!sandbox.path("out").exists());
}

#[test]
fn launch_and_ckpt_ignore_incomplete_variables() {
    let sandbox = Sandbox::new();
    // What operators for Kubernetes set in a pod.
    let pod = "RANK=0 WORLD_SIZE=2";
    let saves = "--set checkpoint.every=3";
    let launched = ran(&sandbox, pod, &format!("launch --nproc 2 -- train run.toml {saves}"));
    assert_eq!(launched.code, Some(0), "{}", launched.stderr);
    let verified = ran(&sandbox, pod, "ckpt verify out/checkpoints/step-00000003");
    assert_eq!(verified.code, Some(0), "{}", verified.stderr);
}

#[test]
fn process_that_waits_for_others_says_so() {
    let sandbox = Sandbox::new();
    let port = free_port();
    let second = format!(
        "RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT={port}"
    );
    // As a script does that is started below torchrun.
    let audit = "audit run.toml --data --before before --after after --set run.timeout_s=8";
    let ran = ran(&sandbox, &second, audit);
    assert_ne!(ran.code, Some(0), "{}", ran.stderr);
    let line = ran.stderr.lines().find(|line| line.contains("waiting for the other processes"));
    let line = line.unwrap_or_else(|| panic!("{}", ran.stderr));
    assert!(line.contains("process 1 of 2 of torchrun (RANK=1, WORLD_SIZE=2"), "{line}");
    assert!(line.ends_with("unset these variables"), "{line}");
}
