//! Processes that are killed at random, that wake after others have taken over the run, and that return in other
//! numbers: the result is that of an undisturbed run.

use std::time::Duration;

use fsdp_ckpt::native::{NativeReader, RunDir};
use fsdp_sim::SeededOrder;

use crate::interposer;
use crate::launching::Launch;
use crate::processes::newest;
use crate::support::Sandbox;
use crate::world::{FSDP, World, free_port, process, send, wait_until};

const FOUR: &str = "train run.toml --set run.ranks=4 --set train.global_batch_size=16";

const ENDLESS: &str = "--set train.steps=1000000";

/// Completes a run, and asserts that it equals an undisturbed run on threads.
pub(crate) fn ends_as_if_nothing_had_been(sandbox: &Sandbox, args: &str) {
    let steps = format!("--set train.steps={}", newest(sandbox) + 2);
    sandbox.succeed(&format!("{args} {steps} --resume"));
    sandbox.succeed(&format!("{args} {steps} --set run.out_dir=whole"));
    for key in ["step", "loss", "grad_norm", "lr"] {
        assert!(sandbox.column("out", key) == sandbox.column("whole", key), "{key}");
    }
    let model = |out: &str| std::fs::read(sandbox.path(&format!("{out}/model/model.safetensors"))).unwrap();
    assert!(model("out") == model("whole"));
    let run = RunDir::new(sandbox.path("out"));
    for step in run.steps().unwrap() {
        NativeReader::open(run.checkpoint(step)).unwrap().verify().unwrap();
    }
}

/// Waits until a launch has made random progress: its processes exist, or have saved once or more; and then up to 100
/// ms longer. Waiting a fixed time instead might end before any process has started on a loaded machine.
fn come_along(sandbox: &Sandbox, launch: &Launch, random: &mut SeededOrder) {
    let (before, more) = (newest(sandbox), [0, 3, 6][random.choose(3)]);
    wait_until("a process", || !launch.workers().is_empty());
    wait_until("a checkpoint", || newest(sandbox) >= before + more);
    std::thread::sleep(Duration::from_millis(random.choose(100) as u64));
}

/// Waits until the run has saved more checkpoints.
pub(crate) fn wait_for_saves(sandbox: &Sandbox) {
    let before = newest(sandbox);
    wait_until("a checkpoint", || newest(sandbox) > before + 3);
}

#[test]
fn randomly_killed_run_matches_uninterrupted_run() {
    let sandbox = Sandbox::new();
    for seed in 0..6 {
        let mut random = SeededOrder::new(seed);
        let processes = [2, 4][random.choose(2)];
        let args =
            format!("launch --nproc {processes} -- {FOUR} {ENDLESS} --resume --set checkpoint.every=3");
        let launch = Launch::start(&sandbox, &args);
        // Kill one of the processes, after which all are restarted; then the launcher, with which all end.
        come_along(&sandbox, &launch, &mut random);
        let workers = launch.workers();
        send("KILL", workers[random.choose(workers.len())]);
        come_along(&sandbox, &launch, &mut random);
        let workers = launch.workers();
        send("KILL", launch.id());
        wait_until("the end of its processes", || !workers.iter().any(Launch::is_there));
    }
    ends_as_if_nothing_had_been(&sandbox, FOUR);
}

#[test]
fn resizing_from_four_nodes_to_two_and_back_matches_threads() {
    let sandbox = Sandbox::new();
    let port = free_port();
    for (nodes, victim) in [(4, 3), (2, 0), (4, 1)] {
        let args = format!("{FOUR} {ENDLESS} --resume --set checkpoint.every=2");
        let world = World::of((0..nodes).map(|number| {
            let mut command = process(&sandbox, FSDP, number, nodes);
            command.env("FSDP_LOCAL_PROCESS", "0").env("FSDP_LOCAL_PROCESSES", "1");
            command.env("FSDP_RENDEZVOUS", format!("127.0.0.1:{port}")).env("FSDP_SOCKET_IFNAME", "lo");
            command.args(args.split_whitespace());
            command
        }));
        wait_for_saves(&sandbox);
        world.signal(victim, "KILL");
        for (node, ran) in world.end().into_iter().enumerate().filter(|(node, _)| *node != victim) {
            assert_eq!(ran.code, Some(75), "{node} of {nodes}: {}", ran.stderr);
        }
    }
    ends_as_if_nothing_had_been(&sandbox, FOUR);
}

const TWO: &str = "train run.toml --resume --set checkpoint.every=1 --set run.heartbeat_s=0.4";

/// Starts two processes that continue the run. Without locks: file systems of clusters may lack locks that other nodes
/// see.
fn attempt(sandbox: &Sandbox, has_locks: bool) -> World {
    World::of((0..2).map(|number| {
        let mut command = process(sandbox, FSDP, number, 2);
        command.args(TWO.split_whitespace()).args(ENDLESS.split_whitespace());
        if !has_locks {
            command.env("LD_PRELOAD", interposer::library()).env("NO_LOCKS", "1");
        }
        command
    }))
}

/// Stops process 0 after a random delay, and waits until the other process has given up.
fn stop_the_leader(world: &World, random: &mut SeededOrder) {
    std::thread::sleep(Duration::from_millis(random.choose(20) as u64));
    world.signal(0, "STOP");
    wait_until("the end of the other", || world.try_wait(1) == Some(Some(75)));
}

#[test]
fn woken_leader_cannot_damage_taken_over_run() {
    let sandbox = Sandbox::new();
    for seed in 0..2 {
        let mut random = SeededOrder::new(seed);
        let zombie = attempt(&sandbox, false);
        wait_for_saves(&sandbox);
        stop_the_leader(&zombie, &mut random);
        let next = attempt(&sandbox, false);
        wait_for_saves(&sandbox);
        zombie.signal(0, "CONT");
        let ran = zombie.end();
        assert_eq!(ran[0].code, Some(75), "{}", ran[0].stderr);
        // If the woken process has done damage, the new ones have already ended and report why.
        let before = newest(&sandbox);
        wait_until("a checkpoint", || newest(&sandbox) > before + 3 || next.try_wait(0).is_some());
        if next.try_wait(0).is_none() {
            next.signal(0, "TERM");
        }
        let ran = next.end();
        assert!(ran[0].stdout.contains("stopped early"), "{} {}", ran[0].stdout, ran[0].stderr);
    }
    ends_as_if_nothing_had_been(&sandbox, "train run.toml");
}

#[test]
fn lock_blocks_takeover_while_leader_is_stopped() {
    let sandbox = Sandbox::new();
    let zombie = attempt(&sandbox, true);
    wait_for_saves(&sandbox);
    stop_the_leader(&zombie, &mut SeededOrder::new(0));
    let ran = attempt(&sandbox, true).end();
    assert_eq!([ran[0].code, ran[1].code], [Some(75); 2], "{}", ran[0].stderr);
    assert!(ran[0].stderr.contains("is locked by another process"), "{}", ran[0].stderr);
    zombie.signal(0, "CONT");
    assert_eq!(zombie.end()[0].code, Some(75));
    // A launcher ends the stopped process itself.
    let launch = Launch::start(&sandbox, &format!("launch --nproc 2 -- {TWO} {ENDLESS}"));
    wait_for_saves(&sandbox);
    let workers = launch.workers();
    send("STOP", workers[0]);
    wait_until("other processes", || !workers.iter().any(Launch::is_there));
    wait_for_saves(&sandbox);
    send("TERM", launch.id());
    let ran = launch.end();
    assert_eq!(ran.code, Some(75), "{}", ran.stderr);
    ends_as_if_nothing_had_been(&sandbox, "train run.toml");
}
