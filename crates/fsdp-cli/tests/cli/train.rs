//! A run: its output, repeating it and resuming it.

use fsdp_ckpt::model_files::ModelReader;
use fsdp_config::Resolved;
use serde_json::Value;

use crate::support::{LLAMA, Sandbox};

#[test]
fn metrics_have_one_object_per_step() {
    let sandbox = Sandbox::new();
    sandbox.succeed("train run.toml --set run.peak_tflops=0.1");
    let metrics = sandbox.metrics("out");
    let keys: Vec<&String> = metrics[0].as_object().unwrap().keys().collect();
    let all =
        ["step", "loss", "grad_norm", "lr", "tokens", "targets", "tokens_per_s", "step_ms", "mfu", "mfu_6n"];
    assert_eq!(keys, all);
    assert_eq!(sandbox.column("out", "step"), [1.0, 2.0, 3.0]);
    assert_eq!(sandbox.column("out", "tokens"), [64.0; 3]);
    // An untrained model with 256 tokens has a loss of about ln 256.
    assert!((sandbox.column("out", "loss")[0] - 256f64.ln()).abs() < 0.1);

    sandbox.succeed("train run.toml --set run.out_dir=unknown-peak");
    assert!(sandbox.metrics("unknown-peak")[0].get("mfu").is_none());
}

#[test]
fn summary_reports_steps_speed_memory_and_model() {
    let sandbox = Sandbox::new();
    let ran = sandbox.succeed("train run.toml");
    for word in ["3, in ", " first, ", "tokens/s", "parameter shards", "all-gather", "out/model"] {
        assert!(ran.stdout.contains(word), "no {word} in:\n{}", ran.stdout);
    }
    assert_eq!(ran.stderr.lines().count(), 3, "a line per step:\n{}", ran.stderr);
}

#[test]
fn resolved_run_file_lists_all_defaults() {
    let sandbox = Sandbox::new();
    sandbox.succeed("train run.toml");
    let text = sandbox.read("out/resolved.toml");
    let (_, config) = text.split_once("\n\n").unwrap();
    insta::assert_snapshot!("resolved", config);
    let loaded = Resolved::parse(&text, "resolved.toml", &[]).unwrap();
    assert_eq!(loaded.config.to_toml(), config);
    assert!(loaded.warnings.is_empty());
}

#[test]
fn resolved_run_file_reproduces_run_bitwise() {
    let sandbox = Sandbox::new();
    sandbox.succeed("train run.toml --set train.steps=5 --set model.seed=3");
    sandbox.succeed("train out/resolved.toml --set run.out_dir=again");
    for key in ["loss", "grad_norm", "lr"] {
        assert_eq!(sandbox.column("out", key), sandbox.column("again", key), "{key}");
    }
    let weights = |dir: &str| std::fs::read(sandbox.path(dir).join("model/model.safetensors")).unwrap();
    assert!(weights("out") == weights("again"), "exported weights are equal in bits");
}

#[test]
fn exported_model_keeps_names_and_stores_tied_weights_once() {
    let sandbox = Sandbox::new();
    sandbox.succeed("train run.toml");
    let layer = ["input_layernorm", "post_attention_layernorm"].map(|norm| format!("{norm}.weight"));
    let mlp = ["down_proj", "gate_proj", "up_proj"].map(|linear| format!("mlp.{linear}.weight"));
    let attention =
        ["k_proj", "o_proj", "q_proj", "v_proj"].map(|linear| format!("self_attn.{linear}.weight"));
    let layer: Vec<&String> = layer.iter().chain(&mlp).chain(&attention).collect();
    let mut names = vec!["model.embed_tokens.weight".to_owned(), "model.norm.weight".to_owned()];
    names.extend((0..2).flat_map(|i| layer.iter().map(move |name| format!("model.layers.{i}.{name}"))));
    names.sort();
    let model = ModelReader::open(sandbox.path("out/model")).unwrap();
    assert_eq!(model.names().collect::<Vec<_>>(), names);
    assert_eq!(model.entry("model.layers.0.self_attn.k_proj.weight").unwrap().shape(), [8, 16]);

    let exported: Value = serde_json::from_str(&sandbox.read("out/model/config.json")).unwrap();
    let mut original: Value = serde_json::from_str(LLAMA).unwrap();
    original["dtype"] = "float32".into();
    assert_eq!(exported, original);

    let mut files: Vec<_> = std::fs::read_dir(sandbox.path("out/model")).unwrap().collect();
    files.sort_by_key(|file| file.as_ref().unwrap().file_name());
    let files: Vec<_> = files.into_iter().map(|file| file.unwrap().file_name()).collect();
    assert_eq!(files, ["config.json", "model.safetensors"]);
}

#[test]
fn training_from_exported_model_reproduces_next_loss() {
    let sandbox = Sandbox::new();
    // The data is one global batch, so every step sees the same data.
    sandbox.edit("run.toml", "global_batch_size = 8", "global_batch_size = 16\ngrad_clip = 1.0");
    sandbox.succeed("train run.toml --set run.out_dir=short --set data.shuffle=false");
    sandbox.succeed("train run.toml --set run.out_dir=long --set data.shuffle=false --set train.steps=4");
    sandbox.succeed(
        "train run.toml --set model.path=short/model --set model.init=pretrained --set run.ranks=4 \
         --set data.shuffle=false",
    );
    let long = sandbox.column("long", "loss");
    assert!(long[3] < long[2], "it learns: {long:?}");
    assert_eq!(sandbox.column("out", "loss")[0].to_bits(), long[3].to_bits());
}

#[test]
fn evaluation_is_reported() {
    let sandbox = Sandbox::new();
    sandbox.write("more.txt", "Other prose of a few samples, which is nowhere in the data of the training.");
    let sets = "[{name=\"train\",paths=[\"data.txt\"]},{name=\"other\",paths=[\"more.txt\"],max_samples=3}]";
    let ran = sandbox.succeed(&format!("train run.toml --set data.eval={sets} --set data.eval_every=2"));
    assert!(ran.stderr.contains("evaluation after step 2 on train: loss 5."), "{}", ran.stderr);
    let table = ran.stdout.split("last evaluation\n").nth(1).unwrap_or_else(|| panic!("{}", ran.stdout));
    let rows: Vec<Vec<&str>> = table.lines().take(4).map(|row| row.split_whitespace().collect()).collect();
    assert_eq!(rows[0], ["set", "loss", "perplexity", "tokens"], "{table}");
    assert_eq!((rows[2][0], rows[2][3], rows[3][0], rows[3][3]), ("train", "128", "other", "24"), "{table}");
    let found = sandbox.evaluations("out");
    let places: Vec<(u64, &str)> = found.iter().map(|(step, set, _)| (*step, &**set)).collect();
    assert_eq!(places, [(2, "train"), (2, "other"), (3, "train"), (3, "other")]);
    assert_eq!(rows[3][1], format!("{:.4}", found[3].2));
    assert_eq!(rows[3][2], format!("{:.2}", found[3].2.exp()));
}

#[test]
fn interrupted_evaluation_is_repeated_without_duplicate_lines() {
    let sandbox = Sandbox::new();
    let sets = "[{name=\"a\",paths=[\"data.txt\"]},{name=\"b\",paths=[\"data.txt\"],max_samples=4}]";
    let run = format!(
        "train run.toml --set data.eval={sets} --set data.eval_every=2 --set train.steps=4 --set checkpoint.every=2"
    );
    sandbox.succeed(&run);
    let whole = sandbox.evaluations("out");
    assert_eq!(whole.len(), 4);
    // As if the process had been killed between the two sets of the evaluation after step 2.
    let lines = sandbox.read("out/metrics.jsonl");
    let kept: String = lines.lines().take(4).map(|line| format!("{line}\n")).collect();
    assert!(kept.trim_end().lines().last().unwrap().contains(r#""set":"a""#), "{kept}");
    sandbox.write("out/metrics.jsonl", kept);
    std::fs::remove_dir_all(sandbox.path("out/checkpoints/step-00000004")).unwrap();
    sandbox.succeed(&format!("{run} --resume"));
    assert_eq!(sandbox.evaluations("out"), whole);
    sandbox.succeed(&format!("{run} --resume"));
    assert_eq!(sandbox.evaluations("out"), whole, "the summary needs the last evaluation, the file has it");
}

#[test]
fn overwrite_keeps_unrelated_files() {
    let sandbox = Sandbox::new();
    sandbox.succeed("train run.toml");
    sandbox.write("out/notes.txt", "keep");
    sandbox.succeed("train run.toml --overwrite --set train.steps=1");
    assert_eq!(sandbox.metrics("out").len(), 1);
    assert_eq!(sandbox.read("out/notes.txt"), "keep");
}

#[test]
fn overwrite_can_train_from_own_exported_model() {
    let sandbox = Sandbox::new();
    sandbox.succeed("train run.toml");
    let before = std::fs::read(sandbox.path("out/model/model.safetensors")).unwrap();
    sandbox.succeed("train run.toml --overwrite --set model.path=out/model --set model.init=pretrained");
    let after = std::fs::read(sandbox.path("out/model/model.safetensors")).unwrap();
    assert_eq!(before.len(), after.len());
    assert!(before != after, "it was trained on");
}

#[test]
fn non_finite_loss_ends_run_without_model() {
    let sandbox = Sandbox::new();
    let ran = sandbox.fsdp("train run.toml --set train.optimizer={name=\"sgd\",lr=1e30} --set run.ranks=1");
    assert_eq!(ran.code, Some(3), "{}", ran.stderr);
    assert!(ran.stderr.contains("step 2: loss") && ran.stderr.contains("train.grad_clip"), "{}", ran.stderr);
    assert_eq!(sandbox.metrics("out").len(), 1, "steps before it are kept");
    assert_eq!(std::fs::read_dir(sandbox.path("out/model")).unwrap().count(), 0);
}

#[test]
fn non_finite_step_is_not_saved_and_its_weights_are_set_aside() {
    let sandbox = Sandbox::new();
    let ran = sandbox.fsdp(
        "train run.toml --set train.optimizer.lr=1e30 --set train.steps=50 --set checkpoint.every=1 \
         --set checkpoint.keep_last=0",
    );
    assert_eq!(ran.code, Some(3), "{}", ran.stderr);
    let applied = sandbox.metrics("out").len() as u64;
    let saved = fsdp_ckpt::native::RunDir::new(sandbox.path("out")).steps().unwrap();
    assert_eq!(saved, [0; 0]);
    assert!(sandbox.path(&format!("out/checkpoints/step-{applied:08}.diverged/manifest.json")).exists());
    let advice = "no saved state is worth continuing: start over (--overwrite) with a lower learning rate";
    assert!(ran.stderr.contains(advice), "{}", ran.stderr);
}

#[test]
fn failed_overwrite_keeps_previous_model() {
    let sandbox = Sandbox::new();
    sandbox.succeed("train run.toml");
    let before = std::fs::read(sandbox.path("out/model/model.safetensors")).unwrap();
    let ran = sandbox.fsdp("train run.toml --overwrite --set train.optimizer.lr=1e30 --set train.steps=50");
    assert_eq!(ran.code, Some(3), "{}", ran.stderr);
    assert_eq!(std::fs::read(sandbox.path("out/model/model.safetensors")).unwrap(), before);
}

#[test]
fn resume_on_other_rank_count_matches_uninterrupted_run() {
    let sandbox = Sandbox::new();
    sandbox.succeed("train run.toml --set train.steps=6 --set run.out_dir=whole");
    let first = sandbox.succeed("train run.toml --set train.steps=4 --set checkpoint.every=2");
    assert!(first.stderr.contains("checkpoint after step 4: "), "{}", first.stderr);
    let resume = "train run.toml --resume --set train.steps=6 --set checkpoint.every=2 --set run.ranks=4";
    let ran = sandbox.succeed(resume);
    assert!(
        ran.stderr.contains("resuming from out/checkpoints/step-00000004 after step 4"),
        "{}",
        ran.stderr
    );
    assert!(ran.stderr.contains("train.steps was 4, now 6"), "{}", ran.stderr);
    assert!(ran.stdout.contains("6, of which 2 after a checkpoint"), "{}", ran.stdout);
    assert_eq!(sandbox.column("out", "loss"), sandbox.column("whole", "loss"));
    let weights = |out: &str| std::fs::read(sandbox.path(&format!("{out}/model/model.safetensors"))).unwrap();
    assert_eq!(weights("out"), weights("whole"));
}
