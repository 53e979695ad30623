//! Programs with layers in loops (`run.xla.scan_layers`): they compute the same as unrolled ones, and do not
//! grow with the depth of a model. `FSDP_TEST_PJRT` names a plugin.

use fsdp_xla::{Collective, Order, Program, ProgramForm, Target};

use crate::support::{GPT2, LLAMA, config, job};
use crate::xla::{LAYERS, NATIVE, TREE, check, plugin, traced, traced_for, written_as};

/// Programs with layers in loops.
pub(crate) const SCANNED: ProgramForm = ProgramForm { scan_layers: true, ..TREE };

/// About the smallest number of layers at which both passes become loops.
pub(crate) const SCANNED_LAYERS: usize = 7;

const BLOCKS: &str = "fsdp.wrap=[\"GPT2Block\"]";
pub(crate) const ADAFACTOR: &str = "train.optimizer={name=\"adafactor\"}";
const RECOMPUTED: &str = "fsdp.activation_checkpointing=\"full\"";

/// Returns a model with another number of layers.
pub(crate) fn deep(model: &str, layers: usize) -> String {
    let count = |key| format!("\"{key}\": {layers},");
    let deeper = model
        .replace("\"num_hidden_layers\": 3,", &count("num_hidden_layers"))
        .replace("\"n_layer\": 2,", &count("n_layer"));
    assert_ne!(deeper, model);
    deeper
}

fn program(model: &str, vocab: u32, overrides: &[&str], form: ProgramForm) -> Program {
    let dir = tempfile::tempdir().unwrap();
    let overrides = [&["run.device=\"xla\""], overrides].concat();
    traced(&job(model, config(dir.path(), vocab, &overrides)), form)
}

/// Checks that the program of a step has loops, and that two steps at each world size match the oracle.
fn check_loops(model: (&str, u32), worlds: &[usize], overrides: &[&str], form: ProgramForm) {
    assert!(program(model.0, model.1, overrides, form).loops > 1, "{overrides:?}");
    check(model, worlds, overrides, written_as(form));
}

#[test]
fn scanned_layers_match_oracle() {
    check_loops((&deep(LLAMA, SCANNED_LAYERS), 61), &[1, 4], &[LAYERS], SCANNED);
    let double = [LAYERS, RECOMPUTED, "fsdp.param_dtype=\"f64\"", "fsdp.reduce_dtype=\"f64\""];
    check_loops((&deep(LLAMA, SCANNED_LAYERS), 61), &[8], &double, SCANNED);
    check_loops((&deep(GPT2, SCANNED_LAYERS), 53), &[2], &[BLOCKS, RECOMPUTED], SCANNED);
    let shared = [LAYERS, RECOMPUTED, "data.seq_len=8", "fsdp.mesh={ context = 2 }"];
    check_loops((&deep(LLAMA, SCANNED_LAYERS), 61), &[4], &shared, SCANNED);
    check_loops(
        (&deep(LLAMA, SCANNED_LAYERS), 61),
        &[4],
        &[LAYERS, ADAFACTOR, "train.grad_clip=0.5"],
        SCANNED,
    );
}

#[test]
fn scanned_layers_with_prefetch_match_oracle() {
    let native = ProgramForm { scan_layers: true, ..NATIVE };
    let ahead = ["fsdp.forward_prefetch=3", "fsdp.backward_prefetch=2", "fsdp.mesh.replicate=2"];
    check_loops((&deep(LLAMA, 9), 61), &[4], &[&[LAYERS, RECOMPUTED], &ahead[..]].concat(), native);
    let narrow = [
        LAYERS,
        "fsdp.reshard_after_forward=2",
        "fsdp.activation_checkpointing=\"selective\"",
        "fsdp.accumulation=\"unsharded\"",
        "fsdp.param_dtype=\"bf16\"",
        "fsdp.forward_prefetch=0",
        "fsdp.backward_prefetch=0",
    ];
    check_loops((&deep(LLAMA, SCANNED_LAYERS), 61), &[4], &narrow, native);
}

/// Loops over micro-batches would contain those over layers.
#[test]
fn nested_loops_with_collectives_match_oracle() {
    let many = [
        "fsdp.accumulation_order=\"running\"",
        "train.micro_batch_size=1",
        "fsdp.reshard_after_forward=true",
    ];
    let overrides = [&[LAYERS], &many[..]].concat();
    check_loops(
        (&deep(LLAMA, SCANNED_LAYERS), 61),
        &[2],
        &overrides,
        ProgramForm { scan_layers: true, ..NATIVE },
    );
}

/// The layers are large enough for the plugin to leave them to other threads. It has at least 8 for these 2 ranks, so a
/// collective could run beside a loop. With initial values this large, rounding errors grow over the layers.
#[test]
fn wide_loops_with_collectives_match_oracle() {
    let wide = deep(GPT2, 12).replace("\"n_embd\": 20", "\"n_embd\": 128");
    let wide = wide.replace("\"n_positions\": 32", "\"n_positions\": 128");
    let long = ["data.seq_len=128", "train.micro_batch_size=1", "train.global_batch_size=4"];
    let overrides = [&[BLOCKS, "fsdp.reshard_after_forward=true"], &long[..]].concat();
    check_loops((&wide, 53), &[2], &overrides, ProgramForm { scan_layers: true, ..NATIVE });
}

/// Programs have the same operations, inputs and outputs for any number of layers: the parameters, gradients and optimizer
/// state of all layers are stacks.
#[test]
fn program_size_is_independent_of_layer_count() {
    let size = |layers: usize, overrides: &[&str], form| {
        let Program { text, operations, .. } = program(&deep(LLAMA, layers), 61, overrides, form);
        let head = text.lines().find(|line| line.contains("@main(")).unwrap();
        let (inputs, outputs) = head.split_once(") -> (").unwrap();
        let count = |list: &str| list.matches("tensor<").count();
        [operations, count(inputs), count(outputs)]
    };
    let native = ProgramForm { scan_layers: true, ..NATIVE };
    let decayed = "train.optimizer={name=\"adamw\",lr=0.1,no_decay=[\"norm\"]}";
    let momentum = "train.optimizer={name=\"sgd\",lr=0.1,momentum=0.9}";
    for (overrides, form) in [
        (&[LAYERS, RECOMPUTED][..], SCANNED),
        (&[LAYERS, "fsdp.param_dtype=\"bf16\"", "fsdp.reshard_after_forward=false"], SCANNED),
        (&[LAYERS, decayed, "train.ema_decay=0.9", "fsdp.mesh.replicate=2"], native),
        (&[LAYERS, momentum, "fsdp.accumulation=\"unsharded\""], SCANNED),
        (&[LAYERS, "train.optimizer={name=\"lion\",lr=0.1}", "fsdp.forward_prefetch=3"], native),
        (&[LAYERS, ADAFACTOR, "fsdp.mesh.replicate=2"], SCANNED),
    ] {
        assert_eq!(size(12, overrides, form), size(16, overrides, form), "{overrides:?}");
    }
}

#[test]
fn only_deep_models_are_scanned() {
    let llama = deep(LLAMA, SCANNED_LAYERS);
    let written = |form| program(&llama, 61, &[LAYERS], form);
    assert_eq!(written(TREE).loops, 0);
    // Forward and backward, for each of two micro-batches, and updates.
    assert_eq!(written(SCANNED).loops, 5);
    let small = program(LLAMA, 61, &[LAYERS], SCANNED);
    assert_eq!((small.loops, small.is_scanned), (0, false), "three layers are no loop");
    // With several layers per round, a unit gathered many layers ahead is read only a few rounds later.
    let far = ["fsdp.forward_prefetch=6", "fsdp.backward_prefetch=6"];
    let far = program(&deep(LLAMA, 16), 61, &[&[LAYERS], &far[..]].concat(), SCANNED);
    assert!(far.is_scanned);
}

/// A loop contains the collectives of a single round.
#[test]
fn scanned_program_contains_collectives_of_one_round() {
    let llama = deep(LLAMA, 12);
    let kinds = |form| {
        let program = program(&llama, 61, &[LAYERS], form);
        Collective::KINDS.map(|kind| program.collectives.iter().filter(|one| one.kind == kind).count())
    };
    let (all, scanned) = (kinds(NATIVE), kinds(ProgramForm { scan_layers: true, ..NATIVE }));
    assert!(scanned.iter().zip(&all).all(|(scanned, all)| scanned <= all), "{scanned:?} of {all:?}");
    assert!(2 * scanned[0] < all[0] && 2 * scanned[1] < all[1], "{scanned:?} of {all:?}");
}

/// XLA keeps the collectives and the recomputation inside loops.
#[test]
fn xla_keeps_collectives_and_recomputation_in_loops() {
    let Some(plugin) = plugin() else { return };
    let target = Target::open(&plugin, "cpu:4", Vec::new()).unwrap();
    for (model, vocab, wrap, form) in [
        (deep(LLAMA, 12), 61, LAYERS, ProgramForm { scan_layers: true, ..NATIVE }),
        (deep(GPT2, SCANNED_LAYERS), 53, BLOCKS, SCANNED),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let overrides = ["run.device=\"xla\"", wrap, RECOMPUTED];
        let program =
            traced_for(target.runs_in_parallel(), &job(&model, config(dir.path(), vocab, &overrides)), form);
        assert!(program.is_scanned);
        let found = target.compile(&program).unwrap().optimized.unwrap();
        assert_eq!(found.products, program.products);
        assert_eq!(Order::of(&program.collectives, &found.collectives), Order::Same);
        assert_eq!(found.collectives.len(), program.collectives.len());
    }
}
