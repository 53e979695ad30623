use std::process::Command;

use clap::Parser;
use serde_json::Value;

use super::models::llama;
use super::*;
use crate::args::{Args, Command as Parsed};
use crate::plan::render;

mod cards;
#[path = "../../../fsdp-cuda/tests/fake_cuda/mod.rs"]
mod fake_cuda;
#[path = "../../../fsdp-cuda/tests/device/mixed.rs"]
mod mixed;

#[test]
fn world_sizes_are_powers_of_two() {
    assert_eq!(worlds(1), [1]);
    assert_eq!(worlds(6), [1, 2, 4]);
    assert_eq!(worlds(8), [1, 2, 4, 8]);
}

fn args(line: &str) -> CalibrateArgs {
    let words = ["fsdp", "calibrate"].into_iter().chain(line.split_whitespace());
    match Args::try_parse_from(words).unwrap().command {
        Parsed::Calibrate(args) => args,
        other => panic!("{other:?}"),
    }
}

/// Set in the test process that loads the stand-in libraries: other processes must see the machine as it is.
const INNER_PROCESS: &str = "FSDP_TEST_CARDS";

/// A model and maximum bytes of collectives for the stand-ins, which are slow.
const TINY: Shape = llama([16, 2, 1, 24], [50, 16, 1, 1]);
const BYTES_MAX: usize = 32 << 10;

/// Seconds that the stand-in driver reports for every interval.
const INTERVAL_S: f64 = 1e-3;

#[test]
fn fake_gpu_calibration_yields_points_and_plans() {
    if std::env::var_os(INNER_PROCESS).is_none() {
        let name = "calibrate::tests::fake_gpu_calibration_yields_points_and_plans";
        let mut inner = Command::new(std::env::current_exe().unwrap());
        inner.args(["--exact", name, "--nocapture"]).env(INNER_PROCESS, "1");
        let ran = inner.output().unwrap();
        assert!(ran.status.success(), "{}{}", text(&ran.stdout), text(&ran.stderr));
        assert!(text(&ran.stdout).contains("1 passed"), "the name of this test has changed");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    for cards in [1, 2] {
        let file = folder.path().join(format!("{cards}.toml"));
        let calibrate = format!("--device cuda --models 1 --steps 1 --out {}", file.display());
        measure(&args(&calibrate), cards);
        expect_points(&read_cluster(&file).unwrap().measured.unwrap(), cards);
        expect_plan(&file, cards);
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Does what `fsdp calibrate` does on a machine with this many GPUs.
fn measure(args: &CalibrateArgs, cards: usize) {
    let runner = cards::Cards::new(cards);
    let run = TINY.job(Device::Cuda, DType::F32, cards).unwrap().config.run;
    let machine = machine::name(Device::Cuda, device_name(&run, &runner).unwrap(), cards);
    let (worlds, progress) = (worlds(cards), ProgressBar::hidden());
    let (device, threads, worlds, progress) = (Device::Cuda, cards, &worlds[..], &progress);
    let like = machine::like(Some("h100-sxm"), device).unwrap();
    let cluster =
        Bench { args, device, threads, worlds, bytes_max: BYTES_MAX, runner, progress, shapes: &[TINY] }
            .measure(like, machine)
            .unwrap();
    write(&cluster, &args.out).unwrap();
}

/// Checks for points of all kinds, and the device, its version and its name.
fn expect_points(measured: &Measured, cards: usize) {
    assert_eq!((measured.device.as_str(), measured.threads), ("cuda", cards));
    assert!(measured.machine.starts_with("Fake GPU "), "{}", measured.machine);
    assert_eq!(measured.version, env!("CARGO_PKG_VERSION"));
    let ranks = |points: &Points, what: &str| {
        let mut ranks: Vec<usize> = points[what].iter().map(|point| point.ranks).collect();
        ranks.sort_unstable();
        ranks.dedup();
        ranks
    };
    for what in ["linear f32", "linear bf16", "attention_backward f32"] {
        assert_eq!(ranks(&measured.calls, what), worlds(cards), "{what}");
    }
    assert_eq!(ranks(&measured.operations, "update"), worlds(cards));
    for what in ["all-gather nccl", "reduce-scatter nccl", "all-reduce nccl"] {
        assert_eq!(ranks(&measured.collectives, what), worlds(cards), "{what}");
    }
    assert_eq!(ranks(&measured.steps, "nccl"), worlds(cards));
    let timed_by_events = [&measured.calls, &measured.operations, &measured.collectives];
    for point in timed_by_events.into_iter().flat_map(|points| points.values().flatten()) {
        assert_eq!(point.seconds, INTERVAL_S, "the queues are timed, not the host: {point:?}");
    }
}

/// Checks that a plan on as many GPUs says what was measured and what was not.
fn expect_plan(file: &Path, cards: usize) {
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let run = repository.join("examples/quickstart.toml");
    let model = repository.join("examples/llama-tiny");
    let line = format!("{} --cluster {} --json", run.display(), file.display());
    let sets = [
        format!("model.path=\"{}\"", model.display()),
        "run.device=cuda".to_owned(),
        format!("run.ranks={cards}"),
    ];
    let mut words: Vec<&str> = ["fsdp", "plan"].into_iter().chain(line.split_whitespace()).collect();
    words.extend(sets.iter().flat_map(|set| ["--set", set]));
    let Parsed::Plan(args) = Args::try_parse_from(words).unwrap().command else { panic!("it is a plan") };
    let plan: Value = serde_json::from_str(&render(&args).unwrap()).unwrap();
    assert_eq!((&plan["cluster"], &plan["devices"]), (&"measured".into(), &cards.into()));
    let assumed = plan["assumed"].to_string();
    assert!(assumed.contains("points that were measured on Fake GPU "), "{assumed}");
    assert!(!assumed.contains("has not been timed"), "{assumed}");
    // The quickstart's model is not the one that was calibrated.
    assert!(assumed.contains("measured at other sizes only"), "{assumed}");
    assert!(!assumed.contains("over nccl"), "as many cards were measured: {assumed}");
    assert!(plan["sources"].to_string().contains("measured by `fsdp calibrate` on "), "{}", plan["sources"]);
}
