//! Slurm with 4 nodes on this machine (`scripts/slurm-nodes.sh`), where it is installed and namespaces may be made.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::launchers::programs;
use crate::processes::{bits, newest};
use crate::support::{Ran, Sandbox};
use crate::world::{may_make_namespaces, send, wait_until};

/// A shell on the first of the nodes.
struct Nodes<'a> {
    sandbox: &'a Sandbox,
    shell: Child,
}

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

impl<'a> Nodes<'a> {
    /// Starts Slurm, if this machine can.
    fn start(sandbox: &'a Sandbox) -> Option<Self> {
        let names = ["slurmctld", "slurmd", "munged", "srun", "sbatch"];
        if let Some(missing) = names.into_iter().find(|name| programs(&[name], "").is_empty()) {
            println!("skipped: {missing} is not on PATH");
            return None;
        }
        if !may_make_namespaces() {
            return None;
        }
        let folder = Path::new(env!("CARGO_BIN_EXE_fsdp")).parent().unwrap().to_owned();
        let path =
            [vec![folder], std::env::split_paths(&std::env::var_os("PATH").unwrap()).collect()].concat();
        let mut shell = Command::new(repository().join("scripts/slurm-nodes.sh"));
        shell.arg(sandbox.path("slurm")).arg("sh").current_dir(sandbox.path(""));
        shell.env("PATH", std::env::join_paths(path).unwrap()).stdin(Stdio::piped());
        Some(Self { sandbox, shell: shell.spawn().unwrap() })
    }

    /// Begins a command.
    fn begin(&mut self, name: &str, command: &str) {
        let line = format!(
            "({command}; echo $? > {name}.part; mv {name}.part {name}.code) > {name}.out 2> {name}.err &"
        );
        writeln!(self.shell.stdin.as_ref().unwrap(), "{line}").unwrap();
    }

    /// Waits for the end of a command.
    fn end(&self, name: &str) -> Ran {
        let file = format!("{name}.code");
        wait_until(&file, || self.sandbox.path(&file).exists());
        let read = |what: &str| self.sandbox.read(&format!("{name}.{what}"));
        Ran { code: read("code").trim().parse().ok(), stdout: read("out"), stderr: read("err") }
    }

    fn run(&mut self, name: &str, command: &str) -> Ran {
        self.begin(name, command);
        self.end(name)
    }

    /// The process of a task.
    fn task(&self, number: usize) -> Option<u32> {
        let variable = format!("SLURM_PROCID={number}");
        let is_task = |process: &u32| {
            let folder = PathBuf::from(format!("/proc/{process}"));
            let runs =
                |name: &str, of: &Path| std::fs::read_link(folder.join(name)).is_ok_and(|found| found == of);
            let environment = std::fs::read(folder.join("environ")).unwrap_or_default();
            runs("exe", &Path::new(env!("CARGO_BIN_EXE_fsdp")).canonicalize().unwrap())
                && runs("cwd", &self.sandbox.path("").canonicalize().unwrap())
                && environment.split(|&byte| byte == 0).any(|entry| entry == variable.as_bytes())
        };
        let numbers = std::fs::read_dir("/proc").unwrap();
        numbers.filter_map(|entry| entry.unwrap().file_name().to_str()?.parse().ok()).find(is_task)
    }

    /// Waits until the run has saved more than it has.
    fn wait_for_saves(&self) {
        let before = newest(self.sandbox);
        wait_until("a checkpoint", || newest(self.sandbox) > before + 3);
    }

    /// Waits until Slurm says all this of a job.
    fn wait_for_job(&mut self, job: &str, state: &[&str]) {
        let begin = Instant::now();
        loop {
            let _ = std::fs::remove_file(self.sandbox.path("show.code"));
            let told = self.run("show", &format!("scontrol show job {job}")).stdout;
            if state.iter().all(|state| told.contains(state)) {
                return;
            }
            assert!(begin.elapsed() < Duration::from_secs(60), "{told}\n{}", self.output(job));
        }
    }

    fn output(&self, job: &str) -> String {
        self.sandbox.read(&format!("slurm-{job}.out"))
    }
}

impl Drop for Nodes<'_> {
    fn drop(&mut self) {
        // All that runs on the nodes goes with the shell.
        let _ = self.shell.kill().and_then(|()| self.shell.wait());
    }
}

const FOUR: &str = "--set run.ranks=4 --set train.global_batch_size=16";

#[test]
fn srun_on_four_nodes_has_the_bits_of_threads_and_ends_with_a_task_that_is_killed() {
    let sandbox = Sandbox::new();
    let Some(mut nodes) = Nodes::start(&sandbox) else { return };
    sandbox.succeed(&format!("train run.toml {FOUR} --set run.out_dir=threads"));
    let ran = nodes.run("whole", &format!("srun -N 4 fsdp train run.toml {FOUR} --set run.out_dir=whole"));
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    assert!(bits(&sandbox, "whole") == bits(&sandbox, "threads"));
    assert!(ran.stderr.contains("4 processes (") && ran.stderr.contains("over TCP"), "{}", ran.stderr);

    for victim in [0, 2] {
        let name = format!("killed{victim}");
        nodes.begin(
            &name,
            &format!(
                "srun -N 4 fsdp train run.toml {FOUR} --resume --set train.steps=1000000 --set checkpoint.every=2"
            ),
        );
        nodes.wait_for_saves();
        send("KILL", nodes.task(victim).unwrap());
        let begin = Instant::now();
        wait_until("the end of all tasks", || (0..4).all(|task| nodes.task(task).is_none()));
        assert!(begin.elapsed() < Duration::from_secs(5), "{:?}", begin.elapsed());
        let ran = nodes.end(&name);
        // Slurm says that a task was killed, not that others ended with 75.
        assert_eq!(ran.code, Some(137), "{}", ran.stderr);
        assert!(ran.stderr.contains(&format!("process {victim} (pid")), "{}", ran.stderr);
    }
}

#[test]
fn a_job_that_is_killed_and_signalled_goes_back_into_the_queue_and_on_to_the_same_end() {
    let sandbox = Sandbox::new();
    let Some(mut nodes) = Nodes::start(&sandbox) else { return };
    // The script that users copy, with one process per node.
    let script = std::fs::read_to_string(repository().join("examples/clusters/slurm.sh")).unwrap();
    let tasks = "#SBATCH --ntasks-per-node=8";
    assert!(script.contains(tasks));
    sandbox.write("slurm.sh", script.replace(tasks, "#SBATCH --ntasks-per-node=1"));
    // And one that leaves all to `RequeueExit=75`.
    sandbox.write("plain.sh", "#!/bin/sh\n#SBATCH --nodes=4\nsrun fsdp train run.toml --resume\n");
    sandbox.edit("run.toml", "ranks = 2", "ranks = 4");
    sandbox.edit("run.toml", "global_batch_size = 8", "global_batch_size = 16");
    sandbox.edit("run.toml", "steps = 3", "steps = 1000000");
    sandbox.edit("run.toml", "[data]", "[checkpoint]\nevery = 2\n[data]");

    let submitted = nodes.run("submit", "sbatch --parsable slurm.sh run.toml");
    assert_eq!(submitted.code, Some(0), "{}", submitted.stderr);
    let job = submitted.stdout.trim();
    nodes.wait_for_saves();
    send("KILL", nodes.task(3).unwrap());
    nodes.wait_for_job(job, &["Restarts=1", "JobState=PENDING"]);
    assert!(nodes.output(job).contains("process 3 (pid"), "{}", nodes.output(job));
    nodes.wait_for_saves();
    // As `--signal=TERM@120` does, when there are two minutes left.
    assert_eq!(nodes.run("signal", &format!("scancel --signal=TERM {job}")).code, Some(0));
    nodes.wait_for_job(job, &["Restarts=2", "JobState=PENDING"]);
    assert!(nodes.output(job).contains("stopped early"), "{}", nodes.output(job));
    assert_eq!(sandbox.metrics("out").len() as u64, newest(&sandbox), "the last step is saved");
    assert_eq!(nodes.run("cancel", &format!("scancel {job}")).code, Some(0));

    let submitted = nodes.run("again", "sbatch --parsable plain.sh");
    assert_eq!(submitted.code, Some(0), "{}", submitted.stderr);
    let job = submitted.stdout.trim();
    nodes.wait_for_saves();
    assert_eq!(nodes.run("usr1", &format!("scancel --signal=USR1 {job}")).code, Some(0));
    nodes.wait_for_job(job, &["Restarts=1", "JobState=PENDING"]);
    let steps = newest(&sandbox) + 3;
    sandbox.edit("run.toml", "steps = 1000000", &format!("steps = {steps}"));
    nodes.wait_for_job(job, &["JobState=COMPLETED"]);
    sandbox.succeed("train run.toml --set run.out_dir=threads");
    for key in ["loss", "grad_norm", "lr"] {
        assert_eq!(sandbox.column("out", key), sandbox.column("threads", key), "{key}");
    }
    let model = |out: &str| std::fs::read(sandbox.path(&format!("{out}/model/model.safetensors"))).unwrap();
    assert!(model("out") == model("threads"));
}
