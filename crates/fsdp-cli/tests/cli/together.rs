//! `verify` and `doctor` in several processes.

use crate::support::Sandbox;
use crate::world::{FSDP, TORCHRUN, World};

fn report(sandbox: &Sandbox, name: &str) -> serde_json::Value {
    serde_json::from_str(&sandbox.read(name)).unwrap()
}

#[test]
fn verification_over_processes_finds_what_it_finds_over_threads() {
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
fn processes_hold_one_world_and_all_end_alike() {
    let sandbox = Sandbox::new();
    for worlds in ["1,2", "3"] {
        let args = format!("verify run.toml --world-sizes {worlds}");
        let ran = World::start(&sandbox, TORCHRUN, 2, &args).end();
        assert_eq!([ran[0].code, ran[1].code], [Some(2); 2], "{}", ran[0].stderr);
        assert_eq!(
            ran[0].stderr,
            "error: --world-sizes: torchrun has started 2 processes, which hold one world together, in equal parts: give \
             one multiple of that, or leave it out for run.ranks = 2\n"
        );
        assert_eq!(ran[1].stderr, "", "it is said once");
    }
    // Nothing that fits is found wrong by all.
    let args = "verify run.toml --world-sizes 6";
    let ran = World::start(&sandbox, TORCHRUN, 2, args).end();
    assert_eq!([ran[0].code, ran[1].code], [Some(1); 2], "{}", ran[0].stderr);
    assert!(ran[0].stdout.contains("skipped world 6") && ran[1].stdout.is_empty(), "{}", ran[0].stdout);
}

#[test]
fn a_process_that_can_not_verify_ends_all() {
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
fn verification_can_be_launched() {
    let sandbox = Sandbox::new();
    let ran = sandbox.succeed("launch --nproc 2 -- verify run.toml --steps 1");
    assert_eq!(ran.stdout.matches("every promise was kept at 1 world size").count(), 1, "{}", ran.stdout);
}
