//! Small models and jobs.

use std::path::Path;
use std::sync::Arc;

use fsdp_config::Resolved;
use fsdp_nn::hf::{HfConfig, HfModel};
use fsdp_nn::model::Architecture;
use fsdp_train::{InitSource, Job};

/// A tiny Llama: grouped queries, untied head, odd widths.
pub(crate) const LLAMA: &str = r#"{
    "model_type": "llama", "vocab_size": 61, "hidden_size": 24, "intermediate_size": 20,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "initializer_range": 0.2, "tie_word_embeddings": false, "hidden_act": "silu"
}"#;

/// A tiny GPT-2: biases, tied head, all three dropouts.
pub(crate) const GPT2: &str = r#"{
    "model_type": "gpt2", "vocab_size": 53, "n_embd": 20, "n_layer": 2, "n_head": 2, "n_positions": 32,
    "initializer_range": 0.2, "embd_pdrop": 0.1, "attn_pdrop": 0.1, "resid_pdrop": 0.1
}"#;

/// Returns the configuration of a small run; `overrides` have the syntax of `--set`.
pub(crate) fn config(dir: &Path, vocab: u32, overrides: &[&str]) -> Resolved {
    let path = dir.join("tokens.bin");
    let ids = (0..4000).map(|i: u32| ((i * i * 7 + i * 3 + i / 11) % vocab) as u16);
    std::fs::write(&path, ids.flat_map(u16::to_le_bytes).collect::<Vec<u8>>()).expect("a temporary file");
    let (tokens, out) = (path.display(), dir.join("out").display().to_string());
    let text = format!(
        r#"
        [model]
        path = "unused"
        [data]
        train = ["{tokens}"]
        format = "tokens-u16"
        seq_len = 7
        [train]
        steps = 4
        micro_batch_size = 2
        global_batch_size = 16
        grad_clip = 1.0
        optimizer = {{ name = "adamw", lr = 3e-3 }}
        lr_schedule = {{ name = "constant" }}
        [run]
        device = "torch-cpu"
        ranks = 4
        out_dir = "{out}"
        "#
    );
    let overrides: Vec<String> = overrides.iter().map(ToString::to_string).collect();
    Resolved::parse(&text, "test", &overrides).unwrap_or_else(|error| panic!("{error}")).config
}

/// Creates the job of a Hugging Face model with a configuration.
pub(crate) fn job(model: &str, config: Resolved) -> Job<HfModel> {
    let model = HfConfig::parse(model).and_then(|config| config.build().map_err(|error| panic!("{error}")));
    job_of(model.unwrap_or_else(|error| panic!("{error}")), config)
}

/// Creates the job of any model with a configuration.
pub(crate) fn job_of<A: Architecture + Clone>(architecture: A, config: Resolved) -> Job<A> {
    let init = Arc::new(architecture.description().init.clone());
    let init = InitSource::Random { seed: config.model.seed, init };
    Job::new(config, architecture, init).unwrap_or_else(|error| panic!("{error}"))
}
