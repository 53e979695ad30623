//! How `fsdp launch` handles repeated signals, stopped processes, and launchers that were killed.

use std::fs::File;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use crate::interposer;
use crate::launching::Launch;
use crate::processes::newest;
use crate::support::Sandbox;
use crate::world::{TORCHRUN, World, send, wait_until};

const ENDLESS: &str = "train run.toml --set train.steps=1000000 --set checkpoint.every=2";

#[test]
fn second_signal_ends_launch_immediately() {
    for second in ["INT", "TERM"] {
        let sandbox = Sandbox::new();
        sandbox.write("data.txt", "0123456789abcdef".repeat(140_000));
        let large =
            "--set train.micro_batch_size=16 --set train.global_batch_size=32768 --set data.seq_len=64";
        let launch = Launch::logged(
            &sandbox,
            &format!("launch --nproc 2 -- {ENDLESS} {large}"),
            "fsdp::launch=info,fsdp::op=trace",
        );
        let is_logged = |what: &str| sandbox.read("log").contains(what);
        // Both ranks have completed an operation, so the first step is in progress; it takes far longer than this test.
        wait_until("the first step", || is_logged("op{rank=0") && is_logged("op{rank=1"));
        send("INT", launch.id());
        wait_until("the first signal", || is_logged("asked to stop"));
        let workers = launch.workers();
        assert_eq!(workers.len(), 2, "the first signal waits for the step");
        send(second, launch.id());
        let ran = launch.end();
        assert_eq!(ran.code, Some(130), "{second}: {}", sandbox.read("log"));
        assert!(!workers.iter().any(Launch::is_there), "{second}");
        assert!(!sandbox.path("out/model/model.safetensors").exists(), "{second}");
        assert_eq!(newest(&sandbox), 0, "{second}");
    }
}

#[test]
fn sigusr1_after_sigterm_still_saves() {
    let sandbox = Sandbox::new();
    let launch = Launch::start(&sandbox, &format!("launch --nproc 2 -- {ENDLESS}"));
    wait_until("a checkpoint", || newest(&sandbox) > 3);
    send("TERM", launch.id());
    send("USR1", launch.id());
    let ran = launch.end();
    assert_eq!(ran.code, Some(75), "{}", ran.stderr);
    assert_eq!(newest(&sandbox), sandbox.metrics("out").len() as u64, "the last step is saved");
}

#[test]
fn stopped_process_is_named_and_ends_launch() {
    for victim in 0..2 {
        let sandbox = Sandbox::new();
        let args = format!("launch --nproc 2 --max-restarts 0 -- {ENDLESS} --set run.heartbeat_s=0.4");
        let launch = Launch::start(&sandbox, &args);
        wait_until("a checkpoint", || newest(&sandbox) > 3);
        // Processes report their current operation only with some heartbeats.
        std::thread::sleep(Duration::from_secs(3));
        let workers = launch.workers();
        send("STOP", workers[victim]);
        let ran = launch.end();
        assert_eq!(ran.code, Some(75), "{victim}: {}", ran.stderr);
        let last = ran.stderr.lines().last().unwrap();
        let names_it = format!("process {victim} (pid {} on host ", workers[victim]);
        for part in [&names_it, "it was silent for 6 s", "its last collective was", "no restarts are left"] {
            assert!(last.contains(part), "{victim}: {part}: {}", ran.stderr);
        }
        assert!(!workers.iter().any(Launch::is_there), "{victim}");
    }
}

#[test]
fn process_killed_before_rendezvous_ends_launch() {
    let sandbox = Sandbox::new();
    let mut command = sandbox.command();
    let args = format!("launch --nproc 2 --max-restarts 0 -- {ENDLESS}");
    command.args(args.split_whitespace()).env("TMPDIR", sandbox.path(""));
    // Process 1 is stopped at its start, so it does not join the other process before it is killed.
    command.env("LD_PRELOAD", interposer::library()).env("STOPPED", "1");
    let launch = Launch::of(command);
    let stopped = || launch.workers().into_iter().find(Launch::is_stopped);
    wait_until("two processes, of which one is stopped", || {
        launch.workers().len() == 2 && stopped().is_some()
    });
    let workers = launch.workers();
    send("KILL", stopped().unwrap());
    let ran = launch.end();
    assert_eq!(ran.code, Some(75), "{}", ran.stderr);
    assert!(!sandbox.path("out/resolved.toml").exists(), "they have not met");
    assert!(ran.stderr.contains("process 1 was killed by signal 9"), "{}", ran.stderr);
    assert!(!workers.iter().any(Launch::is_there));
}

/// Returns the temporary folders of launches and of the processes of a node.
fn folders(sandbox: &Sandbox) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(sandbox.path("")).unwrap().map(|entry| entry.unwrap());
    let is_one = |name: &str| name.starts_with("fsdp-");
    entries.filter(|entry| is_one(entry.file_name().to_str().unwrap())).map(|entry| entry.path()).collect()
}

#[test]
fn next_launch_removes_folders_of_killed_processes() {
    let sandbox = Sandbox::new();
    let launch = Launch::start(&sandbox, &format!("launch --nproc 2 -- {ENDLESS}"));
    wait_until("a checkpoint", || newest(&sandbox) > 3);
    let workers = launch.workers();
    send("KILL", launch.id());
    wait_until("the end of its processes", || !workers.iter().any(Launch::is_there));
    let world = World::start(&sandbox, TORCHRUN, 2, &format!("{ENDLESS} --resume"));
    let before = newest(&sandbox);
    wait_until("a checkpoint", || newest(&sandbox) > before + 3);
    // Process 0 first, which owns the folder: it would remove it on learning that the other process is lost.
    [0, 1].into_iter().for_each(|process| world.signal(process, "KILL"));
    world.end();
    let left = folders(&sandbox);
    assert_eq!(left.len(), 2, "{left:?}");
    // Only old folders are removed, because a new one may not be locked yet.
    let old = SystemTime::now() - Duration::from_secs(600);
    left.iter().for_each(|folder| File::open(folder).unwrap().set_modified(old).unwrap());
    let ran = Launch::start(&sandbox, "launch --nproc 2 -- train run.toml --overwrite").end();
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    let left = folders(&sandbox);
    assert!(left.is_empty(), "{left:?}");
}
