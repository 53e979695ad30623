//! `fsdp generate`: the generated text, its report, and what is refused.

use serde_json::Value;

use crate::support::{GPT2, Sandbox};

/// Creates a sandbox whose `out/model` has been trained for a few steps.
fn trained() -> Sandbox {
    let sandbox = Sandbox::new();
    sandbox.succeed("train run.toml --set train.steps=30 --set train.optimizer.lr=0.02");
    sandbox
}

fn report(sandbox: &Sandbox, args: &str) -> Value {
    let ran = sandbox.succeed(&format!("generate out/model --max-new-tokens 12 --json {args}"));
    let mut report: Value = serde_json::from_str(&ran.stdout).unwrap();
    for time in ["first_token_s", "tokens_per_s"] {
        assert!(report.as_object_mut().unwrap().remove(time).unwrap().as_f64().unwrap() >= 0.0);
    }
    report
}

#[test]
fn text_and_token_id_prompts_generate_same_output() {
    let sandbox = trained();
    let found = report(&sandbox, "--prompt sha");
    assert_eq!(found["prompt_ids"], Value::from(vec![115, 104, 97]));
    assert_eq!(
        (found["tokens"].as_array().unwrap().len(), &found["stopped_by"]),
        (12, &"max_new_tokens".into())
    );
    assert_eq!(report(&sandbox, "--prompt-ids 115,104,97"), found);
    let printed = sandbox.succeed("generate out/model --max-new-tokens 12 --prompt sha");
    assert_eq!(printed.stdout, format!("{}\n", found["text"].as_str().unwrap()));
    assert!(printed.stderr.contains("12 tokens, "), "{}", printed.stderr);
    report(&sandbox, "--prompt sha --dtype bf16");
}

#[test]
fn sampling_is_determined_by_seed() {
    let sandbox = trained();
    let drawn = |seed: u64| report(&sandbox, &format!("--prompt sha --temperature 3 --seed {seed}"));
    assert_eq!(drawn(1), drawn(1));
    assert_ne!(drawn(1), drawn(2));
    let greedy = report(&sandbox, "--prompt sha");
    assert_eq!(report(&sandbox, "--prompt sha --temperature 3 --top-k 1"), greedy);
    assert_eq!(report(&sandbox, "--prompt sha --temperature 3 --top-p 1e-9"), greedy);
}

#[test]
fn end_token_stops_generation_and_is_not_printed() {
    let sandbox = trained();
    let tokens = report(&sandbox, "--prompt sha")["tokens"].clone();
    let ids: Vec<u64> = serde_json::from_value(tokens).unwrap();
    let first = ids.iter().position(|id| *id == ids[4]).unwrap();
    for (file, text) in [
        ("generation_config.json", format!("{{\"eos_token_id\": [{}, 999]}}", ids[4])),
        ("generation_config.json", format!("{{\"eos_token_id\": {}}}", ids[4])),
    ] {
        sandbox.write(&format!("out/model/{file}"), text);
        let found = report(&sandbox, "--prompt sha");
        assert_eq!(found["tokens"], Value::from(ids[..=first].to_vec()));
        assert_eq!(found["stopped_by"], "end token");
        assert_eq!(found["text"].as_str().unwrap().len(), first, "one byte for each token but the last");
    }
}

#[test]
fn invalid_generate_input_is_rejected_with_hint() {
    let sandbox = trained();
    let expect_input_error = |args: &str, expected: &str| {
        let ran = sandbox.fsdp(&format!("generate {args}"));
        assert_eq!(ran.code, Some(2), "{}", ran.stderr);
        assert!(ran.stderr.contains(expected), "{args}: {}", ran.stderr);
    };
    expect_input_error("out/model", "--prompt");
    expect_input_error("out/model --prompt a --top-k 3", "--temperature");
    expect_input_error("out/model --prompt a --temperature 0", "above 0");
    expect_input_error("out/model --prompt-ids 256", "it has token 256, but the model has only 256 tokens");
    expect_input_error("nowhere --prompt a", "MODEL_DIR: nowhere has no config.json; give");
    expect_input_error("model --prompt a", "model.safetensors");
    sandbox.write("model/config.json", GPT2.replace("256", "300"));
    expect_input_error("model --prompt a", "model has no tokenizer.json; give --prompt-ids");
    expect_input_error(
        "model --prompt-ids 1 --max-new-tokens 16",
        "exceed the model's 16 positions; give fewer",
    );
}

/// Follows `docs/training.md` on the best states.
#[test]
fn checkpoint_becomes_complete_model_or_adapter() {
    let sandbox = trained();
    let state = |out: &str, step: u64| format!("{out}/checkpoints/step-{step:08}");
    let tokens = |model: &str| {
        let ran = sandbox.succeed(&format!("generate {model} --prompt sha --max-new-tokens 12 --json"));
        serde_json::from_str::<Value>(&ran.stdout).unwrap()["tokens"].clone()
    };
    let run = "run.toml --set train.steps=9 --set train.optimizer.lr=0.02 --set checkpoint.every=3 --set checkpoint.keep_last=0";
    sandbox.succeed(&format!("train {run} --set run.out_dir=whole"));
    let goes_on = |run: &str, from: &str, out: &str| {
        format!("train {run} --resume-from {} --set train.steps=6 --set run.out_dir={out}", state(from, 6))
    };
    sandbox.succeed(&goes_on(run, "whole", "best"));
    let config = "--to safetensors --config whole/model/config.json";
    sandbox.succeed(&format!("ckpt convert {} converted {config}", state("whole", 6)));
    assert_eq!(tokens("best/model"), tokens("converted"));

    let lora = format!("{run} --set model.path=out/model --set model.init=pretrained --set adapter.rank=2");
    sandbox.succeed(&format!("train {lora} --set run.out_dir=lora"));
    sandbox.succeed(&goes_on(&lora, "lora", "best-lora"));
    assert!(sandbox.path("best-lora/adapter/adapter_model.safetensors").exists());
    let rejected = sandbox.fsdp("generate best-lora/adapter --prompt sha");
    assert_eq!(rejected.code, Some(2), "{}", rejected.stderr);
    let expected = "MODEL_DIR: best-lora/adapter is an adapter, not a whole model";
    assert!(
        rejected.stderr.contains(expected) && rejected.stderr.contains("--set adapter.merge=true"),
        "{}",
        rejected.stderr
    );
    sandbox.succeed(&format!("{} --set adapter.merge=true", goes_on(&lora, "lora", "merged")));
    assert_eq!(tokens("merged/model").as_array().unwrap().len(), 12);
    let rejected = sandbox.fsdp("eval run.toml --model lora --set data.eval=[\"data.txt\"]");
    assert!(rejected.stderr.contains("--model: lora has no config.json"), "{}", rejected.stderr);
}
