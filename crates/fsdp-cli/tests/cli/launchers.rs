//! Launchers installed on this machine: those on `PATH`, and those that `FSDP_TEST_MPIRUN` and `FSDP_TEST_TORCHRUN`
//! name (paths separated by colons).

use std::env;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::kills::{ends_as_if_nothing_had_been, wait_for_saves};
use crate::launching::Launch;
use crate::processes::bits;
use crate::support::{Ran, Sandbox};
use crate::world::{free_port, send, wait_until};

/// A launcher and its arguments to start processes on this machine.
struct Launcher {
    program: PathBuf,
    arguments: fn(usize) -> Vec<String>,
}

fn words(text: &str) -> Vec<String> {
    text.split_whitespace().map(str::to_owned).collect()
}

fn open_mpi(processes: usize) -> Vec<String> {
    words(&format!("--allow-run-as-root --oversubscribe -np {processes}"))
}

fn hydra(processes: usize) -> Vec<String> {
    words(&format!("-np {processes}"))
}

fn torchrun(processes: usize) -> Vec<String> {
    words(&format!("--standalone --nproc_per_node {processes} --no-python"))
}

/// Returns the programs with these names on `PATH`, and those that a variable names.
pub(crate) fn programs(names: &[&str], variable: &str) -> Vec<PathBuf> {
    let folders = env::var_os("PATH").unwrap_or_default();
    let on_path =
        env::split_paths(&folders).flat_map(|folder| names.iter().map(move |name| folder.join(name)));
    let named = env::var_os(variable).unwrap_or_default();
    let mut found: Vec<PathBuf> = on_path
        .chain(env::split_paths(&named))
        .filter_map(|path| path.canonicalize().ok().map(|_| path))
        .collect();
    found.sort_by_key(|path| path.canonicalize().ok());
    found.dedup_by_key(|path| path.canonicalize().ok());
    found
}

fn mpi() -> Vec<Launcher> {
    let of = |program: PathBuf| {
        let version = Command::new(&program).arg("--version").output().ok()?;
        let is_open_mpi = String::from_utf8_lossy(&version.stdout).contains("Open MPI");
        Some(Launcher { program, arguments: if is_open_mpi { open_mpi } else { hydra } })
    };
    programs(&["mpirun", "mpirun.mpich", "mpirun.openmpi"], "FSDP_TEST_MPIRUN")
        .into_iter()
        .filter_map(of)
        .collect()
}

fn of_torch() -> Vec<Launcher> {
    let of = |program| Launcher { program, arguments: torchrun };
    programs(&["torchrun"], "FSDP_TEST_TORCHRUN").into_iter().map(of).collect()
}

impl Launcher {
    fn run(&self, sandbox: &Sandbox, processes: usize, args: &str) -> Ran {
        Ran::of(command(sandbox, &self.program, (self.arguments)(processes), args).output().unwrap())
    }
}

/// Returns the command of a launcher that starts `fsdp` with `args`.
fn command(sandbox: &Sandbox, launcher: &Path, arguments: Vec<String>, args: &str) -> Command {
    let fsdp = sandbox.command();
    let mut command = Command::new(launcher);
    command.args(arguments).arg(fsdp.get_program()).args(args.split_whitespace());
    command.current_dir(sandbox.path("")).stdin(std::process::Stdio::null());
    for (name, value) in fsdp.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    command
}

/// Whether there is a launcher to test; prints a note otherwise.
fn is_there(launchers: &[Launcher], what: &str) -> bool {
    if launchers.is_empty() {
        println!("skipped: this machine has no {what}");
    }
    !launchers.is_empty()
}

fn model(sandbox: &Sandbox, out: &str) -> Vec<u8> {
    std::fs::read(sandbox.path(out).join("model/model.safetensors")).unwrap()
}

fn has_the_bits_of_threads(launchers: &[Launcher], connected_over: fn(&Path) -> &'static str) {
    for launcher in launchers {
        let sandbox = Sandbox::new();
        let program = launcher.program.display();
        for ranks in [2, 4] {
            let args =
                |out: &str| format!("train run.toml --set run.ranks={ranks} --set run.out_dir={out}{ranks}");
            sandbox.succeed(&args("threads"));
            let ran = launcher.run(&sandbox, ranks, &args("processes"));
            assert_eq!(ran.code, Some(0), "{program}: {}", ran.stderr);
            let (threads, processes) = (format!("threads{ranks}"), format!("processes{ranks}"));
            assert!(model(&sandbox, &processes) == model(&sandbox, &threads), "{program}");
            assert_eq!(sandbox.column(&processes, "loss"), sandbox.column(&threads, "loss"), "{program}");
            let over = connected_over(&launcher.program);
            assert!(ran.stderr.contains(&format!("connected over {over}")), "{program}: {}", ran.stderr);
            assert_eq!(ran.stdout.matches("steps         3,").count(), 1, "{program}: {}", ran.stdout);
        }
        // Each process holds several ranks.
        let args = "train run.toml --set run.ranks=4 --set run.transport=tcp --set run.out_dir=tcp";
        let ran = launcher.run(&sandbox, 2, args);
        assert_eq!(ran.code, Some(0), "{program}: {}", ran.stderr);
        assert!(model(&sandbox, "tcp") == model(&sandbox, "threads4"), "{program}");
    }
}

#[test]
fn mpirun_matches_threads_bitwise() {
    let launchers = mpi();
    if is_there(&launchers, "mpirun") {
        has_the_bits_of_threads(&launchers, |_| "MPI (");
    }
}

#[test]
fn verify_and_doctor_run_over_mpi_under_mpirun() {
    let launchers = mpi();
    if !is_there(&launchers, "mpirun") {
        return;
    }
    for launcher in &launchers {
        let sandbox = Sandbox::new();
        let program = launcher.program.display();
        let ran = launcher.run(&sandbox, 4, "verify run.toml --world-sizes 4");
        assert_eq!(ran.code, Some(0), "{program}: {}", ran.stderr);
        assert!(ran.stderr.contains("connected over MPI ("), "{program}: {}", ran.stderr);
        assert_eq!(ran.stdout.matches("every promise was kept").count(), 1, "{program}: {}", ran.stdout);
        let ran = launcher.run(&sandbox, 2, "doctor run.toml");
        assert_eq!(ran.code, Some(0), "{program}: {}", ran.stderr);
        assert!(ran.stdout.contains("connected over  MPI ("), "{program}: {}", ran.stdout);
    }
}

#[test]
fn torchrun_matches_threads_bitwise() {
    let launchers = of_torch();
    if is_there(&launchers, "torchrun (named in FSDP_TEST_TORCHRUN or on PATH)") {
        has_the_bits_of_threads(&launchers, |_| "TCP");
    }
}

#[test]
fn two_torchrun_agents_match_threads_bitwise() {
    let launchers = of_torch();
    if !is_there(&launchers, "torchrun (named in FSDP_TEST_TORCHRUN or on PATH)") {
        return;
    }
    for launcher in &launchers {
        let sandbox = Sandbox::new();
        let args = |out: &str| {
            format!(
                "train run.toml --set run.ranks=4 --set train.global_batch_size=16 --set run.out_dir={out}"
            )
        };
        let port = free_port();
        let agent = format!(
            "--nnodes 2 --nproc_per_node 2 --rdzv_id run --rdzv_backend c10d --rdzv_endpoint 127.0.0.1:{port} \
             --local_addr 127.0.0.1 --no-python"
        );
        let start = || {
            let mut command = command(&sandbox, &launcher.program, words(&agent), &args("agents"));
            command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
        };
        let ran = [start(), start()].map(|agent| Ran::of(agent.wait_with_output().unwrap()));
        for ran in &ran {
            assert_eq!(ran.code, Some(0), "{}", ran.stderr);
        }
        sandbox.succeed(&args("threads"));
        assert!(bits(&sandbox, "agents") == bits(&sandbox, "threads"));
        let stderr: String = ran.into_iter().map(|ran| ran.stderr).collect();
        assert_eq!(stderr.matches("4 processes (").count(), 1, "{stderr}");
    }
}

#[test]
fn torchrun_restarts_run_after_killed_process() {
    let launchers = of_torch();
    if !is_there(&launchers, "torchrun (named in FSDP_TEST_TORCHRUN or on PATH)") {
        return;
    }
    for launcher in &launchers {
        let sandbox = Sandbox::new();
        let args = "train run.toml --set checkpoint.every=2";
        let agent = words("--standalone --nproc_per_node 2 --max-restarts 2 --no-python");
        let endless = format!("{args} --resume --set train.steps=1000000");
        let launch = Launch::of(command(&sandbox, &launcher.program, agent, &endless));
        for _ in 0..2 {
            wait_for_saves(&sandbox);
            let workers = launch.workers();
            send("KILL", workers[1]);
            // The other process may save until it notices.
            wait_until("the end of both", || !workers.iter().any(Launch::is_there));
        }
        wait_for_saves(&sandbox);
        send("TERM", launch.id());
        let ran = launch.end();
        assert_ne!(ran.code, Some(0), "{}", ran.stderr);
        assert_eq!(sandbox.starts("out").len(), 3, "{}", ran.stderr);
        ends_as_if_nothing_had_been(&sandbox, args);
    }
}

#[test]
fn launcher_reports_exit_code_of_diverged_run() {
    for launcher in mpi() {
        let sandbox = Sandbox::new();
        let args = "train run.toml --set train.optimizer={name=\"sgd\",lr=1e39}";
        let mut arguments = (launcher.arguments)(2);
        if arguments == hydra(2) {
            // Otherwise it kills the second process when the first has ended, and may report that (docs/clusters.md).
            arguments.push("-disable-auto-cleanup".to_owned());
        }
        let ran = Ran::of(command(&sandbox, &launcher.program, arguments, args).output().unwrap());
        assert_eq!(ran.code, Some(3), "{}: {}", launcher.program.display(), ran.stderr);
        assert!(ran.stderr.contains("not finite"), "{}", ran.stderr);
    }
    for launcher in of_torch() {
        let sandbox = Sandbox::new();
        let args = "train run.toml --set train.optimizer={name=\"sgd\",lr=1e39}";
        let ran = launcher.run(&sandbox, 2, args);
        // torchrun turns every failure into exit code 1, and shows the error of the process that failed first.
        assert_eq!(ran.code, Some(1), "{}", ran.stderr);
        assert!(ran.stderr.contains("not finite"), "{}", ran.stderr);
    }
}

#[test]
fn mpi_library_of_another_launcher_is_rejected() {
    let has = |launchers: &[Launcher], arguments: fn(usize) -> Vec<String>| {
        launchers.iter().any(|launcher| (launcher.arguments)(1) == arguments(1))
    };
    let launchers = mpi();
    if !(has(&launchers, open_mpi) && has(&launchers, hydra)) {
        println!("skipped: this machine has not both Open MPI and MPICH");
        return;
    }
    // Debian installs libraries where the loader searches, wheels in `lib` next to the folder of their programs.
    let beside = |launcher: &Launcher| Some(launcher.program.parent()?.parent()?.join("lib"));
    let folders: Vec<PathBuf> =
        launchers.iter().filter_map(beside).chain([PathBuf::from("/usr/lib/x86_64-linux-gnu")]).collect();
    for launcher in &launchers {
        let is_open_mpi = (launcher.arguments)(1) == open_mpi(1);
        let names: &[&str] =
            if is_open_mpi { &["libmpich.so.12", "libmpi.so.12"] } else { &["libmpi.so.40"] };
        let mut files = names.iter().flat_map(|name| folders.iter().map(move |folder| folder.join(name)));
        let foreign = files.find(|file| file.exists()).expect("each launcher has its library");
        let sandbox = Sandbox::new();
        let fsdp = sandbox.command();
        let mut command = Command::new(&launcher.program);
        command.args((launcher.arguments)(2)).arg(fsdp.get_program()).args(["train", "run.toml"]);
        command.current_dir(sandbox.path("")).env("FSDP_MPI_LIBRARY", &foreign);
        command.env_remove(OsStr::new("RUST_LOG"));
        let ran = Ran::of(command.output().unwrap());
        assert_eq!(ran.code, Some(2), "{}: {}", launcher.program.display(), ran.stderr);
        assert!(ran.stderr.contains("name the right one in FSDP_MPI_LIBRARY"), "{}", ran.stderr);
    }
}
