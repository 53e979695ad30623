//! The `[data]` table: what is read, how it becomes tokens, and how tokens become samples.

use serde::{Serialize, Serializer};
use toml::Value;
use toml::value::Datetime;

use super::error::ConfigError;
use super::eval::EvalSet;
use super::kind::{BOOL, COUNT, Kind, MICRO_BATCH_SIDE, PATHS, POSITIVE, SOME_TEXTS, TEXT};
use super::named::named;
use super::reader::Reader;
use super::table::table;
use super::written;

const DATE: Kind<String> = Kind { allowed: "a day such as \"2024-07-26\"", read: date };

/// What the tokenizer does.
const AUTO: &str = "auto";

const END_TOKEN: Kind<EndToken> =
    Kind { allowed: "\"auto\", a token (string) or an id from 0 to 4294967294", read: end_token };

const TOKEN: Kind<TokenRef> = Kind { allowed: "a token (string) or an id from 0 to 4294967294", read: token };

table! {
    /// The `[data]` table.
    pub struct DataConfig {
        /// Files and folders to train on, relative to the current directory. Files of tokens are mapped: they must not
        /// change during a run.
        train: Vec<String> = unless("source", SOME_TEXTS),
        /// What is evaluated on, in this order; nothing means no evaluation.
        eval: Vec<EvalSet> = eval_sets(),
        /// Evaluate after every so many steps; 0 means only after the last.
        eval_every: u64 = or(COUNT, 100),
        /// Evaluate on at most so many global batches of each set; 0 means on all data.
        eval_batches: u64 = or(COUNT, 0),
        /// What the files hold.
        format: Format = named(Format::Auto),
        /// The field of JSON lines, or the column of Parquet and Arrow files, with the document: a string, or a list of token ids. None
        /// means `text`, else `input_ids`.
        column: Option<String> = or_none(TEXT),
        /// What becomes of lines and rows that hold no document.
        malformed: Malformed = named(Malformed::Error),
        /// `"bytes"`, or the path of a Hugging Face `tokenizer.json`.
        tokenizer: String = or(TEXT, "bytes".to_owned()),
        /// The folder where the tokens that a `tokenizer.json` makes of text are kept for later starts; none means `cache`
        /// in the output folder.
        cache: Option<String> = or_none(TEXT),
        /// The fields of a prompt and of what is to follow it: strings, or lists of messages. None means `prompt` and
        /// `completion`.
        prompt: Option<String> = or_none(TEXT),
        /// See `prompt`.
        completion: Option<String> = or_none(TEXT),
        /// A file with the chat template of `messages`; none means the one that lies beside the tokenizer.
        chat_template: Option<String> = or_none(TEXT),
        /// The day that a chat template hears when it asks for today's date; none means that it can not ask.
        date: Option<String> = or_none(DATE),
        /// Which tokens of `messages`, and of a `prompt` with its `completion`, count in the loss.
        loss_on: LossOn = named(LossOn::Answers),
        /// How documents become samples.
        packing: Packing = named(Packing::Stream),
        /// Put before every document.
        bos: Option<EndToken> = unless_none(END_TOKEN, EndToken::Auto),
        /// Put after every document.
        eos: Option<EndToken> = unless_none(END_TOKEN, EndToken::Auto),
        /// Fills short documents. Padded positions do not count, so the default, id 0, serves any vocabulary.
        pad: TokenRef = or(TOKEN, TokenRef::Id(0)),
        /// Inputs per sample.
        seq_len: usize = required(MICRO_BATCH_SIDE),
        /// Whether samples are permuted, anew in every epoch.
        shuffle: bool = or(BOOL, true),
        /// Seed of the permutations.
        seed: u64 = or(COUNT, 0),
        /// Several sources to train on, instead of `train`.
        source: Vec<SourceConfig> = tables("a list of tables [[data.source]]", SourceConfig::read),
    }
}

table! {
    /// A `[[data.source]]` table: files that are mixed with those of other sources.
    pub struct SourceConfig {
        /// Files, folders and patterns.
        path: Vec<String> = required(PATHS),
        /// Its part of the samples, in proportion to those of the other sources.
        weight: f64 = or(POSITIVE, 1.0),
        /// What the files hold, if it is not as `data.format` says.
        format: Format = named(Format::Auto),
        /// The field or column with the document, if it is not that of `data.column`.
        column: Option<String> = or_none(TEXT),
    }
}

impl DataConfig {
    /// The sources of training data: those of `source`, or `train` as the only one.
    pub fn sources(&self) -> Vec<SourceConfig> {
        if !self.source.is_empty() {
            return self.source.clone();
        }
        let (format, column) = (self.format, self.column.clone());
        vec![SourceConfig { path: self.train.clone(), weight: 1.0, format, column }]
    }

    /// The key of what is trained on, dotted.
    pub(crate) fn train_key(&self) -> &'static str {
        if self.source.is_empty() { "data.train" } else { "data.source" }
    }

    /// How the files of a source are read.
    pub fn of_source(&self, source: &SourceConfig) -> DataConfig {
        let format = if source.format == Format::Auto { self.format } else { source.format };
        let column = source.column.clone().or_else(|| self.column.clone());
        DataConfig { format, column, ..self.clone() }
    }

    /// All paths that are trained or evaluated on, as the run file has them.
    pub fn paths(&self) -> impl Iterator<Item = &String> {
        let sources = self.source.iter().flat_map(|source| &source.path);
        self.train.iter().chain(sources).chain(self.eval.iter().flat_map(|set| &set.paths))
    }
}

/// What data files hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// What their names say: `.jsonl`, `.parquet`, `.arrow`, and text otherwise.
    Auto,
    /// UTF-8 text, one document per file.
    Text,
    /// One JSON object per line, its document under `data.column`.
    Jsonl,
    /// Apache Parquet, a document per row in the column `data.column`.
    Parquet,
    /// A stream of Arrow, as `datasets` keeps its data, a document per row in the column `data.column`.
    Arrow,
    /// Little-endian 16-bit token ids, one document per file.
    TokensU16,
    /// Little-endian 32-bit token ids, one document per file.
    TokensU32,
}

/// What becomes of a record without a document: a line that is no JSON, a row that is null, a value of another type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Malformed {
    /// It ends the start, named by file and line.
    Error,
    /// It is left out, and counted.
    Skip,
}

/// Which tokens of a conversation count in the loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LossOn {
    /// What the assistant says, with the token that ends its turn; of a prompt with its completion, the completion.
    Answers,
    /// All.
    All,
}

/// How documents become samples.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Packing {
    /// Documents joined, cut every `seq_len` tokens.
    Stream,
    /// One document per sample: clipped, or padded.
    Documents,
    /// As many documents per sample as fit, clipped as well; they do not see each other, and positions begin anew in each.
    Packed,
}

named! {
    Format {
        "auto": Auto, "text": Text, "jsonl": Jsonl, "parquet": Parquet, "arrow": Arrow,
        "tokens-u16": TokensU16, "tokens-u32": TokensU32
    }
    LossOn { "answers": Answers, "all": All }
    Malformed { "error": Error, "skip": Skip }
    Packing { "stream": Stream, "documents": Documents, "packed": Packed }
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

/// The token at an end of a document.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EndToken {
    /// The one that the tokenizer puts there, if it does.
    Auto,
    /// A token.
    Token(TokenRef),
}

impl EndToken {
    /// The token, if it is the user who says which.
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

fn end_token(value: &Value) -> Option<EndToken> {
    match value.as_str() {
        Some(AUTO) => Some(EndToken::Auto),
        _ => token(value).map(EndToken::Token),
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

/// A date of TOML, or the same as a string.
fn date(value: &Value) -> Option<String> {
    let text = value
        .as_str()
        .map_or_else(|| value.as_datetime().map(ToString::to_string), |text| Some(text.to_owned()))?;
    let date: Datetime = text.parse().ok()?;
    (date.date.is_some() && date.time.is_none()).then_some(text)
}
