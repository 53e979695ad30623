//! Tests that user errors in configurations, data and the order of calls are reported with their cause.

use fsdp_core::DType;
use fsdp_core::comm::Comms;
use fsdp_core::program::{BlockCall, Pass, Program, calls};
use fsdp_core::schedule::{Checkpointing, Round};

use super::harness::{Subject, batch, gpt2, host, small};
use crate::backend::IGNORED_TARGET;
use crate::hf::{ConfigError, FAMILIES, HfConfig};
use crate::model::{Batch, Gpt2};

const LLAMA: &str = r#"{"model_type": "llama", "vocab_size": 61, "hidden_size": 24, "intermediate_size": 36,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "unknown": [1]}"#;
const GPT2: &str =
    r#"{"model_type": "gpt2", "vocab_size": 61, "n_positions": 16, "n_embd": 24, "n_layer": 2, "n_head": 4}"#;

/// Returns a configuration with one key replaced (or removed, for `null`).
fn with(base: &str, key: &str, value: &str) -> Result<HfConfig, ConfigError> {
    let mut keys: serde_json::Map<String, serde_json::Value> = serde_json::from_str(base).unwrap();
    keys.insert(key.into(), serde_json::from_str(value).unwrap());
    HfConfig::parse(&serde_json::Value::Object(keys).to_string())
}

#[test]
fn unsupported_keys_are_rejected_by_name() {
    for (base, key, value) in [
        (LLAMA, "hidden_act", "\"elu\""),
        (LLAMA, "sliding_window", "128"),
        (LLAMA, "partial_rotary_factor", "0.5"),
        (LLAMA, "quantization_config", "{}"),
        (LLAMA, "layer_types", "[\"full_attention\", \"sliding_attention\"]"),
        (LLAMA, "architectures", "[\"LlamaForSequenceClassification\"]"),
        (GPT2, "activation_function", "\"elu\""),
        (GPT2, "scale_attn_weights", "false"),
        (GPT2, "scale_attn_by_inverse_layer_idx", "true"),
        (GPT2, "reorder_and_upcast_attn", "true"),
        (GPT2, "add_cross_attention", "true"),
        (GPT2, "is_encoder_decoder", "true"),
        (GPT2, "pruned_heads", "{\"0\": [1]}"),
        (GPT2, "architectures", "[\"GPT2ForSequenceClassification\"]"),
    ] {
        let error = with(base, key, value).unwrap_err();
        assert!(matches!(error, ConfigError::Unsupported { key: ref named, .. } if named == key), "{error}");
    }
    for (key, value, path) in [
        ("rope_scaling", r#"{"type": "mrope", "factor": 2.0}"#, "rope_scaling.type"),
        ("rope_scaling", r#"{"rope_type": "ntk", "factor": 8.0}"#, "rope_scaling.rope_type"),
        ("rope_parameters", r#"{"partial_rotary_factor": 0.5}"#, "rope_parameters.partial_rotary_factor"),
        ("rope_parameters", r#"{"full_attention": {"rope_theta": 1e4}}"#, "rope_parameters.full_attention"),
    ] {
        let error = with(LLAMA, key, value).unwrap_err();
        assert!(matches!(error, ConfigError::Unsupported { key: ref named, .. } if named == path), "{error}");
    }
}

#[test]
fn missing_invalid_and_indivisible_values_are_named() {
    for (base, key) in
        [(LLAMA, "hidden_size"), (LLAMA, "vocab_size"), (GPT2, "n_embd"), (GPT2, "n_positions")]
    {
        let error = with(base, key, "null").unwrap_err();
        assert!(matches!(error, ConfigError::Missing { key: ref named } if named == key), "{error}");
    }
    for (base, key, value) in [
        (LLAMA, "hidden_size", "0"),
        (LLAMA, "hidden_size", "-3"),
        (LLAMA, "num_hidden_layers", "2.5"),
        (LLAMA, "vocab_size", "\"many\""),
        (LLAMA, "head_dim", "5"),
        (LLAMA, "rms_norm_eps", "0"),
        (LLAMA, "attention_dropout", "1.0"),
        (LLAMA, "tie_word_embeddings", "1"),
        (LLAMA, "rope_parameters", "3"),
        (GPT2, "resid_pdrop", "-0.1"),
        (GPT2, "initializer_range", "-1"),
    ] {
        let error = with(base, key, value).unwrap_err();
        assert!(matches!(error, ConfigError::Value { key: ref named, .. } if named == key), "{error}");
    }
    for (base, key, value) in
        [(LLAMA, "num_key_value_heads", "3"), (LLAMA, "num_attention_heads", "10"), (GPT2, "n_head", "5")]
    {
        assert!(matches!(with(base, key, value), Err(ConfigError::Indivisible { .. })), "{key}");
    }
    assert!(matches!(HfConfig::parse("[1]"), Err(ConfigError::Json { .. })));
    assert!(matches!(HfConfig::parse("{"), Err(ConfigError::Json { .. })));
}

#[test]
fn sizes_above_limit_are_rejected_with_limit_named() {
    for (base, key, max) in [
        (LLAMA, "num_hidden_layers", 4096u64),
        (LLAMA, "intermediate_size", 1 << 22),
        (LLAMA, "vocab_size", 1 << 24),
        (LLAMA, "max_position_embeddings", 1 << 24),
        (LLAMA, "head_dim", 1 << 18),
        (GPT2, "n_layer", 4096),
        (GPT2, "n_inner", 1 << 22),
        (GPT2, "n_positions", 1 << 24),
    ] {
        assert!(with(base, key, &max.to_string()).is_ok(), "{key} = {max}");
        for size in [max + 2, 1 << 40, 1 << 62, u64::MAX] {
            let error = with(base, key, &size.to_string()).unwrap_err().to_string();
            assert!(error.contains(key) && error.contains("too large: at most"), "{error}");
        }
    }
    let error = with(LLAMA, "head_dim", "262146").unwrap_err().to_string();
    assert_eq!(
        error,
        "config.json: `num_attention_heads * head_dim` = 1048584 is too large: at most 1048576 is supported"
    );
}

#[test]
fn unsupported_family_is_rejected_before_its_keys() {
    let phi = r#"{"model_type": "phi", "layer_types": ["sliding_attention"], "architectures": ["Phi"]}"#;
    let error = HfConfig::parse(phi).unwrap_err();
    assert!(matches!(error, ConfigError::Family { nearest: "phi3", .. }), "{error}");
    let gemma = HfConfig::parse(r#"{"model_type": "gemma3"}"#).unwrap_err();
    assert!(matches!(gemma, ConfigError::Family { nearest: "gemma3_text", .. }), "{gemma}");
    let refused = HfConfig::parse(r#"{"model_type": "gemma3n_text"}"#).unwrap_err();
    assert!(
        refused.to_string().contains("\"gemma3n_text\" is not supported: its layers have embeddings"),
        "{refused}"
    );
    for family in FAMILIES {
        assert!(error.to_string().contains(&format!("\"{}\"", family.model_type)), "{error}");
    }
}

#[test]
fn defaults_and_aliases_match_transformers() {
    let has = |config: &HfConfig, what: &str| {
        let text = format!("{config:?}");
        assert!(text.contains(what), "{what} is not in {text}");
    };
    let llama = HfConfig::parse(LLAMA).unwrap();
    assert_eq!(llama.summary().head_dim, 6);
    has(&llama, "theta: 10000.0");
    has(&llama, "tie_word_embeddings: false");
    let gpt2 = HfConfig::parse(GPT2).unwrap();
    assert_eq!(gpt2.summary().inner, 96);
    has(&gpt2, "attn_pdrop: 0.1");
    has(&gpt2, "tie_word_embeddings: true");
    has(&with(LLAMA, "rope_parameters", r#"{"rope_theta": 5e5}"#).unwrap(), "theta: 500000.0");
    let aliases = GPT2.replace("n_embd", "hidden_size").replace("n_head", "num_attention_heads");
    assert_eq!(sizes(&HfConfig::parse(&aliases).unwrap()), sizes(&gpt2));
}

/// Returns the sizes of a configuration as text.
fn sizes(config: &HfConfig) -> String {
    let text = format!("{config:?}");
    text.split(", original: ").next().unwrap().to_owned()
}

#[test]
fn export_keeps_unknown_keys() {
    let text = with(LLAMA, "torch_dtype", "\"bfloat16\"").unwrap().export(DType::F32);
    let keys: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!((&keys["unknown"][0], &keys["torch_dtype"]), (&1.into(), &"float32".into()));
    assert_eq!(sizes(&HfConfig::parse(&text).unwrap()), sizes(&HfConfig::parse(LLAMA).unwrap()));
}

#[test]
fn invalid_batches_are_rejected() {
    let memory = host();
    let mut program = Subject::new(Gpt2::new(&gpt2()).unwrap(), DType::F32).program();
    let mut message = |batch: Batch| program.set_batches(&memory, 0, vec![batch]).unwrap_err().to_string();
    let good = batch(2, 7, 13);
    let token = Batch { ids: vec![13; 14], ..good.clone() };
    assert_eq!(
        message(token),
        "block `micro-batch 0`: token id 13 is outside the vocabulary of 13; use the model's own tokenizer"
    );
    let target = Batch { targets: vec![IGNORED_TARGET - 1; 14], ..good.clone() };
    assert!(message(target).contains("outside the vocabulary"));
    assert!(message(batch(1, 10, 13)).contains("exceed the model's 9 positions"));
    assert!(message(Batch { samples: vec![1], ..good.clone() }).contains("has 14 ids"));
    let positions = |positions: &[u32]| Batch { positions: Some(positions.to_vec()), ..good.clone() };
    assert!(message(positions(&[0; 13])).contains("13 positions"));
    // A position continues a document or begins one; no document continues in the next sample.
    for (row, position, at) in
        [(0, 1, "token 0 "), (2, 1, "token 2 "), (2, 3, "token 2 "), (7, 7, "token 7 ")]
    {
        let mut all: Vec<u32> = (0..14).map(|row| row % 7).collect();
        all[row] = position;
        assert!(message(positions(&all)).contains(&format!("{at}of the batch has position {position};")));
    }
    assert!(message(Batch::default()).contains("0 samples"));
}

#[test]
fn out_of_order_calls_are_rejected() {
    let memory = host();
    let subject = Subject::new(small(), DType::F32);
    let (mut program, pass) = (subject.program(), Pass::Train(Checkpointing::None));
    assert!(program.begin(&memory, Round(0), pass).is_err());
    program.set_batches(&memory, 0, vec![batch(2, 7, 13)]).unwrap();
    assert!(
        program.begin(&memory, Round(1), pass).unwrap_err().to_string().contains("this rank's step has 1")
    );
    program.begin(&memory, Round(0), pass).unwrap();
    let params = subject.whole(&memory).params();
    let mut gradients = subject.open_gradients(&memory);
    let right = calls(&subject.spec, pass);
    let mut call = |call: BlockCall| {
        program.call(&memory, call, &params, std::slice::from_mut(&mut gradients), &mut Comms::alone())
    };
    for (index, &next) in right.iter().enumerate() {
        for &other in right.iter().filter(|&&other| other != next) {
            let message = call(other).unwrap_err().to_string();
            assert!(
                message.contains(&format!("expected the call Some({next:?}), got {other:?}")),
                "{message}"
            );
        }
        call(next).unwrap_or_else(|error| panic!("call {index}: {error}"));
    }
    let message = call(right[0]).unwrap_err().to_string();
    assert!(message.contains("expected the call None"), "{message}");
}
