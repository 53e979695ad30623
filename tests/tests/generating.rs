//! Every family continues a text as transformers does, and as it does itself without a cache.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use fsdp_core::DType;
use fsdp_nn::hf::{FAMILIES, HfConfig, HfModel};
use fsdp_nn::model::Session;
use fsdp_nn::sampling::Sampling;
use fsdp_nn::{HostMemory, HostOptions};
use fsdp_train::generate::{GenerateOptions, generate_tokens, load};
use serde_json::Value;

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("golden").join(name)
}

fn expected() -> Value {
    serde_json::from_str(&std::fs::read_to_string(golden("greedy.json")).unwrap()).unwrap()
}

fn ids(value: &Value) -> Vec<u32> {
    serde_json::from_value(value.clone()).unwrap()
}

fn config(case: &str) -> HfConfig {
    HfConfig::parse(&std::fs::read_to_string(golden(case).join("config.json")).unwrap()).unwrap()
}

/// Creates a session with the weights of a case.
fn session(case: &str, dtype: DType, capacity: usize) -> Session<HfModel> {
    let model = config(case).build().unwrap();
    let memory = Arc::new(HostMemory::new(HostOptions { poison: true, ..HostOptions::default() }).unwrap());
    let weights = load(&memory, &golden(case), &model, dtype).unwrap();
    Session::new(memory, model, &weights, capacity).unwrap()
}

fn greedy(max_new_tokens: usize) -> GenerateOptions {
    GenerateOptions { max_new_tokens, sampling: None, ends: [].into() }
}

#[test]
fn greedy_tokens_match_transformers() {
    let expected = expected();
    let cases = expected["greedy"].as_object().unwrap();
    for family in FAMILIES {
        assert!(cases.keys().any(|case| config(case).family().model_type == family.model_type), "{family:?}");
    }
    for (case, expected) in cases {
        let (prompt, tokens) = (ids(&expected["prompt"]), ids(&expected["tokens"]));
        let mut session = session(case, DType::F32, prompt.len() + tokens.len());
        let mut generated = Vec::new();
        let found =
            generate_tokens(&mut session, &prompt, &greedy(tokens.len()), |token| generated.push(token))
                .unwrap();
        assert_eq!(found, tokens, "{case}");
        assert_eq!(generated, tokens, "{case}");
    }
}

#[test]
fn cached_incremental_logits_match_single_pass() {
    for (case, expected) in expected()["greedy"].as_object().unwrap() {
        let text = [ids(&expected["prompt"]), ids(&expected["tokens"])].concat();
        for (dtype, bound) in [(DType::F64, 1e-11), (DType::F32, 1e-3)] {
            // One token at a time, three at a time, and all but one at once.
            for step in [1, 3, text.len() - 1] {
                let mut whole_by_parts = session(case, dtype, text.len());
                let mut given = 0;
                for part in text.chunks(step) {
                    given += part.len();
                    let found = whole_by_parts.extend(part).unwrap();
                    let at_once = session(case, dtype, given).extend(&text[..given]).unwrap();
                    for (found, expected) in found.iter().zip(&at_once) {
                        let distance = (found - expected).abs();
                        assert!(distance <= bound, "{case}, {dtype}, {given} by {step}: {distance}");
                    }
                }
            }
        }
    }
}

#[test]
fn generation_stops_at_end_token() {
    let expected = expected();
    let case = &expected["greedy"]["llama-gqa"];
    let (prompt, tokens) = (ids(&case["prompt"]), ids(&case["tokens"]));
    let end = tokens[3];
    let first = tokens.iter().position(|&token| token == end).unwrap();
    let how = GenerateOptions { ends: [end].into(), ..greedy(tokens.len()) };
    let mut session = session("llama-gqa", DType::F32, 24);
    let found = generate_tokens(&mut session, &prompt, &how, |_| ()).unwrap();
    assert_eq!(found, tokens[..=first]);
}

#[test]
fn context_beyond_position_table_is_rejected() {
    let model = config("gpt2").build().unwrap();
    let memory = Arc::new(HostMemory::new(HostOptions::default()).unwrap());
    let weights = load(&memory, &golden("gpt2"), &model, DType::F32).unwrap();
    let error = Session::new(memory, model, &weights, 10_000).err().unwrap();
    assert!(
        std::error::Error::source(&error).unwrap().to_string().contains("10000 tokens exceed"),
        "{error}"
    );
}

#[test]
fn sampling_probabilities_match_transformers() {
    let expected = expected();
    for case in expected["warped"].as_array().unwrap() {
        let values = |key: &str| serde_json::from_value::<Vec<f64>>(case[key].clone()).unwrap();
        let sampling = Sampling {
            temperature: case["temperature"].as_f64().unwrap(),
            top_k: case["top_k"].as_u64().map(|count| count as usize),
            top_p: case["top_p"].as_f64(),
            seed: 0,
        };
        for (found, expected) in sampling.probabilities(&values("logits")).iter().zip(values("probabilities"))
        {
            assert!((found - expected).abs() < 1e-12, "{sampling:?}: {found}, {expected}");
        }
    }
}
