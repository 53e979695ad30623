//! The LoRA example of `examples/`, shortened: the files it writes, and training that continues from them.

use std::path::Path;

use fsdp_ckpt::model_files::ModelReader;
use serde_json::Value;

use crate::support::{Ran, Sandbox, folded};

/// Runs `fsdp` in the repository root, to which the paths in examples are relative.
fn fsdp(sandbox: &Sandbox, args: &str) -> Ran {
    fsdp_within(sandbox, "600", args)
}

/// As [`fsdp`], and kills it after some seconds.
fn fsdp_within(sandbox: &Sandbox, seconds: &str, args: &str) -> Ran {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let command = sandbox.under(&["timeout", "-s", "KILL", seconds]);
    Ran::of({ command }.args(args.split_whitespace()).current_dir(root).output().unwrap())
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
fn adapters_are_merged_by_more_ranks_than_cores() {
    let sandbox = Sandbox::new();
    base(&sandbox);
    let merge = |out: &str, threads: usize| {
        let args = example(&sandbox, out)
            + &format!(" --set train.micro_batch_size=1 --set run.ranks=4 --set run.threads={threads}");
        let ran = fsdp_within(&sandbox, "100", &args);
        assert_eq!(ran.code, Some(0), "{threads}: {}", ran.stderr);
        std::fs::read(sandbox.path(&format!("{out}/model/model.safetensors"))).unwrap()
    };
    let on_all = merge("all", 4);
    // Which rank has a core when the others begin to wait differs from run to run.
    for run in 0..4 {
        assert!(merge(&format!("one-{run}"), 1) == on_all);
    }
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

/// The run of the fixtures of PEFT, in the folder of a sandbox.
const PEFT_RUN: &str = r#"train fsdp2/run.toml --set model.path=fsdp2 --set data.train=["fsdp2/tokens.bin"] --set train.steps=8
    --set train.optimizer.no_decay=[] --set adapter.rank=2 --set adapter.alpha=3 --set adapter.rslora=true
    --set adapter.target_modules=["q_proj","v_proj","down_proj"] --set adapter.modules_to_save=["lm_head"]"#;

/// What PEFT's models saved continues as they did: with the base of the checkpoint or of `model.path`, by name and by
/// number.
#[test]
fn adapters_of_peft_resume_like_pytorch() {
    let sandbox = Sandbox::with_fixtures(&["fsdp2", "lora_states"]);
    let taken = "7 parameters; exp_avg, exp_avg_sq of 7; the base of the adapters; step 4";
    let derived = "the base of the adapters, from model.path";
    let alpha = "those of the run file apply (adapter.alpha = 3, adapter.rslora = true)";
    for (number, (path, init, ranks, said)) in [
        ("dcp", "random", 2, [taken, alpha]),
        ("dcp", "pretrained", 1, [derived, alpha]),
        ("numbered.pt", "random", 1, [taken, alpha]),
        ("numbered.pt", "pretrained", 2, [derived, alpha]),
        ("checkpoint-4", "pretrained", 2, [derived, "exp_avg, exp_avg_sq of 7"]),
        ("fsdp2/checkpoint-4", "pretrained", 2, [derived, alpha]),
    ]
    .into_iter()
    .enumerate()
    {
        let run = format!(
            "{PEFT_RUN} --set model.init={init} --set run.ranks={ranks} --set run.out_dir=out-{number}"
        );
        let ran = sandbox.succeed(&format!("{run} --resume-from lora_states/{path}"));
        said.iter().for_each(|said| assert!(ran.stderr.contains(said), "{path} {init}: {}", ran.stderr));
        let config = path == "checkpoint-4";
        assert_eq!(ran.stderr.contains(alpha), !config, "{path}: {}", ran.stderr);
        let exported = format!("out-{number}/adapter/adapter_model.safetensors");
        sandbox.succeed(&format!("ckpt diff {exported} lora_states/expected_end.safetensors --atol 1e-6"));
    }
}

/// A base that no other file holds is read from the checkpoint again, as long as it is there.
#[test]
fn base_of_a_checkpoint_is_found_by_later_starts() {
    let sandbox = Sandbox::with_fixtures(&["fsdp2", "lora_states"]);
    let run = format!("{PEFT_RUN} --set model.init=random --set checkpoint.every=2 --set run.out_dir=out");
    sandbox.succeed(&format!("{run} --set train.steps=6 --resume-from lora_states/dcp"));
    sandbox.succeed(&format!("{run} --resume"));
    let exported = "out/adapter/adapter_model.safetensors";
    sandbox.succeed(&format!("ckpt diff {exported} lora_states/expected_end.safetensors --atol 1e-6"));
    // Evaluations of a checkpoint and of the same with the base of model.path.
    let eval = r#"--set data.eval=["fsdp2/tokens.bin"] --model out/checkpoints/step-00000008 --json"#;
    let eval = PEFT_RUN.replace("train fsdp2/run.toml", "eval fsdp2/run.toml") + " " + eval;
    let loss = |options: &str| {
        let ran = sandbox.succeed(&format!("{eval} {options}"));
        let report: serde_json::Value = serde_json::from_str(&ran.stdout).unwrap();
        report["evaluations"][0]["loss"].as_f64().unwrap()
    };
    assert_eq!(loss("--set model.init=random").to_bits(), loss("--set model.init=pretrained").to_bits());
    std::fs::rename(sandbox.path("lora_states/dcp"), sandbox.path("elsewhere")).unwrap();
    let gone = sandbox.fsdp(&format!("{run} --set train.steps=9 --resume"));
    assert_eq!(gone.code, Some(2), "{}", gone.stderr);
    assert!(gone.stderr.contains("lora_states/dcp, which is gone: put it back"), "{}", gone.stderr);
    sandbox.succeed(&format!("{run} --set train.steps=9 --set model.init=pretrained --resume"));
}

/// The base of a checkpoint counts, not other weights in `model.path`; merged models have it too.
#[test]
fn base_of_a_checkpoint_precedes_other_weights() {
    let sandbox = Sandbox::with_fixtures(&["fsdp2", "lora_states"]);
    sandbox.succeed(&format!(
        "{PEFT_RUN} --set run.out_dir=merged --set adapter.merge=true --resume-from lora_states/dcp"
    ));
    let end = "fsdp2/expected_end.safetensors";
    sandbox.succeed(&format!(
        "ckpt convert {end} fsdp2/other.safetensors --to safetensors --strip-prefix model. --no-sync"
    ));
    std::fs::rename(sandbox.path("fsdp2/other.safetensors"), sandbox.path("fsdp2/model.safetensors"))
        .unwrap();
    let ran = sandbox.succeed(&format!(
        "{PEFT_RUN} --set run.out_dir=other --set adapter.merge=true --resume-from lora_states/dcp"
    ));
    let note = "the weights in model.path are not the base of these adapters, and are not used";
    assert!(ran.stderr.contains(note), "{}", ran.stderr);
    sandbox.succeed("ckpt diff merged/model other/model");
    // No file but the checkpoint has the base.
    sandbox.succeed(&format!(
        "{PEFT_RUN} --set run.out_dir=alone --set adapter.merge=true --set model.init=random --resume-from lora_states/dcp"
    ));
    sandbox.succeed("ckpt diff merged/model alone/model");
}

/// Patterns of ranks and alphas that change nothing are read, and others are refused by the key that they would need.
#[test]
fn patterns_of_adapters_are_read_or_refused_by_key() {
    let sandbox = Sandbox::with_fixtures(&["fsdp2", "lora_states"]);
    let path = sandbox.path("lora_states/checkpoint-4/adapter_config.json");
    let plain = std::fs::read_to_string(&path).unwrap();
    for (key, value, why) in [
        ("rank_pattern", r#"{"q_proj": 2, "layers.0.mlp.down_proj": 2}"#, None),
        ("alpha_pattern", r#"{"v_proj": 3.0}"#, None),
        ("rank_pattern", r#"{"q_proj": 2, "v_proj": 4}"#, Some("adapter.rank is one for all modules")),
        ("alpha_pattern", r#"{"v_proj": 6}"#, Some("adapter.alpha is one for all modules")),
        ("use_dora", "true", Some("`use_dora` is true, but adapter.dora")),
    ] {
        let at = plain.find(&format!("\"{key}\": ")).unwrap();
        let rest = plain[at..].split_once('\n').unwrap().1;
        std::fs::write(&path, format!("{}\"{key}\": {value},\n{rest}", &plain[..at])).unwrap();
        let run = format!("{PEFT_RUN} --set run.out_dir=out --overwrite --set model.init=pretrained");
        let ran = sandbox.fsdp(&format!("{run} --resume-from lora_states/checkpoint-4"));
        assert_eq!(ran.code, Some(if why.is_some() { 2 } else { 0 }), "{key} = {value}: {}", ran.stderr);
        assert!(why.is_none_or(|why| folded(&ran.stderr).replace('\n', " ").contains(why)), "{}", ran.stderr);
    }
}

#[test]
fn adapters_that_differ_from_the_run_are_refused() {
    let sandbox = Sandbox::with_fixtures(&["fsdp2", "lora_states"]);
    for (options, from, why) in [
        ("--set adapter.rank=4", "lora_states/dcp", "q_proj.lora_A.weight` (expected [4, 9], got [2, 9])"),
        ("--set adapter.alpha=4", "lora_states/checkpoint-4", "`lora_alpha` is 3, but adapter.alpha"),
        ("--set adapter.modules_to_save=[]", "lora_states/dcp", "it trained `lm_head.weight` in full"),
        (
            "--set adapter.modules_to_save=[]",
            "lora_states/checkpoint-4",
            "it trained `lm_head.weight` in full",
        ),
        (r#"--set adapter.target_modules=["q_proj"]"#, "lora_states/dcp", "4 not expected: "),
        ("--set model.init=random", "lora_states/checkpoint-4", "adapters without their base"),
        ("", "fsdp2/dcp", "it holds no adapter (`lora_A`); remove [adapter]"),
    ] {
        let ran = sandbox.fsdp(&format!("{PEFT_RUN} --set run.out_dir=out {options} --resume-from {from}"));
        assert_eq!(ran.code, Some(2), "{options} {from}: {}", ran.stderr);
        assert!(ran.stderr.contains(why), "{options} {from}: {}", ran.stderr);
        assert!(!sandbox.path("out").exists(), "{options} {from}");
    }
    let whole = r#"train fsdp2/run.toml --set model.path=fsdp2 --set data.train=["fsdp2/tokens.bin"] --set run.out_dir=out"#;
    let ran = sandbox.fsdp(&format!("{whole} --resume-from lora_states/dcp"));
    let set = "set [adapter] with rank = 2, target_modules = [\"down_proj\", \"q_proj\", \"v_proj\"], modules_to_save = \
               [\"lm_head\"], and adapter.alpha and adapter.rslora to that run's lora_alpha and use_rslora";
    assert!(ran.stderr.contains(set), "{}", ran.stderr);
}
