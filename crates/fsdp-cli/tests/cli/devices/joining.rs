//! Ranks in several processes, on a plugin that joins the devices of all processes: same bits as one process with all
//! devices.
//!
//! The processes communicate only through the key-value store that the plugin is given (`joining_plugin.c`).

use std::path::Path;

use super::plugins::library;
use super::xla::plugin;
use crate::processes::bits;
use crate::support::{Ran, Sandbox};
use crate::world::{FSDP, TORCHRUN, World, process, wait_until};

const XLA: &str =
    "--set run.device=xla --set run.xla.plugin=./joining.so --set run.xla.compile_cache=compiled";

/// Creates a sandbox with the plugin; `None` if there is no plugin that it can wrap.
fn joining() -> Option<Sandbox> {
    plugin()?;
    let sandbox = Sandbox::new();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cli/devices/joining_plugin.c");
    library(&sandbox, "joining.so", &source, &["-Wall", "-Wextra", "-Werror"]);
    Some(sandbox)
}

/// Starts a command in processes with `devices` devices each and additional environment variables.
fn start(
    sandbox: &Sandbox,
    (processes, devices): (usize, usize),
    variables: &[(&str, &str)],
    args: &str,
) -> World {
    start_each(sandbox, (processes, devices), |_| variables.to_vec(), args)
}

/// Like [`start`], with variables that depend on the process.
fn start_each<'a>(
    sandbox: &Sandbox,
    (processes, devices): (usize, usize),
    variables: impl Fn(usize) -> Vec<(&'a str, &'a str)>,
    args: &str,
) -> World {
    World::of((0..processes).map(|number| {
        let mut command = process(sandbox, FSDP, number, processes);
        command.env("JOINING_DEVICES", devices.to_string()).envs(variables(number));
        command.args(args.split_whitespace()).args(XLA.split_whitespace());
        command
    }))
}

/// Runs a command that must succeed in all processes; returns the output of the first one.
fn succeed(sandbox: &Sandbox, layout: (usize, usize), args: &str) -> Ran {
    let mut ran = start(sandbox, layout, &[], args).end();
    for (process, ran) in ran.iter().enumerate() {
        assert_eq!(ran.code, Some(0), "{layout:?}, process {process}: {}", ran.stderr);
    }
    ran.swap_remove(0)
}

/// The arguments of a run of four ranks that saves every step.
fn train(out: &str, steps: usize) -> String {
    format!(
        "train run.toml --resume --set run.ranks=4 --set run.out_dir={out} --set train.steps={steps} \
         --set checkpoint.every=1 --set checkpoint.keep_last=0"
    )
}

const LAYOUTS: [(usize, usize); 3] = [(1, 4), (2, 2), (4, 1)];

#[test]
fn processes_match_single_process_bitwise_across_resumes() {
    let Some(sandbox) = joining() else { return };
    for (processes, devices) in LAYOUTS {
        succeed(&sandbox, (processes, devices), &train(&format!("in{processes}"), 3));
    }
    let expected = bits(&sandbox, "in1");
    assert_eq!(expected.1.len(), 3 * 4 + 1, "three checkpoints and the model");
    for (processes, _) in LAYOUTS {
        assert!(bits(&sandbox, &format!("in{processes}")) == expected, "{processes} processes");
    }
    let starts = sandbox.starts("in2");
    assert_eq!(starts[0]["processes"].as_array().unwrap().len(), 2);
    // Only one program, compiled at the first start.
    let kept = std::fs::read_dir(sandbox.path("compiled")).unwrap().count();
    assert_eq!(kept, 1, "all processes of all starts have the same program");
    // The order of the processes in the plugin does not matter.
    let reversed = start(&sandbox, (2, 2), &[("JOINING_REVERSED", "1")], &train("reversed", 3)).end();
    assert!(reversed.iter().all(|ran| ran.code == Some(0)), "{reversed:?}");
    assert!(bits(&sandbox, "reversed") == expected, "the first ranks have the last devices");
    for (steps, layout) in [(1, (2, 2)), (2, (1, 4)), (3, (4, 1))] {
        succeed(&sandbox, layout, &train("cut", steps));
    }
    assert!(bits(&sandbox, "cut") == expected, "a run in 2, 1 and 4 processes");
    // The run can also be resumed on another device.
    World::succeed(&sandbox, TORCHRUN, 2, &train("cut", 4));
}

/// The wrapped plugin's losses are read at once. No step is due to be saved or evaluated before the last one.
#[test]
fn deferred_loss_reads_match_immediate_reads() {
    let Some(sandbox) = joining() else { return };
    let train = |out: &str| {
        format!(
            "train run.toml --set run.ranks=4 --set run.out_dir={out} --set train.steps=6 --set checkpoint.every=0"
        )
    };
    for (processes, devices) in [(1, 4), (2, 2)] {
        succeed(&sandbox, (processes, devices), &train(&format!("late{processes}")));
    }
    let wrapped = format!("--set run.device=xla --set run.xla.plugin={}", plugin().unwrap());
    sandbox.succeed(&format!("{} {wrapped}", train("at-once")));
    let expected = bits(&sandbox, "at-once");
    assert_eq!(expected.0.len(), 2 * 6);
    assert!(bits(&sandbox, "late1") == expected && bits(&sandbox, "late2") == expected);
}

#[test]
fn replicas_and_evaluations_match_single_process() {
    let Some(sandbox) = joining() else { return };
    sandbox.write(
        "run.toml",
        sandbox.read("run.toml") + "\n[[data.eval]]\nname = 'seen'\npaths = ['data.txt']\nmax_samples = 5\n",
    );
    let replicas = "--set fsdp.mesh.replicate=2 --set data.eval_every=1 --set run.xla.reduction=native";
    for (processes, devices) in [(1, 4), (2, 2)] {
        let args = format!("{} {replicas}", train(&format!("in{processes}"), 2));
        succeed(&sandbox, (processes, devices), &args);
    }
    assert!(bits(&sandbox, "in1") == bits(&sandbox, "in2"));
    let evaluations = sandbox.evaluations("in1");
    assert_eq!(evaluations.len(), 2);
    assert_eq!(sandbox.evaluations("in2"), evaluations);
}

#[test]
fn verify_passes_across_processes() {
    let Some(sandbox) = joining() else { return };
    let ran = succeed(&sandbox, (2, 1), "verify run.toml --steps 2 --set run.ranks=2");
    assert!(ran.stdout.contains("every promise was kept at 1 world size"), "{}", ran.stdout);
}

#[test]
fn killed_process_ends_peer_blocked_in_plugin() {
    let Some(sandbox) = joining() else { return };
    for victim in 0..2 {
        let saved = || std::fs::read_dir(sandbox.path("out/checkpoints")).map_or(0, |found| found.count());
        let before = saved();
        let world = start(
            &sandbox,
            (2, 1),
            &[],
            // The heartbeat timeout and the wait of the plugin are both longer than any test, so neither ends the run.
            "train run.toml --resume --set train.steps=100000 --set checkpoint.every=1 --set checkpoint.keep_last=0 \
             --set run.heartbeat_s=60",
        );
        wait_until("the second checkpoint", || saved() > before + 1);
        world.signal(victim, "KILL");
        wait_until("the end of the other", || world.try_wait(1 - victim).is_some());
        let ran = world.end();
        let other = &ran[1 - victim];
        assert_eq!(other.code, Some(75), "{}", other.stderr);
        assert!(other.stderr.contains(&format!("process {victim} (pid")), "{}", other.stderr);
    }
}

/// Returns the stderr of all processes, each of which must exit with `code`.
fn run_stderr(
    sandbox: &Sandbox,
    code: i32,
    layout: (usize, usize),
    variables: &[(&str, &str)],
    args: &str,
) -> String {
    stderr_with(code, start(sandbox, layout, variables, args))
}

fn stderr_with(code: i32, world: World) -> String {
    let ran = world.end();
    assert!(ran.iter().all(|ran| ran.code == Some(code)), "{ran:?}");
    ran.into_iter().map(|ran| ran.stderr).collect()
}

#[test]
fn compile_mismatch_is_rejected_before_comparing_devices() {
    let Some(sandbox) = joining() else { return };
    let others = [
        ("JOINING_VERSION", ["1.5", "1.6"], "rank 2 has the plugin joining (1.6), PJRT "),
        (
            "LIBTPU_INIT_ARGS",
            ["--xla_one=true", ""],
            "rank 2 has LIBTPU_INIT_ARGS \"\", and rank 0 has \"--xla_one=true\"",
        ),
        (
            "XLA_FLAGS",
            ["", "--xla_cpu_enable_fast_math=false"],
            "rank 2 has XLA_FLAGS \"--xla_cpu_enable_fast_math=false\", and",
        ),
    ];
    for (variable, values, expected) in others {
        // The last process has none of the devices that it needs, but one of the first process, so
        // comparing devices would fail too.
        let variables = |number| {
            let devices = [("JOINING_APART", "1"), ("JOINING_DEVICES", ["2", "1"][number])];
            devices.into_iter().chain([(variable, values[number])]).collect()
        };
        let stderr = stderr_with(2, start_each(&sandbox, (2, 2), variables, &train("out", 1)));
        assert!(
            stderr.contains(expected) && stderr.contains("give all processes the same plugin version"),
            "{stderr}"
        );
    }
}

#[test]
fn invalid_multi_process_setups_are_rejected() {
    let Some(sandbox) = joining() else { return };
    let train = train("out", 1);
    let stderr = run_stderr(&sandbox, 2, (2, 1), &[], &train);
    let few =
        "of 2 holds 2 ranks, which need a device each, but the plugin ./joining.so (joining) gives it 1";
    assert!(stderr.contains(few) && stderr.contains("set `run.ranks` to 2"), "{stderr}");
    let stderr = run_stderr(&sandbox, 2, (2, 4), &[], &train);
    assert!(stderr.contains("gives it 4") && stderr.contains("set `run.ranks` to 8"), "{stderr}");
    let stderr = run_stderr(&sandbox, 2, (2, 2), &[("JOINING_APART", "1")], &train);
    assert!(
        stderr.contains("rank 0 and rank 2 would both have device 0 of the plugin ./joining.so"),
        "{stderr}"
    );
    let stderr = run_stderr(&sandbox, 2, (2, 2), &[("JOINING_ELSEWHERE", "1")], &train);
    assert!(stderr.contains("runs the program on its devices [") && stderr.contains("have ["), "{stderr}");
    let stderr = run_stderr(&sandbox, 2, (2, 2), &[], &format!("{train} --set run.transport=nccl"));
    assert!(stderr.contains("are connected by XLA, except for their work on the host"), "{stderr}");
    // Exit code 75: the other processes may be present at the next attempt.
    let silent = [("JOINING_SILENT", "1"), ("JOINING_WAIT_MS", "200")];
    let stderr = run_stderr(&sandbox, 75, (2, 2), &silent, &train);
    assert!(stderr.contains("no process has set the plugin's key \"devices of 1\" within 0.2 s"), "{stderr}");
    let processors = format!("{train} --set run.ranks=2");
    let run = |number| {
        let mut command = process(&sandbox, FSDP, number, 2);
        let plugin = format!("run.xla.plugin={}", plugin().unwrap());
        command.args(processors.split_whitespace()).args(["--set", "run.device=xla", "--set", &plugin]);
        command
    };
    let ran = World::of((0..2).map(run)).end();
    assert!(ran.iter().all(|ran| ran.code == Some(2)), "{ran:?}");
    assert!(
        ran[0].stderr.contains("(cpu) has no collectives between processes: start one process"),
        "{ran:?}"
    );
}
