//! `fsdp eval`: the loss of any model, bit-identical to the evaluation during training.

use serde_json::Value;

use crate::support::{GPT2, Sandbox};
use crate::world::{FSDP, TORCHRUN, World};

const SETS: &str = "\n[[data.eval]]\nname = 'held-out'\npaths = ['held-out.txt']\n\
                    [[data.eval]]\nname = 'seen'\npaths = ['data.txt']\nmax_samples = 5\n";

/// Creates a sandbox whose run file has two evaluation sets, followed by `settings`.
fn sandbox(settings: &str) -> Sandbox {
    let sandbox = Sandbox::new();
    sandbox.write("held-out.txt", "Each rank holds its rows, and none holds the model. ".repeat(3));
    sandbox.write("run.toml", sandbox.read("run.toml") + SETS + settings);
    sandbox
}

/// Returns the sets of `fsdp eval` with the bits of their losses.
fn evaluated(sandbox: &Sandbox, args: &str) -> Vec<(String, u64)> {
    losses(&sandbox.succeed(&format!("eval {args} --json")).stdout)
}

/// Reads the sets and the bits of their losses from a JSON report.
fn losses(json: &str) -> Vec<(String, u64)> {
    let found: Value = serde_json::from_str(json).unwrap();
    let set = |set: &Value| {
        let (loss, perplexity) = (set["loss"].as_f64().unwrap(), set["perplexity"].as_f64().unwrap());
        assert_eq!(perplexity, loss.exp());
        assert!(set["tokens"].as_u64().unwrap() > 0);
        (set["set"].as_str().unwrap().to_owned(), loss.to_bits())
    };
    found["evaluations"].as_array().unwrap().iter().map(set).collect()
}

/// Returns the sets and the bits of their losses that training recorded after a step.
fn recorded_losses(sandbox: &Sandbox, step: u64) -> Vec<(String, u64)> {
    let of_step = sandbox.evaluations("out").into_iter().filter(|(at, ..)| *at == step);
    of_step.map(|(_, set, loss)| (set, loss.to_bits())).collect()
}

#[test]
fn eval_matches_training_evaluation_bitwise() {
    for param_dtype in ["f32", "bf16"] {
        let sandbox = sandbox("[checkpoint]\nevery = 1\nkeep_last = 0\n");
        let set = format!("--set data.eval_every=1 --set fsdp.param_dtype=\"{param_dtype}\"");
        sandbox.succeed(&format!("train run.toml {set}"));
        for step in 1..=3 {
            let expected = recorded_losses(&sandbox, step);
            assert_eq!(expected.len(), 2, "both sets were evaluated after step {step}");
            for ranks in [1, 2, 4] {
                let checkpoint = format!("out/checkpoints/step-0000000{step}");
                let args = format!("run.toml {set} --set run.ranks={ranks} --model {checkpoint}");
                assert_eq!(evaluated(&sandbox, &args), expected, "{param_dtype}, step {step}, {ranks} ranks");
            }
        }
        assert_ne!(recorded_losses(&sandbox, 1), recorded_losses(&sandbox, 3));
        // The export is in the master dtype here, so it has the same weights.
        let args = format!("run.toml {set} --model out/model");
        assert_eq!(evaluated(&sandbox, &args), recorded_losses(&sandbox, 3), "{param_dtype}, export");
    }
}

#[test]
fn all_policies_evaluate_bitwise_equal_without_training_data() {
    let sandbox = sandbox("");
    sandbox.succeed("train run.toml");
    std::fs::copy(sandbox.path("data.txt"), sandbox.path("seen.txt")).unwrap();
    sandbox.edit("run.toml", "paths = ['data.txt']", "paths = ['seen.txt']");
    std::fs::remove_file(sandbox.path("data.txt")).unwrap();
    let expected = recorded_losses(&sandbox, 3);
    for set in [
        "fsdp.reshard_after_forward=false",
        "fsdp.reshard_after_forward=2 --set run.ranks=4",
        "fsdp.offload=\"cpu\"",
        "fsdp.mesh.replicate=2",
        "fsdp.activation_checkpointing=\"full\"",
        "train.ema_decay=0.9",
        "train.optimizer.no_decay=[\"norm\"]",
    ] {
        assert_eq!(
            evaluated(&sandbox, &format!("run.toml --model out/model --set {set}")),
            expected,
            "{set}"
        );
    }
}

#[test]
fn eval_accepts_model_of_another_family() {
    let sandbox = sandbox("");
    std::fs::create_dir(sandbox.path("gpt2")).unwrap();
    sandbox.write("gpt2/config.json", GPT2);
    let other = "--set model.path=\"gpt2\" --set fsdp.wrap=[\"GPT2Block\"]";
    sandbox.succeed(&format!("train run.toml {other}"));
    let args = "run.toml --model out/model --set fsdp.wrap=[\"GPT2Block\"]";
    assert_eq!(evaluated(&sandbox, args), recorded_losses(&sandbox, 3));
}

#[test]
fn adapter_evaluates_with_base_and_from_checkpoint() {
    let sandbox = sandbox("[checkpoint]\nevery = 3\n");
    sandbox.succeed("train run.toml --set run.out_dir=\"base\"");
    sandbox.succeed("train run.toml --set run.out_dir=\"other\" --set model.seed=9");
    let adapter = "[model]\ninit = \"pretrained\"";
    sandbox.edit("run.toml", "[model]", adapter);
    sandbox.edit("run.toml", "path = \"model\"", "path = \"base/model\"");
    let settings = "[adapter]\nrank = 2\nalpha = 4\ntarget_modules = [\"q_proj\", \"down_proj\"]\n";
    sandbox.write("run.toml", sandbox.read("run.toml") + settings);
    sandbox.succeed("train run.toml --set train.optimizer.lr=0.1");
    let expected = recorded_losses(&sandbox, 3);
    assert_eq!(evaluated(&sandbox, "run.toml --model out/adapter"), expected);
    assert_eq!(evaluated(&sandbox, "run.toml --model out/checkpoints/step-00000003"), expected);
    assert_ne!(
        evaluated(&sandbox, "run.toml --model base/model"),
        expected,
        "the base is evaluated as it is"
    );
    let other = "eval run.toml --model out/checkpoints/step-00000003 --set model.path=\"other/model\"";
    let ran = sandbox.fsdp(other);
    assert_eq!(ran.code, Some(2), "{}", ran.stderr);
    assert!(ran.stderr.contains("weights of the base in model.path"), "{}", ran.stderr);
}

#[test]
fn processes_evaluate_jointly_and_only_first_prints() {
    let sandbox = sandbox("[checkpoint]\nevery = 3\n");
    sandbox.succeed("train run.toml");
    for (launcher, model) in [(FSDP, "out/model"), (TORCHRUN, "out/checkpoints/step-00000003")] {
        let args = format!("eval run.toml --model {model} --json");
        let ran = World::start(&sandbox, launcher, 2, &args).end();
        assert_eq!([ran[0].code, ran[1].code], [Some(0); 2], "{}{}", ran[0].stderr, ran[1].stderr);
        assert_eq!((ran[1].stdout.as_str(), ran[1].stderr.as_str()), ("", ""), "it is said once");
        assert_eq!(losses(&ran[0].stdout), recorded_losses(&sandbox, 3), "{model}");
    }
}

#[test]
fn eval_report_is_printed_as_table() {
    let sandbox = sandbox("");
    sandbox.succeed("train run.toml");
    let report = sandbox.succeed("eval run.toml --model out/model").stdout;
    let lines: Vec<&str> = report.lines().collect();
    assert!(lines[0].starts_with("out/model, in 0:0"), "{report}");
    assert_eq!(lines[2].split_whitespace().collect::<Vec<_>>(), ["set", "loss", "perplexity", "tokens"]);
    assert!(
        lines[4].trim_start().starts_with("held-out") && lines[5].trim_start().starts_with("seen"),
        "{report}"
    );
}

#[test]
fn invalid_eval_input_is_rejected_with_hint() {
    let sandbox = Sandbox::new();
    sandbox.succeed("train run.toml");
    let input_error = |args: &str| {
        let ran = sandbox.fsdp(&format!("eval run.toml {args}"));
        assert_eq!(ran.code, Some(2), "{}", ran.stderr);
        ran.stderr
    };
    let without = input_error("--model out/model");
    assert!(without.contains("data.eval: the run file has no evaluation sets; name one with"), "{without}");
    let eval = "--set data.eval=[\"data.txt\"]";
    let missing = input_error(&format!("{eval} --model nowhere"));
    assert!(missing.contains("--model: nowhere has no config.json"), "{missing}");
    let empty = input_error(&format!("{eval} --model model"));
    assert!(empty.contains("model.safetensors"), "{empty}");
}
