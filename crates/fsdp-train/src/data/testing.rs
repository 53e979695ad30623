//! For the tests of this room.

use super::chat::Chats;
use super::tokenizer::Tokenizer;
use crate::config::{DataConfig, Resolved};

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

/// A configuration of bytes, every other key by default.
pub(super) fn config() -> DataConfig {
    Resolved::parse(RUN, "run.toml", &[]).unwrap().config.data
}

/// What makes tokens of conversations where there is no template.
pub(super) fn chats() -> Chats {
    Chats::find(&config(), &Tokenizer::load("bytes").unwrap()).unwrap()
}
