//! Turns conversations into tokens: their text by the model's own chat template, and which tokens count in the loss.

mod answers;
mod conversation;
mod fault;
mod learned;
mod probe;
mod sharegpt;
#[cfg(not(feature = "tokenizers"))]
#[path = "chat/absent.rs"]
mod template;
#[cfg(feature = "tokenizers")]
mod template;
mod templates;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::OnceLock;

use fsdp_core::Digest;
use serde::Serialize;
use serde_json::Value;

pub(super) use conversation::{Conversation, context, messages};

use answers::{Answers, Tokenized};
use fault::RenderFault;
use template::ChatTemplate;
use templates::{Compiled, Templates};

use super::encoder::EncodeFault;
use super::error::DataError;
use super::tokenizer::Tokenizer;
use crate::config::{DataConfig, LossOn};

/// Names of the fields of a template's context that do not come from the record.
const MESSAGES: &str = "messages";
const TOOLS: &str = "tools";
const PROMPT: &str = "add_generation_prompt";

/// A rendered text, and which parts of it the assistant says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Rendered {
    /// The text.
    text: String,
    /// Byte ranges, in order, written by `{% generation %}` blocks.
    generated: Vec<Range<usize>>,
}

/// Tokens of a document, and whether each counts in the loss.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Marked {
    /// Token ids.
    pub(super) ids: Vec<u32>,
    /// Whether each token counts in the loss.
    pub(super) counts: Vec<bool>,
}

/// Turns conversations into tokens.
#[derive(Debug)]
pub(super) struct Chats {
    templates: Templates,
    /// Compiled on first use, because only data with conversations needs a template.
    compiled: OnceLock<Compiled>,
    loss_on: LossOn,
    /// Whether reasoning counts as answers do.
    counts_reasoning: bool,
    /// The tokens at which generation stops.
    stops: Vec<u32>,
}

impl Chats {
    /// Looks for the templates.
    ///
    /// # Errors
    /// If a template file exists but cannot be read.
    pub(super) fn find(config: &DataConfig, tokenizer: &Tokenizer) -> Result<Chats, DataError> {
        let templates = Templates::find(config, tokenizer.folder(), tokenizer.chat_template())?;
        let stops = tokenizer.stops();
        let counts_reasoning = config.loss_on_reasoning;
        Ok(Chats { templates, compiled: OnceLock::new(), loss_on: config.loss_on, counts_reasoning, stops })
    }

    /// Which tokens count in the loss.
    pub(super) fn loss_on(&self) -> LossOn {
        self.loss_on
    }

    /// Digest of everything besides the tokenizer that determines the tokens of a conversation.
    pub(super) fn digest(&self) -> Digest {
        self.templates.digest().and(&(self.loss_on, self.counts_reasoning, &self.stops))
    }

    /// Returns the tokens of a conversation, and whether its answers end with no token that stops generation.
    ///
    /// # Errors
    /// [`EncodeFault`].
    pub(super) fn encode(
        &self,
        conversation: &Conversation,
        tokenizer: &Tokenizer,
    ) -> Result<(Marked, bool), EncodeFault> {
        let compiled = match self.compiled.get() {
            Some(compiled) => compiled,
            // If two threads get here, both compile the same templates and the first result is kept.
            None => {
                let compiled = self.templates.compile()?;
                self.compiled.get_or_init(|| compiled)
            }
        };
        let template = compiled.select(conversation.context.contains_key(TOOLS));
        let chat = Chat { chats: self, template, tokenizer, conversation };
        let rendered = chat.render(&conversation.messages, false).map_err(|fault| fault.to_string())?;
        let tokenized = chat.tokenize(&rendered.text)?;
        let Answers { counts, is_open } = answers::find(&chat, &rendered, &tokenized)?;
        // Bytes have no special tokens.
        Ok((Marked { ids: tokenized.tokens.ids, counts }, is_open && tokenizer.digest().is_some()))
    }
}

/// A conversation with its template and tokenizer.
struct Chat<'a> {
    chats: &'a Chats,
    template: &'a ChatTemplate,
    tokenizer: &'a Tokenizer,
    conversation: &'a Conversation,
}

/// The variables of a template.
#[derive(Serialize)]
struct Context<'a> {
    messages: &'a [Value],
    add_generation_prompt: bool,
    #[serde(flatten)]
    others: BTreeMap<&'a str, &'a Value>,
}

impl Chat<'_> {
    /// Renders messages, followed by the prompt for an answer if `prompt` is set.
    fn render(&self, messages: &[Value], prompt: bool) -> Result<Rendered, RenderFault> {
        // As in transformers, a record's own values override special tokens of the same name.
        let absent = [(TOOLS, &Value::Null), ("documents", &Value::Null)];
        let special = self.tokenizer.special_tokens();
        let variables =
            special.iter().chain(&self.conversation.context).map(|(name, value)| (name.as_str(), value));
        let mut others: BTreeMap<&str, &Value> = absent.into_iter().chain(variables).collect();
        others.retain(|name, _| ![MESSAGES, PROMPT].contains(name));
        self.template.render(&Context { messages, add_generation_prompt: prompt, others })
    }

    /// Tokenizes a rendered text. The template has already written the tokens that begin and end it.
    fn tokenize<'t>(&'t self, text: &'t str) -> Result<Tokenized<'t>, String> {
        let tokens = self.tokenizer.encode_with_offsets(text);
        let tokens = tokens.map_err(|fault| format!("it cannot be tokenized: {fault}"))?;
        Ok(Tokenized { text, tokens, tokenizer: self.tokenizer })
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
mod tests;
