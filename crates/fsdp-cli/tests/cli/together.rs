//! `verify` and `doctor` in several processes.

use crate::interposer;
use crate::support::{Ran, Sandbox};
use crate::world::{FSDP, TORCHRUN, World, free_port, process};

fn report(sandbox: &Sandbox, name: &str) -> serde_json::Value {
    serde_json::from_str(&sandbox.read(name)).unwrap()
}

#[test]
fn verify_reports_match_between_processes_and_threads() {
    let sandbox = Sandbox::new();
    for (processes, world, more) in [
        (2, 2, ""),
        (4, 4, "--set fsdp.mesh={replicate=2}"),
        (2, 4, "--order-seed 7 --set fsdp.param_dtype=bf16"),
        (3, 3, "--set train.micro_batch_size=1 --set train.global_batch_size=6"),
    ] {
        let verify = |json| format!("verify run.toml {more} --json {json} --world-sizes {world}");
        let threads = sandbox.succeed(&verify("threads.json"));
        let ran = World::start(&sandbox, FSDP, processes, &verify("p.json")).end();
        for (process, ran) in ran.iter().enumerate() {
            assert_eq!(ran.code, Some(0), "{more}, {process}: {}", ran.stderr);
            assert_eq!(process == 0, ran.stdout.contains("every promise was kept"), "{}", ran.stdout);
        }
        assert_eq!(ran[0].stdout, threads.stdout, "{more}");
        assert_eq!(report(&sandbox, "p.json"), report(&sandbox, "threads.json"), "{more}");
        assert!(ran[0].stderr.contains("connected over TCP"), "{}", ran[0].stderr);
        assert!(
            ran[1..].iter().all(|ran| ran.stderr.is_empty() && ran.stdout.is_empty()),
            "{}",
            ran[1].stderr
        );
    }
}

#[test]
fn processes_reject_world_sizes_they_cannot_verify() {
    let sandbox = Sandbox::new();
    for worlds in ["1,2", "3"] {
        let args = format!("verify run.toml --world-sizes {worlds}");
        let ran = World::start(&sandbox, TORCHRUN, 2, &args).end();
        assert_eq!([ran[0].code, ran[1].code], [Some(2); 2], "{}", ran[0].stderr);
        assert_eq!(
            ran[0].stderr,
            "error: --world-sizes: torchrun has started 2 processes, which form one world together, in equal parts: give \
             one multiple of that, or leave it out for run.ranks = 2\n"
        );
        assert_eq!(ran[1].stderr, "", "it is said once");
    }
    // A world that does not fit is skipped by all processes.
    let args = "verify run.toml --world-sizes 6";
    let ran = World::start(&sandbox, TORCHRUN, 2, args).end();
    assert_eq!([ran[0].code, ran[1].code], [Some(1); 2], "{}", ran[0].stderr);
    assert!(ran[0].stdout.contains("skipped world 6") && ran[1].stdout.is_empty(), "{}", ran[0].stdout);
}

#[test]
fn failure_of_one_verifying_process_ends_all() {
    let sandbox = Sandbox::new();
    let args = |process| match process {
        1 => "verify run.toml --set data.train=[\"none.txt\"]".to_owned(),
        _ => "verify run.toml".to_owned(),
    };
    let ran = World::start_each(&sandbox, FSDP, 2, args).end();
    assert_eq!([ran[0].code, ran[1].code], [Some(2); 2], "{} {}", ran[0].stderr, ran[1].stderr);
    assert!(ran[1].stderr.contains("none.txt"), "{}", ran[1].stderr);
}

#[test]
fn verify_runs_under_launch() {
    let sandbox = Sandbox::new();
    let ran = sandbox.succeed("launch --nproc 2 -- verify run.toml --steps 1");
    assert_eq!(ran.stdout.matches("every promise was kept at 1 world size").count(), 1, "{}", ran.stdout);
}

/// Runs `fsdp doctor` as four processes of two nodes; `of_process` adjusts their commands.
fn doctor(sandbox: &Sandbox, args: &str, of_process: impl Fn(usize, &mut std::process::Command)) -> Vec<Ran> {
    let port = free_port();
    let start = |number: usize| {
        let mut command = process(sandbox, TORCHRUN, number, 4);
        command.env("LOCAL_RANK", (number % 2).to_string()).env("LOCAL_WORLD_SIZE", "2");
        command.env("FSDP_RENDEZVOUS", format!("127.0.0.1:{port}")).env("FSDP_SOCKET_IFNAME", "lo");
        command.args(args.split_whitespace());
        of_process(number, &mut command);
        command.spawn().unwrap()
    };
    let children: Vec<_> = (0..4).map(start).collect();
    children.into_iter().map(|child| Ran::of(child.wait_with_output().unwrap())).collect()
}

fn host() -> String {
    fsdp_comm::process::cluster::host()
}

#[test]
fn doctor_reports_nodes_clocks_and_links() {
    let sandbox = Sandbox::new();
    let ran = doctor(&sandbox, "doctor run.toml --insecure-network --json", |_, _| {});
    for ran in &ran {
        assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    }
    assert!(ran[1..].iter().all(|ran| ran.stdout.is_empty() && ran.stderr.is_empty()), "{}", ran[1].stderr);
    let found: serde_json::Value = serde_json::from_str(&ran[0].stdout).unwrap();
    assert_eq!(
        (&found["launcher"]["name"], &found["launcher"]["variables"]["RANK"]),
        (&"torchrun".into(), &"0".into())
    );
    assert_eq!((&found["processes"], &found["transport"]), (&4.into(), &"TCP".into()));
    let nodes = found["nodes"].as_array().unwrap();
    let names: Vec<String> = nodes.iter().map(|node| node["name"].as_str().unwrap().to_owned()).collect();
    assert_eq!(names, [format!("{}:0", host()), format!("{}:2", host())]);
    let number = |value: &serde_json::Value| value.as_f64().unwrap_or_else(|| panic!("{value}"));
    for node in nodes {
        assert_eq!((&node["processes"], &node["out_dir"]["lock"]), (&2.into(), &"excludes".into()));
        assert!(
            number(&node["out_dir"]["free_bytes"]) > 0.0 && number(&node["out_dir"]["seen_after_ms"]) < 1e4
        );
        assert_eq!(node["interfaces"][0], "lo 127.0.0.1");
        let parts: Vec<&str> = node["libraries"]
            .as_array()
            .unwrap()
            .iter()
            .map(|library| library["part"].as_str().unwrap())
            .collect();
        assert!(["driver", "NCCL", "libtorch", "MPI"].iter().all(|part| parts.contains(part)), "{parts:?}");
    }
    // Both nodes are this machine, so they have the same clock.
    let clock = &nodes[1]["clock"];
    assert!(number(&clock["ahead_ms"]).abs() <= number(&clock["uncertainty_ms"]) + 1.0, "{clock}");
    let links = found["links"].as_array().unwrap();
    assert_eq!((links.len(), &links[0]["nodes"]), (1, &serde_json::json!([0, 1])));
    assert!(number(&links[0]["latency_us"]) > 0.0 && number(&links[0]["gb_per_s"][1]) > 0.0, "{}", links[0]);
    assert!(!sandbox.path("out").exists(), "nothing is left of it");
}

#[test]
fn doctor_names_node_with_problem() {
    let sandbox = Sandbox::new();
    std::fs::create_dir_all(sandbox.path("elsewhere")).unwrap();
    sandbox.write("elsewhere/out", "a file");
    std::fs::copy(sandbox.path("run.toml"), sandbox.path("elsewhere/run.toml")).unwrap();
    let folder = sandbox.path("elsewhere");
    let ran = doctor(&sandbox, "doctor run.toml --insecure-network", |number, command| {
        if number >= 2 {
            command.current_dir(&folder);
        }
    });
    assert!(
        ran.iter().all(|ran| ran.code == Some(1)),
        "{:?} {}",
        ran.iter().map(|ran| ran.code).collect::<Vec<_>>(),
        ran[0].stderr
    );
    let broken: Vec<&str> = ran[0].stdout.lines().filter(|line| line.starts_with("broken:")).collect();
    assert_eq!(broken, [format!("broken: {}:2: out is not a folder", host())]);
    // Without locks a run works, but a second run would not be noticed.
    let ran = doctor(&sandbox, "doctor run.toml --insecure-network", |number, command| {
        if number == 2 {
            command.env("LD_PRELOAD", interposer::library()).env("NO_LOCKS", "1");
        }
    });
    assert!(ran.iter().all(|ran| ran.code == Some(0)), "{}", ran[0].stderr);
    let warning = format!(
        "warning: {}:2: locks are not supported in out: a second run there would not be noticed",
        host()
    );
    assert!(ran[0].stdout.contains(&warning), "{}", ran[0].stdout);
}

#[test]
fn doctor_runs_under_launch_and_alone() {
    let sandbox = Sandbox::new();
    let ran = sandbox.succeed("launch --nproc 3 -- doctor run.toml");
    assert!(ran.stdout.contains("processes       3 on 1 node\n"), "{}", ran.stdout);
    assert_eq!(ran.stdout.matches("nothing is wrong").count(), 1, "{}", ran.stdout);
    let ran = sandbox.succeed("doctor --launch run.toml --set run.out_dir=other");
    assert!(ran.stdout.contains("no known launcher: this process is alone"), "{}", ran.stdout);
    assert!(ran.stdout.contains("output folder other\n"), "{}", ran.stdout);
    assert!(!sandbox.path("other").exists(), "nothing is left of it");
    sandbox.input_error("doctor none.toml");
}
