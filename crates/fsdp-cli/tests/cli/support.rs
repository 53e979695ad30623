//! A folder with a tiny model, data and a run file.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use fsdp_comm::process::place::LaunchedBy;
use serde_json::Value;
use tempfile::TempDir;

/// A tiny Llama with a byte vocabulary and a tied head.
pub(crate) const LLAMA: &str = r#"{
  "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 256, "hidden_size": 16,
  "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
  "max_position_embeddings": 64, "rms_norm_eps": 1e-05, "initializer_range": 0.02, "tie_word_embeddings": true
}"#;

/// A tiny GPT-2 with a byte vocabulary.
pub(crate) const GPT2: &str = r#"{
  "model_type": "gpt2", "vocab_size": 256, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16
}"#;

/// A minimal run file: 4 micro-batches of 2 sequences over 2 ranks.
const RUN: &str = r#"
[model]
path = "model"
[data]
train = ["data.txt"]
seq_len = 8
[train]
steps = 3
micro_batch_size = 2
global_batch_size = 8
[fsdp]
wrap = ["LlamaDecoderLayer"]
[run]
ranks = 2
out_dir = "out"
"#;

/// Prose of 131 bytes: 16 samples of 8 tokens.
const TEXT: &str = "A shard is what one rank keeps of a tensor. Gather it before the forward pass, \
                    and give it back after; then reduce, scatter, update.";

/// The folder of a test.
pub(crate) struct Sandbox {
    dir: TempDir,
}

/// Exit code and output of a command; `code` is `None` if a signal ended it.
#[derive(Debug)]
pub(crate) struct Ran {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Sandbox {
    pub(crate) fn new() -> Self {
        let sandbox = Self { dir: tempfile::tempdir().unwrap() };
        std::fs::create_dir(sandbox.path("model")).unwrap();
        sandbox.write("model/config.json", LLAMA);
        sandbox.write("data.txt", TEXT);
        sandbox.write("run.toml", RUN);
        sandbox
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub(crate) fn write(&self, name: &str, content: impl AsRef<[u8]>) {
        std::fs::write(self.path(name), content).unwrap();
    }

    pub(crate) fn read(&self, name: &str) -> String {
        let path = self.path(name);
        std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
    }

    /// Replaces text in a file, which must contain it.
    pub(crate) fn edit(&self, name: &str, from: &str, to: &str) {
        let text = self.read(name);
        assert!(text.contains(from), "{name} has no {from}");
        self.write(name, text.replace(from, to));
    }

    pub(crate) fn command(&self) -> Command {
        self.prepare(Command::new(env!("CARGO_BIN_EXE_fsdp")))
    }

    /// Runs `fsdp` like [`Sandbox::command`], under another command.
    pub(crate) fn under(&self, wrapper: &[&str]) -> Command {
        let mut command = Command::new(wrapper[0]);
        command.args(&wrapper[1..]).arg(env!("CARGO_BIN_EXE_fsdp"));
        self.prepare(command)
    }

    /// Sets the folder and the environment of a command.
    pub(crate) fn prepare(&self, mut command: Command) -> Command {
        command.current_dir(self.dir.path()).stdin(Stdio::null());
        command.env_remove("RUST_LOG").env_remove("COLUMNS").env("NO_COLOR", "1");
        // Keeps the data cache out of the user's home folder.
        command.env("XDG_CACHE_HOME", self.path("cache"));
        if let Ok(endpoint) = std::env::var("FSDP_TEST_S3") {
            command
                .env("AWS_ENDPOINT_URL", endpoint)
                .env("AWS_ALLOW_HTTP", "true")
                .env("AWS_REGION", "us-east-1");
            command.env("AWS_ACCESS_KEY_ID", "test").env("AWS_SECRET_ACCESS_KEY", "test");
        }
        // The tests themselves may run under a process launcher.
        for variable in LaunchedBy::ALL.into_iter().flat_map(LaunchedBy::variables) {
            command.env_remove(variable);
        }
        command
    }

    /// Runs `fsdp` with arguments separated by spaces.
    pub(crate) fn fsdp(&self, args: &str) -> Ran {
        Ran::of(self.command().args(args.split_whitespace()).output().unwrap())
    }

    /// Runs a command that must succeed.
    pub(crate) fn succeed(&self, args: &str) -> Ran {
        let ran = self.fsdp(args);
        assert_eq!(ran.code, Some(0), "fsdp {args}: {}", ran.stderr);
        ran
    }

    /// Returns all files below a folder with their contents.
    pub(crate) fn files(&self, folder: &str) -> BTreeMap<PathBuf, Vec<u8>> {
        let mut files = BTreeMap::new();
        collect(&self.path(folder), &mut files);
        files
    }

    /// Returns the step objects of a `metrics.jsonl`.
    pub(crate) fn metrics(&self, out_dir: &str) -> Vec<Value> {
        self.lines_of_metrics(out_dir).filter(|line| line["loss"].is_f64()).collect()
    }

    /// Returns the steps, sets and losses of the evaluations in a `metrics.jsonl`.
    pub(crate) fn evaluations(&self, out_dir: &str) -> Vec<(u64, String, f64)> {
        let read = |line: Value| {
            let set = line["set"].as_str()?.to_owned();
            Some((line["step"].as_u64()?, set, line["eval_loss"].as_f64()?))
        };
        self.lines_of_metrics(out_dir).filter_map(read).collect()
    }

    /// Returns the start records of a `metrics.jsonl`.
    pub(crate) fn starts(&self, out_dir: &str) -> Vec<Value> {
        self.lines_of_metrics(out_dir).filter_map(|mut line| Some(line.get_mut("start")?.take())).collect()
    }

    fn lines_of_metrics(&self, out_dir: &str) -> impl Iterator<Item = Value> {
        let text = self.read(&format!("{out_dir}/metrics.jsonl"));
        let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        lines.into_iter()
    }

    /// Returns a number of each step, such as the loss.
    pub(crate) fn column(&self, out_dir: &str, key: &str) -> Vec<f64> {
        self.metrics(out_dir).iter().map(|step| step[key].as_f64().unwrap()).collect()
    }
}

fn collect(folder: &Path, files: &mut BTreeMap<PathBuf, Vec<u8>>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            collect(&path, files);
        } else {
            let content = std::fs::read(&path).unwrap();
            files.insert(path, content);
        }
    }
}

impl Ran {
    pub(crate) fn of(output: Output) -> Self {
        let text = |bytes| String::from_utf8(bytes).unwrap();
        Self { code: output.status.code(), stdout: text(output.stdout), stderr: text(output.stderr) }
    }
}

/// Folds the long lines of a message, so that snapshots fit on a page.
pub(crate) fn folded(text: &str) -> String {
    const WIDTH: usize = 100;
    let mut folded = String::new();
    for line in text.lines() {
        let mut rest = line;
        while let Some((at, _)) = rest.char_indices().nth(WIDTH) {
            let Some(space) = rest[..at].rfind(' ').filter(|&space| space > 4) else { break };
            folded += &format!("{}\n", &rest[..space]);
            rest = &rest[space + 1..];
        }
        folded += &format!("{rest}\n");
    }
    folded
}
