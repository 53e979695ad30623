//! How a run starts: what it leaves untouched, and what it never treats as its own.

use std::fs;
use std::os::unix::fs::symlink;

use fsdp_ckpt::native::{NativeReader, RunDir};
use serde_json::Value;

use crate::interposer;
use crate::support::{Ran, Sandbox, folded};

impl Sandbox {
    /// Returns the steps that have checkpoints.
    pub(crate) fn steps(&self, out_dir: &str) -> Vec<u64> {
        RunDir::new(self.path(out_dir)).steps().unwrap()
    }

    fn weights(&self, out_dir: &str) -> Vec<u8> {
        fs::read(self.path(&format!("{out_dir}/model/model.safetensors"))).unwrap()
    }
}

#[test]
fn resume_of_finished_run_without_checkpoints_is_rejected() {
    let sandbox = Sandbox::new();
    sandbox.succeed("train run.toml");
    let before = sandbox.files("out");
    for flags in ["--resume", "--resume --skip-unsound", "--resume --set train.steps=9"] {
        let ran = sandbox.fsdp(&format!("train run.toml {flags}"));
        assert_eq!(ran.code, Some(2), "{flags}: {}", ran.stderr);
        assert_eq!(sandbox.files("out"), before, "{flags}");
    }
    let ran = sandbox.fsdp("train run.toml --resume");
    insta::assert_snapshot!(folded(&ran.stderr), @r"
    error: run.out_dir out holds out/model/model.safetensors but no checkpoint: its run has ended and
    cannot be resumed. Pass --overwrite to train from the start; to continue from these weights, --set
    model.init=pretrained --set model.path=out/model, with --overwrite or another run.out_dir
    ");
    // Both ways out that the message names work.
    let on = "--set model.init=pretrained --set model.path=out/model --set run.out_dir=on";
    sandbox.succeed(&format!("train run.toml --resume {on}"));
    sandbox.succeed("train run.toml --resume --overwrite --set train.steps=2");
    assert_eq!(sandbox.metrics("out").len(), 2);
}

#[test]
fn run_killed_before_first_checkpoint_restarts() {
    let sandbox = Sandbox::new();
    sandbox.succeed("train run.toml");
    let expected = sandbox.weights("out");
    fs::remove_dir_all(sandbox.path("out/model")).unwrap();
    let ran = sandbox.succeed("train run.toml --resume");
    assert!(ran.stderr.contains("no checkpoint in run.out_dir yet: starting"), "{}", ran.stderr);
    assert_eq!(sandbox.weights("out"), expected);
    // With --overwrite, the model of the previous run stays until the new one is exported.
    let lines = sandbox.read("out/metrics.jsonl");
    let first: String = lines.lines().take(2).map(|line| format!("{line}\n")).collect();
    sandbox.write("out/metrics.jsonl", first);
    let rejected = sandbox.fsdp("train run.toml --resume");
    assert_eq!(rejected.code, Some(2), "the model is newer than the run file: {}", rejected.stderr);
    sandbox.write("out/resolved.toml", sandbox.read("out/resolved.toml"));
    sandbox.succeed("train run.toml --resume");
    assert_eq!(sandbox.metrics("out").len(), 3);
}

/// Kills `--overwrite` at every directory change, and checks what `--resume` then makes of the folder.
#[test]
fn interrupted_overwrite_never_resumes_partial_run() {
    let sandbox = Sandbox::new();
    let saving = "--set checkpoint.every=1 --set checkpoint.keep_last=0";
    sandbox.succeed(&format!("train run.toml {saving}"));
    sandbox.succeed(&format!("train run.toml {saving} --set run.out_dir=fresh --set train.steps=4"));
    let (mut old, mut new) = (0, 0);
    for at in 0.. {
        let copy = sandbox.shell("rm -rf copy && cp -r out copy");
        assert_eq!(copy.code, Some(0), "{}", copy.stderr);
        let mut command = sandbox.command();
        command.args([
            "train",
            "run.toml",
            "--overwrite",
            "--set",
            "run.out_dir=copy",
            "--set",
            "train.steps=4",
        ]);
        command.env("LD_PRELOAD", interposer::library()).env("KILL_AT", at.to_string());
        let killed = Ran::of(command.output().unwrap());
        assert!([None, Some(0)].contains(&killed.code), "{}", killed.stderr);
        if sandbox.metrics("copy").len() == 4 {
            break;
        }
        let ran = sandbox.succeed("train run.toml --resume --set run.out_dir=copy --set train.steps=4");
        if ran.stderr.contains("resuming from copy/checkpoints/step-00000003 after step 3") {
            old += 1;
        } else {
            assert!(
                ran.stderr.contains("no checkpoint in run.out_dir yet: starting"),
                "at {at}: {}",
                ran.stderr
            );
            assert!(sandbox.steps("copy").is_empty(), "at {at}");
            new += 1;
        }
        // Either way the result is one run, without leftovers of the clearing.
        assert_eq!(sandbox.column("copy", "step"), [1.0, 2.0, 3.0, 4.0], "at {at}");
        assert_eq!(sandbox.weights("copy"), sandbox.weights("fresh"), "at {at}");
        assert!(!sandbox.path("copy/checkpoints.cleared.tmp").exists(), "at {at}");
    }
    assert!(old > 0 && new > 10, "both outcomes occur: {old} {new}");
}

#[test]
fn outputs_inside_data_folder_are_not_read_as_data() {
    let sandbox = Sandbox::new();
    fs::create_dir(sandbox.path("data")).unwrap();
    fs::rename(sandbox.path("data.txt"), sandbox.path("data/data.txt")).unwrap();
    let args = "train run.toml --set data.train=[\"data\"] --set data.eval=[\"data\"] --set run.out_dir=data/out \
                --set checkpoint.every=3";
    let first = sandbox.succeed(args);
    let on = sandbox.succeed(&format!("{args} --resume --set train.steps=6"));
    let state = |step| {
        let path = RunDir::new(sandbox.path("data/out")).checkpoint(step);
        NativeReader::open(path).unwrap().manifest().run_state["data"]["digest"].clone()
    };
    assert_eq!(state(3), state(6));
    assert!(on.stderr.contains("after step 3"), "{}", on.stderr);
    // The evaluation has the same tokens too.
    let tokens = |ran: &Ran| {
        let line = ran.stderr.lines().find(|line| line.starts_with("evaluation")).unwrap().to_owned();
        line.rsplit(", ").next().unwrap().to_owned()
    };
    assert_eq!(tokens(&first), tokens(&on));
}

#[test]
fn data_inside_output_folder_is_rejected() {
    let sandbox = Sandbox::new();
    insta::assert_snapshot!(sandbox.input_error_with("--set run.out_dir=data.txt"), @r"
    error: data.train: data.txt lies in run.out_dir data.txt, which the run writes to; move the data,
    or choose another run.out_dir
    ");
    fs::create_dir(sandbox.path("all")).unwrap();
    sandbox.write("all/eval.txt", "0123456789abcdef");
    let ran =
        sandbox.fsdp("train run.toml --set data.eval=[\"all/eval.txt\"] --set run.out_dir=all --overwrite");
    assert_eq!(ran.code, Some(2));
    insta::assert_snapshot!(folded(&ran.stderr), @r"
    error: data.eval: all/eval.txt lies in run.out_dir all, which the run writes to; move the data, or
    choose another run.out_dir
    ");
    assert_eq!(fs::read_dir(sandbox.path("all")).unwrap().count(), 1, "nothing is written");
}

#[test]
fn damaged_metrics_line_does_not_prevent_resume() {
    let sandbox = Sandbox::new();
    sandbox.succeed("train run.toml --set checkpoint.every=1");
    let mut metrics = fs::read(sandbox.path("out/metrics.jsonl")).unwrap();
    let ends: Vec<usize> = (0..metrics.len()).filter(|&at| metrics[at] == b'\n').collect();
    // Damage the third line, after the start record and the first step.
    metrics[ends[1] + 4] = 0xff;
    sandbox.write("out/metrics.jsonl", metrics);
    sandbox.succeed("train run.toml --resume --set train.steps=5 --set checkpoint.every=1");
    assert_eq!(sandbox.column("out", "step"), [1.0, 4.0, 5.0]);
}

#[test]
fn symlinks_out_of_output_folder_are_not_followed() {
    let sandbox = Sandbox::new();
    sandbox.write("precious", "precious");
    fs::create_dir_all(sandbox.path("out/model")).unwrap();
    let planted =
        ["resolved.tmp", "resolved.toml.tmp", "metrics.jsonl", "metrics.jsonl.tmp", "resolved.toml"];
    let in_model = ["model/config.tmp", "model/config.json.tmp", "model/config.json"];
    for name in planted.iter().chain(&in_model) {
        symlink(sandbox.path("precious"), sandbox.path(&format!("out/{name}"))).unwrap();
    }
    sandbox.succeed("train run.toml --overwrite");
    assert_eq!(sandbox.read("precious"), "precious");
    for name in ["resolved.toml", "metrics.jsonl", "model/config.json"] {
        assert!(fs::symlink_metadata(sandbox.path(&format!("out/{name}"))).unwrap().is_file(), "{name}");
    }
    assert_eq!(sandbox.metrics("out").len(), 3);
}

#[test]
fn lockless_file_system_prints_warning() {
    let sandbox = Sandbox::new();
    let mut command = sandbox.command();
    command.args(["train", "run.toml"]).env("LD_PRELOAD", interposer::library()).env("NO_LOCKS", "1");
    let ran = Ran::of(command.output().unwrap());
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    let warnings: Vec<&str> = ran.stderr.lines().filter(|line| line.starts_with("warning")).collect();
    insta::assert_snapshot!(folded(&warnings.join("\n")), @r"warning: run.out_dir out is on a file system without locks: a second run there would not be noticed");
    assert!(!sandbox.succeed("train run.toml --overwrite").stderr.contains("warning"));
}

#[test]
fn rejected_resume_creates_no_output_folder() {
    let sandbox = Sandbox::new();
    sandbox.succeed("train run.toml --set run.out_dir=first --set checkpoint.every=1");
    let newest = "first/checkpoints/step-00000003";
    sandbox.input_error("train run.toml --resume-from model");
    sandbox.input_error("train run.toml --resume-from nowhere");
    sandbox.input_error(&format!("train run.toml --resume-from {newest} --set data.seed=1"));
    sandbox.input_error(&format!("train run.toml --resume-from {newest} --set train.steps=2"));
    sandbox.write(&format!("{newest}/manifest.json"), "{}");
    sandbox.input_error(&format!("train run.toml --resume-from {newest}"));
}

#[test]
fn renamed_checkpoint_is_rejected() {
    let sandbox = Sandbox::new();
    sandbox.succeed("train run.toml --set checkpoint.every=1");
    let [right, wrong] = ["out/checkpoints/step-00000003", "out/checkpoints/step-00000020"];
    fs::rename(sandbox.path(right), sandbox.path(wrong)).unwrap();
    for args in
        ["--resume".to_owned(), format!("--resume-from {wrong}"), "--resume --skip-unsound".to_owned()]
    {
        let ran = sandbox.fsdp(&format!("train run.toml --set train.steps=30 {args}"));
        assert_eq!(ran.code, Some(2), "{args}: {}", ran.stderr);
        assert!(ran.stderr.contains("Rename it back to step-00000003"), "{args}: {}", ran.stderr);
    }
    let ran = sandbox.fsdp("train run.toml --set train.steps=30 --resume");
    insta::assert_snapshot!(folded(&ran.stderr), @r"
    error: out/checkpoints/step-00000020 is named after step 20 but holds the state after step 3: it
    was renamed. Rename it back to step-00000003, or move it away
    ");
    fs::rename(sandbox.path(wrong), sandbox.path(right)).unwrap();
    sandbox.succeed("train run.toml --resume --set train.steps=4");
    let last: Vec<Value> = sandbox.metrics("out");
    assert_eq!(last.len(), 4);
}

#[test]
fn finished_run_with_damaged_metrics_is_not_restarted() {
    let sandbox = Sandbox::new();
    sandbox.succeed("train run.toml");
    let lines = sandbox.read("out/metrics.jsonl");
    let last = lines.trim_end().rfind('\n').unwrap();
    sandbox.write("out/metrics.jsonl", [&lines.as_bytes()[..=last], b"\xff\n"].concat());
    let before = sandbox.weights("out");
    let ran = sandbox.fsdp("train run.toml --resume");
    assert_eq!(ran.code, Some(2), "{}", ran.stderr);
    assert_eq!(sandbox.weights("out"), before);
}

#[test]
fn files_are_synced_before_rename() {
    let sandbox = Sandbox::new();
    for more in ["--set train.steps=2", "--set train.steps=4 --resume"] {
        let args = format!("train run.toml --set checkpoint.every=1 {more}");
        let mut command = sandbox.command();
        command.args(args.split_whitespace()).env("LD_PRELOAD", interposer::library()).env("SYNC_FIRST", "1");
        let ran = Ran::of(command.output().unwrap());
        assert_eq!(ran.code, Some(0), "a file was renamed before it was synced: {}", ran.stderr);
    }
}
