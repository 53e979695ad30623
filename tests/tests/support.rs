//! Small jobs and launchers that the tests share. Sizes are the smallest that still show an error: a test
//! that needs more says so itself.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use fsdp_comm::{ThreadOptions, Threads};
use fsdp_nn::hf::{HfConfig, HfModel};
use fsdp_nn::model::Architecture;
use fsdp_nn::{HostMemory, HostOptions};
use fsdp_train::checkpoint::Resume;
use fsdp_train::config::Resolved;
use fsdp_train::train::RunOptions;
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

/// Writes tokens of a deterministic text to `dir` and returns the file's path.
pub(crate) fn tokens(dir: &Path, vocab: u32, count: u32) -> String {
    let path = dir.join("tokens.bin");
    let ids = (0..count).map(|i| ((i * i * 7 + i * 3 + i / 11) % vocab) as u16);
    std::fs::write(&path, ids.flat_map(u16::to_le_bytes).collect::<Vec<u8>>()).unwrap();
    path.display().to_string()
}

/// The configuration of a tiny run; `overrides` are those of `--set`.
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

/// The job of a Hugging Face model under a configuration.
pub(crate) fn job(model: &str, config: Resolved) -> Job<HfModel> {
    job_of(HfConfig::parse(model).unwrap().build().unwrap(), config)
}

/// The job of any model under a configuration.
pub(crate) fn job_of<A: Architecture + Clone>(architecture: A, config: Resolved) -> Job<A> {
    let init = Arc::new(architecture.description().init.clone());
    let init = InitSource::Random { seed: config.model.seed, init };
    Job::new(config, architecture, init).unwrap_or_else(|error| panic!("{error}"))
}

/// Ranks as threads with poisoned host memory, each with storage of its own, so that allocations of one rank
/// do not depend on the timing of others.
pub(crate) fn threads() -> Threads<HostMemory> {
    threads_with(options())
}

/// In what time a world must have ended, on any machine and beside any other work: what does not come by itself, the
/// time limit would end later.
pub(crate) const SOON: Duration = Duration::from_secs(300);

/// Options for worlds that must not hang.
pub(crate) fn options() -> ThreadOptions {
    ThreadOptions { timeout: 2 * SOON, ..ThreadOptions::default() }
}

/// Options of a run that nobody watches or stops.
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

/// As [`threads`], under other options.
pub(crate) fn threads_with(options: ThreadOptions) -> Threads<HostMemory> {
    Threads::new(options, |_, _| {
        let options = HostOptions { poison: true, resident: true, ..HostOptions::default() };
        Ok(Arc::new(HostMemory::new(options)?))
    })
}
