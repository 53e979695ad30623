//! Ranks in several processes: same bits as with threads, one process reports, and all end together.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use fsdp_ckpt::native::{NativeReader, RunDir};

use crate::interposer;
use crate::support::Sandbox;
use crate::world::{FSDP, HYDRA, OPEN_MPI, SRUN, TORCHRUN, Variables, World, free_port, process, wait_until};

const SAVES: &str = "--set checkpoint.every=1 --set checkpoint.keep_last=0";

/// Returns everything that must be equal in two runs: losses and norms, the exported model, and all checkpoint shards.
pub(crate) fn bits(sandbox: &Sandbox, out_dir: &str) -> (Vec<f64>, BTreeMap<PathBuf, Vec<u8>>) {
    let numbers = [sandbox.column(out_dir, "loss"), sandbox.column(out_dir, "grad_norm")].concat();
    let root = sandbox.path(out_dir);
    let files = sandbox
        .files(out_dir)
        .into_iter()
        .filter(|(path, _)| path.extension().is_some_and(|extension| extension == "safetensors"));
    (numbers, files.map(|(path, bytes)| (path.strip_prefix(&root).unwrap().to_owned(), bytes)).collect())
}

#[test]
fn processes_match_threads_for_any_ranks_per_process() {
    let sandbox = Sandbox::new();
    for (ranks, batch) in [(2, 12), (3, 12), (4, 12), (8, 16)] {
        let run = |out: &str| {
            format!(
                "train run.toml {SAVES} --set run.ranks={ranks} --set run.out_dir={out} --set train.micro_batch_size=1 --set train.global_batch_size={batch}"
            )
        };
        let threads = format!("threads{ranks}");
        sandbox.succeed(&run(&threads));
        let expected = bits(&sandbox, &threads);
        assert_eq!(expected.1.len(), 3 * ranks + 1, "three checkpoints and the model");
        for processes in (2..=ranks).filter(|processes| ranks % processes == 0) {
            let out = format!("processes{ranks}of{processes}");
            World::succeed(&sandbox, FSDP, processes, &run(&out));
            assert!(bits(&sandbox, &out) == expected, "{ranks} ranks in {processes} processes");
        }
    }
}

#[test]
fn all_launchers_match_threads_and_print_once() {
    let launchers: [(&str, Variables); 5] =
        [("fsdp", FSDP), ("torchrun", TORCHRUN), ("openmpi", OPEN_MPI), ("hydra", HYDRA), ("srun", SRUN)];
    let sandbox = Sandbox::new();
    sandbox.succeed("train run.toml --set run.out_dir=threads");
    for (name, variables) in launchers {
        // MPI was not started here. The variables of srun show that; those of mpirun always imply MPI.
        let transport = if [OPEN_MPI, HYDRA].contains(&variables) { "tcp" } else { "auto" };
        let args = format!("train run.toml --set run.out_dir={name} --set run.transport={transport}");
        let ran = World::start(&sandbox, variables, 2, &args).end();
        for (process, ran) in ran.iter().enumerate() {
            assert_eq!(ran.code, Some(0), "{name} {process}: {}", ran.stderr);
        }
        assert!(bits(&sandbox, name) == bits(&sandbox, "threads"), "{name}");
        let starts = sandbox.starts(name);
        let processes = starts[0]["processes"].as_array().unwrap();
        assert_eq!((&starts[0]["transport"], processes.len()), (&"TCP".into(), 2), "{name}");
        assert_ne!(processes[0]["pid"], processes[1]["pid"], "{name}");
        assert_eq!(processes[1]["first_rank"], 1, "{name}");
        assert!(ran[0].stdout.contains("steps         3,"), "{}", ran[0].stdout);
        assert_eq!((&*ran[1].stdout, &*ran[1].stderr), ("", ""), "{name}: it is said once");
        let expected = "2 processes (2 on ";
        assert!(
            ran[0].stderr.contains(expected) && ran[0].stderr.contains("connected over TCP"),
            "{}",
            ran[0].stderr
        );
    }
}

#[test]
fn ranks_default_to_one_per_process() {
    let sandbox = Sandbox::new();
    sandbox.edit("run.toml", "ranks = 2\n", "");
    World::succeed(&sandbox, TORCHRUN, 4, "train run.toml");
    assert!(sandbox.read("out/resolved.toml").contains("ranks = 4"));
}

#[test]
fn indivisible_rank_count_error_names_both_counts() {
    let sandbox = Sandbox::new();
    let ran = World::start(&sandbox, TORCHRUN, 3, "train run.toml --set run.ranks=4").end();
    assert!(ran.iter().all(|ran| ran.code == Some(2)), "{}", ran[0].stderr);
    let stderr = &ran[0].stderr;
    assert!(stderr.contains("run.ranks = 4, but torchrun has started 3 processes"), "{stderr}");
    assert!(!sandbox.path("out").exists());
}

#[test]
fn command_errors_are_printed_once() {
    let sandbox = Sandbox::new();
    for (args, message) in [
        ("train none.toml", "none.toml"),
        ("train run.toml --set train.stpes=3", "train.stpes"),
        ("trian run.toml", "unrecognized subcommand"),
    ] {
        let ran = World::start(&sandbox, TORCHRUN, 3, args).end();
        assert!(ran.iter().all(|ran| ran.code == Some(2)), "{args}: {}", ran[0].stderr);
        assert!(ran[0].stderr.contains(message), "{args}: {}", ran[0].stderr);
        assert_eq!((&*ran[1].stderr, &*ran[2].stderr), ("", ""), "{args}");
    }
    let left = sandbox.files("").into_keys().filter(|path| path.to_string_lossy().contains("told-")).count();
    assert_eq!(left, 0, "nothing is left of it");
}

#[test]
fn error_in_one_process_is_reported_by_that_process() {
    let sandbox = Sandbox::new();
    let args = |process| match process {
        1 => "train none.toml".to_owned(),
        _ => "train run.toml --set run.timeout_s=2 --set run.heartbeat_s=0.1".to_owned(),
    };
    let ran = World::start_each(&sandbox, TORCHRUN, 2, args).end();
    let host = fsdp_comm::process::cluster::host();
    assert_eq!(ran[1].code, Some(2), "{}", ran[1].stderr);
    let stderr = &ran[1].stderr;
    assert!(
        stderr.starts_with(&format!("error: process 1 on {host}: ")) && stderr.contains("none.toml"),
        "{stderr}"
    );
}

#[test]
fn log_lines_of_other_processes_are_prefixed() {
    let sandbox = Sandbox::new();
    let start = |number: usize| {
        let mut command = process(&sandbox, FSDP, number, 2);
        command.env("RUST_LOG", "info").args(["train", "run.toml", "--set", "run.ranks=4"]).spawn().unwrap()
    };
    let children: Vec<_> = (0..2).map(start).collect();
    let ran: Vec<_> = children
        .into_iter()
        .map(|child| crate::support::Ran::of(child.wait_with_output().unwrap()))
        .collect();
    assert_eq!([ran[0].code, ran[1].code], [Some(0); 2], "{}", ran[0].stderr);
    let host = fsdp_comm::process::cluster::host();
    let (before, after) = (format!("process 1 on {host}: "), format!("ranks 2 to 3 on {host}: "));
    assert!(ran[1].stderr.lines().any(|line| line.starts_with(&after)), "{}", ran[1].stderr);
    for line in ran[1].stderr.lines() {
        assert!(line.starts_with(&before) || line.starts_with(&after), "{line}");
    }
    assert!(!ran[0].stderr.contains(&format!("on {host}: ")), "{}", ran[0].stderr);
}

#[test]
fn commands_without_ranks_print_once() {
    let sandbox = Sandbox::new();
    for args in ["schedule run.toml", "doctor"] {
        let ran = World::start(&sandbox, TORCHRUN, 2, args).end();
        assert_eq!([ran[0].code, ran[1].code], [Some(0); 2], "{args}: {}", ran[0].stderr);
        assert!(!ran[0].stdout.is_empty() && ran[1].stdout.is_empty() && ran[1].stderr.is_empty(), "{args}");
    }
    let bench = "bench train --ranks 2 --steps 3 --warmup 1 --layers 1 --hidden 32 --ffn 32 --heads 2 --vocab 64 --seq 8 \
                 --global-batch 4";
    let ran = World::start(&sandbox, TORCHRUN, 2, bench).end();
    assert_eq!([ran[0].code, ran[1].code], [Some(0); 2], "{}", ran[0].stderr);
    assert!(ran[0].stdout.contains("2 ranks") && ran[1].stdout.is_empty(), "{}", ran[0].stdout);
}

/// Starts a run of very many steps, and waits until it has saved some.
fn endless(sandbox: &Sandbox, processes: usize, more: &str) -> World {
    let args = format!(
        "train run.toml --resume --set run.ranks={processes} --set train.global_batch_size={} --set train.steps=1000000 \
         --set checkpoint.every=2 {more}",
        2 * processes
    );
    let before = newest(sandbox);
    let world = World::start(sandbox, FSDP, processes, &args);
    wait_until("the second checkpoint", || newest(sandbox) > before + 3);
    world
}

pub(crate) fn newest(sandbox: &Sandbox) -> u64 {
    RunDir::new(sandbox.path("out")).newest().unwrap().map_or(0, |(step, _)| step)
}

#[test]
fn killed_process_is_named_and_others_end_before_heartbeat() {
    let sandbox = Sandbox::new();
    for victim in 0..3 {
        // Fifteen such heartbeats take longer than any test.
        let world = endless(&sandbox, 3, "--set run.heartbeat_s=60");
        world.signal(victim, "KILL");
        let ran = world.end();
        let speaker = usize::from(victim == 0);
        for process in (0..3).filter(|&process| process != victim) {
            assert_eq!(ran[process].code, Some(75), "{victim}, {process}: {}", ran[process].stderr);
            let has_spoken = ran[process].stderr.contains("error:");
            assert_eq!(has_spoken, process == speaker, "{victim}, {process}: {}", ran[process].stderr);
        }
        let stderr = &ran[speaker].stderr;
        let names_it = stderr.contains(&format!("process {victim} (pid")) && stderr.contains("--resume");
        assert!(names_it, "{stderr}");
        let (_, path) = RunDir::new(sandbox.path("out")).newest().unwrap().unwrap();
        NativeReader::open(path).unwrap().verify().unwrap();
        // The flight record shows the operations in progress.
        let record = sandbox.read(&format!("out/flight-{speaker}.jsonl"));
        let lines: Vec<serde_json::Value> =
            record.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert!(lines[0]["verdict"].as_str().is_some_and(|verdict| stderr.contains(verdict)), "{}", lines[0]);
        assert!(lines.len() > 20 && lines[1..].iter().all(|line| line["issued"].is_f64()), "{}", lines.len());
    }
}

#[test]
fn silent_process_is_declared_dead_after_15_heartbeats() {
    let sandbox = Sandbox::new();
    for victim in 0..2 {
        let world = endless(&sandbox, 2, "--set run.heartbeat_s=0.4");
        world.signal(victim, "STOP");
        let begin = Instant::now();
        wait_until("the end of the other", || {
            let status = world.try_wait(1 - victim);
            status.is_some_and(|code| {
                assert_eq!(code, Some(75));
                true
            })
        });
        // On a loaded machine, the last heartbeat may have been sent long before.
        assert!(begin.elapsed() > Duration::from_secs(3), "{:?}", begin.elapsed());
        world.signal(victim, "CONT");
        let ran = world.end();
        assert_eq!(ran[victim].code, Some(75), "it finds that the world has ended: {}", ran[victim].stderr);
        let stderr = &ran[1 - victim].stderr;
        let names_it =
            stderr.contains(&format!("process {victim} (pid")) && stderr.contains("it was silent for 6 s");
        assert!(names_it, "{stderr}");
    }
}

#[test]
fn metrics_record_wait_time_and_slowest_rank() {
    let sandbox = Sandbox::new();
    let world = World::start(&sandbox, FSDP, 3, &format!("train run.toml {ENDLESS_OF_THREE}"));
    let metrics = || std::fs::read_to_string(sandbox.path("out/metrics.jsonl")).unwrap_or_default();
    wait_until("the waiting of some steps", || metrics().matches("wait_step").count() > 20);
    world.signal(0, "TERM");
    world.end().iter().for_each(|ran| assert_eq!(ran.code, Some(75), "{}", ran.stderr));
    for line in sandbox.metrics("out").iter().filter(|line| line["wait_step"].is_u64()) {
        assert!(line["wait_step"].as_u64() < line["step"].as_u64(), "{line}");
        assert!(
            line["wait_ms"].as_f64().unwrap() > 0.0 && line["slowest_rank"].as_u64().unwrap() < 3,
            "{line}"
        );
    }
}

const ENDLESS_OF_THREE: &str = "--set run.ranks=3 --set train.global_batch_size=6 --set train.steps=1000000";

#[test]
fn signal_to_any_process_saves_and_stops_all() {
    for (signal, process) in [("TERM", 0), ("TERM", 1), ("USR1", 1)] {
        let sandbox = Sandbox::new();
        let world = endless(&sandbox, 2, "");
        world.signal(process, signal);
        let ran = world.end();
        assert_eq!([ran[0].code, ran[1].code], [Some(75); 2], "{signal}: {}", ran[0].stderr);
        assert!(ran[0].stdout.contains("stopped early"), "{}", ran[0].stdout);
        let steps = sandbox.metrics("out").len() as u64;
        assert_eq!(newest(&sandbox), steps, "the last step is saved");
    }
}

#[test]
fn resume_with_other_process_counts_matches_uninterrupted_run() {
    let sandbox = Sandbox::new();
    let args = |out: &str, steps| {
        format!(
            "train run.toml --resume {SAVES} --set run.ranks=4 --set run.out_dir={out} --set train.steps={steps} \
             --set train.global_batch_size=16"
        )
    };
    sandbox.succeed(&args("whole", 6));
    World::succeed(&sandbox, FSDP, 4, &args("cut", 2));
    World::succeed(&sandbox, TORCHRUN, 2, &args("cut", 4));
    sandbox.succeed(&args("cut", 5));
    World::succeed(&sandbox, FSDP, 4, &args("cut", 6));
    assert!(bits(&sandbox, "cut") == bits(&sandbox, "whole"));
}

#[test]
fn error_in_one_process_ends_all_with_same_exit_code() {
    let sandbox = Sandbox::new();
    // With another learning rate, all processes learn which ranks differ; missing data is known only to process 1.
    let cases = [
        ("--set train.optimizer={name=\"adamw\",lr=1e-9}", 3, "would run a different schedule"),
        ("--set data.train=[\"none.txt\"]", 2, "none.txt"),
    ];
    for (wrong, code, message) in cases {
        let args = |process| {
            let wrong = if process == 1 { wrong } else { "" };
            format!("train run.toml --set run.ranks=3 --set train.global_batch_size=6 {wrong}")
        };
        let ran = World::start_each(&sandbox, FSDP, 3, args).end();
        for (process, ran) in ran.iter().enumerate() {
            assert_eq!(ran.code, Some(code), "{wrong}, {process}: {}", ran.stderr);
        }
        assert!(ran.iter().any(|ran| ran.stderr.contains(message)), "{}", ran[0].stderr);
        let _ = std::fs::remove_dir_all(sandbox.path("out"));
    }
}

#[test]
fn non_empty_output_folder_is_reported_once_and_ends_all() {
    let sandbox = Sandbox::new();
    sandbox.succeed("train run.toml");
    let ran = World::start(&sandbox, FSDP, 2, "train run.toml").end();
    assert_eq!([ran[0].code, ran[1].code], [Some(2); 2]);
    assert!(ran[0].stderr.contains("run.out_dir out is not empty"), "{}", ran[0].stderr);
    assert_eq!(ran[1].stderr, "");
}

#[test]
fn full_disk_of_one_process_saves_state_and_ends_all() {
    let sandbox = Sandbox::new();
    let start = |number: usize| {
        let mut command = process(&sandbox, FSDP, number, 2);
        if number == 1 {
            command.env("LD_PRELOAD", interposer::library()).env("FULL", "/out/checkpoints/");
        }
        command.args(["train", "run.toml", "--set", "checkpoint.every=1"]);
        command
    };
    let ran = World::of((0..2).map(start)).end();
    assert_eq!([ran[0].code, ran[1].code], [Some(75); 2], "{} {}", ran[0].stderr, ran[1].stderr);
    assert!(ran[0].stderr.contains("rank 1 failed"), "{}", ran[0].stderr);
    assert!(ran[0].stderr.contains("No space left on device"), "{}", ran[0].stderr);
    // The state is where the message says, and is a complete checkpoint.
    let place = ran[0].stderr.split_whitespace().find(|word| word.contains("fsdp-state-"));
    let state = place.unwrap_or_else(|| panic!("{}", ran[0].stderr)).trim_end_matches([':', ';', ',']);
    sandbox.succeed(&format!("ckpt verify {state}"));
    World::succeed(&sandbox, FSDP, 2, &format!("train run.toml --set run.out_dir=on --resume-from {state}"));
    sandbox.succeed("train run.toml --set run.out_dir=whole");
    let model = |out: &str| sandbox.files(&format!("{out}/model"));
    assert!(model("on").values().eq(model("whole").values()));
}

#[test]
fn torchrun_error_files_contain_cause() {
    let sandbox = Sandbox::new();
    let args = format!("train run.toml {SAVES} --set train.optimizer={{name=\"sgd\",lr=1e39}}");
    let start = |number: usize| {
        let mut command = process(&sandbox, TORCHRUN, number, 2);
        let file = sandbox.path(&format!("error{number}.json"));
        command.env("TORCHELASTIC_ERROR_FILE", file).args(args.split_whitespace()).spawn().unwrap()
    };
    let children: Vec<_> = (0..2).map(start).collect();
    for child in children {
        assert_eq!(child.wait_with_output().unwrap().status.code(), Some(3));
    }
    for number in 0..2 {
        let text = sandbox.read(&format!("error{number}.json"));
        let error_file: serde_json::Value = serde_json::from_str(&text).unwrap();
        let cause = error_file["message"]["extraInfo"]["py_callstack"].as_str().unwrap();
        assert!(cause.contains("not finite"), "{cause}");
    }
}

#[test]
fn torchrun_error_file_of_single_process_contains_cause() {
    for (set, code, expected) in
        [("train.optimizer={name=\"sgd\",lr=1e39}", 3, "not finite"), ("run.ranks=3", 2, "global_batch_size")]
    {
        let sandbox = Sandbox::new();
        let file = sandbox.path("error.json");
        let mut command = process(&sandbox, TORCHRUN, 0, 1);
        command.env("TORCHELASTIC_ERROR_FILE", file).args(["train", "run.toml", "--set", set]);
        let ran = crate::support::Ran::of(command.output().unwrap());
        assert_eq!(ran.code, Some(code), "{}", ran.stderr);
        let text: serde_json::Value = serde_json::from_str(&sandbox.read("error.json")).unwrap();
        for cause in [&text["message"]["message"], &text["message"]["extraInfo"]["py_callstack"]] {
            assert!(cause.as_str().unwrap().contains(expected), "{cause}");
        }
        assert!(text["message"]["extraInfo"]["timestamp"].as_str().unwrap().parse::<u64>().is_ok());
    }
}

#[test]
fn torchrun_error_files_report_requested_stop() {
    let sandbox = Sandbox::new();
    let args = format!("train run.toml {SAVES} --set train.steps=1000000");
    let world = World::of((0..2).map(|number| {
        let mut command = process(&sandbox, TORCHRUN, number, 2);
        let file = sandbox.path(&format!("error{number}.json"));
        command.env("TORCHELASTIC_ERROR_FILE", file).args(args.split_whitespace());
        command
    }));
    wait_until("a checkpoint", || newest(&sandbox) > 1);
    world.signal(1, "TERM");
    for ran in world.end() {
        assert_eq!(ran.code, Some(75), "{}", ran.stderr);
    }
    let expected = format!("asked to stop after step {}, whose state is saved", newest(&sandbox));
    for number in 0..2 {
        let text: serde_json::Value =
            serde_json::from_str(&sandbox.read(&format!("error{number}.json"))).unwrap();
        let message = text["message"]["message"].as_str().unwrap();
        assert!(message.starts_with(&expected), "{message}");
    }
}

#[test]
fn missing_named_mpi_library_does_not_fall_back_to_tcp() {
    let sandbox = Sandbox::new();
    let world = World::of((0..2).map(|number| {
        let mut command = process(&sandbox, OPEN_MPI, number, 2);
        command.env("FSDP_MPI_LIBRARY", "/nowhere/libmpi.so").args(["train", "run.toml"]);
        command
    }));
    let ran = world.end();
    assert!(ran.iter().all(|ran| ran.code == Some(2)), "{}", ran[0].stderr);
    assert!(ran.iter().any(|ran| ran.stderr.contains("/nowhere/libmpi.so: ")), "{}", ran[0].stderr);
}

#[test]
fn several_nodes_connect_with_token_in_output_folder() {
    let sandbox = Sandbox::new();
    sandbox.succeed("train run.toml --set run.ranks=4 --set run.out_dir=threads");
    let port = free_port();
    let start = |number: usize| {
        let mut command = process(&sandbox, TORCHRUN, number, 4);
        // Two nodes with two processes each.
        command.env("LOCAL_RANK", (number % 2).to_string()).env("LOCAL_WORLD_SIZE", "2");
        command.env("FSDP_RENDEZVOUS", format!("127.0.0.1:{port}")).env("FSDP_SOCKET_IFNAME", "lo");
        command.args(["train", "run.toml", "--set", "run.ranks=4"]).spawn().unwrap()
    };
    let mut stdout = String::new();
    for child in [3, 1, 0, 2].map(start) {
        let ran = crate::support::Ran::of(child.wait_with_output().unwrap());
        assert_eq!(ran.code, Some(0), "{}", ran.stderr);
        stdout += &ran.stdout;
    }
    assert_eq!(stdout.matches("steps         3,").count(), 1, "{stdout}");
    assert!(bits(&sandbox, "out") == bits(&sandbox, "threads"));
    let token = sandbox.read("out/.token");
    assert_eq!(token.trim().len(), 64);
}

/// As in pods of Kubernetes, whose number is known and whose first one has a name.
#[test]
fn nodes_with_master_address_and_token_need_no_shared_folder() {
    let sandbox = Sandbox::new();
    let port = free_port().to_string();
    let start = |number: usize| {
        let mut command = process(&sandbox, TORCHRUN, number, 2);
        command.env("LOCAL_RANK", "0").env("LOCAL_WORLD_SIZE", "1").env("FSDP_TOKEN", "ab".repeat(32));
        command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", &port);
        command.args(["train", "run.toml", "--set", "run.ranks=4"]).spawn().unwrap()
    };
    // The second node starts first.
    let [second, first] =
        [1, 0].map(start).map(|child| crate::support::Ran::of(child.wait_with_output().unwrap()));
    assert_eq!((first.code, second.code), (Some(0), Some(0)), "{first:?} {second:?}");
    assert!(first.stdout.contains("steps         3,") && second.stdout.is_empty(), "{first:?} {second:?}");
    assert!(!sandbox.path("out/.token").exists() && !sandbox.path("out/.leader").exists());
}

#[test]
fn insecure_network_needs_no_token() {
    let sandbox = Sandbox::new();
    let port = free_port();
    let start = |number: usize| {
        let mut command = process(&sandbox, TORCHRUN, number, 2);
        // Two nodes that reach each other as `localhost`.
        command.env("LOCAL_RANK", "0").env("LOCAL_WORLD_SIZE", "1");
        command.env("FSDP_RENDEZVOUS", format!("localhost:{port}"));
        command.args(["train", "run.toml", "--insecure-network"]).spawn().unwrap()
    };
    for child in [1, 0].map(start) {
        let ran = crate::support::Ran::of(child.wait_with_output().unwrap());
        assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    }
    assert!(!sandbox.path("out/.token").exists());
}

#[test]
fn mismatched_or_world_readable_token_is_rejected() {
    use std::os::unix::fs::PermissionsExt;
    let sandbox = Sandbox::new();
    for (name, digit) in [("a", "a"), ("b", "b")] {
        sandbox.write(name, digit.repeat(64));
        std::fs::set_permissions(sandbox.path(name), std::fs::Permissions::from_mode(0o600)).unwrap();
    }
    let start = |number: usize| {
        let mut command = process(&sandbox, FSDP, number, 2);
        command.env("FSDP_TOKEN_FILE", if number == 0 { "a" } else { "b" });
        let short = ["train", "run.toml", "--set", "run.timeout_s=20", "--set", "run.heartbeat_s=0.1"];
        command.args(short).spawn().unwrap()
    };
    for child in [0, 1].map(start) {
        let ran = crate::support::Ran::of(child.wait_with_output().unwrap());
        assert_ne!(ran.code, Some(0), "{}", ran.stderr);
        assert!(ran.stderr.contains("another token"), "{}", ran.stderr);
    }
    std::fs::set_permissions(sandbox.path("a"), std::fs::Permissions::from_mode(0o644)).unwrap();
    let mut command = process(&sandbox, FSDP, 0, 2);
    let ran = command.env("FSDP_TOKEN_FILE", "a").args(["train", "run.toml"]).output().unwrap();
    let ran = crate::support::Ran::of(ran);
    assert_eq!(ran.code, Some(2), "{}", ran.stderr);
}
