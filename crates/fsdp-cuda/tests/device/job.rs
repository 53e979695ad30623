//! Small models, and a run that trains them.

use std::path::Path;
use std::sync::Arc;

use fsdp_config::Resolved;
use fsdp_nn::hf::{HfConfig, HfModel};
use fsdp_nn::model::Architecture;
use fsdp_train::{InitSource, Job};

pub(crate) const LLAMA: &str = r#"{
    "model_type": "llama", "vocab_size": 61, "hidden_size": 24, "intermediate_size": 20,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "initializer_range": 0.2, "tie_word_embeddings": false, "hidden_act": "silu"
}"#;

pub(crate) const GPT2: &str = r#"{
    "model_type": "gpt2", "vocab_size": 53, "n_embd": 20, "n_layer": 2, "n_head": 2, "n_positions": 32,
    "initializer_range": 0.2, "embd_pdrop": 0.1, "attn_pdrop": 0.1, "resid_pdrop": 0.1
}"#;

/// Creates a job of four steps. Its token file is created in `dir` unless it exists.
pub(crate) fn job(dir: &Path, model: &str, overrides: &[&str]) -> Job<HfModel> {
    let model = HfConfig::parse(model).unwrap().build().unwrap();
    let vocab = model.head().vocab as u32;
    let ids = (0..700_u32).map(|i| ((i * i * 7 + i * 3 + i / 11) % vocab) as u16);
    let tokens = dir.join("tokens.bin");
    if !tokens.exists() {
        std::fs::write(&tokens, ids.flat_map(u16::to_le_bytes).collect::<Vec<u8>>()).unwrap();
    }
    let text = format!(
        r#"
        [model]
        path = "unused"
        [data]
        train = ["{}"]
        format = "tokens-u16"
        seq_len = 7
        [train]
        steps = 4
        micro_batch_size = 2
        global_batch_size = 8
        grad_clip = 1.0
        optimizer = {{ name = "adamw", lr = 3e-3 }}
        lr_schedule = {{ name = "constant" }}
        [run]
        ranks = 2
        out_dir = "{}"
        "#,
        tokens.display(),
        dir.join("out").display()
    );
    let overrides: Vec<String> = overrides.iter().map(ToString::to_string).collect();
    let config = Resolved::parse(&text, "test", &overrides).unwrap_or_else(|error| panic!("{error}")).config;
    let init = Arc::new(model.description().init.clone());
    let init = InitSource::Random { seed: config.model.seed, init };
    Job::new(config, model, init).unwrap_or_else(|error| panic!("{error}"))
}
