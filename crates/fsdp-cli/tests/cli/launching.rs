//! `fsdp launch`: processes of this machine, supervised and restarted.

use std::fs::File;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use crate::processes::newest;
use crate::support::{Ran, Sandbox};
use crate::world::{send, wait_until};

/// A running launcher, in a process group of its own.
pub(crate) struct Launch {
    child: Option<std::process::Child>,
}

const ENDLESS: &str = "train run.toml --set train.steps=1000000 --set checkpoint.every=2";

impl Launch {
    pub(crate) fn start(sandbox: &Sandbox, args: &str) -> Self {
        let mut command = sandbox.command();
        command.args(args.split_whitespace()).env("TMPDIR", sandbox.path(""));
        Self::of(command)
    }

    /// Starts a launch that logs what `filter` selects to the file `log` while it runs.
    pub(crate) fn logged(sandbox: &Sandbox, args: &str, filter: &str) -> Self {
        let mut command = sandbox.command();
        command.args(args.split_whitespace()).env("TMPDIR", sandbox.path("")).env("RUST_LOG", filter);
        let log = File::create(sandbox.path("log")).unwrap();
        command.stdout(Stdio::null()).stderr(log).process_group(0);
        Self { child: Some(command.spawn().unwrap()) }
    }

    /// Starts a launcher from its command.
    pub(crate) fn of(mut command: Command) -> Self {
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
        Self { child: Some(command.spawn().unwrap()) }
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.as_ref().unwrap().id()
    }

    /// Returns the child processes of the launcher, sorted.
    pub(crate) fn workers(&self) -> Vec<u32> {
        let parent_of = |process: u32| -> Option<u32> {
            let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
            // The state and then the parent follow the name, which may contain anything.
            stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()
        };
        let processes = std::fs::read_dir("/proc").unwrap();
        let numbers = processes.filter_map(|entry| entry.unwrap().file_name().to_str()?.parse().ok());
        let mut workers: Vec<u32> =
            numbers.filter(|&process| parent_of(process) == Some(self.id())).collect();
        workers.sort_unstable();
        workers
    }

    /// Whether a started process still exists.
    pub(crate) fn is_there(worker: &u32) -> bool {
        // Adopted processes may remain as zombies. While any other thread of a process is left, its files and locks are
        // too.
        let status = std::fs::read_to_string(format!("/proc/{worker}/status"));
        let is_over = |status: &str| {
            status.contains("State:\tZ")
                && ["Threads:\t0\n", "Threads:\t1\n"].iter().any(|one| status.contains(one))
        };
        status.is_ok_and(|status| !is_over(&status))
    }

    /// Whether a process is stopped by a signal.
    pub(crate) fn is_stopped(worker: &u32) -> bool {
        let status = std::fs::read_to_string(format!("/proc/{worker}/status"));
        status.is_ok_and(|status| status.contains("State:\tT"))
    }

    pub(crate) fn end(mut self) -> Ran {
        Ran::of(self.child.take().unwrap().wait_with_output().unwrap())
    }
}

impl Drop for Launch {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            let _ = child.kill().and_then(|()| child.wait());
        }
    }
}

#[test]
fn launch_matches_threads_bitwise() {
    let sandbox = Sandbox::new();
    // The schedule causes a warning, which must be printed once.
    let warned = "train run.toml --set train.lr_schedule={name=\"warmup-cosine\",warmup_steps=20}";
    let ran = sandbox.succeed(&format!("launch --nproc 2 -- {warned}"));
    assert_eq!(ran.stderr.matches("warning:").count(), 1, "{}", ran.stderr);
    sandbox.succeed(&format!("{warned} --set run.out_dir=threads"));
    assert!(ran.stdout.contains("steps         3,"), "{}", ran.stdout);
    assert_eq!(ran.stdout.matches("steps ").count(), 1, "{}", ran.stdout);
    let model = |out: &str| std::fs::read(sandbox.path(&format!("{out}/model/model.safetensors"))).unwrap();
    assert!(model("out") == model("threads"));
}

#[test]
fn killed_process_loses_only_steps_since_last_checkpoint() {
    let sandbox = Sandbox::new();
    let launch = Launch::start(&sandbox, &format!("launch --nproc 2 -- {ENDLESS}"));
    for _ in 0..2 {
        let before = newest(&sandbox);
        wait_until("a checkpoint", || newest(&sandbox) > before + 3);
        let workers = launch.workers();
        send("KILL", workers[workers.len() - 1]);
        wait_until("other processes", || {
            launch.workers().iter().all(|worker| !workers.contains(worker)) && launch.workers().len() == 2
        });
    }
    let before = newest(&sandbox);
    wait_until("a checkpoint", || newest(&sandbox) > before + 3);
    send("TERM", launch.id());
    let ran = launch.end();
    assert_eq!(ran.code, Some(75), "stopped, and not started again: {}", ran.stderr);
    assert_eq!(ran.stderr.matches("restarting all processes").count(), 2, "{}", ran.stderr);
    let steps: Vec<u64> = sandbox.metrics("out").iter().map(|step| step["step"].as_u64().unwrap()).collect();
    assert!(steps.iter().copied().eq(1..=steps.len() as u64), "no step is missing or there twice");
    assert_eq!(newest(&sandbox), steps.len() as u64);
}

#[test]
fn signal_from_terminal_or_scheduler_saves_and_stops() {
    for (signal, to_workers) in [("INT", false), ("TERM", true)] {
        let sandbox = Sandbox::new();
        let launch = Launch::start(&sandbox, &format!("launch --nproc 2 -- {ENDLESS}"));
        wait_until("a checkpoint", || newest(&sandbox) > 3);
        // A terminal signals the process group of the launcher; a scheduler signals every process.
        let workers = launch.workers();
        for worker in workers.into_iter().filter(|_| to_workers) {
            send(signal, worker);
        }
        let group = format!("kill -{signal} -{}", launch.id());
        assert!(Command::new("sh").args(["-c", &group]).status().unwrap().success());
        let ran = launch.end();
        assert_eq!(ran.code, Some(75), "{signal}: {}", ran.stderr);
        assert!(ran.stdout.contains("stopped early"), "{signal}: {}", ran.stdout);
        assert_eq!(newest(&sandbox), sandbox.metrics("out").len() as u64, "the last step is saved");
    }
}

#[test]
fn max_restarts_is_enforced() {
    let sandbox = Sandbox::new();
    let launch = Launch::start(&sandbox, &format!("launch --nproc 2 --max-restarts 0 -- {ENDLESS}"));
    wait_until("a checkpoint", || newest(&sandbox) > 3);
    send("KILL", launch.workers()[0]);
    let ran = launch.end();
    assert_eq!(ran.code, Some(75), "{}", ran.stderr);
    assert!(ran.stderr.contains("no restarts are left (--max-restarts 0)"), "{}", ran.stderr);
}

#[test]
fn permanent_failures_are_not_restarted() {
    let sandbox = Sandbox::new();
    for (args, code, message) in [
        ("train run.toml --set train.optimizer={name=\"sgd\",lr=1e39}", 3, "not finite"),
        ("train run.toml --set data.train=[\"none.txt\"]", 2, "none.txt"),
    ] {
        let ran = sandbox.fsdp(&format!("launch --nproc 2 -- {args} --overwrite"));
        assert_eq!(ran.code, Some(code), "{}", ran.stderr);
        assert!(ran.stderr.contains(message) && !ran.stderr.contains("again ("), "{}", ran.stderr);
    }
    // Errors in the command are reported once, before any process starts.
    for (args, message) in [
        ("train", "<RUN.toml>"),
        ("train none.toml", "none.toml"),
        ("train run.toml --set run.ranks=x", "run.ranks"),
        (
            "check run.toml",
            "only `train`, `bench train`, `verify`, `audit`, `eval`, `schedule`, `calibrate` and `doctor` run as several processes",
        ),
    ] {
        let ran = sandbox.fsdp(&format!("launch --nproc 2 -- {args}"));
        assert_eq!(ran.code, Some(2), "{args}: {}", ran.stderr);
        assert_eq!(
            ran.stderr.matches("error:").count(),
            1 + usize::from(args == "train"),
            "{args}: {}",
            ran.stderr
        );
        assert!(ran.stderr.contains(message), "{args}: {}", ran.stderr);
    }
}

#[test]
fn log_dir_has_separate_files_per_rank() {
    let sandbox = Sandbox::new();
    let ran = sandbox.succeed("launch --nproc 2 --log-dir logs -- train run.toml");
    assert!(ran.stdout.contains("steps         3,") && ran.stderr.contains("step 3/3"), "{}", ran.stderr);
    assert_eq!(sandbox.read("logs/attempt-0/rank-0/stdout.log"), ran.stdout);
    assert!(sandbox.read("logs/attempt-0/rank-0/stderr.log").contains("step 3/3"));
    assert_eq!(sandbox.read("logs/attempt-0/rank-1/stdout.log"), "");
}

#[test]
fn logs_of_earlier_launch_are_kept() {
    let sandbox = Sandbox::new();
    for attempt in 0..2 {
        sandbox.succeed("launch --nproc 1 --log-dir logs -- train run.toml --overwrite");
        assert!(sandbox.read(&format!("logs/attempt-{attempt}/rank-0/stderr.log")).contains("step 3/3"));
    }
}

#[test]
fn invalid_options_are_rejected() {
    let sandbox = Sandbox::new();
    for (args, message) in [
        ("--nproc none -- train run.toml", "expected a number from 1 to 4096, auto, gpu or cpu"),
        // Several nodes are started by other launchers.
        ("--nnodes 2 -- train run.toml", "unexpected argument '--nnodes' found"),
    ] {
        let ran = sandbox.fsdp(&format!("launch {args}"));
        assert_eq!(ran.code, Some(2), "{args}: {}", ran.stderr);
        assert!(ran.stderr.contains(message), "{args}: {}", ran.stderr);
    }
}

#[test]
fn killed_launcher_leaves_no_processes() {
    for processes in [1, 2] {
        killed(processes);
    }
}

fn killed(processes: usize) {
    let sandbox = Sandbox::new();
    let launch = Launch::start(&sandbox, &format!("launch --nproc {processes} -- {ENDLESS}"));
    wait_until("a checkpoint", || newest(&sandbox) > 3);
    let workers = launch.workers();
    assert_eq!(workers.len(), processes);
    send("KILL", launch.id());
    wait_until("the end of its processes", || !workers.iter().any(Launch::is_there));
    let done = newest(&sandbox);
    sandbox
        .succeed(&format!("train run.toml --resume --set checkpoint.every=2 --set train.steps={}", done + 1));
}

#[test]
fn launched_eval_has_the_loss_of_one_process() {
    let sandbox = Sandbox::new();
    sandbox.succeed("train run.toml");
    let eval = "eval run.toml --model out/model --json --set data.eval=[\"data.txt\"]";
    let evaluations = |stdout: &str| {
        let found: serde_json::Value = serde_json::from_str(stdout).unwrap();
        found["evaluations"].clone()
    };
    let one = evaluations(&sandbox.succeed(eval).stdout);
    assert!(one[0]["loss"].is_f64(), "{one}");
    let launched = sandbox.succeed(&format!("launch --nproc 2 -- {eval}"));
    assert_eq!(evaluations(&launched.stdout), one);
}
