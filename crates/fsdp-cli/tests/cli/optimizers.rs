//! Runs with parameter groups, 8-bit states, or averaged parameters.

use fsdp_ckpt::model_files::ModelReader;
use serde_json::Value;

use crate::support::Sandbox;

/// Returns all values of the exported weights of a run.
fn weights(sandbox: &Sandbox, out_dir: &str) -> Vec<f64> {
    let reader = ModelReader::open(sandbox.path(out_dir).join("model")).unwrap();
    let mut all = Vec::new();
    for name in reader.names() {
        let entry = reader.entry(name).unwrap();
        let mut values = vec![0.0; entry.row_count() * entry.row_len() as usize];
        reader.read_rows_f64(name, 0..entry.row_count(), &mut values).unwrap();
        all.extend(values);
    }
    all
}

#[test]
fn param_groups_are_reported_and_saved_in_checkpoints() {
    let sandbox = Sandbox::new();
    let optimizer = r#"train.optimizer={lr=1e-2,no_decay=["norm"],group=[{patterns=["embed_tokens"],lr=5e-3,weight_decay=0.5},{patterns=["layers\\.0\\."],lr_scale=0}]}"#;
    let ran = sandbox.succeed(&format!("train run.toml --set {optimizer} --set checkpoint.every=3"));
    for line in [
        "group embed_tokens: 1 tensors, ",
        "lr 5e-3, weight decay 0.5",
        "lr 0e0, weight decay 0.01",
        "group norm: ",
        "group all others: ",
    ] {
        assert!(ran.stderr.contains(line), "no `{line}` in:\n{}", ran.stderr);
    }
    let manifest = sandbox.path("out").join("checkpoints/step-00000003/manifest.json");
    let manifest: Value = serde_json::from_str(&std::fs::read_to_string(manifest).unwrap()).unwrap();
    let groups = manifest["run_state"]["param_groups"].as_array().unwrap();
    let of = |name: &str| {
        let named = |params: &Value| params.as_array().unwrap().iter().any(|param| param == name);
        groups.iter().find(|group| named(&group["params"])).unwrap_or_else(|| panic!("{name} in {groups:?}"))
    };
    assert_eq!(of("model.embed_tokens.weight")["lr"], 5e-3);
    assert_eq!(of("model.embed_tokens.weight")["weight_decay"], 0.5);
    assert_eq!(of("model.layers.0.input_layernorm.weight")["lr"], 0.0);
    assert_eq!(of("model.norm.weight")["weight_decay"], 0.0);

    let still = |out_dir: &str, steps: u64| {
        sandbox.succeed(&format!(
            "train run.toml --set {optimizer} --set run.out_dir={out_dir} --set train.steps={steps}"
        ));
        let reader = ModelReader::open(sandbox.path(out_dir).join("model")).unwrap();
        ["model.layers.0.mlp.up_proj.weight", "model.embed_tokens.weight"].map(|name| {
            let rows = reader.entry(name).unwrap().row_count();
            let mut values = vec![0.0; rows * reader.entry(name).unwrap().row_len() as usize];
            reader.read_rows_f64(name, 0..rows, &mut values).unwrap();
            values
        })
    };
    let [[frozen, moving], [still_frozen, moved]] = [still("one", 1), still("three", 3)];
    assert_eq!(frozen, still_frozen, "a learning rate of 0");
    assert_ne!(moving, moved);
}

#[test]
fn adamw8bit_state_survives_conversion_and_rejects_mismatch() {
    let sandbox = Sandbox::new();
    let run = "train run.toml --set train.optimizer={name=\"adamw8bit\"} --set checkpoint.every=3";
    sandbox.succeed(run);
    sandbox.succeed("ckpt convert out/checkpoints/step-00000003 dcp --to dcp --no-sync");
    sandbox.succeed("ckpt diff out/checkpoints/step-00000003 dcp");
    let report = sandbox.json("ckpt inspect dcp --tensors");
    let named = |name: &str| {
        let tensors = report["tensors"].as_array().unwrap();
        let found = tensors.iter().find(|tensor| tensor["name"].as_str().unwrap().ends_with(name));
        let found = found.unwrap_or_else(|| panic!("{name} in {tensors:?}"));
        (found["dtype"].as_str().unwrap().to_owned(), found["shape"].clone())
    };
    // The embedding, of 256 rows of 16, has 8-bit states; a projection is too small for them.
    let embedding = "optim.state.model.embed_tokens.weight";
    assert_eq!(named(&format!("{embedding}.exp_avg_codes")), ("U8".into(), serde_json::json!([256, 16])));
    assert_eq!(named(&format!("{embedding}.exp_avg_sq_absmax")), ("F32".into(), serde_json::json!([256, 1])));
    assert_eq!(named("o_proj.weight.exp_avg"), ("F32".into(), serde_json::json!([16, 16])));
    for (path, optimizer, expected) in [
        ("dcp", "adamw8bit", "exp_avg_codes"),
        ("dcp", "adamw", "`exp_avg of model.embed_tokens.weight`"),
        ("out/checkpoints/step-00000003", "adamw", "train.optimizer.name was \"adamw8bit\", now \"adamw\""),
    ] {
        let ran = sandbox.fsdp(&format!(
            "train run.toml --set run.out_dir=on --set train.optimizer={{name=\"{optimizer}\"}} --set train.steps=4 \
             --resume-from {path}"
        ));
        assert_eq!(ran.code, Some(2), "{}", ran.stderr);
        assert!(ran.stderr.contains(expected), "no `{expected}` in: {}", ran.stderr);
    }
    let on = "--set train.steps=4 --set run.ranks=1 --resume";
    sandbox.succeed(&format!("{run} {on}"));
}

#[test]
fn muon_and_adamw_groups_are_reported_and_survive_conversion() {
    let sandbox = Sandbox::new();
    let optimizer = "--set train.optimizer={name=\"muon\",lr=2e-2,adamw_lr=1e-2,adamw_params=[\"o_proj\"],no_decay=[\"norm\"]}";
    let run = format!("train run.toml {optimizer}");
    let ran = sandbox.succeed(&format!("{run} --set checkpoint.every=3"));
    for line in [
        "group norm by adamw: ",
        "group all others by muon: ",
        "lr 2e-2, weight decay 0.1",
        "group all others by adamw: ",
        "lr 1e-2, weight decay 0.01",
    ] {
        assert!(ran.stderr.contains(line), "no `{line}` in:\n{}", ran.stderr);
    }
    sandbox.succeed("ckpt convert out/checkpoints/step-00000003 dcp --to dcp --no-sync");
    sandbox.succeed("ckpt diff out/checkpoints/step-00000003 dcp");
    let report = sandbox.json("ckpt inspect dcp --tensors");
    let names: Vec<&str> =
        report["tensors"].as_array().unwrap().iter().map(|tensor| tensor["name"].as_str().unwrap()).collect();
    let has = |name: &str| names.iter().any(|found| found.ends_with(name));
    assert!(has("model.layers.0.mlp.up_proj.weight.momentum_buffer"), "{names:?}");
    assert!(!has("up_proj.weight.exp_avg") && !has("o_proj.weight.momentum_buffer"), "{names:?}");
    assert!(has("o_proj.weight.exp_avg") && has("embed_tokens.weight.exp_avg_sq"), "{names:?}");
    // Both optimizers continue, from either checkpoint format, on another number of ranks.
    let on = |out_dir: &str, more: &str| {
        let more = format!("--set run.out_dir={out_dir} --set train.steps=6 {more}");
        sandbox.succeed(&format!("{run} {more}"));
        weights(&sandbox, out_dir)
    };
    let whole = on("whole", "");
    assert_eq!(on("native", "--set run.ranks=1 --resume-from out/checkpoints/step-00000003"), whole);
    assert_eq!(on("foreign", "--set run.ranks=1 --resume-from dcp"), whole);
    let costs = sandbox.succeed(&format!("schedule run.toml {optimizer} --costs")).stdout;
    for line in [
        "compute  directions model.layers.0",
        "all-gather directions model.layers.0 -> gradient slot",
        "products of its updates",
    ] {
        assert!(costs.contains(line), "no `{line}` in:\n{costs}");
    }
}

#[test]
fn muon_rejects_unsupported_settings() {
    let sandbox = Sandbox::new();
    for (more, expected) in [
        ("--set run.device=cuda", "\"lion\" or \"schedule_free_adamw\" with run.device = \"cuda\""),
        ("--set fsdp.offload=cpu", "`fsdp.offload` is \"cpu\"; it must be \"none\" with"),
        ("--set train.optimizer.adamw_params=[\"nothing\"]", "train.optimizer.adamw_params"),
        ("--set train.optimizer.adjust_lr_fn=rms", "\"original\" or \"match_rms_adamw\""),
        ("--set train.optimizer.lr=0", "a finite number above 0"),
    ] {
        let ran = sandbox.fsdp(&format!("train run.toml --set train.optimizer.name=muon {more}"));
        assert_eq!(ran.code, Some(2), "{}", ran.stderr);
        assert!(ran.stderr.contains(expected), "no `{expected}` in: {}", ran.stderr);
    }
}

#[test]
fn exported_ema_is_independent_of_world_size_and_resume() {
    let sandbox = Sandbox::new();
    let run = |out_dir: &str, more: &str| {
        sandbox.succeed(&format!(
            "train run.toml --set run.out_dir={out_dir} --set train.optimizer={{name=\"lion\",lr=1e-2}} {more}"
        ));
        weights(&sandbox, out_dir)
    };
    let last = run("last", "");
    assert_eq!(run("forgets", "--set train.ema_decay=0 --set run.export_weights=ema"), last);
    let averaged = "--set train.ema_decay=0.9 --set run.export_weights=ema";
    let average = run("average", averaged);
    assert_ne!(average, last);
    assert_eq!(run("kept", "--set train.ema_decay=0.9"), last);
    assert_eq!(run("one", &format!("{averaged} --set run.ranks=1")), average);
    run("halves", &format!("{averaged} --set train.steps=2 --set checkpoint.every=2"));
    assert_eq!(run("halves", &format!("{averaged} --resume")), average);
    let rejected = sandbox.fsdp(
        "train run.toml --set run.out_dir=halves --resume --set train.optimizer={name=\"lion\",lr=1e-2}",
    );
    assert_eq!(rejected.code, Some(2), "{}", rejected.stderr);
    assert!(rejected.stderr.contains("train.ema_decay was 0.9, now \"none\""), "{}", rejected.stderr);
}

#[test]
fn schedule_free_run_exports_average() {
    let sandbox = Sandbox::new();
    let rule = "train.optimizer={name=\"schedule_free_adamw\",lr=1e-2}";
    let run = |out_dir: &str, more: &str| {
        sandbox.succeed(&format!("train run.toml --set run.out_dir={out_dir} --set {rule} {more}"));
        weights(&sandbox, out_dir)
    };
    // The parameters of the last checkpoint, which gradients are taken at.
    let params = |out_dir: &str, step: u64| {
        std::fs::create_dir(sandbox.path(&format!("{out_dir}-{step}"))).unwrap();
        sandbox.succeed(&format!(
            "ckpt convert {out_dir}/checkpoints/step-{step:08} {out_dir}-{step}/model --to safetensors"
        ));
        weights(&sandbox, &format!("{out_dir}-{step}"))
    };
    let first = run("first", "--set train.steps=1 --set checkpoint.every=1");
    assert_eq!(first, params("first", 1), "one iterate is its own average");
    let average = run("average", "--set checkpoint.every=3");
    assert_ne!(average, params("average", 3));
    assert_eq!(run("one", "--set run.ranks=1"), average);
    run("halves", "--set train.steps=2 --set checkpoint.every=2");
    assert_eq!(run("halves", "--resume"), average);
}

#[test]
fn schedule_free_rule_rejects_schedules_and_averages() {
    let sandbox = Sandbox::new();
    for (more, expected) in [
        ("train.lr_schedule={name=\"warmup-cosine\"}", "the rule has its own warmup_steps"),
        ("train.lr_schedule={name=\"constant\",warmup_steps=2}", "the rule has its own warmup_steps"),
        ("train.ema_decay=0.9", "`train.ema_decay` is 0.9; it must be \"none\" with"),
        ("run.out_dir=s3://bucket/run", "a folder, not an object store"),
    ] {
        let rule = "--set train.optimizer.name=schedule_free_adamw";
        let ran = sandbox.fsdp(&format!("train run.toml {rule} --set {more}"));
        assert_eq!(ran.code, Some(2), "{}", ran.stderr);
        assert!(ran.stderr.contains(expected), "no `{expected}` in: {}", ran.stderr);
    }
}
