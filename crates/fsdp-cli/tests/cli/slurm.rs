//! Slurm with 4 nodes on this machine (`scripts/slurm-nodes.sh`), if it is installed and namespaces are allowed.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::launchers::programs;
use crate::processes::{bits, newest};
use crate::shell::{Shell, may_make_namespaces};
use crate::support::Sandbox;
use crate::world::{send, wait_until};

/// A shell on the first node.
struct Nodes<'a> {
    sandbox: &'a Sandbox,
    shell: Shell<'a>,
}

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

impl<'a> Nodes<'a> {
    /// Starts Slurm; `None` if this machine does not allow it.
    fn start(sandbox: &'a Sandbox) -> Option<Self> {
        let names = ["slurmctld", "slurmd", "munged", "srun", "sbatch"];
        if let Some(missing) = names.into_iter().find(|name| programs(&[name], "").is_empty()) {
            println!("skipped: {missing} is not on PATH");
            return None;
        }
        let mut command = Command::new(repository().join("scripts/slurm-nodes.sh"));
        command.arg(sandbox.path("slurm")).arg("sh");
        may_make_namespaces().then(|| Self { sandbox, shell: Shell::start(sandbox, command) })
    }

    /// Returns the process ID of a task.
    fn task(&self, number: usize) -> Option<u32> {
        self.shell.process_with(&format!("SLURM_PROCID={number}"))
    }

    fn submit(&self, script: &str) -> String {
        self.shell.succeed("submit", &format!("sbatch --parsable {script}")).stdout.trim().to_owned()
    }

    /// Waits until the run has saved more checkpoints.
    fn wait_for_saves(&self) {
        let before = newest(self.sandbox);
        wait_until("a checkpoint", || newest(self.sandbox) > before + 3);
    }

    /// Whether Slurm's description of a job contains `state`.
    fn has_state(&self, job: &str, state: &str) -> bool {
        self.shell.succeed("show", &format!("scontrol show job {job}")).stdout.contains(state)
    }

    /// Waits until Slurm's description of a job contains `state`.
    fn wait_for_job(&self, job: &str, state: &str) {
        wait_until(state, || self.has_state(job, state));
    }

    /// Sends a signal to a job whose run then returns to the queue, and holds it there. A job waits in the queue only
    /// for seconds by itself: if it has started again, it gets another signal. `restarts` is the number of its earlier
    /// restarts.
    fn requeue(&self, job: &str, signal: &str, restarts: usize) {
        for sent in 1.. {
            self.wait_for_saves();
            self.shell.succeed("signal", &format!("scancel --signal={signal} {job}"));
            self.wait_for_job(job, &format!("Restarts={}", restarts + sent));
            let is_now = |state: &str| self.has_state(job, &format!("JobState={state}"));
            wait_until("its place in the queue", || is_now("PENDING") || is_now("RUNNING"));
            let is_held = self.shell.run("hold", &format!("scontrol hold {job}")).code == Some(0);
            if is_held && is_now("PENDING") {
                return;
            }
        }
    }

    fn output(&self, job: &str) -> String {
        self.sandbox.read(&format!("slurm-{job}.out"))
    }
}

const FOUR: &str = "--set run.ranks=4 --set train.global_batch_size=16";

#[test]
fn srun_matches_threads_and_ends_when_task_is_killed() {
    let sandbox = Sandbox::new();
    let Some(nodes) = Nodes::start(&sandbox) else { return };
    sandbox.succeed(&format!("train run.toml {FOUR} --set run.out_dir=threads"));
    let ran =
        nodes.shell.run("whole", &format!("srun -N 4 fsdp train run.toml {FOUR} --set run.out_dir=whole"));
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    assert!(bits(&sandbox, "whole") == bits(&sandbox, "threads"));
    assert!(ran.stderr.contains("4 processes (") && ran.stderr.contains("over TCP"), "{}", ran.stderr);

    for victim in [0, 2] {
        let name = format!("killed{victim}");
        nodes.shell.begin(
            &name,
            &format!(
                "srun -N 4 fsdp train run.toml {FOUR} --resume --set train.steps=1000000 --set checkpoint.every=2 \
                 --set run.heartbeat_s=60"
            ),
        );
        nodes.wait_for_saves();
        send("KILL", nodes.task(victim).unwrap());
        wait_until("the end of all tasks", || (0..4).all(|task| nodes.task(task).is_none()));
        let ran = nodes.shell.end(&name);
        // Slurm reports the killed task, not the exit code 75 of the others.
        assert_eq!(ran.code, Some(137), "{}", ran.stderr);
        assert!(ran.stderr.contains(&format!("process {victim} (pid")), "{}", ran.stderr);
    }
}

#[test]
fn killed_and_signaled_job_is_requeued_and_matches_threads() {
    let sandbox = Sandbox::new();
    let Some(nodes) = Nodes::start(&sandbox) else { return };
    // The script that users copy, with one process per node.
    let script = std::fs::read_to_string(repository().join("examples/clusters/slurm.sh")).unwrap();
    let tasks = "#SBATCH --ntasks-per-node=8";
    assert!(script.contains(tasks));
    sandbox.write("slurm.sh", script.replace(tasks, "#SBATCH --ntasks-per-node=1"));
    // A script that relies only on `RequeueExit=75`.
    sandbox.write("plain.sh", "#!/bin/sh\n#SBATCH --nodes=4\nsrun fsdp train run.toml --resume\n");
    sandbox.edit("run.toml", "ranks = 2", "ranks = 4");
    sandbox.edit("run.toml", "global_batch_size = 8", "global_batch_size = 16");
    sandbox.edit("run.toml", "steps = 3", "steps = 1000000");
    sandbox.edit("run.toml", "[data]", "[checkpoint]\nevery = 2\n[data]");

    let job = &nodes.submit("slurm.sh run.toml");
    nodes.wait_for_saves();
    send("KILL", nodes.task(3).unwrap());
    nodes.wait_for_job(job, "Restarts=1");
    assert!(nodes.output(job).contains("process 3 (pid"), "{}", nodes.output(job));
    // As `--signal=TERM@120` does two minutes before the time limit.
    nodes.requeue(job, "TERM", 1);
    assert!(nodes.output(job).contains("stopped early"), "{}", nodes.output(job));
    assert_eq!(sandbox.metrics("out").len() as u64, newest(&sandbox), "the last step is saved");
    nodes.shell.succeed("cancel", &format!("scancel {job}"));

    let job = &nodes.submit("plain.sh");
    nodes.requeue(job, "USR1", 0);
    let steps = newest(&sandbox) + 3;
    sandbox.edit("run.toml", "steps = 1000000", &format!("steps = {steps}"));
    nodes.shell.succeed("release", &format!("scontrol release {job}"));
    nodes.wait_for_job(job, "JobState=COMPLETED");
    sandbox.succeed("train run.toml --set run.out_dir=threads");
    for key in ["loss", "grad_norm", "lr"] {
        assert_eq!(sandbox.column("out", key), sandbox.column("threads", key), "{key}");
    }
    let model = |out: &str| std::fs::read(sandbox.path(&format!("{out}/model/model.safetensors"))).unwrap();
    assert!(model("out") == model("threads"));
}
