//! `fsdp launch` on several nodes. Each node is an agent on this machine with its own processes.

use std::process::{Child, Stdio};

use fsdp_ckpt::native::RunDir;

use crate::support::{Ran, Sandbox};
use crate::world::{free_port, send, wait_until};

const ENDLESS: &str = "train run.toml --resume --set train.steps=1000000 --set checkpoint.every=5";

struct Agent {
    child: Option<Child>,
}

impl Agent {
    fn start(sandbox: &Sandbox, args: &str) -> Self {
        Self::start_with(sandbox, args, &[])
    }

    fn start_with(sandbox: &Sandbox, args: &str, variables: &[(&str, &str)]) -> Self {
        let mut command = sandbox.command();
        command.args(args.split_whitespace()).env("TMPDIR", sandbox.path(""));
        command.envs(variables.iter().copied()).stdout(Stdio::piped()).stderr(Stdio::piped());
        Self { child: Some(command.spawn().unwrap()) }
    }

    fn signal(&self, signal: &str) {
        send(signal, self.child.as_ref().unwrap().id());
    }

    fn end(mut self) -> Ran {
        Ran::of(self.child.take().unwrap().wait_with_output().unwrap())
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            let _ = child.kill().and_then(|()| child.wait());
        }
    }
}

fn newest(sandbox: &Sandbox) -> u64 {
    RunDir::new(sandbox.path("out")).newest().unwrap().map_or(0, |(step, _)| step)
}

fn saves_go_on(sandbox: &Sandbox) {
    let before = newest(sandbox);
    wait_until("a checkpoint", || newest(sandbox) > before + 10);
}

/// Waits until the newest start has this many processes. A node joins some time after it starts.
fn take_part(sandbox: &Sandbox, processes: usize) {
    wait_until("the start of these processes", || {
        // The last line may be incomplete.
        let text = std::fs::read_to_string(sandbox.path("out/metrics.jsonl")).unwrap_or_default();
        let lines = text.lines().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
        let newest = lines.filter_map(|line| line["start"]["processes"].as_array().map(Vec::len)).next_back();
        newest == Some(processes)
    });
}

/// Asserts that the metrics so far are those of an uninterrupted run.
fn are_of_one_run(sandbox: &Sandbox) {
    let steps = sandbox.column("out", "step");
    let count = steps.len();
    assert!(
        steps.iter().copied().eq((1..=count).map(|step| step as f64)),
        "no step is missing or there twice"
    );
    // The learning rate depends on the number of steps of the run.
    sandbox.succeed(&format!(
        "train run.toml --set train.steps={count} --set run.out_dir=alone --set run.ranks=1"
    ));
    for key in ["loss", "grad_norm"] {
        assert!(sandbox.column("out", key) == sandbox.column("alone", key), "{key}");
    }
}

#[test]
fn two_nodes_match_threads_bitwise() {
    let sandbox = Sandbox::new();
    let run = "launch --nnodes 2 --nproc 2 -- train run.toml --resume --set run.ranks=4";
    let agents = [Agent::start(&sandbox, run), Agent::start(&sandbox, run)];
    let ran = agents.map(Agent::end);
    assert_eq!(ran.each_ref().map(|ran| ran.code), [Some(0), Some(0)], "{ran:?}");
    let stdout: String = ran.iter().map(|ran| ran.stdout.as_str()).collect();
    assert_eq!(stdout.matches("steps         3,").count(), 1, "{stdout}");
    sandbox.succeed("train run.toml --set run.ranks=4 --set run.out_dir=threads");
    let model = |out: &str| std::fs::read(sandbox.path(&format!("{out}/model/model.safetensors"))).unwrap();
    assert!(model("out") == model("threads"));
    assert_eq!(std::fs::read_dir(sandbox.path("out/.launch")).unwrap().count(), 0, "nothing is left");
}

#[test]
fn nodes_with_master_address_need_no_shared_folder() {
    let sandbox = Sandbox::new();
    let port = free_port().to_string();
    let token = "ab".repeat(32);
    let mut variables = vec![
        ("PET_NNODES", "2"),
        ("PET_NPROC_PER_NODE", "1"),
        ("PET_MASTER_ADDR", "127.0.0.1"),
        ("PET_MASTER_PORT", &*port),
        ("FSDP_TOKEN", &*token),
    ];
    let mut start = |number| {
        variables.push(("PET_NODE_RANK", number));
        Agent::start_with(&sandbox, "launch -- train run.toml", &variables)
    };
    // The second node starts first.
    let agents = [start("1"), start("0")];
    let [second, first] = agents.map(Agent::end);
    assert_eq!((first.code, second.code), (Some(0), Some(0)), "{first:?} {second:?}");
    assert!(first.stdout.contains("steps         3,") && second.stdout.is_empty(), "{first:?} {second:?}");
    assert!(!sandbox.path("out/.launch").exists());
}

#[test]
fn run_survives_loss_and_return_of_nodes() {
    let sandbox = Sandbox::new();
    let run = format!("launch --nnodes 1:2 --node-wait 1 --nproc 1 -- {ENDLESS}");
    let first = Agent::start(&sandbox, &run);
    wait_until("a checkpoint", || newest(&sandbox) > 0);
    // The second node joins at the next checkpoint, and is then lost.
    let second = Agent::start(&sandbox, &run);
    take_part(&sandbox, 2);
    assert!(sandbox.path("out/.launch/leader-1").exists());
    second.signal("KILL");
    take_part(&sandbox, 1);
    saves_go_on(&sandbox);
    // The second node returns, and then the coordinator is lost.
    let second = Agent::start(&sandbox, &run);
    take_part(&sandbox, 2);
    first.signal("KILL");
    wait_until("another coordinator", || sandbox.path("out/.launch/leader-2").exists());
    take_part(&sandbox, 1);
    saves_go_on(&sandbox);
    // The former coordinator returns as an ordinary node, and is stopped again.
    let first = Agent::start(&sandbox, &run);
    take_part(&sandbox, 2);
    first.signal("TERM");
    let first = first.end();
    assert_eq!(first.code, Some(75), "{}", first.stderr);
    take_part(&sandbox, 1);
    saves_go_on(&sandbox);
    second.signal("TERM");
    let second = second.end();
    assert_eq!(second.code, Some(75), "{}", second.stderr);
    are_of_one_run(&sandbox);
}

#[test]
fn restarted_coordinator_resumes_run() {
    let sandbox = Sandbox::new();
    let port = free_port();
    let start = |rank| {
        let options = format!("--nnodes 2 --endpoint 127.0.0.1:{port} --node-rank {rank} --log-dir logs");
        Agent::start(&sandbox, &format!("launch {options} -- {ENDLESS}"))
    };
    let (first, second) = (start(0), start(1));
    wait_until("a checkpoint", || newest(&sandbox) > 0);
    first.signal("KILL");
    let killed = first.end();
    assert_eq!(killed.code, None, "{}", killed.stderr);
    let first = start(0);
    wait_until("the next attempt", || sandbox.path("logs/attempt-1/rank-0").exists());
    saves_go_on(&sandbox);
    first.signal("TERM");
    for agent in [first, second] {
        let ran = agent.end();
        assert_eq!(ran.code, Some(75), "{}", ran.stderr);
    }
    are_of_one_run(&sandbox);
}

#[test]
fn mismatched_node_and_invalid_options_are_rejected() {
    let sandbox = Sandbox::new();
    let run = |nproc| format!("launch --nnodes 1:2 --node-wait 0 --nproc {nproc} -- {ENDLESS}");
    let first = Agent::start(&sandbox, &run(1));
    wait_until("a checkpoint", || newest(&sandbox) > 0);
    let other = Agent::start(&sandbox, &run(2)).end();
    assert_eq!(other.code, Some(2), "{}", other.stderr);
    assert!(other.stderr.contains("has --nproc 2, but the others have 1"), "{}", other.stderr);
    first.signal("INT");
    assert_eq!(first.end().code, Some(75));
    for (args, message) in [
        ("--nnodes 5:7 -- train run.toml", "a range needs a power of two, and there is none from 5 to 7"),
        ("--nnodes 2 -- bench train", "give host:port"),
        ("--nnodes 2 --nproc none -- train run.toml", "expected a number from 1 to 4096, auto, gpu or cpu"),
    ] {
        let ran = sandbox.fsdp(&format!("launch --insecure-network {args}"));
        assert_eq!(ran.code, Some(2), "{args}: {}", ran.stderr);
        assert!(ran.stderr.contains(message), "{args}: {}", ran.stderr);
    }
}

#[test]
fn logs_of_earlier_launch_are_kept() {
    let sandbox = Sandbox::new();
    for attempt in 0..2 {
        sandbox.succeed("launch --nproc 1 --log-dir logs -- train run.toml --overwrite");
        assert!(sandbox.read(&format!("logs/attempt-{attempt}/rank-0/stderr.log")).contains("step 3/3"));
    }
}
