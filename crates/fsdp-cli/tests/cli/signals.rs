//! SIGINT and SIGTERM: the first stops the run after the current step, the second immediately.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, ChildStderr, Command, Stdio};

use fsdp_ckpt::model_files::ModelReader;
use fsdp_ckpt::native::RunDir;

use crate::support::{Ran, Sandbox};

/// A started run.
pub(crate) struct Running {
    child: Child,
    stderr: BufReader<ChildStderr>,
}

impl Running {
    pub(crate) fn start(sandbox: &Sandbox, args: &str) -> Self {
        Self::start_at(sandbox, args, "step")
    }

    /// Starts a run and waits for its first line on stderr, which must begin with `first`.
    fn start_at(sandbox: &Sandbox, args: &str, first: &str) -> Self {
        let mut command = sandbox.command();
        command.args(args.split_whitespace());
        Self::of(sandbox, command, first)
    }

    /// Starts a run and waits until its first step is in progress. The step lasts until [`Running::end`]: every
    /// operation logs a line, far more than the unread stderr pipe holds.
    fn start_in_step(sandbox: &Sandbox) -> Self {
        sandbox.write("data.txt", "0123456789abcdef".repeat(1024));
        let mut command = sandbox.command();
        let many = "train run.toml --quiet --set train.steps=1000 --set train.global_batch_size=256";
        command.args(many.split_whitespace()).env("RUST_LOG", "fsdp::op=trace");
        Self::of(sandbox, command, "")
    }

    fn of(sandbox: &Sandbox, mut command: Command, first: &str) -> Self {
        command.env("TMPDIR", sandbox.path("")).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut stderr = BufReader::new(child.stderr.take().unwrap());
        let mut line = String::new();
        stderr.read_line(&mut line).unwrap();
        assert!(line.trim_start().starts_with(first), "the first line begins with {first}: {line}");
        Self { child, stderr }
    }

    pub(crate) fn signal(&self, name: &str) {
        let kill = format!("kill -{name} {}", self.child.id());
        assert!(Command::new("sh").args(["-c", &kill]).status().unwrap().success());
    }

    pub(crate) fn end(mut self) -> Ran {
        let mut stderr = String::new();
        self.stderr.read_to_string(&mut stderr).unwrap();
        let output = self.child.wait_with_output().unwrap();
        Ran { stderr, ..Ran::of(output) }
    }
}

fn stops_after_the_step(signal: &str, code: i32) {
    let sandbox = Sandbox::new();
    let run = Running::start(&sandbox, "train run.toml --set train.steps=1000000");
    run.signal(signal);
    let ran = run.end();
    assert_eq!(ran.code, Some(code), "{}", ran.stderr);
    assert!(ran.stderr.contains("stopping after the current step"), "{}", ran.stderr);
    let steps = sandbox.metrics("out").len();
    assert!(steps < 1_000_000);
    let expected = format!("steps         {steps} of 1000000, stopped early");
    assert!(ran.stdout.contains(&expected), "{expected}: {}", ran.stdout);
    ModelReader::open(sandbox.path("out/model")).unwrap();
    sandbox.succeed(
        "train run.toml --set model.path=out/model --set model.init=pretrained --set run.out_dir=on",
    );
    // The state is saved although the run file asks for no checkpoints, and the run continues from there.
    assert_eq!(RunDir::new(sandbox.path("out")).steps().unwrap(), [steps as u64]);
    let end = format!("train run.toml --resume --set train.steps={}", steps + 2);
    let on = sandbox.succeed(&end);
    assert!(on.stderr.contains(&format!("step-{steps:08} after step {steps}")), "{}", on.stderr);
    assert_eq!(sandbox.metrics("out").len(), steps + 2);
}

#[test]
fn sigint_stops_after_step_and_exits_with_0() {
    stops_after_the_step("INT", 0);
}

#[test]
fn sigterm_stops_after_step_and_exits_with_75() {
    stops_after_the_step("TERM", 75);
}

#[test]
fn second_signal_exits_immediately_without_model() {
    let sandbox = Sandbox::new();
    let run = Running::start_in_step(&sandbox);
    run.signal("INT");
    run.signal("TERM");
    let ran = run.end();
    assert_eq!(ran.code, Some(130), "{}", ran.stderr);
    assert!(!sandbox.path("out/model/model.safetensors").exists());
    assert!(!sandbox.path("out/model/config.json").exists());
}

/// `fsdp launch` sends SIGUSR1 in addition to the SIGTERM that a scheduler sends to all processes; either may arrive
/// first.
#[test]
fn sigusr1_with_sigterm_does_not_exit_immediately() {
    for signals in [["USR1", "TERM"], ["TERM", "USR1"]] {
        let sandbox = Sandbox::new();
        let run = Running::start_in_step(&sandbox);
        signals.iter().for_each(|signal| run.signal(signal));
        let ran = run.end();
        assert_eq!(ran.code, Some(75), "{signals:?}: {}", ran.stderr);
        let steps = sandbox.metrics("out").len() as u64;
        assert_eq!(RunDir::new(sandbox.path("out")).steps().unwrap(), [steps], "{signals:?}");
    }
}

/// The first line on stderr is a warning about the run file. The data, which takes long to read, is read after it.
fn stops_before_the_data_is_read(signal: &str, code: i32) {
    let sandbox = Sandbox::new();
    sandbox.succeed("train run.toml --set checkpoint.every=1");
    let before = sandbox.files("out");
    sandbox.write("data.txt", "0123456789abcdef".repeat(4 << 20));
    let args = "train run.toml --overwrite --set data.seq_len=65 --set train.steps=1";
    let run = Running::start_at(&sandbox, args, "warning: data.seq_len = 65");
    run.signal(signal);
    let ran = run.end();
    assert_eq!(ran.code, Some(code), "{}", ran.stderr);
    assert_eq!((ran.stdout.as_str(), sandbox.files("out") == before), ("", true), "{}", ran.stderr);
}

#[test]
fn sigterm_before_reading_data_exits_with_75() {
    stops_before_the_data_is_read("TERM", 75);
}

#[test]
fn sigint_before_reading_data_exits_with_130() {
    stops_before_the_data_is_read("INT", 130);
}

/// Schedulers allow seconds between SIGTERM and SIGKILL; an evaluation may take hours.
#[test]
fn sigterm_skips_pending_evaluation() {
    let sandbox = Sandbox::new();
    sandbox.write("eval.txt", "0123456789abcdef".repeat(100_000));
    let args = "train run.toml --set train.steps=9 --set data.eval=[\"eval.txt\"] --set data.eval_every=1";
    let run = Running::start(&sandbox, args);
    run.signal("TERM");
    let ran = run.end();
    assert_eq!(ran.code, Some(75), "{}", ran.stderr);
    assert!(!ran.stderr.contains("evaluation after"), "{}", ran.stderr);
    let steps = RunDir::new(sandbox.path("out")).steps().unwrap();
    assert_eq!(steps, [sandbox.metrics("out").len() as u64]);
}

/// Kills a run that saves in the background; resumed on another number of ranks, it equals a run that was never killed.
#[test]
fn killed_run_resumes_bitwise_on_other_rank_count() {
    let sandbox = Sandbox::new();
    let mut run =
        Running::start(&sandbox, "train run.toml --set train.steps=100000 --set checkpoint.every=3");
    let mut line = String::new();
    while !line.contains("checkpoint after step") {
        line.clear();
        assert!(run.stderr.read_line(&mut line).unwrap() > 0, "it runs until it is killed");
    }
    run.signal("KILL");
    assert_eq!(run.end().code, None);
    let (newest, _) = RunDir::new(sandbox.path("out")).newest().unwrap().unwrap();
    let steps = format!("--set train.steps={} --set run.ranks", newest + 2);
    sandbox.succeed(&format!("train run.toml --resume {steps}=4"));
    sandbox.succeed(&format!("train run.toml --set run.out_dir=whole {steps}=2"));
    assert_eq!(sandbox.column("out", "loss"), sandbox.column("whole", "loss"));
    let weights = |out: &str| std::fs::read(sandbox.path(&format!("{out}/model/model.safetensors"))).unwrap();
    assert_eq!(weights("out"), weights("whole"));
}
