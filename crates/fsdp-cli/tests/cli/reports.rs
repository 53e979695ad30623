//! The reports of `schedule` and `verify`, and traces.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::support::{GPT2, Ran, Sandbox};

/// Configurations whose schedules have snapshots: a name, and arguments beyond the run file.
const SCHEDULES: [(&str, &str); 5] = [
    ("schedule_plain", ""),
    (
        "schedule_hsdp_checkpointing_groups",
        "--set run.ranks=8 --set train.global_batch_size=16 --set fsdp.mesh={replicate=2} \
         --set fsdp.activation_checkpointing=full --set fsdp.reshard_after_forward=2",
    ),
    (
        "schedule_unsharded_accumulation",
        "--set fsdp.accumulation=unsharded --set fsdp.param_dtype=bf16 --set train.grad_clip=1.0",
    ),
    (
        "schedule_offload_selective",
        "--set fsdp.offload=cpu --set fsdp.activation_checkpointing=selective --set fsdp.param_dtype=bf16",
    ),
    (
        "schedule_frozen_evaluation",
        "--set fsdp.frozen=[\"embed_tokens\"] --set data.eval=[\"data.txt\"] --set fsdp.backward_prefetch=0",
    ),
];

#[test]
fn schedules_match_snapshots() {
    for (name, overrides) in SCHEDULES {
        let ran = Sandbox::new().succeed(&format!("schedule run.toml {overrides}"));
        insta::assert_snapshot!(name, ran.stdout);
    }
}

/// Asserts that a command, run in the repository, prints the lines of the block of a page that contains `mark`, in order.
fn assert_documented(page: &str, mark: &str, command: &str) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let text = fs::read_to_string(root.join(page)).unwrap();
    let shown = text.split("```text\n").find(|block| block.contains(mark)).unwrap();
    let shown = shown.split("```").next().unwrap();
    let ran = Ran::of(Sandbox::new().command().args(command.split(' ')).current_dir(&root).output().unwrap());
    let output = format!("{}{}", ran.stderr, ran.stdout);
    let mut printed = output.lines();
    for line in shown.lines().filter(|&line| line != "...") {
        assert!(printed.any(|printed| printed == line), "{page}: {line:?} is not printed there:\n{output}");
    }
}

#[test]
fn documented_outputs_are_printed() {
    assert_documented("docs/schedule.md", "\nchecker: ", "schedule examples/quickstart.toml");
    assert_documented("docs/verifying.md", "world 2: ", "verify examples/quickstart.toml --world-sizes 2");
    let verify = "verify examples/llama-8b.toml --shrink --world-sizes 1,2,8";
    let readme = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../README.md")).unwrap();
    assert!(readme.contains(&format!("\nfsdp {verify}\n")));
    assert_documented("README.md", "world 8: ", verify);
}

#[test]
fn schedule_lists_operations_and_costs() {
    let sandbox = Sandbox::new();
    let text = sandbox
        .succeed("schedule run.toml --ops --costs --set fsdp.activation_checkpointing=selective")
        .stdout;
    let (_, operations) = text.split_once("operations of a micro-batch\n").unwrap();
    let (operations, _) = operations.split_once("\nchecker: ").unwrap();
    insta::assert_snapshot!("schedule_operations", operations);
}

#[test]
fn json_operation_costs_sum_to_totals() {
    let sandbox = Sandbox::new();
    let json = sandbox.succeed("schedule run.toml --json").stdout;
    let report: Value = serde_json::from_str(&json).unwrap();
    let text = sandbox.succeed("schedule run.toml --ops").stdout;
    for what in ["product_flops", "other_flops", "bytes_read", "bytes_written"] {
        let mut step = 0;
        for call in report["calls"].as_array().unwrap() {
            let operations = call["operations"].as_array().unwrap();
            let sum: u64 = operations.iter().map(|op| op["cost"][what].as_u64().unwrap()).sum();
            assert_eq!(call["cost"][what], sum, "{what}");
            step += sum * call["blocks"].as_array().unwrap().len() as u64;
            for operation in operations {
                let name = operation["op"].as_str().unwrap();
                assert!(text.contains(&format!("  {name}(")), "{name} is not in the text");
                assert!(!operation["writes"].as_array().unwrap().is_empty(), "{operation}");
            }
        }
        assert_eq!(report["step_cost"][what], step * report["micro_batches"].as_u64().unwrap(), "{what}");
    }
}

#[test]
fn json_operands_trace_gradient_to_update() {
    let sandbox = Sandbox::new();
    let report: Value = serde_json::from_str(&sandbox.succeed("schedule run.toml --json").stdout).unwrap();
    let step = &report["schedules"]["training_step"];
    let operations = step["operations"].as_array().unwrap();
    let unit = operations.iter().find(|op| op["op"] == "update").unwrap()["unit"].clone();
    // Returns the buffers of the unit that the first operation of a name reads or writes.
    let operands = |name: &str, what: &str| {
        let found = operations.iter().find(|op| op["op"] == name && op["unit"] == unit);
        let ids = found.unwrap_or_else(|| panic!("no {name} of {unit}"))[what].as_array().unwrap().clone();
        ids.iter().map(|id| id.as_u64().unwrap()).collect::<Vec<_>>()
    };
    let slot = operands("open gradient", "writes");
    assert_eq!(operands("reduce-scatter", "reads"), slot);
    let total = operands("reduce-scatter", "writes");
    assert_eq!(operands("square norm", "reads"), total);
    assert_eq!(operands("update", "reads")[..total.len()], total);
    let gathered = operands("all-gather", "reads");
    assert!(gathered.iter().all(|shard| operands("update", "writes").contains(shard)));
    for (buffer, category) in [(slot[0], "gradient slots"), (total[0], "sharded gradients")] {
        let buffer = &step["buffers"][buffer as usize];
        assert_eq!((&buffer["category"], &buffer["dtype"]), (&category.into(), &"f32".into()), "{buffer}");
    }
}

#[test]
fn schedule_needs_no_data() {
    let sandbox = Sandbox::new();
    std::fs::remove_file(sandbox.path("data.txt")).unwrap();
    sandbox.succeed("schedule run.toml --rank 1");
    assert!(!sandbox.path("out").exists());
}

#[test]
fn verify_writes_json_and_passes() {
    let sandbox = Sandbox::new();
    let ran = sandbox.succeed("verify run.toml --world-sizes 1,2,3,4 --steps 2 --json report.json");
    let report: Value = serde_json::from_str(&sandbox.read("report.json")).unwrap();
    let worlds = report["worlds"].as_array().unwrap();
    assert_eq!(worlds.iter().map(|world| world["world"].as_u64().unwrap()).collect::<Vec<_>>(), [1, 2, 4]);
    for world in worlds {
        assert_eq!(world["losses"], report["oracle_losses"]);
        assert_eq!(world["failures"].as_array().unwrap().len(), 0);
        for compared in ["params", "gradients", "states"] {
            assert_eq!(world[compared]["differing"], 0);
            assert!(world[compared]["compared"].as_u64().unwrap() > 0);
        }
    }
    let skipped = report["skipped"].as_array().unwrap();
    assert_eq!((skipped.len(), &skipped[0]["world"]), (1, &Value::from(3)));
    assert!(ran.stdout.contains("every promise was kept at 3 world sizes"), "{}", ran.stdout);
    assert!(ran.stdout.contains("skipped world 3: "), "{}", ran.stdout);
    assert!(!sandbox.path("out").exists(), "verification leaves no run behind");
}

#[test]
fn verify_gpt2_passes_with_order_seed() {
    let sandbox = Sandbox::new();
    sandbox.write("model/config.json", GPT2);
    sandbox.edit("run.toml", "LlamaDecoderLayer", "GPT2Block");
    sandbox.succeed("verify run.toml --world-sizes 4 --order-seed 7");
}

#[test]
fn verify_without_valid_world_size_fails() {
    let ran = Sandbox::new().fsdp("verify run.toml --world-sizes 3,5");
    assert_eq!(ran.code, Some(1));
    assert!(ran.stdout.contains("no world size was verified"), "{}", ran.stdout);
}

#[test]
fn trace_contains_every_operation_of_every_rank() {
    let sandbox = Sandbox::new();
    sandbox.succeed("train run.toml --trace trace.json");
    let trace: Value = serde_json::from_str(&sandbox.read("trace.json")).unwrap();
    let mut operations: BTreeMap<u64, usize> = BTreeMap::new();
    let (mut names, mut calls) = (BTreeSet::new(), BTreeSet::new());
    // Collectives of one queue overlap, so each has a begin event and an end event.
    let mut under_way: BTreeMap<u64, f64> = BTreeMap::new();
    for event in trace["traceEvents"].as_array().unwrap() {
        let number = |key: &str| event[key].as_f64().unwrap();
        assert!(event["tid"].is_u64() && event["name"].is_string());
        match event["ph"].as_str().unwrap() {
            "X" => assert!(number("ts") >= 0.0 && number("dur") >= 0.0),
            "b" => assert!(under_way.insert(event["id"].as_u64().unwrap(), number("ts")).is_none()),
            "e" => {
                let begin = under_way.remove(&event["id"].as_u64().unwrap());
                assert!(begin.unwrap() <= number("ts"));
                continue;
            }
            other => {
                assert_eq!(other, "M", "names of ranks and queues");
                continue;
            }
        }
        names.insert(event["cat"].as_str().unwrap());
        if event["cat"] == "call" {
            calls.insert(event["name"].as_str().unwrap());
            continue;
        }
        *operations.entry(event["pid"].as_u64().unwrap()).or_default() += 1;
    }
    assert!(under_way.is_empty(), "every collective ends");
    let per_step = operations_per_step(&sandbox.succeed("schedule run.toml").stdout);
    assert_eq!(operations, BTreeMap::from([(0, 3 * per_step), (1, 3 * per_step)]));
    for name in ["all-gather", "forward", "backward", "reduce-scatter", "update"] {
        assert!(names.contains(name), "no {name} among {names:?}");
    }
    for call in ["linear", "attention", "linear_backward_weight"] {
        assert!(calls.contains(call), "no {call} among {calls:?}");
    }
}

/// Returns the number of operations per step that `fsdp schedule` reports.
fn operations_per_step(text: &str) -> usize {
    let (_, rest) = text.split_once("checker: training step of ").unwrap();
    rest.split_once(' ').unwrap().0.parse().unwrap()
}

#[test]
fn rust_log_prints_trace_to_stderr() {
    let sandbox = Sandbox::new();
    let output =
        sandbox.command().args(["train", "run.toml"]).env("RUST_LOG", "fsdp=trace").output().unwrap();
    assert!(output.status.success());
    assert!(String::from_utf8(output.stderr).unwrap().contains("all-gather"));
}
