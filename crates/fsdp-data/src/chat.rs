//! Turns conversations into tokens: their text by the model's own chat template, and which tokens count in the loss.

mod answers;
mod contained;
mod conversation;
mod fault;
mod learned;
mod probe;
mod rendered;
mod said;
mod script;
mod setup;
mod sharegpt;
#[cfg(not(feature = "tokenizers"))]
#[path = "chat/absent.rs"]
mod template;
#[cfg(feature = "tokenizers")]
mod template;
mod templates;

use std::ffi::OsString;
use std::ops::Range;
use std::sync::{Mutex, OnceLock};

use fsdp_config::{DataConfig, LossOn};
use fsdp_core::Digest;

pub(super) use contained::Scripts;
pub use contained::contain_chat_templates;
pub(super) use conversation::{Conversation, context, messages};
pub(super) use fault::EncodeFault;
pub(super) use script::Script;

use answers::{Answers, Tokenized};
use contained::{Limits, Process};
use setup::Setup;
use templates::{Compiled, Templates};

use super::error::DataError;
use super::tokenizer::Tokenizer;

/// Tokens of a document, and whether each counts in the loss.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Marked {
    /// Token ids.
    pub(super) ids: Vec<u32>,
    /// Whether each token counts in the loss.
    pub(super) counts: Vec<bool>,
}

/// Turns conversations into tokens: first into [scripts](Chats::scripts), then those into [tokens](Chats::tokens).
#[derive(Debug)]
pub(super) struct Chats {
    setup: Setup,
    /// The tokens at which generation stops.
    stops: Vec<u32>,
    /// The arguments of the processes in which templates run; `None` if there are none, so only tests run templates.
    worker: Option<&'static [OsString]>,
    limits: Limits,
    /// Such processes that have nothing to do.
    idle: Mutex<Vec<Process>>,
    /// The templates of this process, which are compiled on first use.
    compiled: OnceLock<Compiled>,
}

impl Chats {
    /// Looks for the templates.
    ///
    /// # Errors
    /// If a template file exists but cannot be read.
    pub(super) fn find(config: &DataConfig, tokenizer: &Tokenizer) -> Result<Chats, DataError> {
        let stops = tokenizer.stops();
        let texts = stops.iter().filter_map(|&stop| tokenizer.decode(&[stop]).ok());
        let setup = Setup {
            templates: Templates::find(config, tokenizer.folder(), tokenizer.chat_template())?,
            special: tokenizer.special_tokens().clone(),
            stops: texts.filter(|text| !text.trim().is_empty()).collect(),
            loss_on: config.loss_on,
            counts_reasoning: config.loss_on_reasoning,
        };
        Ok(Chats {
            setup,
            stops,
            worker: contained::arguments(),
            limits: Limits::USUAL,
            idle: Mutex::default(),
            compiled: OnceLock::new(),
        })
    }

    /// Which tokens count in the loss.
    pub(super) fn loss_on(&self) -> LossOn {
        self.setup.loss_on
    }

    /// Digest of everything besides the tokenizer that determines the tokens of a conversation.
    pub(super) fn digest(&self) -> Digest {
        let Setup { templates, loss_on, counts_reasoning, .. } = &self.setup;
        templates.digest().and(&(loss_on, counts_reasoning, &self.stops))
    }

    /// Returns the scripts of conversations, which are given as JSON.
    ///
    /// # Errors
    /// If the templates do not compile, or if they cannot run.
    pub(super) fn scripts<'a>(&'a self, conversations: Vec<&'a [u8]>) -> Result<Scripts<'a>, DataError> {
        Scripts::of(self, conversations)
    }

    /// Returns the tokens of a conversation, and whether its answers end with no token that stops generation.
    ///
    /// # Errors
    /// A description, if the text cannot be tokenized.
    pub(super) fn tokens(&self, script: &Script, tokenizer: &Tokenizer) -> Result<(Marked, bool), String> {
        // The template has already written the tokens that begin and end the text.
        let tokens = tokenizer.encode_with_offsets(&script.text);
        let tokens = tokens.map_err(|fault| format!("it cannot be tokenized: {fault}"))?;
        let tokenized = Tokenized { text: &script.text, tokens, tokenizer, stops: &self.stops };
        let Answers { counts, is_open } = answers::find(script, &tokenized, &self.setup);
        // Bytes have no special tokens.
        Ok((Marked { ids: tokenized.tokens.ids, counts }, is_open && tokenizer.digest().is_some()))
    }

    /// An error of the templates, which names where they come from.
    pub(super) fn template_fault(&self, reason: String) -> DataError {
        self.setup.templates.fault(reason)
    }

    fn compiled(&self) -> Result<&Compiled, DataError> {
        if let Some(compiled) = self.compiled.get() {
            return Ok(compiled);
        }
        let compiled = self.setup.templates.compile().map_err(|reason| self.template_fault(reason))?;
        // If two threads get here, both compile the same templates and the first result is kept.
        Ok(self.compiled.get_or_init(|| compiled))
    }
}

/// Tokenizes a prompt and its completion as plain text; only the completion counts, unless all tokens do.
///
/// # Errors
/// A description, if the text cannot be tokenized.
pub(super) fn completion(
    prompt: &str,
    completion: &str,
    loss_on: LossOn,
    tokenizer: &Tokenizer,
) -> Result<Marked, String> {
    let text = format!("{prompt}{completion}");
    let tokens =
        tokenizer.encode_with_offsets(&text).map_err(|fault| format!("it cannot be tokenized: {fault}"))?;
    let is_learned = |token: &Range<usize>| loss_on == LossOn::All || token.end > prompt.len();
    let counts = tokens.offsets.iter().map(is_learned).collect();
    Ok(Marked { ids: tokens.ids, counts })
}

#[cfg(test)]
#[cfg(feature = "tokenizers")]
mod tests;
