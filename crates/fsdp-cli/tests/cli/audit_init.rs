//! `fsdp audit --init`: run files from what the folders of tests/golden/audit say of their runs.

use std::fs;
use std::path::Path;

use crate::auditing::{audit, golden, refused};

/// Runs `--init` on a state, and audits a step with the file that it prints. Returns the file.
fn init_and_audit(folder: &Path, state: &str, rest: &[&str], is_sound: bool) -> String {
    let init = audit(folder, &["--init", state]);
    let stderr = String::from_utf8(init.stderr).unwrap();
    assert!(init.status.success() && stderr.is_empty(), "{}: {stderr}", folder.display());
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("run.toml");
    fs::write(&file, &init.stdout).unwrap();
    let output = audit(folder, &[&[file.to_str().unwrap(), "--before", state], rest].concat());
    let text = String::from_utf8(init.stdout).unwrap();
    let said = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
    assert_eq!(
        output.status.code(),
        Some(if is_sound { 0 } else { 1 }),
        "{}: {text}\n{said}",
        folder.display()
    );
    text
}

#[test]
fn init_files_of_all_frameworks_judge_sound_steps_as_sound() {
    // The number of lines to fill in: that of settings that the folder does not say.
    let cases = [
        ("init/trainer", "after", "batch", "", 0),
        ("init/accelerate", "after", "batch", "", 2),
        ("init/deepspeed", "after", "batch", "", 0),
        ("trainer-llama", "sound/after", "padded", "", 0),
        ("trainer-llama", "sound-packed/after", "packed", "", 0),
        ("trainer-ddp", "sound/after", "padded", "", 0),
        ("trainer-lora", "sound/after", "padded", "", 0),
        // The Trainer adds the balancing losses of four micro-batches, which its config.json takes back.
        ("trainer-mixtral", "sound/after", "plain", "train.router_aux_loss_coef=0.05", 0),
        ("lightning-llama", "sound/after", "padded", "", 2),
        // These loops set the rate before each step, and save nothing of it.
        ("accelerate-fsdp2", "sound/after", "padded", "train.optimizer.lr=0.009251085678648071", 3),
        ("fsdp2-llama", "sound/after", "padded", "train.optimizer.lr=0.009251085678648071", 3),
        ("fsdp2-qwen2-tied", "sound/after", "padded", "train.optimizer.lr=0.009251085678648071", 3),
        ("deepspeed-zero3", "sound/after", "padded", "train.optimizer.lr=0.009251085678648071", 1),
        ("deepspeed-zero2-bf16", "sound/after", "padded", "train.optimizer.lr=0.009251085678648071", 1),
    ];
    for (folder, after, batch, set, open) in cases {
        let folder = golden().join(folder);
        let batch = format!("{batch}.safetensors");
        let set = if set.is_empty() { vec![] } else { vec!["--set", set] };
        let rest = [&["--after", after, "--batch", &batch][..], &set].concat();
        let text = init_and_audit(&folder, "before", &rest, true);
        let found = text.lines().filter(|line| line.starts_with("# fill in: ")).count();
        assert_eq!(found, open, "{}: {text}", folder.display());
    }
}

#[test]
fn init_files_find_what_differs_from_what_the_folder_says() {
    let batch = ["--batch", "padded.safetensors"];
    for case in ["mean-of-micro-batches", "own-loss", "prompts-counted"] {
        let batch = if case == "own-loss" { ["--batch", "plain.safetensors"] } else { batch };
        let after = format!("{case}/after");
        init_and_audit(
            &golden().join("trainer-llama"),
            "before",
            &[&["--after", &after][..], &batch].concat(),
            false,
        );
    }
}

#[test]
fn init_of_sgd_without_momentum_reads_its_settings() {
    let rest = ["--after", "sgd-sound/after", "--batch", "padded.safetensors", "--at-step", "6"];
    let decay = ["--set", "train.optimizer.no_decay=[\"norm\"]"];
    let text =
        init_and_audit(&golden().join("torch-optimizers"), "before-sgd", &[&rest[..], &decay].concat(), true);
    for line in
        ["name = \"sgd\" ", "lr = 0.5 ", "momentum = 0.0 ", "weight_decay = 0.1 ", "# fill in: no_decay = "]
    {
        assert!(text.lines().any(|found| found.starts_with(line)), "{line}: {text}");
    }
}

#[test]
fn findings_name_the_lines_that_are_to_be_filled_in() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("run.toml");
    let file = file.to_str().unwrap();
    let folder = golden().join("fsdp2-llama");
    assert!(audit(&folder, &[file, "--init", "before"]).status.success());
    let text = fs::read_to_string(file).unwrap();
    assert!(text.lines().any(|line| line.starts_with("lr = ") && line.contains("# check it: ")), "{text}");
    let step = [file, "--before", "before", "--after", "sound/after", "--batch", "padded.safetensors"];
    let said = |rest: &[&str], code| {
        let output = audit(&folder, &[&step[..], rest].concat());
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(code), "{stderr}");
        stderr.split_whitespace().collect::<Vec<_>>().join(" ")
    };
    // This loop sets the rate before each step, and saves that of the step before.
    let findings = said(&[], 1);
    assert!(
        findings.contains("run.toml still has lines to fill in (lr_schedule, grad_clip, param_dtype)"),
        "{findings}"
    );
    assert_eq!(said(&["--set", "train.optimizer.lr=0.009251085678648071"], 0), "");
    fs::write(file, text.replace("# fill in: ", "# ")).unwrap();
    assert_eq!(said(&[], 1), "");
}

#[test]
fn init_file_says_where_each_value_comes_from() {
    let output = audit(&golden().join("init/trainer"), &["--init", "before"]);
    insta::assert_snapshot!(String::from_utf8(output.stdout).unwrap());
    let output = audit(&golden().join("init/accelerate"), &["--init", "before"]);
    insta::assert_snapshot!(String::from_utf8(output.stdout).unwrap());
}

#[test]
fn documented_init_file_is_that_of_the_trainer() {
    let output = audit(&golden().join("trainer-llama"), &["--init", "before"]);
    let text = String::from_utf8(output.stdout).unwrap();
    let page =
        fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/audit-method.md")).unwrap();
    let (_, tables) = text.split_once("\n\n").unwrap();
    assert!(page.contains(tables), "{tables}");
}

#[test]
fn init_of_a_torchtitan_run_reads_its_job() {
    let dir = tempfile::tempdir().unwrap();
    let fixture =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../fsdp-ckpt/tests/fixtures/torchtitan/step-10");
    let step = dir.path().join("checkpoint/step-10");
    fs::create_dir_all(&step).unwrap();
    for file in fs::read_dir(fixture).unwrap().map(|entry| entry.unwrap().path()) {
        fs::copy(&file, step.join(file.file_name().unwrap())).unwrap();
    }
    let job = r#"{"training": {"max_norm": 0.5, "mixed_precision_param": "float32"}, "lr_scheduler": {"warmup_steps": 2}}"#;
    fs::write(dir.path().join("job.json"), job).unwrap();
    let output = audit(dir.path(), &["--init", "checkpoint/step-10"]);
    let text = String::from_utf8(output.stdout).unwrap();
    for line in [
        "grad_clip = 0.5                          # job.json: training.max_norm",
        "param_dtype = \"f32\"                      # job.json: training.mixed_precision_param",
        "lr = 0.01                                # the optimizer's param_groups: lr, as the scheduler has left it",
        "betas = [0.9, 0.95]",
        "# fill in: path = \"model\"",
    ] {
        assert!(text.contains(line), "{line}: {text}");
    }
    // A second job beside the first one, and a large file, which is none.
    fs::write(dir.path().join("other.json"), job).unwrap();
    fs::write(dir.path().join("log.json"), format!("{job}{}", " ".repeat(2 << 20))).unwrap();
    let output = audit(dir.path(), &["--init", "checkpoint/step-10"]);
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success() && said.contains("job.json and "), "{said}");
    assert!(said.contains("other.json are both jobs of torchtitan") && !said.contains("log.json"), "{said}");
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("# fill in: grad_clip"), "{text}");
}

#[test]
fn init_warns_of_settings_that_cannot_be_read() {
    let dir = tempfile::tempdir().unwrap();
    let folder = golden().join("init/trainer/before");
    for file in fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
        fs::copy(&file, dir.path().join(file.file_name().unwrap())).unwrap();
    }
    let arguments = dir.path().join("training_args.bin");
    let bytes = fs::read(&arguments).unwrap();
    fs::write(&arguments, &bytes[..bytes.len() / 2]).unwrap();
    fs::write(dir.path().join("trainer_state.json"), "{").unwrap();
    let output = refused(dir.path(), &["--init", "."]);
    assert!(output.contains("training_args.bin"), "{output}");
    fs::remove_file(&arguments).unwrap();
    let output = audit(dir.path(), &["--init", "."]);
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success() && said.contains("trainer_state.json is left out"), "{said}");
    let text = String::from_utf8(output.stdout).unwrap();
    // Without the arguments, the scheduler's state has at least the rate of the step.
    assert!(text.contains("lr = 3.571"), "{text}");
}

#[test]
fn init_writes_a_new_file_and_replaces_none() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("run.toml");
    let arguments = [file.to_str().unwrap(), "--init", "before"];
    let folder = golden().join("init/accelerate");
    let output = audit(&folder, &arguments);
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(said.starts_with("wrote ") && said.contains("2 lines that begin with `# fill in: `"), "{said}");
    let written = fs::read_to_string(&file).unwrap();
    assert_eq!(written, String::from_utf8(audit(&folder, &["--init", "before"]).stdout).unwrap());
    fs::write(&file, "mine").unwrap();
    let message = refused(&folder, &arguments);
    assert!(message.contains("exists"), "{message}");
    assert_eq!(fs::read_to_string(&file).unwrap(), "mine");
    let none = refused(dir.path(), &["--init", "."]);
    assert!(none.contains("holds no checkpoint"), "{none}");
    let model = refused(&golden().join("trainer-lora"), &["--init", "."]);
    assert!(model.contains("has no state of an optimizer"), "{model}");
    let both = refused(&folder, &["run.toml", "--init", "before", "--before", "before"]);
    assert!(both.contains("cannot be used with"), "{both}");
}
