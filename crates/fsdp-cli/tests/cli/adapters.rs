//! The LoRA example of `examples/`, shortened: the files it writes, and training that continues from them.

use std::path::Path;

use fsdp_ckpt::model_files::ModelReader;
use serde_json::Value;

use crate::support::{Ran, Sandbox};

/// Runs `fsdp` in the repository root, to which the paths in examples are relative.
fn fsdp(sandbox: &Sandbox, args: &str) -> Ran {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    Ran::of(sandbox.command().args(args.split_whitespace()).current_dir(root).output().unwrap())
}

/// The arguments that train the example on a little data from a base in the sandbox.
fn example(sandbox: &Sandbox, out: &str) -> String {
    let path = |name: &str| sandbox.path(name).display().to_string();
    format!(
        "train examples/llama-lora.toml --set model.path={} --set run.out_dir={} --set data.train=['docs/memory.md'] \
         --set train.steps=3 --set train.global_batch_size=4 --set data.seq_len=16 --set adapter.dropout=0",
        path("base/model"),
        path(out)
    )
}

fn base(sandbox: &Sandbox) {
    let ran = fsdp(
        sandbox,
        &format!(
            "train examples/quickstart.toml --set run.out_dir={} --set data.train=['docs/memory.md'] --set train.steps=2 \
             --set train.global_batch_size=4 --set data.seq_len=16 --set run.ranks=2",
            sandbox.path("base").display()
        ),
    );
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
}

#[test]
fn lora_example_adapter_and_merged_model_losses_match() {
    let sandbox = Sandbox::new();
    base(&sandbox);
    let ran = fsdp(&sandbox, &example(&sandbox, "lora"));
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    let config: Value = serde_json::from_str(&sandbox.read("lora/adapter/adapter_config.json")).unwrap();
    assert_eq!(
        (&config["peft_type"], &config["r"], &config["lora_alpha"]),
        (&"LORA".into(), &8.into(), &16.into())
    );
    let linears = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"];
    assert_eq!(config["target_modules"], Value::from(linears.to_vec()));
    let adapter = ModelReader::open(sandbox.path("lora/adapter/adapter_model.safetensors")).unwrap();
    assert_eq!(adapter.names().len(), 4 * 7 * 2);
    assert!(adapter.entry("base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight").is_ok());

    // One more step from the adapter and from the merged model: the losses differ only by the rounding of the merged
    // weights.
    let again = format!(
        "{} --set train.steps=1 --set adapter.merge=false --set data.shuffle=false",
        example(&sandbox, "again")
    );
    let adapter = format!("--set adapter.path={}", sandbox.path("lora/adapter").display());
    let ran = fsdp(&sandbox, &format!("{again} {adapter}"));
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    let merged = format!(
        "{again} --set model.path={} --set run.out_dir={}",
        sandbox.path("lora/model").display(),
        sandbox.path("merged").display()
    );
    let ran = fsdp(&sandbox, &merged);
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    let loss = |out: &str| sandbox.column(out, "loss")[0];
    assert!((loss("again") / loss("merged") - 1.0).abs() < 1e-5, "{} {}", loss("again"), loss("merged"));
    assert!(!sandbox.path("again/model").exists(), "nothing is merged unasked");
}

#[test]
fn lora_example_passes_verify() {
    let sandbox = Sandbox::new();
    base(&sandbox);
    let args = example(&sandbox, "lora").replacen("train ", "verify ", 1);
    for args in [format!("{args} --world-sizes 1,2"), format!("{args} --world-sizes 2 --shrink")] {
        let ran = fsdp(&sandbox, &format!("{args} --set adapter.dropout=0.1"));
        assert_eq!(ran.code, Some(0), "{}{}", ran.stdout, ran.stderr);
        assert!(ran.stdout.contains("every promise was kept"), "{}", ran.stdout);
    }
}

#[test]
fn invalid_adapter_settings_are_rejected() {
    let sandbox = Sandbox::new();
    for (change, named) in [
        ("--set fsdp.frozen=['norm']", "`adapter` and `fsdp.frozen` exclude each other"),
        (
            "--set adapter.target_modules=every",
            "`adapter.target_modules` is \"every\"; it must be \"all-linear\", or",
        ),
        ("--set adapter.ranks=2", "unknown key `adapter.ranks`; did you mean `adapter.rank`?"),
        ("--set adapter.target_modules=['q_pro']", "did you mean `q_proj`?"),
        ("--set adapter.merge=true", "adapters cannot be merged with random weights"),
    ] {
        let ran = sandbox.fsdp(&format!("train run.toml --set adapter.rank=2 {change}"));
        assert_eq!(ran.code, Some(2), "{change}: {}", ran.stderr);
        assert!(ran.stderr.contains(named), "{change}: {}", ran.stderr);
        assert!(!sandbox.path("out").exists(), "nothing is written");
    }
}
