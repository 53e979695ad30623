//! Helpers for the tests of this module.

use fsdp_config::{DataConfig, Resolved};

use super::chat::Chats;
use super::dataset::Dataset;
use super::tokenizer::Tokenizer;

const RUN: &str = r#"
[model]
path = "m"
[data]
train = ["a"]
seq_len = 8
[train]
steps = 1
micro_batch_size = 1
global_batch_size = 1
[run]
out_dir = "out"
"#;

/// Returns a configuration with the byte tokenizer, and defaults for all other keys.
pub(super) fn config() -> DataConfig {
    Resolved::parse(RUN, "run.toml", &[]).unwrap().config.data
}

/// Returns a tokenizer of conversations without a template.
pub(super) fn chats() -> Chats {
    Chats::find(&config(), &Tokenizer::load("bytes").unwrap()).unwrap()
}

impl Dataset {
    /// Returns the inputs and targets of a sample.
    pub(super) fn sample(&self, index: usize) -> (Vec<u32>, Vec<u32>) {
        let (mut inputs, mut targets) = (vec![0; self.seq_len()], vec![0; self.seq_len()]);
        self.fill(Some(index), &mut inputs, &mut targets);
        (inputs, targets)
    }
}
