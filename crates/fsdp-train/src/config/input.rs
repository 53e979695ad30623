//! The `[data]` table: what is read, how it becomes tokens, and how tokens become samples.

use serde::{Deserialize, Serialize};
use toml::{Table, Value};

use super::error::ConfigError;
use super::kind::{BOOL, COUNT, Kind, MICRO_BATCH_SIDE, SOME_TEXTS, TEXT, TEXTS, one_of, write_or_none};
use super::reader::{Origin, Reader};

const FORMAT: Kind<Format> = one_of("\"text\", \"jsonl\", \"tokens-u16\" or \"tokens-u32\"");
const PACKING: Kind<Packing> = one_of("\"stream\" or \"documents\"");
const TOKEN: Kind<TokenRef> = Kind { allowed: "a token (string) or an id from 0 to 4294967294", read: token };
const KEYS: &[&str] = &[
    "train",
    "eval",
    "eval_every",
    "eval_batches",
    "format",
    "tokenizer",
    "cache",
    "packing",
    "bos",
    "eos",
    "pad",
    "seq_len",
    "shuffle",
    "seed",
];

/// The `[data]` table.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DataConfig {
    /// Files and folders to train on, relative to the current directory. Files of tokens are mapped: they must not change
    /// during a run.
    pub train: Vec<String>,
    /// Files and folders to evaluate on; none means no evaluation.
    pub eval: Vec<String>,
    /// Evaluate after every so many steps; 0 means only after the last.
    pub eval_every: u64,
    /// Evaluate on at most so many global batches; 0 means on all data.
    pub eval_batches: u64,
    /// What the files hold.
    pub format: Format,
    /// `"bytes"`, or the path of a Hugging Face `tokenizer.json`.
    pub tokenizer: String,
    /// The folder where the tokens that a `tokenizer.json` makes of text are kept for later starts; none means `cache` in
    /// the output folder.
    #[serde(serialize_with = "write_or_none")]
    pub cache: Option<String>,
    /// How documents become samples.
    pub packing: Packing,
    /// Put before every document (packing "documents" only).
    #[serde(serialize_with = "write_or_none")]
    pub bos: Option<TokenRef>,
    /// Put after every document (packing "documents" only).
    #[serde(serialize_with = "write_or_none")]
    pub eos: Option<TokenRef>,
    /// Fills short documents. Padded positions do not count, so the default, id 0, serves any vocabulary.
    pub pad: TokenRef,
    /// Inputs per sample.
    pub seq_len: usize,
    /// Whether samples are permuted, anew in every epoch.
    pub shuffle: bool,
    /// Seed of the permutations.
    pub seed: u64,
}

/// What data files hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Format {
    /// UTF-8 text, one document per file.
    Text,
    /// One JSON object per line, its document under `text`.
    Jsonl,
    /// Little-endian 16-bit token ids, one document per file.
    TokensU16,
    /// Little-endian 32-bit token ids, one document per file.
    TokensU32,
}

/// How documents become samples.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Packing {
    /// Documents joined, cut every `seq_len` tokens.
    Stream,
    /// One document per sample: clipped, or padded.
    Documents,
}

/// A token by its id or its text.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum TokenRef {
    /// The id.
    Id(u32),
    /// The text, which the tokenizer must know as one token.
    Token(String),
}

impl DataConfig {
    pub(super) fn read(origin: &Origin, table: Table) -> Result<DataConfig, ConfigError> {
        let reader = Reader::open(origin, "data", table, KEYS)?;
        Ok(DataConfig {
            train: reader.required("train", SOME_TEXTS)?,
            eval: reader.or("eval", TEXTS, Vec::new())?,
            eval_every: reader.or("eval_every", COUNT, 100)?,
            eval_batches: reader.or("eval_batches", COUNT, 0)?,
            format: reader.or("format", FORMAT, Format::Text)?,
            tokenizer: reader.or("tokenizer", TEXT, "bytes".to_owned())?,
            cache: reader.or_none("cache", TEXT)?,
            packing: reader.or("packing", PACKING, Packing::Stream)?,
            bos: reader.or_none("bos", TOKEN)?,
            eos: reader.or_none("eos", TOKEN)?,
            pad: reader.or("pad", TOKEN, TokenRef::Id(0))?,
            seq_len: reader.required("seq_len", MICRO_BATCH_SIDE)?,
            shuffle: reader.or("shuffle", BOOL, true)?,
            seed: reader.or("seed", COUNT, 0)?,
        })
    }
}

/// The largest id is kept free: it marks targets that do not count.
fn token(value: &Value) -> Option<TokenRef> {
    match value {
        Value::String(text) if !text.is_empty() => Some(TokenRef::Token(text.clone())),
        Value::Integer(id) => u32::try_from(*id).ok().filter(|&id| id < u32::MAX).map(TokenRef::Id),
        _ => None,
    }
}
