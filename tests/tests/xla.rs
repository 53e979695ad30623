//! Steps compiled by XLA, on the devices of a CPU plugin (`FSDP_TEST_PJRT` names its library).

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use fsdp_comm::launch::{Launcher, Seat};
use fsdp_core::Digest;
use fsdp_core::plan::Plan;
use fsdp_nn::hf::HfModel;
use fsdp_nn::model::Architecture;
use fsdp_train::verify::{VerifyOptions, verify};
use fsdp_train::{Job, trace_step};
use fsdp_xla::{
    Devices, Program, ProgramEvent, ProgramForm, ProgramOptions, Reduction, Target, Tracer, XlaMemory,
};

use crate::half_precision::OVERFLOWING;
use crate::support::{GPT2, LLAMA, config, job, options};
use crate::xla_scan::{ADAFACTOR, SCANNED, SCANNED_LAYERS, deep};

/// Returns the plugin to test with; `None` if `FSDP_TEST_PJRT` is not set.
pub(crate) fn plugin() -> Option<PathBuf> {
    let plugin = std::env::var_os("FSDP_TEST_PJRT").map(PathBuf::from);
    if plugin.is_none() {
        println!("skipped: this test needs a PJRT plugin for processors, named by FSDP_TEST_PJRT");
    }
    plugin
}

/// Programs that add gradients by the tree, with unrolled layers.
pub(crate) const TREE: ProgramForm = ProgramForm { reduction: Reduction::Tree, scan_layers: false };

/// Programs whose gradients the plugin adds.
pub(crate) const NATIVE: ProgramForm = ProgramForm { reduction: Reduction::Native, ..TREE };

/// Options for programs of a form that are not cached.
pub(crate) fn written_as(form: ProgramForm) -> ProgramOptions {
    ProgramOptions { form, ..ProgramOptions::default() }
}

/// Compares two steps of a model at each world size with the oracle; `None` without a plugin.
pub(crate) fn check(
    model: (&str, u32),
    worlds: &[usize],
    overrides: &[&str],
    programs: ProgramOptions,
) -> Option<Arc<Plan>> {
    let plugin = plugin()?;
    let dir = tempfile::tempdir().unwrap();
    let overrides: Vec<&str> = overrides.iter().copied().chain(["run.device=\"xla\""]).collect();
    let job = job(model.0, config(dir.path(), model.1, &overrides));
    check_job(&plugin, &job, worlds, programs);
    Some(job.plan)
}

/// Compares two steps of a job at each world size with the oracle.
pub(crate) fn check_job<A: Architecture + Clone>(
    plugin: &Path,
    job: &Job<A>,
    worlds: &[usize],
    programs: ProgramOptions,
) {
    let devices = Devices::new(plugin, 8, programs, options()).unwrap();
    let report = verify(job, &devices, &VerifyOptions::new(worlds, 2)).unwrap();
    assert!(report.holds(), "{report:#?}");
}

pub(crate) const LAYERS: &str = "fsdp.wrap=[\"LlamaDecoderLayer\"]";

#[test]
fn compiled_llama_matches_oracle_at_every_world_size() {
    check((LLAMA, 61), &[1, 2, 4, 8], &[LAYERS], ProgramOptions::default());
}

/// In double precision a program is within 7e-15 of the oracle. So both compute the same function, and their difference
/// in single precision is rounding.
#[test]
fn f64_programs_match_oracle_at_every_world_size() {
    let double = ["fsdp.param_dtype=\"f64\"", "fsdp.reduce_dtype=\"f64\""];
    check((LLAMA, 61), &[1, 2, 4, 8], &[&[LAYERS], &double[..]].concat(), ProgramOptions::default());
    let blocks = &["fsdp.wrap=[\"GPT2Block\"]", double[0], double[1]];
    check((GPT2, 53), &[1, 2, 4, 8], blocks, ProgramOptions::default());
}

#[test]
fn compiled_gpt2_with_dropout_matches_oracle() {
    check((GPT2, 53), &[1, 2, 4, 8], &["fsdp.wrap=[\"GPT2Block\"]"], ProgramOptions::default());
}

#[test]
fn compiled_replicas_groups_and_recomputation_match_oracle() {
    let mixed = [
        LAYERS,
        "fsdp.mesh.replicate=2",
        "fsdp.activation_checkpointing=\"full\"",
        "train.optimizer.no_decay=[\"norm\"]",
        "train.ema_decay=0.9",
    ];
    check((LLAMA, 61), &[4], &mixed, written_as(NATIVE));
    let grouped = [
        LAYERS,
        "fsdp.reshard_after_forward=2",
        "fsdp.accumulation=\"unsharded\"",
        "train.optimizer={name=\"sgd\",lr=0.1,momentum=0.9}",
    ];
    check((LLAMA, 61), &[4], &grouped, ProgramOptions::default());
    let averaged = [LAYERS, "fsdp.reduce_op=\"average\"", "fsdp.accumulation_order=\"running\""];
    check((LLAMA, 61), &[2, 4], &averaged, ProgramOptions::default());
}

#[test]
fn chunks_of_samples_are_exchanged_within_programs() {
    let double = ["fsdp.param_dtype=\"f64\"", "fsdp.reduce_dtype=\"f64\""];
    let shared = [LAYERS, "data.seq_len=8", "fsdp.mesh={ context = 2 }"];
    for (form, checkpointing) in [(TREE, "none"), (NATIVE, "full"), (SCANNED, "selective")] {
        let checkpointing = format!("fsdp.activation_checkpointing=\"{checkpointing}\"");
        let overrides = [&shared, &double[..], &[&checkpointing]].concat();
        check((LLAMA, 61), &[2, 4], &overrides, written_as(form));
    }
}

/// Runs two steps with a cache folder for compiled programs, and returns the reported events.
fn recorded_events(plugin: &Path, folder: &Path) -> Vec<ProgramEvent> {
    let dir = tempfile::tempdir().unwrap();
    let job = job(LLAMA, config(dir.path(), 61, &[LAYERS, "run.device=\"xla\""]));
    let programs = ProgramOptions { compile_cache: Some(folder.into()), ..ProgramOptions::default() };
    let events: Arc<Mutex<Vec<ProgramEvent>>> = Arc::default();
    let listener = Arc::clone(&events);
    let devices = Devices::new(plugin, 2, programs, options())
        .unwrap()
        .with_listener(Arc::new(move |one: &ProgramEvent| listener.lock().unwrap().push(one.clone())));
    let report = verify(&job, &devices, &VerifyOptions::new(&[2], 2)).unwrap();
    assert!(report.holds(), "{report:#?}");
    let events = events.lock().unwrap();
    events.clone()
}

#[test]
fn program_is_compiled_once_and_cached_for_later_runs() {
    let Some(plugin) = plugin() else { return };
    let folder = tempfile::tempdir().unwrap();
    let entries = || -> Vec<PathBuf> {
        std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().path()).collect()
    };
    let first = recorded_events(&plugin, folder.path());
    assert!(matches!(first[..], [ProgramEvent::Compiled { .. }]), "{first:?}");
    assert_eq!(entries().len(), 1);
    let second = recorded_events(&plugin, folder.path());
    assert!(matches!(second[..], [ProgramEvent::Found { .. }]), "{second:?}");
    // A truncated entry is compiled again and overwritten.
    let entry = entries().remove(0);
    let whole = std::fs::read(&entry).unwrap();
    std::fs::write(&entry, &whole[..whole.len() / 2]).unwrap();
    let third = recorded_events(&plugin, folder.path());
    let ProgramEvent::Unusable { reason } = &third[0] else { panic!("{third:?}") };
    assert!(reason.contains("damaged"), "{reason}");
    assert!(matches!(third[1..], [ProgramEvent::Compiled { .. }]), "{third:?}");
    let fourth = recorded_events(&plugin, folder.path());
    assert!(matches!(fourth[..], [ProgramEvent::Found { .. }]), "{fourth:?}");
}

/// The first steps overflow, so that several scales occur; one program serves them all.
#[test]
fn f16_program_trains_and_skips_overflowing_steps() {
    let Some(plugin) = plugin() else { return };
    let (dir, dump) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let half = [LAYERS, "fsdp.param_dtype=\"f16\"", OVERFLOWING, "run.device=\"xla\""];
    let job = job(LLAMA, config(dir.path(), 61, &half));
    let programs = ProgramOptions { dump: Some(dump.path().into()), ..ProgramOptions::default() };
    let devices = Devices::new(&plugin, 8, programs, options()).unwrap();
    let report = verify(&job, &devices, &VerifyOptions::new(&[2], 8)).unwrap();
    assert!(report.holds(), "{report:#?}");
    assert!(dump.path().join("program-0.mlir").exists());
    assert!(!dump.path().join("program-1.mlir").exists(), "all steps are one program");
}

#[test]
fn ahead_of_time_step_equals_executed_program() {
    let mixed = [
        LAYERS,
        "fsdp.mesh.replicate=2",
        "fsdp.activation_checkpointing=\"full\"",
        "train.optimizer.no_decay=[\"norm\"]",
        "run.device=\"xla\"",
    ];
    let deep = deep(LLAMA, SCANNED_LAYERS);
    for (model, form) in [(LLAMA, TREE), (&deep, SCANNED)] {
        let (dir, dump) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let programs = ProgramOptions { dump: Some(dump.path().into()), ..written_as(form) };
        if check((model, 61), &[4], &mixed, programs).is_none() {
            return;
        }
        let program = traced_for(true, &job(model, config(dir.path(), 61, &mixed)), form);
        assert_eq!(program.loops > 0, form.scan_layers);
        let run = std::fs::read_to_string(dump.path().join("program-0.mlir")).unwrap();
        assert!(program.text == run, "the two programs differ");
    }
}

/// Traces the program of a step for devices that run operations one by one, without running it.
pub(crate) fn traced(job: &Job<HfModel>, form: ProgramForm) -> Program {
    traced_for(false, job, form)
}

/// Traces the program of a step for devices that may run operations beside a loop, or for those that do not.
pub(crate) fn traced_for(in_parallel: bool, job: &Job<HfModel>, form: ProgramForm) -> Program {
    let tracer = Tracer::new(form, in_parallel, options());
    let step = |seat: Seat<XlaMemory>| trace_step(&job.config, &job.architecture, &job.plan, seat);
    tracer.launch(job.plan.mesh.world(), &step).unwrap();
    tracer.into_program().unwrap()
}

#[test]
fn compiled_step_reports_memory_and_collectives() {
    let Some(plugin) = plugin() else { return };
    let dir = tempfile::tempdir().unwrap();
    let overrides = [LAYERS, "fsdp.activation_checkpointing=\"full\"", "run.device=\"xla\""];
    let job = job(LLAMA, config(dir.path(), 61, &overrides));
    let program = traced(&job, NATIVE);
    let target = Target::open(&plugin, "cpu:4", Vec::new()).unwrap();
    assert_eq!(target.devices(), 4);
    let report = target.compile(&program).unwrap();
    let optimized = report.optimized.unwrap();
    assert_eq!(optimized.collectives.len(), program.collectives.len());
    let memory = report.memory.unwrap();
    let shards: usize =
        job.plan.layout.units.iter().flat_map(|unit| &unit.segments).map(|one| one.shard_len()).sum();
    // Parameters and two moments in single precision.
    assert!(memory.arguments >= 12 * shards as u64, "{memory:?}");
    // The results of the step reuse their buffers.
    assert!(memory.aliased >= 12 * shards as u64, "{memory:?}");
    // Eight ranks do not fit on four devices.
    let large = traced(&job.at(8).unwrap(), NATIVE);
    let message = target.compile(&large).unwrap_err().to_string();
    assert!(message.contains("8 ranks need as many devices"), "{message}");
}

/// Returns the digest of a program and the number of times it has each operation.
fn described(name: &str, model: (&str, u32), overrides: &[&str], form: ProgramForm) -> String {
    let dir = tempfile::tempdir().unwrap();
    let overrides: Vec<&str> = overrides.iter().copied().chain(["run.device=\"xla\""]).collect();
    let text = traced(&job(model.0, config(dir.path(), model.1, &overrides)), form).text;
    let [high, low] = Digest::of(&text).words();
    let mut summary = format!("{name}: {high:016x}{low:016x}\n");
    let mut kinds: BTreeMap<&str, usize> = BTreeMap::new();
    for (at, name) in text.match_indices("stablehlo.") {
        // After `#` it is an attribute, not an operation.
        if !text[..at].ends_with('#') {
            let rest = &text[at + name.len()..];
            let kind = rest.split(|c: char| c != '_' && !c.is_alphanumeric()).next().unwrap();
            *kinds.entry(kind).or_default() += 1;
        }
    }
    for (kind, count) in kinds {
        writeln!(summary, "  {count:5} {kind}").unwrap();
    }
    summary
}

/// Shows how a change of a rule or of the schedule changes programs.
#[test]
fn program_operations_match_snapshot() {
    let mixed = [LAYERS, "fsdp.activation_checkpointing=\"full\"", "fsdp.mesh.replicate=2"];
    let bf16 = [LAYERS, "fsdp.param_dtype=\"bf16\""];
    let layers = ["fsdp.wrap=[\"GPT2Block\"]"];
    insta::assert_snapshot!(
        [
            described("llama, recomputed, two replicas, tree", (LLAMA, 61), &mixed, TREE),
            described("llama in bf16, native", (LLAMA, 61), &bf16, NATIVE),
            described("gpt2 with dropout, native", (GPT2, 53), &layers, NATIVE),
            described("gpt2 with adafactor, tree", (GPT2, 53), &[layers[0], ADAFACTOR], TREE),
            described("llama of eight layers in loops, tree", (&deep(LLAMA, 8), 61), &[LAYERS], SCANNED),
        ]
        .concat()
    );
}

/// Returns the double-precision constants in the text of a program.
fn constants_in_double(text: &str) -> Vec<f64> {
    let of_line = |line: &str| -> Vec<f64> {
        let Some((_, constant)) = line.split_once("stablehlo.constant dense<") else { return Vec::new() };
        let (values, shape) = constant.split_once("> : ").unwrap();
        let bits = |value: &str| u64::from_str_radix(value.trim().strip_prefix("0x").unwrap(), 16).unwrap();
        if !shape.ends_with("f64>") {
            return Vec::new();
        }
        values.trim_matches(['[', ']']).split(',').map(|value| f64::from_bits(bits(value))).collect()
    };
    text.lines().flat_map(of_line).collect()
}

/// For TPUs, XLA emulates double precision by pairs of f32; a constant beyond their range becomes infinite or zero.
#[test]
fn f64_constants_fit_f32_range() {
    let dir = tempfile::tempdir().unwrap();
    let layers = [LAYERS, "run.device=\"xla\"", "train.grad_clip=1.0"];
    let adafactor = "train.optimizer={ name = \"adafactor\" }";
    for optimizer in ["train.optimizer={ name = \"adamw\", lr = 1e-3 }", adafactor] {
        let overrides = [&layers[..], &[optimizer]].concat();
        let text = traced(&job(LLAMA, config(dir.path(), 61, &overrides)), TREE).text;
        let constants = constants_in_double(&text);
        assert!(constants.len() > 100, "{}", constants.len());
        let fits = |one: &f64| !one.is_finite() || *one == 0.0 || (*one as f32).is_normal();
        assert!(constants.iter().all(fits), "{:?}", constants.iter().find(|one| !fits(one)));
    }
}

/// Returns how often an operation occurs in a program.
fn count(program: &Path, operation: &str) -> usize {
    std::fs::read_to_string(program).unwrap().matches(operation).count()
}

#[test]
fn program_collective_counts_match_schedule() {
    let dump = tempfile::tempdir().unwrap();
    let programs = ProgramOptions { dump: Some(dump.path().into()), ..written_as(NATIVE) };
    let Some(plan) = check((LLAMA, 61), &[4], &[LAYERS], programs) else { return };
    // Each collective of the schedule becomes one per segment.
    let calls = |name: &str| -> usize {
        plan.step.ops.iter().filter(|op| op.kind.name() == name).map(|op| op.reads.len()).sum()
    };
    let program = dump.path().join("program-0.mlir");
    assert_eq!(count(&program, "stablehlo.all_gather\""), calls("all-gather"));
    assert_eq!(count(&program, "stablehlo.reduce_scatter\""), calls("reduce-scatter"));
    assert_eq!(count(&program, "stablehlo.all_reduce\""), 1);
    assert!(count(&program, "stablehlo.optimization_barrier") > 0);
    assert!(!dump.path().join("program-1.mlir").exists(), "both steps are one program");
}
