//! Small jobs and launchers shared by the tests. Sizes are the smallest that still show an error; a test that needs
//! larger ones sets them itself.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use fsdp_config::Resolved;
use fsdp_nn::hf::{HfConfig, HfModel};
use fsdp_nn::model::Architecture;
use fsdp_nn::{HostMemory, HostOptions};
use fsdp_sim::{ThreadOptions, Threads};
use fsdp_train::train::{Resume, RunOptions};
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

/// Writes deterministic tokens to a file in `dir` and returns its path.
pub(crate) fn tokens(dir: &Path, vocab: u32, count: u32) -> String {
    let path = dir.join("tokens.bin");
    let ids = (0..count).map(|i| ((i * i * 7 + i * 3 + i / 11) % vocab) as u16);
    std::fs::write(&path, ids.flat_map(u16::to_le_bytes).collect::<Vec<u8>>()).unwrap();
    path.display().to_string()
}

/// Writes 90 short documents; returns the settings that pack them.
pub(crate) fn packed(dir: &Path, vocab: u16) -> [String; 3] {
    let documents = dir.join("documents");
    std::fs::create_dir(&documents).unwrap();
    for document in 0..90_u16 {
        let ids = (0..1 + document * 7 % 9).map(|i| (i * i + document) % vocab);
        let bytes: Vec<u8> = ids.flat_map(u16::to_le_bytes).collect();
        std::fs::write(documents.join(format!("{document}.bin")), bytes).unwrap();
    }
    let data = format!("data.train=[\"{}\"]", documents.display());
    [data, "data.packing=\"packed\"".to_owned(), "data.eos=2".to_owned()]
}

/// Returns the configuration of a tiny run; `overrides` have the syntax of `--set`.
pub(crate) fn config(dir: &Path, vocab: u32, overrides: &[&str]) -> Resolved {
    let tokens = tokens(dir, vocab, 700);
    let out = dir.join("out").display().to_string();
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
        ranks = 4
        out_dir = "{out}"
        "#
    );
    let overrides: Vec<String> = overrides.iter().map(ToString::to_string).collect();
    Resolved::parse(&text, "test", &overrides).unwrap_or_else(|error| panic!("{error}")).config
}

/// Creates the job of a Hugging Face model with a configuration.
pub(crate) fn job(model: &str, config: Resolved) -> Job<HfModel> {
    job_of(HfConfig::parse(model).unwrap().build().unwrap(), config)
}

/// Creates the job of any model with a configuration.
pub(crate) fn job_of<A: Architecture + Clone>(architecture: A, config: Resolved) -> Job<A> {
    let init = Arc::new(architecture.description().init.clone());
    let init = InitSource::Random { seed: config.model.seed, init };
    Job::new(config, architecture, init).unwrap_or_else(|error| panic!("{error}"))
}

/// Ranks as threads with poisoned host memory, each with its own storage, so that allocations of one rank do not depend
/// on the timing of others.
pub(crate) fn threads() -> Threads<HostMemory> {
    threads_with(options())
}

/// Time within which a world must end, on any machine under any load. The time limit of [`options`] is longer, so an
/// end within this time was not caused by it.
pub(crate) const SOON: Duration = Duration::from_secs(300);

/// Options for worlds that must not hang.
pub(crate) fn options() -> ThreadOptions {
    ThreadOptions { timeout: 2 * SOON, ..ThreadOptions::default() }
}

/// Options of a run without reporter, observer or stop request.
pub(crate) fn run_options(resume: Resume) -> RunOptions<'static> {
    static NEVER: AtomicBool = AtomicBool::new(false);
    RunOptions {
        reporter: &(),
        stop: &NEVER,
        resume,
        overwrite: false,
        observer: &|_| Box::new(()),
        config_json: None,
        flops: None,
        process_table: None,
    }
}

/// Like [`threads`], with other options.
pub(crate) fn threads_with(options: ThreadOptions) -> Threads<HostMemory> {
    Threads::new(options, |_, _| {
        let options = HostOptions { poison: true, resident: true, ..HostOptions::default() };
        Ok(Arc::new(HostMemory::new(options)?))
    })
}
