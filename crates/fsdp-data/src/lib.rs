//! From files to batches: files, documents, tokens, samples, and the batches they go into.
//!
//! This crate is a part of [`fsdp`](https://docs.rs/fsdp), without a promise of stability: any version may change it.
//!
//! Everything is a function of the configuration and the files: no rank reads ahead, and no rank keeps a position. The
//! samples of a micro-batch follow from the step and the micro-batch index alone (`sampler.rs`), so that every world
//! size cuts the same global batches and a resumed run needs no state.

mod cache;
mod chat;
mod corpus;
mod dataset;
mod encoder;
mod error;
mod eval;
mod fetched;
mod files;
mod image;
mod loading;
#[expect(unsafe_code, reason = "the one module of this crate that may")]
mod mapped;
mod mix;
mod packed;
mod panics;
mod permutation;
mod pipeline;
mod preview;
mod progress;
mod record;
mod resolve_links;
mod role;
mod run_data;
mod sampler;
mod source;
mod special;
mod stamp;
mod survey;
#[cfg(test)]
mod testing;
mod text;
mod tokenizer;
mod tokens;
mod training;
mod warning;

pub use chat::contain_chat_templates;
pub use error::DataError;
pub use files::{is_data, missing};
pub use preview::Preview;
pub use progress::{Tokenizing, Watch};
pub use resolve_links::resolve_links;
pub use role::Role;
pub use run_data::{DataPosition, RunData};
pub use survey::{Outlook, Survey, Whole, lost, outlook, survey};
pub use tokenizer::{Tokenizer, TokenizerFault};
pub use training::{SourcePosition, SourceSummary, expect_shares};
pub use warning::DataWarning;
