//! `fsdp check`.

use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::support::Sandbox;

#[test]
fn everything_that_a_run_file_names_is_looked_at_and_nothing_is_written() {
    let sandbox = Sandbox::new();
    let before = sandbox.files(".");
    let stdout = sandbox.succeed("check run.toml").stdout;
    let (known, disk) = stdout.trim_end().rsplit_once('\n').unwrap();
    assert!(disk.starts_with("ok       disk          a checkpoint takes "), "{disk}");
    assert!(disk.ends_with(" free"), "{disk}");
    insta::assert_snapshot!(known, @"
    ok       run file      run.toml
    ok       device        cpu
    ok       data          1 file, 132 B, about 130 tokens by the first records, 16 samples
    ok       output        out
    ok       model         llama, 8.0K parameters; 2 layers, hidden 16, heads 4/2, ffn 24, vocabulary 256
    ok       positions     8 of 64 in a sample
    ok       schedule      73 operations in 3 units on mesh 1 x 2 (replicate x shard), safe
    ok       weights       random
    ok       memory        179.7 KiB at the peak of a rank, of 2 ranks
    ");
    assert_eq!(sandbox.files("."), before);
}

#[test]
fn all_that_is_wrong_is_told_at_once() {
    let sandbox = Sandbox::new();
    let ran =
        sandbox.fsdp("check run.toml --set data.train=[\"nowhere\"] --set model.init=pretrained --json");
    assert_eq!(ran.code, Some(2), "{}", ran.stderr);
    let report: Value = serde_json::from_str(&ran.stdout).unwrap();
    let of = |verdict: &str| -> Vec<String> {
        let findings = report["findings"].as_array().unwrap().iter();
        let told = findings.filter(|finding| finding["verdict"] == verdict);
        told.map(|finding| {
            format!("{}: {}", finding["subject"].as_str().unwrap(), finding["detail"].as_str().unwrap())
        })
        .collect()
    };
    let errors = of("error");
    assert_eq!(errors.len(), 2, "{errors:?}");
    assert!(errors[0].starts_with("data: ") && errors[0].contains("nowhere"), "{errors:?}");
    assert!(errors[1].starts_with("weights: ") && errors[1].contains("model"), "{errors:?}");
    assert!(of("ok").iter().any(|line| line.starts_with("schedule: ")));
}

#[test]
fn a_record_that_can_not_be_read_and_a_folder_with_a_run_are_told() {
    let sandbox = Sandbox::new();
    sandbox.write("data.jsonl", "{\"text\": \"a\"}\n{\"text\": 3}\n");
    let ran = sandbox.fsdp("check run.toml --set data.train=[\"data.jsonl\"]");
    assert_eq!(ran.code, Some(2));
    assert!(ran.stdout.contains("data.jsonl") && ran.stdout.contains("line 2"), "{}", ran.stdout);
    sandbox.succeed("train run.toml");
    let ran = sandbox.succeed("check run.toml");
    assert!(ran.stdout.contains("warning") && ran.stdout.contains("--overwrite"), "{}", ran.stdout);
    assert_eq!(sandbox.fsdp("check nowhere.toml").code, Some(2));
}

#[test]
fn the_examples_are_sound() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let files = fs::read_dir(root.join("examples")).unwrap().map(|entry| entry.unwrap().file_name());
    let names: Vec<String> = files.map(|name| name.into_string().unwrap()).collect();
    let examples: Vec<&str> = names.iter().filter_map(|name| name.strip_suffix(".toml")).collect();
    assert!(examples.len() >= 6, "{examples:?}");
    for example in examples {
        let mut command = Sandbox::new().command();
        let file = format!("examples/{example}.toml");
        let mut args = vec!["check", &file, "--json", "--set", "run.out_dir=target/nowhere"];
        if example == "llama-lora" {
            // What its base is, another example leaves.
            args.extend(["--set", "model.path=examples/llama-tiny", "--set", "model.init=random"]);
        }
        let ran = command.current_dir(&root).args(args).output().unwrap();
        let report: Value = serde_json::from_slice(&ran.stdout).unwrap();
        let findings = report["findings"].as_array().unwrap().iter();
        let errors: Vec<&Value> = findings.filter(|finding| finding["verdict"] == "error").collect();
        // What is for a cluster does not fit a machine.
        let is_expected = |error: &&Value| {
            example == "llama-8b" && (error["subject"] == "memory" || error["subject"] == "disk")
        };
        assert!(errors.iter().all(is_expected), "{example}: {errors:#?}");
    }
}
