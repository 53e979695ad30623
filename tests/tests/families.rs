//! Every model family, with the configurations of its golden files.

use std::path::Path;

use fsdp_config::Ranks;
use fsdp_core::{Axis, Mesh};
use fsdp_nn::hf::{FAMILIES, HfConfig, Small};
use fsdp_nn::model::Architecture;
use fsdp_nn::quantized::{BLOCK, Format};
use fsdp_train::verify::{VerifyOptions, verify};
use serde_json::{Value, json};

use crate::support::{config, job, job_of, threads};

/// Returns the text of a golden `config.json`.
fn golden(case: &str) -> String {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("golden").join(case);
    std::fs::read_to_string(folder.join("config.json")).unwrap()
}

/// Returns the folders of all families, with the class of their layers.
fn cases() -> Vec<(String, String)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("golden/families");
    let names = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name());
    let mut cases: Vec<String> = names.map(|name| format!("families/{}", name.to_str().unwrap())).collect();
    cases.extend(["gpt2".to_owned(), "llama-gqa".to_owned()]);
    cases.sort();
    let layers = |case: String| {
        let model = HfConfig::parse(&golden(&case)).unwrap().build().unwrap();
        let modules = &model.description().spec.modules;
        let list = modules.iter().position(|module| module.class == "ModuleList");
        let layer = modules.iter().find(|module| module.parent == list).unwrap();
        (case, layer.class.clone())
    };
    cases.into_iter().map(layers).collect()
}

#[test]
fn every_family_has_golden_files() {
    let families: Vec<&str> =
        cases().iter().map(|(case, _)| HfConfig::parse(&golden(case)).unwrap().family().model_type).collect();
    for family in FAMILIES {
        assert!(families.contains(&family.model_type), "{} has none", family.model_type);
    }
}

#[test]
fn every_family_is_bitwise_equal_at_every_world_size() {
    for (case, layer) in cases() {
        let dir = tempfile::tempdir().unwrap();
        let text = golden(&case);
        let vocab = HfConfig::parse(&text).unwrap().summary().vocab as u32;
        let wrap = format!("fsdp.wrap=[\"{layer}\"]");
        let job = job(&text, config(dir.path(), vocab, &[&wrap]));
        let report = verify(&job, &threads(), &VerifyOptions::new(&[1, 2, 4], 2)).unwrap();
        assert_eq!(report.worlds.len(), 3, "{case}");
        for world in &report.worlds {
            assert_eq!(world.promise, "equal bits (D2)", "{case}");
            assert!(world.failures.is_empty(), "{case}, world {}: {:#?}", world.world, world.failures);
        }
    }
}

/// Whether a model has linear attention, whose samples cannot be cut.
fn is_linear(text: &str) -> bool {
    text.contains("\"linear_attention\"")
}

/// Where two ranks share samples, in two chunks, every family has the bits of one rank.
#[test]
fn every_family_is_bitwise_equal_on_a_context_axis() {
    // Cases for padding have another embedding and nothing else.
    for (case, layer) in cases().into_iter().filter(|(case, _)| !case.ends_with("-padding")) {
        let dir = tempfile::tempdir().unwrap();
        let text = golden(&case);
        if is_linear(&text) {
            continue;
        }
        let vocab = HfConfig::parse(&text).unwrap().summary().vocab as u32;
        let wrap = format!("fsdp.wrap=[\"{layer}\"]");
        let chunks = ["data.seq_len=8", "fsdp.chunks={ context = 2 }", &wrap];
        let job = job(&text, config(dir.path(), vocab, &chunks));
        let mesh = |context| Mesh::new([(Axis::Shard, 2), (Axis::Context, context)]).unwrap();
        let worlds = [1, 2].map(|context| Ranks::On(mesh(context))).into();
        let options = VerifyOptions { worlds, ..VerifyOptions::new(&[], 2) };
        let report = verify(&job, &threads(), &options).unwrap_or_else(|error| panic!("{case}: {error}"));
        assert_eq!(report.worlds.len(), 2, "{case}: {:?}", report.skipped);
        for world in &report.worlds {
            assert_eq!(world.promise, "equal bits (D2)", "{case}");
            assert!(world.failures.is_empty(), "{case}, world {}: {:#?}", world.world, world.failures);
            assert_eq!(world.losses, report.worlds[0].losses, "{case}");
        }
    }
}

/// The sizes of published mixtures: DeepSeek V3, GLM 4.5, gpt-oss-20b, MiniMax M2 and Qwen 3 Next.
fn published() -> [Value; 5] {
    [
        json!({"model_type": "deepseek_v3", "vocab_size": 129_280, "hidden_size": 7168, "intermediate_size": 18_432,
            "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536,
            "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
            "n_routed_experts": 256, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4,
            "max_position_embeddings": 163_840, "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40,
            "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096, "type": "yarn"}}),
        json!({"model_type": "glm4_moe", "vocab_size": 151_552, "hidden_size": 5120, "intermediate_size": 12_288,
            "num_hidden_layers": 92, "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128,
            "n_routed_experts": 160, "moe_intermediate_size": 1536, "routed_scaling_factor": 2.5,
            "first_k_dense_replace": 3, "attention_bias": true, "use_qk_norm": true, "rope_theta": 1_000_000,
            "partial_rotary_factor": 0.5, "pad_token_id": 151_329}),
        json!({"model_type": "gpt_oss", "vocab_size": 201_088, "hidden_size": 2880, "intermediate_size": 2880,
            "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8, "num_local_experts": 32,
            "head_dim": 64, "sliding_window": 128, "pad_token_id": 199_999, "swiglu_limit": 7.0}),
        json!({"model_type": "minimax_m2", "vocab_size": 200_064, "hidden_size": 3072, "intermediate_size": 1536,
            "num_hidden_layers": 62, "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128,
            "rotary_dim": 64, "partial_rotary_factor": 0.5}),
        json!({"model_type": "qwen3_next", "vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 5120,
            "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
            "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512, "rope_theta": 10_000_000}),
    ]
}

/// With a base in 4 bits, shrunk models keep whole blocks.
#[test]
fn published_mixtures_shrink_to_models_that_can_be_quantized() {
    for keys in published() {
        let name = keys["model_type"].as_str().unwrap();
        let small = Small { layers: 4, vocab: Some(64), seq_len: 8, width_step: BLOCK };
        let small = HfConfig::parse(&keys.to_string()).unwrap().shrink(small);
        let mut description = small.build().unwrap().description().clone();
        description.spec.params.iter_mut().for_each(|param| param.trainable = false);
        description.quantize(Format::Nf4).unwrap_or_else(|(weight, why)| panic!("{name}: `{weight}` {why}"));
        let elements = description.spec.elements();
        assert!(!description.quantized.is_empty() && elements < 2_000_000, "{name}: {elements} elements");
    }
}

/// What `fsdp verify --shrink` makes of published mixtures: small models with the same kinds of layers.
#[test]
fn published_mixtures_shrink_to_small_models_with_the_bits_of_one_rank() {
    for keys in published() {
        let name = keys["model_type"].as_str().unwrap();
        let published = HfConfig::parse(&keys.to_string()).unwrap();
        let small = published.shrink(Small { layers: 3, vocab: Some(64), seq_len: 8, width_step: 1 });
        let model = small.build().unwrap();
        let elements = model.description().spec.elements();
        assert!((1000..50_000).contains(&elements), "{name}: {elements} elements in {}", small.summary());
        let of = |config: &HfConfig| format!("{config:?}");
        for part in
            ["mixture: Some", "mixture: None", "window: Some", "latent: Some", "sinks: true", "delta: Some"]
        {
            assert_eq!(of(&small).contains(part), of(&published).contains(part), "{name}: {part}, {small:?}");
        }
        let dir = tempfile::tempdir().unwrap();
        let config = config(dir.path(), 64, &["data.seq_len=8", "fsdp.min_num_params=500"]);
        let report = verify(&job_of(model, config), &threads(), &VerifyOptions::new(&[2, 4], 2)).unwrap();
        assert!(report.holds(), "{name}: {report:#?}");
    }
}
