//! `fsdp audit`: steps of PyTorch, accelerate, the Trainer, DeepSpeed and Lightning, sound and with an error each
//! (tests/golden/audit), and input that cannot be judged.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::thread;
use std::time::Duration;

use serde_json::Value;

use crate::support::Sandbox;

pub(crate) fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/audit")
}

/// The folders of `tests/golden/audit`: one per framework, model and dtype, and one of optimizers.
fn settings() -> Vec<PathBuf> {
    let mut folders: Vec<PathBuf> =
        fs::read_dir(golden()).unwrap().map(|entry| entry.unwrap().path()).collect();
    folders.retain(|path| path.join("config.json").exists());
    folders.sort();
    folders
}

pub(crate) fn audit(folder: &Path, arguments: &[&str]) -> Output {
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

/// What was planted in a case.
fn expected(case: &Path) -> Value {
    serde_json::from_slice(&fs::read(case.join("expected.json")).unwrap()).unwrap()
}

/// Audits a case, in its folder.
fn audit_case(folder: &Path, expected: &Value, rest: &[&str]) -> Output {
    let text = |key: &str| expected[key].as_str().unwrap();
    let paths = ["--before", text("before"), "--after", text("after"), "--batch", text("batch"), "--json"];
    let shifted = expected["shifted"].as_bool().unwrap().then_some("--shifted");
    let number = |flag: &str, key: &str| {
        let number = expected[key].as_u64();
        number.map_or(Vec::new(), |number| vec![flag.to_owned(), number.to_string()])
    };
    let numbers = [number("--steps", "steps"), number("--at-step", "at_step")].concat();
    let numbers = numbers.iter().map(String::as_str);
    let arguments: Vec<&str> = [text("run")].into_iter().chain(paths).chain(shifted).chain(numbers).collect();
    audit(folder, &[&arguments, rest].concat())
}

/// Compares the verdict on a case with what was planted in it.
fn check(folder: &Path, case: &Path) -> Result<(), String> {
    let expected = expected(case);
    let text = |key: &str| expected[key].as_str().unwrap();
    let output = audit_case(folder, &expected, &[]);
    let report = judged(&output);
    let is_sound = text("verdict") == "sound";
    if output.status.code() != Some(if is_sound { 0 } else { 1 }) || report["verdict"] != expected["verdict"]
    {
        return Err(format!("{:?}: {}", output.status, report["findings"]));
    }
    if is_sound {
        return Ok(());
    }
    let [finding, others @ ..] = &report["findings"].as_array().unwrap()[..] else {
        return Err("no finding".to_owned());
    };
    let second: Vec<&Value> = expected.get("second").into_iter().collect();
    if others.iter().map(|other| &other["cause"]).collect::<Vec<_>>() != second {
        return Err(format!("not {} findings: {}", 1 + second.len(), report["findings"]));
    }
    if finding["cause"] != expected["cause"] {
        return Err(format!("{} instead of {}", finding["text"], expected["cause"]));
    }
    let explains = finding["explains"].as_f64().unwrap();
    // Masks are not known, so dropout explains a share only.
    let is_whole = !["unexplained", "dropout_active"].contains(&finding["cause"].as_str().unwrap());
    if is_whole && !(0.95..=1.0).contains(&explains) {
        return Err(format!("{} explains {explains}", finding["text"]));
    }
    let mut params = finding["params"].as_array().unwrap().clone();
    params.sort_by_key(ToString::to_string);
    let planted = expected["params"].as_array().unwrap();
    if !planted.is_empty() && params != *planted && !params.is_empty() {
        return Err(format!("parameters {params:?} instead of {planted:?}"));
    }
    let Some(planted) = expected["factor"].as_f64() else { return Ok(()) };
    let error = if folder.to_string_lossy().contains("bf16") { 2e-2 } else { 1e-3 };
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
    assert!(cases.len() > 190, "there are {} cases", cases.len());
    let wrong: Vec<String> = cases
        .iter()
        .filter_map(|(folder, case)| Some(format!("{}: {}", case.display(), check(folder, case).err()?)))
        .collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn reduction_in_16_bits_widens_the_bound() {
    let case = llama().join("sound");
    let bound =
        |rest: &[&str]| judged(&audit_case(&llama(), &expected(&case), rest))["bound"].as_f64().unwrap();
    let [own, reduced] = [bound(&[]), bound(&["--set", "fsdp.reduce_dtype=bf16"])];
    let roundings = 2.0 * 2f64.powi(-8);
    assert!(own < 1e-3 && (roundings..roundings + 1e-3).contains(&reduced), "{own} {reduced}");
}

#[test]
fn gradients_rounded_before_the_update_are_sound_if_that_is_stated() {
    for case in ["gradients-rounded", "gradients-rounded-clip"] {
        let expected = expected(&llama().join(case));
        let report = judged(&audit_case(&llama(), &expected, &["--set", "fsdp.reduce_dtype=bf16"]));
        assert_eq!(report["verdict"], "sound", "{case}: {}", report["findings"]);
        let text = judged(&audit_case(&llama(), &expected, &[]))["findings"][0]["text"].to_string();
        assert!(text.contains("fsdp.reduce_dtype") && text.contains("bf16"), "{case}: {text}");
    }
}

/// Runs an audit that has to fail, and returns its message.
pub(crate) fn refused(folder: &Path, arguments: &[&str]) -> String {
    let output = audit(folder, arguments);
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{text}");
    text
}

/// The arguments for a sound step of [`llama`].
const SOUND: [&str; 7] =
    ["run.toml", "--before", "before", "--after", "sound/after", "--batch", "padded.safetensors"];

fn llama() -> PathBuf {
    settings().into_iter().find(|folder| folder.ends_with("fsdp2-llama")).unwrap()
}

#[test]
fn rows_longer_than_the_positions_of_the_model_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let batch = dir.path().join("long.safetensors");
    let header = r#"{"m0.input_ids":{"dtype":"U8","shape":[1,65],"data_offsets":[0,65]},
        "m0.labels":{"dtype":"U8","shape":[1,65],"data_offsets":[65,130]}}"#;
    fs::write(&batch, [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &[1; 130]].concat()).unwrap();
    let step = ["run.toml", "--before", "before", "--after", "sound/after", "--batch"];
    let message = refused(&golden().join("fsdp2-gpt2"), &[&step[..], &[batch.to_str().unwrap()]].concat());
    let message = message.split_whitespace().collect::<Vec<_>>().join(" ");
    let expected = "long.safetensors: tensor m0.input_ids: its rows have 65 tokens, more than the 64 positions of the model";
    assert!(message.contains(expected), "{message}");
}

#[test]
fn states_that_do_not_follow_each_other_are_refused() {
    let batch = ["--batch", "padded.safetensors"];
    let same = [&["run.toml", "--before", "before", "--after", "before"][..], &batch].concat();
    assert!(refused(&llama(), &same).contains("has done 6 steps and before has done 6"));
    let swapped = [&["run.toml", "--before", "sound/after", "--after", "before"][..], &batch].concat();
    assert!(refused(&llama(), &swapped).contains("two states one step apart"));
}

/// Sound and planted steps with several micro-batches: clipped, with rows of one rank scaled, weighted, with dropout, tied, with
/// experts, of an optimizer without moments, and three steps together.
const SHARED: [(&str, &str); 10] = [
    ("fsdp2-llama", "sound-clip"),
    ("fsdp2-llama", "scaled-rows-of-rank-1"),
    ("fsdp2-llama", "scaled-norms-2-clip"),
    ("fsdp2-llama", "micro-batches-weighted"),
    ("fsdp2-llama", "dropout-active"),
    ("fsdp2-qwen2-tied", "tied-without-head"),
    ("trainer-mixtral", "auxiliary-summed"),
    ("trainer-mixtral", "resumed-without-experts"),
    ("torch-optimizers", "sgd-scaled-norms-2"),
    ("torch-optimizers", "several-prompts-counted"),
];

#[test]
fn ranks_come_to_the_verdict_of_one() {
    for (folder, case) in SHARED {
        let folder = golden().join(folder);
        let expected = expected(&folder.join(case));
        let with = |ranks: &str| judged(&audit_case(&folder, &expected, &["--ranks", ranks]));
        let one = with("1");
        assert_eq!(one["verdict"], expected["verdict"]);
        for ranks in ["2", "3"] {
            let several = with(ranks);
            assert_eq!(one["verdict"], several["verdict"], "{case}, {ranks} ranks");
            let rows = |report: &Value, table: &str| report[table].as_array().unwrap().clone();
            assert_eq!(rows(&one, "findings").len(), rows(&several, "findings").len(), "{case}");
            for (one, several) in rows(&one, "findings").iter().zip(rows(&several, "findings")) {
                assert_eq!([&one["cause"], &one["params"]], [&several["cause"], &several["params"]]);
                assert_near(&one["factor"], &several["factor"]);
            }
            for (one, several) in rows(&one, "params").iter().zip(rows(&several, "params")) {
                assert_eq!(one["name"], several["name"]);
                assert_near(&one["expected"], &several["expected"]);
                assert_near(&one["used"], &several["used"]);
            }
            for (one, several) in rows(&one, "updates").iter().zip(rows(&several, "updates")) {
                assert_near(&one["lr_found"], &several["lr_found"]);
                assert_near(&one["residual"], &several["residual"]);
            }
        }
    }
}

#[track_caller]
fn assert_near(left: &Value, right: &Value) {
    let [left, right] = [left, right].map(|value| value.as_f64().unwrap_or(0.0));
    assert!((left - right).abs() <= 1e-5 * left.abs(), "{left} {right}");
}

#[test]
fn processes_print_the_bits_of_ranks_of_one() {
    let run = "run.toml --before before --after scaled-norms-2/after --batch padded.safetensors --json";
    for ranks in ["2", "3", "4"] {
        let together = audit(&llama(), &[run.split(' ').collect(), vec!["--ranks", ranks]].concat());
        let mut launched = Command::new(env!("CARGO_BIN_EXE_fsdp"));
        launched.args(["launch", "--nproc", ranks, "--", "audit"]).args(run.split(' ')).current_dir(llama());
        let launched = launched.output().unwrap();
        assert_eq!(launched.status.code(), Some(1), "{}", String::from_utf8_lossy(&launched.stderr));
        assert_eq!(judged(&launched), judged(&together), "{ranks} ranks");
    }
}

#[test]
fn optimizer_without_first_moment_is_refused() {
    let arguments =
        ["run.toml", "--before", "before", "--after", "sound/after", "--batch", "padded.safetensors"];
    let message =
        refused(&llama(), &[&arguments[..], &["--set", "train.optimizer={name=\"muon\",lr=0.1}"]].concat());
    assert!(message.contains("keeps no first moment"), "{message}");
}

#[test]
fn input_error_of_all_processes_is_printed_once() {
    for processes in ["2", "3"] {
        let mut launched = Command::new(env!("CARGO_BIN_EXE_fsdp"));
        let run = "audit run.toml --before before --after before --batch padded.safetensors";
        launched.args(["launch", "--nproc", processes, "--"]).args(run.split(' ')).current_dir(llama());
        let launched = launched.output().unwrap();
        let text = String::from_utf8(launched.stderr).unwrap();
        assert_eq!(launched.status.code(), Some(2), "{text}");
        assert_eq!(text.matches("error:").count(), 1, "{text}");
        assert!(
            text.contains("has done 6 steps and before has done 6") && !text.contains("--resume"),
            "{text}"
        );
    }
}

#[test]
fn ranks_without_micro_batches_are_left_out() {
    let with = |ranks| audit(&llama(), &[&SOUND[..], &["--json", "--ranks", ranks]].concat());
    let (four, many) = (with("4"), with("100000"));
    assert_eq!(judged(&many), judged(&four));
    assert!(four.stderr.is_empty());
    let warning = String::from_utf8(many.stderr).unwrap();
    assert!(warning.contains("a step has 4 micro-batches"), "{warning}");
}

#[test]
fn moments_are_refused_where_the_run_file_has_none() {
    let sgd = "train.optimizer={name=\"sgd\",lr=0.1}";
    let message = refused(&llama(), &[&SOUND[..], &["--set", sgd]].concat());
    assert!(
        message.contains("exp_avg") && message.contains("name the optimizer that the program used"),
        "{message}"
    );
}

#[test]
fn states_without_an_optimizer_are_refused() {
    let weights = "../trainer-llama/before/model.safetensors";
    let run = ["run.toml", "--before", "before", "--after", weights, "--batch", "padded.safetensors"];
    let message = refused(&llama(), &run);
    assert!(message.contains("model.safetensors has no state of an optimizer"), "{message}");
    assert!(!message.contains("resume"), "{message}");
}

#[test]
fn states_of_two_runs_are_refused() {
    let sandbox = Sandbox::new();
    for seed in [0, 1] {
        let set = format!("--set model.seed={seed} --set run.out_dir=run{seed}");
        sandbox
            .succeed(&format!("train run.toml --set checkpoint.every=1 --set checkpoint.keep_last=0 {set}"));
    }
    let states = "--before run0/checkpoints/step-00000002 --after run1/checkpoints/step-00000003";
    let refused = sandbox.fsdp(&format!("audit run.toml --data {states}"));
    assert_eq!(refused.code, Some(2), "{}", refused.stdout);
    let message = refused.stderr.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(message.contains("step-00000003 does not follow run0/checkpoints/step-00000002"), "{message}");
}

#[test]
fn state_with_a_value_that_is_not_finite_is_refused() {
    let sandbox = Sandbox::new();
    sandbox.succeed("train run.toml --set checkpoint.every=1 --set checkpoint.keep_last=0");
    sandbox.succeed("ckpt convert --to dcp out/checkpoints/step-00000003 after");
    let parts: Vec<PathBuf> =
        fs::read_dir(sandbox.path("after")).unwrap().map(|entry| entry.unwrap().path()).collect();
    let part = parts.iter().find(|path| path.extension().is_some_and(|ending| ending == "distcp")).unwrap();
    let mut bytes = fs::read(part).unwrap();
    // Weights of norms are near one.
    let one = bytes
        .chunks_exact(4)
        .position(|bytes| (0.9..1.1).contains(&f32::from_le_bytes(bytes.try_into().unwrap())));
    bytes[4 * one.unwrap()..][..4].copy_from_slice(&f32::NAN.to_le_bytes());
    fs::write(part, bytes).unwrap();
    let refused = sandbox.fsdp("audit run.toml --data --before out/checkpoints/step-00000002 --after after");
    assert_eq!(refused.code, Some(2), "{}", refused.stdout);
    assert!(refused.stderr.contains("has values that are not"), "{}", refused.stderr);
}

#[test]
fn more_steps_than_any_run_does_are_refused_at_once() {
    let step = ["--before", "before-sgd", "--after", "sgd-sound/after", "--batch", "padded.safetensors"];
    for steps in ["4294967296", "18446744073709551615"] {
        let arguments = [&["run-sgd.toml"], &step[..], &["--at-step", steps]].concat();
        let message = refused(&golden().join("torch-optimizers"), &arguments);
        assert!(message.contains("steps are more than any run does"), "{message}");
    }
    for flag in ["--steps", "--ranks", "--at-step"] {
        let arguments = [&["run-sgd.toml"], &step[..], &[flag, "-1"]].concat();
        let message = refused(&golden().join("torch-optimizers"), &arguments);
        assert!(message.contains(&format!("invalid value '-1' for '{flag} <N>'")), "{message}");
    }
}

#[test]
fn report_in_a_missing_folder_is_refused_before_the_work() {
    let run = ["run.toml", "--before", "nothing", "--after", "nothing", "--batch", "nothing"];
    let message = refused(&llama(), &[&run[..], &["--report", "missing/audit.html"]].concat());
    assert!(message.contains("--report missing/audit.html: cannot create the file"), "{message}");
}

#[test]
fn rate_of_zero_without_momentum_is_refused() {
    let arguments = [
        "run-sgd.toml",
        "--before",
        "before-sgd",
        "--after",
        "sgd-sound/after",
        "--batch",
        "padded.safetensors",
        "--at-step",
        "6",
        "--set",
        "train.optimizer.lr=0",
    ];
    let message = refused(&llama().with_file_name("torch-optimizers"), &arguments);
    assert!(message.contains("the learning rate of model.embed_tokens.weight is 0"), "{message}");
}

#[test]
fn weights_that_do_not_move_are_refused_without_momentum() {
    let arguments = ["run-sgd.toml", "--before", "before-sgd", "--after", "before-sgd", "--batch"];
    let rate = ["padded.safetensors", "--at-step", "6", "--steps", "1", "--set", "train.optimizer.lr=1e-12"];
    let message = refused(&llama().with_file_name("torch-optimizers"), &[&arguments[..], &rate[..]].concat());
    assert!(message.contains("weights move by less than their rounding"), "{message}");
}

#[test]
fn number_of_steps_has_to_fit_states_and_batch() {
    let arguments =
        ["run-several.toml", "--before", "before-several", "--after", "several-sound/after", "--batch"];
    let refused = |batch: &str, steps: &str| {
        refused(
            &llama().with_file_name("torch-optimizers"),
            &[&arguments[..], &[batch, "--steps", steps]].concat(),
        )
    };
    let message = refused("padded-3.safetensors", "2");
    assert!(message.contains("has done 9, expected 2 more"), "{message}");
    let message = refused("padded.safetensors", "3");
    assert!(message.contains("4 micro-batches of 1 rank(s) are not those of 3 steps"), "{message}");
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
    for part in ["model.layers.1.input_layernorm.weight", "gradient scaled", "<svg", "2.0000"] {
        assert!(html.contains(part), "{part}");
    }
    // Bounds depend on the processor.
    let text = String::from_utf8(output.stdout).unwrap();
    insta::assert_snapshot!(text.lines().next().unwrap());
}

#[test]
fn several_steps_are_judged_by_their_whole_update() {
    let arguments = [
        "run-several.toml",
        "--before",
        "before-several",
        "--after",
        "several-rate-half/after",
        "--batch",
        "padded-3.safetensors",
        "--steps",
        "3",
    ];
    let output = audit(&llama().with_file_name("torch-optimizers"), &arguments);
    assert_eq!(output.status.code(), Some(1));
    let text = String::from_utf8(output.stdout).unwrap();
    for part in
        ["steps 7 to 9", "only the whole update of 3 steps can be judged", "exp_avg_sq of lm_head.weight"]
    {
        assert!(text.contains(part), "{part}: {text}");
    }
}

#[test]
fn own_runs_are_sound_by_their_own_data() {
    let settings = [
        "run.ranks=4",
        "run.ranks=2 --set train.grad_clip=0.05",
        "fsdp.param_dtype=\"bf16\"",
        "train.optimizer={name=\"sgd\",lr=0.1,momentum=0.9,nesterov=true,weight_decay=0.01}",
        "train.optimizer={name=\"sgd\",lr=0.1,weight_decay=0.01}",
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
        let output = sandbox.succeed(&format!(
            "audit run.toml --data --steps 2 --before out/checkpoints/step-00000001 --after out/checkpoints/step-00000003 --set {set}"
        ));
        assert!(
            output.stdout.starts_with("sound: the whole update of steps 2 to 3"),
            "{set}: {}",
            output.stdout
        );
    }
}

#[test]
fn faults_of_own_runs_are_named() {
    let cases = [
        ("train.optimizer.lr=0.02", "learning rate"),
        ("train.label_smoothing=0.1", "model differs"),
        ("data.seed=1", "unexplained"),
    ];
    for (planted, cause) in cases {
        let sandbox = Sandbox::new();
        let set = format!("--set checkpoint.every=1 --set checkpoint.keep_last=0 --set {planted}");
        sandbox.succeed(&format!("train run.toml {set}"));
        let states = "--before out/checkpoints/step-00000001 --after out/checkpoints/step-00000002";
        let output = sandbox.fsdp(&format!("audit run.toml --data {states}"));
        assert_eq!(output.code, Some(1), "{planted}: {}", output.stderr);
        assert!(output.stdout.starts_with(&format!("{cause}: step 2: ")), "{planted}: {}", output.stdout);
        assert_eq!(output.stdout.matches(": step 2: ").count(), 1, "{planted}: {}", output.stdout);
    }
}

/// The largest memory that a process had, in MiB, and its output. What it needed in its last milliseconds may be missing.
fn peak_of(command: &mut Command) -> (f64, Output) {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let status = format!("/proc/{}/status", child.id());
    let mut peak = 0.0;
    while child.try_wait().unwrap().is_none() {
        let text = fs::read_to_string(&status).unwrap_or_default();
        let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:")?.strip_suffix("kB"));
        peak = line.map_or(peak, |kib| kib.trim().parse::<f64>().unwrap() / 1024.0);
        thread::sleep(Duration::from_millis(2));
    }
    (peak, child.wait_with_output().unwrap())
}

#[test]
fn audit_needs_the_memory_that_it_says() {
    let sandbox = Sandbox::new();
    let larger = [("size\": 256", "size\": 8192"), ("hidden_size\": 16", "hidden_size\": 512")];
    larger.into_iter().for_each(|(from, to)| sandbox.edit("model/config.json", from, to));
    sandbox.edit(
        "model/config.json",
        "_size\": 24, \"num_hidden_layers\": 2",
        "_size\": 2048, \"num_hidden_layers\": 1",
    );
    let set = "--set run.ranks=1 --set train.global_batch_size=2 --set train.steps=2";
    sandbox.succeed(&format!("train run.toml --set checkpoint.every=1 --set checkpoint.keep_last=0 {set}"));
    let mut command = sandbox.command();
    let states = "--before out/checkpoints/step-00000001 --after out/checkpoints/step-00000002";
    command.args(format!("audit run.toml --data {states} {set}").split(' ')).env("RUST_LOG", "info");
    let (peak, output) = peak_of(&mut command);
    let log = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(0), "{log}");
    let (_, said) = log.split_once("this takes about ").unwrap();
    let said: f64 = said.split_once(" MiB of memory").unwrap().0.parse().unwrap();
    // The program itself, and what else is small.
    let own = 64.0;
    assert!(peak < said + own && peak > 0.75 * said, "{peak} MiB where {said} MiB were said");
}

#[test]
fn moments_of_8_bits_are_refused_with_the_way_out() {
    for name in ["bitsandbytes", "torchao"] {
        let state = golden().join(format!("eight-bit/{name}.pt"));
        let state = state.to_str().unwrap();
        let step = ["run.toml", "--before", state, "--after", state, "--batch", "padded.safetensors"];
        for message in [refused(&llama(), &step), refused(&llama(), &["--init", state])] {
            let message = message.split_whitespace().collect::<Vec<_>>().join(" ");
            assert!(message.contains(&format!("has the moments of {name} in 8 bits or fewer")), "{message}");
            assert!(message.contains("do not contain the gradient that was used"), "{message}");
        }
    }
}

#[test]
fn no_decay_may_name_kinds_that_the_model_lacks() {
    let step = ["run.toml", "--before", "before", "--after", "sound/after", "--batch", "padded.safetensors"];
    let with = |patterns: &str| {
        let set = format!("train.optimizer.no_decay={patterns}");
        audit(&llama(), &[&step[..], &["--set", &set]].concat())
    };
    assert_eq!(with(r#"["norm", "bias"]"#).status.code(), Some(0));
    assert_eq!(with(r#"["norm", "\\.bias$", "ln_"]"#).status.code(), Some(0));
    assert_eq!(with(r#"["norm", "bais"]"#).status.code(), Some(2));
}
