//! `fsdp audit`: steps of PyTorch, accelerate, the Trainer, DeepSpeed and Lightning, sound and with an error each
//! (tests/golden/audit), and input that cannot be judged.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;

use crate::support::Sandbox;

/// The folders of `tests/golden/audit`: one per framework, model and dtype.
fn settings() -> Vec<PathBuf> {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/audit");
    let mut folders: Vec<PathBuf> =
        fs::read_dir(golden).unwrap().map(|entry| entry.unwrap().path()).collect();
    folders.retain(|path| path.join("run.toml").exists());
    folders.sort();
    folders
}

fn audit(folder: &Path, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_fsdp"))
        .arg("audit")
        .args(arguments)
        .current_dir(folder)
        .output()
        .unwrap()
}

fn judged(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|_| panic!("{}", String::from_utf8_lossy(&output.stderr)))
}

/// Compares the verdict on a case with what was planted in it.
fn check(folder: &Path, case: &Path) -> Result<(), String> {
    let expected: Value = serde_json::from_slice(&fs::read(case.join("expected.json")).unwrap()).unwrap();
    let text = |key: &str| expected[key].as_str().unwrap();
    let paths = ["--before", text("before"), "--after", text("after"), "--batch", text("batch"), "--json"];
    let shifted = expected["shifted"].as_bool().unwrap().then_some("--shifted");
    let arguments: Vec<&str> = [text("run")].into_iter().chain(paths).chain(shifted).collect();
    let output = audit(folder, &arguments);
    let report = judged(&output);
    let is_sound = text("verdict") == "sound";
    if output.status.code() != Some(if is_sound { 0 } else { 1 }) || report["verdict"] != expected["verdict"]
    {
        return Err(format!("{:?}: {}", output.status, report["findings"]));
    }
    if is_sound {
        return Ok(());
    }
    let [finding] = &report["findings"].as_array().unwrap()[..] else {
        return Err(format!("not one finding: {}", report["findings"]));
    };
    if finding["cause"] != expected["cause"] {
        return Err(format!("{} instead of {}", finding["text"], expected["cause"]));
    }
    let mut params = finding["params"].as_array().unwrap().clone();
    params.sort_by_key(ToString::to_string);
    let planted = expected["params"].as_array().unwrap();
    if !planted.is_empty() && params != *planted && !params.is_empty() {
        return Err(format!("parameters {params:?} instead of {planted:?}"));
    }
    let Some(planted) = expected["factor"].as_f64() else { return Ok(()) };
    let error = if folder.to_string_lossy().contains("bf16") { 1e-2 } else { 1e-3 };
    match finding["factor"].as_f64() {
        Some(factor) if (factor - planted).abs() <= error * planted.abs().max(1e-2) => Ok(()),
        found => Err(format!("factor {found:?} instead of {planted}")),
    }
}

#[test]
fn planted_errors_are_named_and_sound_steps_are_not_accused() {
    let cases: Vec<(PathBuf, PathBuf)> = settings()
        .into_iter()
        .flat_map(|folder| {
            let entries = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path());
            let cases: Vec<PathBuf> = entries.filter(|case| case.join("expected.json").exists()).collect();
            cases.into_iter().map(move |case| (folder.clone(), case))
        })
        .collect();
    assert!(cases.len() > 100, "there are {} cases", cases.len());
    let wrong: Vec<String> = cases
        .iter()
        .filter_map(|(folder, case)| Some(format!("{}: {}", case.display(), check(folder, case).err()?)))
        .collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Runs an audit that has to fail, and returns its message.
fn refused(folder: &Path, arguments: &[&str]) -> String {
    let output = audit(folder, arguments);
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{text}");
    text
}

fn llama() -> PathBuf {
    settings().into_iter().find(|folder| folder.ends_with("fsdp2-llama")).unwrap()
}

#[test]
fn states_that_do_not_follow_each_other_are_refused() {
    let batch = ["--batch", "padded.safetensors"];
    let same = [&["run.toml", "--before", "before", "--after", "before"][..], &batch].concat();
    assert!(refused(&llama(), &same).contains("has done 6 steps and before has done 6"));
    let swapped = [&["run.toml", "--before", "sound/after", "--after", "before"][..], &batch].concat();
    assert!(refused(&llama(), &swapped).contains("two states one step apart"));
}

#[test]
fn optimizer_without_first_moment_is_refused() {
    let arguments =
        ["run.toml", "--before", "before", "--after", "sound/after", "--batch", "padded.safetensors"];
    let message =
        refused(&llama(), &[&arguments[..], &["--set", "train.optimizer={name=\"sgd\",lr=0.1}"]].concat());
    assert!(message.contains("keeps no first moment"), "{message}");
}

#[test]
fn report_is_html_with_a_bar_for_each_parameter() {
    let folder = tempfile::tempdir().unwrap();
    let page = folder.path().join("audit.html");
    let arguments = [
        "run.toml",
        "--before",
        "before",
        "--after",
        "scaled-norms-2/after",
        "--batch",
        "padded.safetensors",
        "--report",
    ];
    let output = audit(&llama(), &[&arguments[..], &[page.to_str().unwrap()]].concat());
    assert_eq!(output.status.code(), Some(1));
    let html = fs::read_to_string(page).unwrap();
    for part in ["model.layers.1.input_layernorm.weight", "gradient_scaled", "<svg", "2.0000"] {
        assert!(html.contains(part), "{part}");
    }
    // Bounds depend on the processor.
    let text = String::from_utf8(output.stdout).unwrap();
    insta::assert_snapshot!(text.lines().next().unwrap());
}

#[test]
fn own_runs_are_sound_by_their_own_data() {
    let settings = [
        "run.ranks=4",
        "run.ranks=2 --set train.grad_clip=0.05",
        "fsdp.param_dtype=\"bf16\"",
        "train.optimizer={name=\"sgd\",lr=0.1,momentum=0.9,nesterov=true,weight_decay=0.01}",
        "train.optimizer={name=\"lion\",lr=0.001,weight_decay=0.1}",
        "train.optimizer={name=\"adamw\",lr=0.01,betas=[0.8,0.9],no_decay=[\"norm\"]}",
        "model.path=base/model --set model.init=pretrained --set adapter.rank=4 --set adapter.target_modules=[\"q_proj\",\"down_proj\"]",
        "fsdp.frozen=[\"embed\"]",
        "train.label_smoothing=0.1 --set train.z_loss=0.001",
    ];
    for set in settings {
        let sandbox = Sandbox::new();
        sandbox.succeed("train run.toml --set run.out_dir=base");
        sandbox.succeed(&format!(
            "train run.toml --set checkpoint.every=1 --set checkpoint.keep_last=0 --set {set}"
        ));
        for step in [1, 2] {
            let at = |step| format!("out/checkpoints/step-0000000{step}");
            let output = sandbox.succeed(&format!(
                "audit run.toml --data --before {} --after {} --set {set}",
                at(step),
                at(step + 1)
            ));
            assert!(output.stdout.starts_with("sound: "), "{set}, step {step}: {}", output.stdout);
        }
    }
}
