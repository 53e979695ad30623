//! Training data in several formats and from several sources.

use std::path::Path;

use super::support::{Ran, Sandbox, folded};

const MIXED: &str =
    r#"--set data.train=[] --set data.source=[{path="data.txt",weight=3},{path="more.jsonl"}]"#;

/// Creates a sandbox that also has a JSON Lines file.
fn sandbox() -> Sandbox {
    let sandbox = Sandbox::new();
    let line = |index: usize| format!("{{\"id\": {index}, \"text\": \"line {index} of more text\"}}\n");
    sandbox.write("more.jsonl", (0..9).map(line).collect::<String>());
    sandbox
}

#[test]
fn parquet_example_trains() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let sandbox = Sandbox::new();
    let out = format!("run.out_dir=\"{}\"", sandbox.path("out").display());
    let mut command = sandbox.command();
    command.current_dir(root).args([
        "train",
        "examples/parquet.toml",
        "--set",
        "train.steps=2",
        "--set",
        &out,
    ]);
    command.args([
        "--set",
        "data.eval_batches=1",
        "--set",
        "train.global_batch_size=4",
        "--set",
        "data.seq_len=32",
    ]);
    let ran = Ran::of(command.output().unwrap());
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    assert!(
        ran.stderr.contains("75.00 %") && ran.stderr.contains("handbook/data/train-*.parquet"),
        "{}",
        ran.stderr
    );
    assert!(sandbox.column("out", "loss").iter().all(|loss| *loss > 4.0 && *loss < 7.0));
}

#[test]
fn mixed_sources_resume_matches_uninterrupted_run() {
    let sandbox = sandbox();
    let whole = sandbox.succeed(&format!("train run.toml {MIXED} --set train.steps=4"));
    let expected = "sources of data.train: each begins its next epoch when it is exhausted";
    assert!(whole.stderr.contains(expected) && whole.stderr.contains("25.00 %"), "{}", whole.stderr);
    let half = format!("train run.toml {MIXED} --set checkpoint.every=2 --set run.out_dir=half");
    sandbox.succeed(&format!("{half} --set train.steps=2"));
    sandbox.succeed(&format!("{half} --set train.steps=4 --set run.ranks=1 --resume"));
    assert_eq!(sandbox.column("half", "loss"), sandbox.column("out", "loss"));

    let other = half.replace("weight=3", "weight=2");
    let rejected = sandbox.fsdp(&format!("{other} --set train.steps=5 --resume"));
    assert_eq!(rejected.code, Some(2), "{}", rejected.stderr);
    assert!(folded(&rejected.stderr).contains("content of data.train"), "{}", rejected.stderr);
}

#[test]
fn data_train_with_data_source_is_rejected() {
    let sandbox = sandbox();
    let both = sandbox
        .fsdp(&format!("train run.toml {}", MIXED.replace("data.train=[]", "data.train=[\"data.txt\"]")));
    assert_eq!(both.code, Some(2));
    assert!(
        folded(&both.stderr).contains("`data.train` and `data.source` exclude each other"),
        "{}",
        both.stderr
    );
}

#[test]
fn schedule_warns_about_missing_data() {
    let sandbox = Sandbox::new();
    let ran =
        sandbox.succeed("schedule run.toml --set data.train=[\"data.txt\",\"books\",\"none-*.parquet\"]");
    let expected = "warning: books of [data] does not exist; a schedule does not need it, but a run does\n\
                    warning: none-*.parquet of [data] does not exist; a schedule does not need it, but a run does\n";
    assert_eq!(ran.stderr, expected);
}
