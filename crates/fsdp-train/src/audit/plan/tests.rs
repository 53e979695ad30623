use fsdp_nn::hf::HfConfig;

use super::*;
use crate::memory::Limit;

const GIB: f64 = (1 << 30) as f64;

/// Llama 3.1 8B.
const LLAMA_8B: &str = r#"{"model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": false}"#;

/// What an audit of a model in bf16 needs.
fn need(config: &str, batches: &[MicroBatch], world: usize) -> AuditMemory {
    let model = HfConfig::parse(config).unwrap().build().unwrap();
    let spec = &model.description().spec;
    AuditMemory::of((&model, spec), LossTerms::default(), DType::F32, (batches, world), false).unwrap()
}

fn micro_batch(seq: usize) -> MicroBatch {
    MicroBatch {
        ids: vec![1; seq],
        targets: vec![Some(1); seq],
        seq,
        positions: None,
        runs_on: false,
        is_text: vec![true; seq],
    }
}

#[test]
fn eight_billion_in_bf16_fit_a_small_machine() {
    let need = need(LLAMA_8B, &[micro_batch(1024), micro_batch(1024)], 1);
    // The head: 4 bytes for its parameters, 4 for their gradient and 4 for the sum over micro-batches.
    let head = 128_256 * 4096 + 4096;
    assert_eq!(need.layer, 12 * head);
    // 32 inputs of layers and what the last one passes on, for all tokens, are most of what else is held.
    let inputs = (33 * 2048 * 4096 * 4) as f64;
    assert!((1.0..1.5).contains(&(need.activations as f64 / inputs)), "{}", need.activations as f64 / inputs);
    assert!((7.0..9.0).contains(&(need.total() as f64 / GIB)), "{}", need.total() as f64 / GIB);
}

#[test]
fn ranks_share_the_inputs_of_layers_only() {
    let batches = vec![micro_batch(512); 8];
    let [one, four, eight, more] = [1, 4, 8, 16].map(|world| need(LLAMA_8B, &batches, world));
    assert_eq!([one.layer, one.samples], [eight.layer, eight.samples]);
    assert!(4 * four.activations < 2 * one.activations, "{four:?} {one:?}");
    assert!(eight.activations < four.activations);
    // A rank without micro-batches helps nobody.
    assert_eq!(eight, more);
}

#[test]
fn need_beyond_what_is_left_is_refused_with_its_parts() {
    let need = need(LLAMA_8B, &[micro_batch(32)], 1);
    let left = |bytes| Some(Available { bytes, limit: Limit::Machine });
    let enough = 2 * (need.layer + need.activations + need.states);
    assert!(need.expect(2, left(enough)).is_ok());
    assert!(need.expect(2, None).is_ok());
    let message = need.expect(2, left(enough - 1)).unwrap_err().to_string();
    assert!(message.starts_with("2 rank(s) need 11.8 GiB of memory at once, but this machine"), "{message}");
    assert!(message.contains("each 5.9 GiB for the largest layer"), "{message}");
    assert!(need.expect(3, left(enough)).is_err());
}
