//! The files that `--trace` may write.

use std::fs;

use crate::support::{Sandbox, folded};

#[test]
fn trace_overwrites_only_traces() {
    let sandbox = Sandbox::new();
    for file in ["run.toml", "data.txt", "model/config.json"] {
        let before = sandbox.read(file);
        let ran = sandbox.fsdp(&format!("train run.toml --trace {file}"));
        assert_eq!(ran.code, Some(2), "{file}: {}", ran.stderr);
        assert_eq!(sandbox.read(file), before);
    }
    insta::assert_snapshot!(sandbox.input_error("train run.toml --trace run.toml"), @r"error: --trace: run.toml exists already and is not a trace: it would be lost; choose another file");
    insta::assert_snapshot!(sandbox.input_error("train run.toml --trace data.txt"), @r"error: --trace: data.txt is or would become data of the run ([data]); choose another file");
    sandbox.succeed("train run.toml --trace trace.json");
    let first = sandbox.read("trace.json");
    sandbox.succeed("train run.toml --overwrite --set train.steps=1 --trace trace.json");
    assert!(sandbox.read("trace.json").len() < first.len(), "it was replaced");
    // An empty file, as left by a run that was killed at once.
    sandbox.write("trace.json", "");
    sandbox.succeed("train run.toml --overwrite --trace trace.json");
}

#[test]
fn trace_inside_output_or_data_is_rejected() {
    let sandbox = Sandbox::new();
    let files =
        ["model/t.json", "checkpoints/t.json", "metrics.jsonl", "resolved.toml", "./model/../model/t.json"];
    for file in files {
        let text = sandbox.input_error(&format!("train run.toml --trace out/{file}"));
        assert!(text.contains("is a file that the run writes (run.out_dir)"), "{file}: {text}");
    }
    fs::create_dir(sandbox.path("texts")).unwrap();
    sandbox.write("texts/a.txt", "0123456789".repeat(30));
    let folder = "--set data.train=[\"texts\"]";
    let ran = sandbox.fsdp(&format!("train run.toml {folder} --trace texts/trace.json"));
    assert_eq!(ran.code, Some(2));
    insta::assert_snapshot!(folded(&ran.stderr), @r"error: --trace: texts/trace.json is or would become data of the run ([data]); choose another file");
    sandbox.succeed(&format!("train run.toml {folder} --trace trace.json"));
}
