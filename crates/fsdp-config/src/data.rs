//! The `[data]` table: which files are read, how they become tokens, and how tokens become samples.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize, Serializer};
use toml::Value;
use toml::value::Datetime;

use super::describe::ValueSchema;
use super::error::ConfigError;
use super::eval::EvalSet;
use super::kind::{BOOL, COUNT, Kind, MICRO_BATCH_SIDE, PATHS, POSITIVE, SOME_TEXTS, TEXT};
use super::named::named;
use super::reader::Reader;
use super::table::table;
use super::writer;

const DATE: Kind<String> = Kind { allowed: "a day such as \"2024-07-26\"", read: date };

/// Leaves the choice of a token to the tokenizer.
const AUTO: &str = "auto";

const END_TOKEN: Kind<EndToken> =
    Kind { allowed: "\"auto\", a token (string) or an id from 0 to 4294967294", read: end_token };

const TOKEN: Kind<TokenRef> = Kind { allowed: "a token (string) or an id from 0 to 4294967294", read: token };

table! {
    /// The `[data]` table.
    pub struct DataConfig {
        /// Files and folders to train on, relative to the current directory. Files of tokens are mapped: they must not
        /// change during a run.
        train: Vec<String> = required_unless("source", SOME_TEXTS),
        /// Evaluation sets, in order; empty means no evaluation.
        eval: Vec<EvalSet> = eval_sets(),
        /// Number of steps between evaluations; 0 evaluates only after the last step.
        eval_every: u64 = or(COUNT, 100),
        /// Maximum number of global batches to evaluate of each set; 0 means all data.
        eval_batches: u64 = or(COUNT, 0),
        /// Format of the files.
        format: Format = named(Format::Auto),
        /// Field of JSON lines, or column of Parquet and Arrow files, with the document: a string, or a list of token ids.
        /// None means `messages`, `conversations`, `prompt` with `completion`, `text` or `input_ids`, whichever exists.
        column: Option<String> = or_none(TEXT),
        /// What to do with lines and rows without a document.
        malformed: Malformed = named(Malformed::Error),
        /// Maximum size of the content of a file, in times its size on disk; up to 256 MiB are always read.
        expansion_max: u64 = or(COUNT, 100),
        /// `"bytes"`, or the path of a Hugging Face `tokenizer.json`.
        tokenizer: String = or(TEXT, "bytes".to_owned()),
        /// Folder that caches tokens made by a `tokenizer.json`; none means `cache` in the output
        /// folder.
        cache: Option<String> = or_none(TEXT),
        /// Field of the prompt: a string, or a list of messages. None means `prompt`, with the answer in
        /// `completion`.
        prompt: Option<String> = or_none(TEXT),
        /// Field of the answer to the prompt; see `prompt`.
        completion: Option<String> = or_none(TEXT),
        /// File with the chat template of `messages`; none means the one next to the tokenizer.
        chat_template: Option<String> = or_none(TEXT),
        /// Date that a chat template gets as today's; none means that templates that ask for it fail.
        date: Option<String> = or_none(DATE),
        /// Tokens of `messages`, or of a `prompt` and `completion`, that count in the loss.
        loss_on: LossOn = named(LossOn::Answers),
        /// Whether the reasoning of the assistant's messages, in `<think>`, counts in the loss as their answers do.
        loss_on_reasoning: bool = or(BOOL, true),
        /// How documents become samples.
        packing: Packing = named(Packing::Stream),
        /// Token put before every document.
        bos: Option<EndToken> = unless_none(END_TOKEN, EndToken::Auto),
        /// Token put after every document.
        eos: Option<EndToken> = unless_none(END_TOKEN, EndToken::Auto),
        /// Token that pads short documents. Padding does not count in the loss, so the default, id 0, works with any vocabulary.
        pad: TokenRef = or(TOKEN, TokenRef::Id(0)),
        /// Input tokens per sample.
        seq_len: usize = required(MICRO_BATCH_SIDE),
        /// Whether to shuffle samples, differently in every epoch.
        shuffle: bool = or(BOOL, true),
        /// Seed of the shuffling.
        seed: u64 = or(COUNT, 0),
        /// Several weighted sources to train on, instead of `train`.
        source: Vec<SourceConfig> = tables("a list of tables [[data.source]]", SourceConfig::read),
    }
}

table! {
    /// A `[[data.source]]` table: files mixed with those of the other sources.
    pub struct SourceConfig {
        /// Files, folders and patterns.
        path: Vec<String> = required(PATHS),
        /// Its share of the samples, relative to the other sources.
        weight: f64 = or(POSITIVE, 1.0),
        /// Format of the files, if it differs from `data.format`.
        format: Format = named(Format::Auto),
        /// Field or column with the document, if it differs from `data.column`.
        column: Option<String> = or_none(TEXT),
    }
}

impl DataConfig {
    /// The folder for cached tokens inside an output folder, unless `data.cache` names another.
    pub const CACHE: &str = "cache";

    /// Returns the folder for cached tokens of a run with this output folder.
    pub fn cache_folder(&self, out_dir: &Path) -> PathBuf {
        self.cache.as_ref().map_or_else(|| out_dir.join(Self::CACHE), PathBuf::from)
    }

    /// Returns the sources of training data: `source`, or `train` as the only one.
    pub fn sources(&self) -> Vec<SourceConfig> {
        if !self.source.is_empty() {
            return self.source.clone();
        }
        let (format, column) = (self.format, self.column.clone());
        vec![SourceConfig { path: self.train.clone(), weight: 1.0, format, column }]
    }

    /// The dotted key of the training data.
    pub fn train_key(&self) -> &'static str {
        if self.source.is_empty() { "data.train" } else { "data.source" }
    }

    /// Returns the settings for reading the files of a source.
    pub fn of_source(&self, source: &SourceConfig) -> DataConfig {
        let format = if source.format == Format::Auto { self.format } else { source.format };
        let column = source.column.clone().or_else(|| self.column.clone());
        DataConfig { format, column, ..self.clone() }
    }

    /// All training and evaluation paths, as written in the run file.
    pub fn paths(&self) -> impl Iterator<Item = &String> {
        let sources = self.source.iter().flat_map(|source| &source.path);
        self.train.iter().chain(sources).chain(self.eval.iter().flat_map(|set| &set.paths))
    }
}

/// Format of data files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Chosen by file name: `.jsonl`, `.parquet`, `.arrow`, and text otherwise.
    Auto,
    /// UTF-8 text, one document per file.
    Text,
    /// One JSON object per line, its document under `data.column`.
    Jsonl,
    /// Apache Parquet, a document per row in the column `data.column`.
    Parquet,
    /// An Arrow stream, as `datasets` stores its data, a document per row in the column `data.column`.
    Arrow,
    /// Little-endian 16-bit token ids, one document per file.
    TokensU16,
    /// Little-endian 32-bit token ids, one document per file.
    TokensU32,
}

/// What to do with a record without a document: a line that is not JSON, a null row, or a value of another type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Malformed {
    /// Fail at the start of the run, naming the file and line.
    Error,
    /// Skip it and count it.
    Skip,
}

/// Which tokens of a conversation count in the loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum LossOn {
    /// The assistant's messages, including the token that ends a turn; of a prompt with its completion, the completion.
    Answers,
    /// As [`Answers`](LossOn::Answers), but only what the assistant says after the last message of the user that it
    /// answers.
    LastAnswer,
    /// All tokens.
    All,
}

/// How documents become samples.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Packing {
    /// Documents are concatenated and cut every `seq_len` tokens.
    Stream,
    /// One document per sample, truncated or padded.
    Documents,
    /// As many documents per sample as fit, also truncated. They do not attend to each other, and positions restart in
    /// each.
    Packed,
}

named! {
    Format {
        "auto": Auto, "text": Text, "jsonl": Jsonl, "parquet": Parquet, "arrow": Arrow,
        "tokens-u16": TokensU16, "tokens-u32": TokensU32
    }
    LossOn { "answers": Answers, "last-answer": LastAnswer, "all": All }
    Malformed { "error": Error, "skip": Skip }
    Packing { "stream": Stream, "documents": Documents, "packed": Packed }
}

/// A token, given by its id or its text.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum TokenRef {
    /// Token id.
    Id(u32),
    /// Text of the token, which the tokenizer must know as one token.
    Token(String),
}

/// The token at the start or the end of documents.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EndToken {
    /// The token that the tokenizer puts there, if any.
    Auto,
    /// A given token.
    Token(TokenRef),
}

impl EndToken {
    /// Returns the token that the run file gives; `None` for [`EndToken::Auto`].
    pub fn given(&self) -> Option<&TokenRef> {
        match self {
            EndToken::Auto => None,
            EndToken::Token(token) => Some(token),
        }
    }
}

impl Serialize for EndToken {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            EndToken::Auto => serializer.serialize_str(AUTO),
            EndToken::Token(token) => token.serialize(serializer),
        }
    }
}

impl ValueSchema for TokenRef {
    fn of(_: &Kind<TokenRef>) -> serde_json::Value {
        serde_json::json!({"type": ["string", "integer"]})
    }
}

impl ValueSchema for EndToken {
    fn of(_: &Kind<EndToken>) -> serde_json::Value {
        serde_json::json!({"type": ["string", "integer"]})
    }
}

fn end_token(value: &Value) -> Option<EndToken> {
    match value.as_str() {
        Some(AUTO) => Some(EndToken::Auto),
        _ => token(value).map(EndToken::Token),
    }
}

/// Rejects the largest id, because it marks targets that do not count in the loss.
fn token(value: &Value) -> Option<TokenRef> {
    match value {
        Value::String(text) if !text.is_empty() => Some(TokenRef::Token(text.clone())),
        Value::Integer(id) => u32::try_from(*id).ok().filter(|&id| id < u32::MAX).map(TokenRef::Id),
        _ => None,
    }
}

/// Reads a TOML date, or a string with one.
fn date(value: &Value) -> Option<String> {
    let text = value
        .as_str()
        .map_or_else(|| value.as_datetime().map(ToString::to_string), |text| Some(text.to_owned()))?;
    let date: Datetime = text.parse().ok()?;
    (date.date.is_some() && date.time.is_none()).then_some(text)
}
