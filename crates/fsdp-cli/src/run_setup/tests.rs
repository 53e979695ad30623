//! Checks that any size in a file leads at worst to an error, and that memory use stays low until then.

use fsdp_core::Rank;
use fsdp_nn::HostMemory;
use fsdp_train::{plan, predict};
use serde_json::{Value, json};

use super::*;
use crate::shrink::shrink;

/// Zero, large for a model, around the limits of 32 and 64 bits, and beyond.
const SIZES: [u64; 8] = [0, 1 << 20, 1 << 31, 1 << 32, 1 << 40, 1 << 62, (1 << 63) - 1, u64::MAX];

const LLAMA_KEYS: [&str; 8] = [
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
];
const GPT2_KEYS: [&str; 6] = ["vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "n_inner"];

const RUN_KEYS: [&str; 13] = [
    "data.seq_len",
    "data.eval_every",
    "data.eval_batches",
    "train.steps",
    "train.micro_batch_size",
    "train.global_batch_size",
    "fsdp.mesh.replicate",
    "fsdp.forward_prefetch",
    "fsdp.backward_prefetch",
    "fsdp.reshard_after_forward",
    "checkpoint.every",
    "run.ranks",
    "run.threads",
];

fn llama() -> Value {
    json!({"model_type": "llama", "vocab_size": 256, "hidden_size": 16, "intermediate_size": 24,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2})
}

/// A model for each other way in which `--shrink` makes a small model of a family.
fn relatives() -> [Value; 2] {
    let mut qwen3 = llama();
    qwen3["model_type"] = "qwen3".into();
    qwen3["head_dim"] = 4.into();
    let mut phi3 = llama();
    phi3["model_type"] = "phi3".into();
    phi3["partial_rotary_factor"] = 0.5.into();
    phi3["sliding_window"] = 3.into();
    [qwen3, phi3]
}

fn gpt2() -> Value {
    json!({"model_type": "gpt2", "vocab_size": 256, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16})
}

/// Does what every command does with a model and a run file before a rank starts.
fn walk_through(model: &Value, overrides: &[String]) -> Result<(), CliError> {
    let text = "model = { path = 'unused' }\ndata = { train = ['unused'], seq_len = 8 }\n\
                train = { steps = 1, micro_batch_size = 2, global_batch_size = 8 }\n\
                fsdp = { min_num_params = 100 }\nrun = { ranks = 2, out_dir = 'unused' }";
    let config = Resolved::parse(text, "run.toml", overrides)?.config;
    let model = HfConfig::parse(&model.to_string())
        .map_err(|source| CliError::Model { origin: "model".to_owned(), source })?;
    let setup = RunSetup { config, model };
    let small = shrink(&setup, &[1, 2, 4])?.setup;
    for setup in [&setup, &small] {
        let architecture = setup.build()?;
        if architecture.positions_max().is_some_and(|positions| setup.config.data.seq_len > positions) {
            continue;
        }
        let plan = plan(&setup.config, &architecture.description().spec, false)?;
        predict::<HostMemory, _>(&setup.config, &architecture, &plan, Rank(0))?;
    }
    Ok(())
}

/// Checks that an outcome is success or an input error; returns whether it is success.
#[track_caller]
fn is_accepted(outcome: Result<(), CliError>, case: &str) -> bool {
    match outcome {
        Ok(()) => true,
        Err(error) => {
            assert_eq!(error.exit().code(), 2, "{case}: {error}");
            assert!(error.to_string().len() < 1000, "{case}: {error}");
            false
        }
    }
}

#[test]
fn config_json_sizes_are_accepted_or_rejected_by_key() {
    let [qwen3, phi3] = relatives();
    for (model, keys) in [
        (llama(), &LLAMA_KEYS[..]),
        (qwen3, &LLAMA_KEYS[..]),
        (phi3, &LLAMA_KEYS[..]),
        (gpt2(), &GPT2_KEYS[..]),
    ] {
        for &key in keys {
            for size in SIZES {
                let mut model = model.clone();
                model[key] = size.into();
                let outcome = walk_through(&model, &[]);
                let case = format!("{key} = {size}");
                let names = outcome.as_ref().err().is_none_or(|error| {
                    let text = error.to_string();
                    text.contains(key) || text.contains("head")
                });
                assert!(names, "{case}: {outcome:?}");
                let is_taken = is_accepted(outcome, &case);
                assert!(!is_taken || size == 1 << 20, "{case} is taken");
            }
        }
    }
}

/// The individual limits still allow products of two sizes that no model has.
#[test]
fn pairs_of_large_sizes_are_accepted_or_rejected() {
    let large = [1 << 12, 1 << 16, 1 << 20, 1 << 24, 1 << 40];
    for (model, keys) in [(llama(), &LLAMA_KEYS[..]), (gpt2(), &GPT2_KEYS[..])] {
        for (index, &first) in keys.iter().enumerate() {
            for &second in &keys[index + 1..] {
                for (one, other) in large.iter().flat_map(|one| large.map(|other| (*one, other))) {
                    let is_deep = |key: &str, size: u64| key.contains("layer") && size == 1 << 12;
                    if is_deep(first, one) || is_deep(second, other) {
                        continue;
                    }
                    let mut model = model.clone();
                    (model[first], model[second]) = (one.into(), other.into());
                    is_accepted(walk_through(&model, &[]), &format!("{first} = {one}, {second} = {other}"));
                }
            }
        }
    }
}

#[test]
fn largest_sizes_combined_are_rejected_without_overflow() {
    let mut model = llama();
    for (key, size) in [
        ("vocab_size", 1 << 24),
        ("hidden_size", 1 << 20),
        ("intermediate_size", 1 << 20),
        ("num_hidden_layers", 1 << 12),
        ("num_attention_heads", 1 << 10),
        ("num_key_value_heads", 1 << 10),
    ] {
        model[key] = size.into();
    }
    let error = walk_through(&model, &[]).unwrap_err().to_string();
    assert!(error.contains("2^48"), "{error}");
}

#[test]
fn run_file_sizes_are_accepted_or_rejected() {
    for (model, key) in [llama(), gpt2()].iter().flat_map(|model| RUN_KEYS.map(|key| (model, key))) {
        for size in SIZES {
            let case = format!("{key}={size}");
            is_accepted(walk_through(model, std::slice::from_ref(&case)), &case);
        }
    }
    let both = |first: &str, second: &str| walk_through(&llama(), &[first.to_owned(), second.to_owned()]);
    let error = both("train.micro_batch_size=8388608", "train.global_batch_size=67108864").unwrap_err();
    assert!(error.to_string().contains("at most 1048576 with data.seq_len = 8"), "{error}");
    let error = both("train.micro_batch_size=1", "train.global_batch_size=4294967294").unwrap_err();
    assert!(error.to_string().contains("raise train.micro_batch_size or run.ranks"), "{error}");
    let error = both("run.ranks=1048576", "train.global_batch_size=2097152");
    assert!(error.is_ok(), "large worlds can be looked at");
}
