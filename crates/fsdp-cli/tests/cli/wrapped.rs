//! Scripts between a launcher and its processes, as users write to set rank-dependent variables.

use std::process::{Command, Stdio};

use crate::launching::Launch;
use crate::processes::{bits, newest};
use crate::support::Sandbox;
use crate::world::{HYDRA, TORCHRUN, World, process, wait_until};

/// A script that starts the program in its arguments, and stays until the program ends.
const SCRIPT: &str = "\"$@\"; exit $?";

/// Returns a shell that runs a script with a program and its arguments, in the folder and environment of that program.
fn shell(script: &str, program: &Command, args: &str) -> Command {
    let mut shell = Command::new("bash");
    shell.args(["-c", script, "script"]).arg(program.get_program()).args(args.split_whitespace());
    shell.current_dir(program.get_current_dir().unwrap());
    for (name, value) in program.get_envs() {
        match value {
            Some(value) => shell.env(name, value),
            None => shell.env_remove(name),
        };
    }
    shell.stdout(Stdio::piped()).stderr(Stdio::piped());
    shell
}

#[test]
fn processes_started_by_wrapper_scripts_connect() {
    let sandbox = Sandbox::new();
    sandbox.succeed("train run.toml --set run.out_dir=threads");
    // Hydra gives its processes nothing in common except their parent process.
    let args = "train run.toml --set run.transport=tcp --set run.timeout_s=60";
    let world = World::of((0..2).map(|number| shell(SCRIPT, &process(&sandbox, HYDRA, number, 2), args)));
    for ran in world.end() {
        assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    }
    assert!(bits(&sandbox, "out") == bits(&sandbox, "threads"));
}

#[test]
fn wrapped_processes_end_with_launcher_and_write_records() {
    let sandbox = Sandbox::new();
    let args = "train run.toml --set train.steps=1000000 --set checkpoint.every=2";
    // The launcher sets these variables for each process, and does not have them itself.
    let launcher = format!(
        "for rank in 0 1; do RANK=$rank LOCAL_RANK=$rank bash -c '{SCRIPT}' script \"$@\" & done; wait"
    );
    let mut launcher = shell(&launcher, &process(&sandbox, TORCHRUN, 0, 2), args);
    launcher.env_remove("RANK").env_remove("LOCAL_RANK");
    let launch = Launch::of(launcher);
    wait_until("a checkpoint", || newest(&sandbox) > 1);
    // Only the first line is read, because the last may be incomplete.
    let metrics = sandbox.read("out/metrics.jsonl");
    let first: serde_json::Value = serde_json::from_str(metrics.lines().next().unwrap()).unwrap();
    let pid = |process: &serde_json::Value| u32::try_from(process["pid"].as_u64().unwrap()).unwrap();
    let processes: Vec<u32> = first["start"]["processes"].as_array().unwrap().iter().map(pid).collect();
    assert!(processes.len() == 2 && processes.iter().all(Launch::is_there));
    let scripts = launch.workers();
    assert!(!scripts.iter().any(|script| processes.contains(script)), "there are scripts between them");
    drop(launch);
    wait_until("the end of its processes", || !processes.iter().any(Launch::is_there));
    for process in 0..2 {
        let record = sandbox.read(&format!("out/flight-{process}.jsonl"));
        assert!(record.lines().count() > 20, "{record}");
    }
    assert!(!sandbox.path("out/flight-0.jsonl.tmp").exists());
}
