//! The text of a conversation, and where its answers are.
//!
//! All of this happens before tokenizing, and where the template runs: see [`contained`](super::contained).

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::Range;

use fsdp_config::LossOn;
use serde::{Deserialize, Serialize};
use serde_json::{Deserializer, Value};

use super::conversation::{Conversation, MESSAGES, PROMPT, TOOLS};
use super::fault::{RenderFault, ScriptFault};
use super::probe::Probe;
use super::rendered::Rendered;
use super::said::Said;
use super::setup::Setup;
use super::template::{self, ChatTemplate, Prepared};
use super::templates::Compiled;

/// A text, and the byte ranges in it that the loss depends on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Script {
    /// The text of the whole conversation.
    pub(super) text: String,
    /// What the model learns to say: answers, or `{% generation %}` blocks.
    pub(super) learned: Vec<Said>,
    /// Whether these are blocks, which the template has chosen.
    pub(super) has_blocks: bool,
    /// Answers that it does not learn.
    pub(super) left_out: Vec<Said>,
    /// The end of the last answer.
    pub(super) last: Last,
}

/// The end of the last answer of a conversation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Last {
    /// There is no answer.
    None,
    /// It is the end of the text.
    End {
        /// Whether the answer counts in the loss.
        counts: bool,
    },
    /// Something follows it. Without that the text is this one, if the template renders it.
    Followed(Option<String>),
}

/// A conversation with its template.
pub(super) struct Chat<'a> {
    pub(super) setup: &'a Setup,
    template: &'a ChatTemplate,
    pub(super) conversation: &'a Conversation,
    /// The messages, as the template engine holds them.
    pub(super) messages: Vec<Prepared>,
    /// The other variables of the template.
    others: BTreeMap<&'a str, Prepared>,
    /// Set if the template has exceeded the limit on instructions, even where another text would do.
    excess: RefCell<Option<RenderFault>>,
}

/// Parts of a text, in bytes.
type Spans = Vec<Said>;

/// The variables of a template.
#[derive(Serialize)]
struct Context<'a> {
    messages: &'a [Prepared],
    add_generation_prompt: bool,
    #[serde(flatten)]
    others: &'a BTreeMap<&'a str, Prepared>,
}

impl Setup {
    /// Returns the script of a conversation, which is given as JSON, by the compiled templates.
    ///
    /// # Errors
    /// [`ScriptFault`].
    pub(super) fn script(&self, compiled: &Compiled, conversation: &[u8]) -> Result<Script, ScriptFault> {
        let mut json = Deserializer::from_slice(conversation);
        // This program has written it. JSON strings within were parsed, so it may nest deeper than what can be read.
        json.disable_recursion_limit();
        let conversation = Conversation::deserialize(&mut json);
        let conversation = conversation.map_err(|fault| ScriptFault::Record(fault.to_string()))?;
        let template = compiled.select(conversation.context.contains_key(TOOLS));
        Script::of(&conversation, template, self)
    }
}

impl Script {
    /// Renders a conversation.
    ///
    /// # Errors
    /// [`ScriptFault`].
    fn of(
        conversation: &Conversation,
        template: &ChatTemplate,
        setup: &Setup,
    ) -> Result<Script, ScriptFault> {
        let chat = Chat::new(conversation, template, setup);
        let script = chat.script();
        match chat.excess.into_inner() {
            Some(excess) => Err(ScriptFault::Excess(excess.to_string())),
            None => script.map_err(ScriptFault::Record),
        }
    }
}

impl<'a> Chat<'a> {
    fn new(conversation: &'a Conversation, template: &'a ChatTemplate, setup: &'a Setup) -> Chat<'a> {
        // As in transformers, a record's own values override special tokens of the same name.
        let absent = [(TOOLS, &Value::Null), ("documents", &Value::Null)];
        let variables = setup.special.iter().chain(&conversation.context);
        let variables = variables.map(|(name, value)| (name.as_str(), value));
        let mut others: BTreeMap<&str, &Value> = absent.into_iter().chain(variables).collect();
        others.retain(|name, _| ![MESSAGES, PROMPT].contains(name));
        let others = others.into_iter().map(|(name, value)| (name, template::prepare(value))).collect();
        let messages = conversation.messages.iter().map(template::prepare).collect();
        Chat { setup, template, conversation, messages, others, excess: RefCell::default() }
    }

    /// Renders messages, followed by the prompt for an answer if `prompt` is set.
    pub(super) fn render(&self, messages: &[Prepared], prompt: bool) -> Result<Rendered, RenderFault> {
        if let Some(excess) = &*self.excess.borrow() {
            return Err(excess.clone());
        }
        let context = Context { messages, add_generation_prompt: prompt, others: &self.others };
        let rendered = self.template.render(&context);
        if rendered == Err(RenderFault::Endless) {
            self.excess.replace(Some(RenderFault::Endless));
        }
        rendered
    }

    /// Renders the conversation, and finds its answers.
    ///
    /// A template with `{% generation %}` blocks marks the answers itself. For other templates, the text is rendered up
    /// to and including message i, and up to the prompt for message i. If both are prefixes of the whole text, the
    /// answer is the difference. Otherwise a [`Probe`] finds it.
    fn script(&self) -> Result<Script, String> {
        let Setup { loss_on, counts_reasoning, .. } = *self.setup;
        self.conversation.check_marks(loss_on)?;
        let whole = self.render(&self.messages, false).map_err(|fault| fault.to_string())?;
        let answers = self.conversation.answers(loss_on);
        let spans = |wanted: bool| -> Result<Spans, String> {
            let wanted = answers.iter().filter(|(_, counts)| *counts == wanted);
            wanted.map(|&(index, _)| self.answer(&whole.text, index)).collect()
        };
        let has_blocks = loss_on != LossOn::All && self.template.has_generation();
        let (left_out, learned) = if loss_on == LossOn::All {
            // Of answers that count, only the reasoning may be left out.
            (spans(false)?, if counts_reasoning { Vec::new() } else { spans(true)? })
        } else if has_blocks {
            self.blocks(&whole, &answers, spans)?
        } else {
            (Vec::new(), spans(true)?)
        };
        let last = match answers.last() {
            None => Last::None,
            Some(&(index, counts)) if index + 1 == self.messages.len() => Last::End { counts },
            Some(&(index, _)) => {
                Last::Followed(self.render(&self.messages[..=index], false).ok().map(|up_to| up_to.text))
            }
        };
        Ok(Script { text: whole.text, learned, has_blocks, left_out, last })
    }

    /// Returns the answers that are left out, unless the blocks alone tell which these are, and the `{% generation %}`
    /// blocks after the prompt.
    fn blocks(
        &self,
        whole: &Rendered,
        answers: &[(usize, bool)],
        spans: impl Fn(bool) -> Result<Spans, String>,
    ) -> Result<(Spans, Spans), String> {
        let prompt = self.conversation.prompt;
        let start = if prompt == 0 { 0 } else { self.answer_start(&whole.text, prompt)? };
        let blocks = whole.generated.iter().filter(|bytes| bytes.start >= start);
        let blocks: Vec<Range<usize>> = blocks.cloned().collect();
        if blocks.len() != answers.len() {
            let indices: Vec<usize> = answers.iter().map(|(index, _)| *index).collect();
            return Ok((spans(false)?, Said::parts(self, &whole.text, &blocks, &indices)));
        }
        let counted = blocks.iter().zip(answers).filter(|(_, (_, counts))| *counts);
        let block = |(bytes, (index, _)): (_, &(usize, bool))| Said::block(self, &whole.text, bytes, *index);
        Ok((Vec::new(), counted.map(block).collect()))
    }

    /// Returns the text of an answer: between the prompt for it and the end of its message.
    fn answer(&self, whole: &str, index: usize) -> Result<Said, String> {
        let start = self.answer_start(whole, index)?;
        let partial = match index + 1 == self.messages.len() {
            true => Ok(whole.to_owned()),
            false => self.render(&self.messages[..=index], false).map(|partial| partial.text),
        };
        match partial {
            Ok(partial) if whole.starts_with(&partial) && start <= partial.len() => {
                Ok(Said::last(self, &partial, start, index))
            }
            other => Probe { chat: self, whole, index }.said(start).ok_or_else(|| {
                let differently = |_| "the chat template renders it differently as the last one".to_owned();
                let cause = other
                    .map_or_else(|fault| format!("with only the messages up to it, {fault}"), differently);
                undetermined(index, &cause)
            }),
        }
    }

    /// Returns where the text of an answer starts: after the prompt for it.
    fn answer_start(&self, whole: &str, index: usize) -> Result<usize, String> {
        self.prompt_len(whole, index).or_else(|cause| {
            Probe { chat: self, whole, index }.start().ok_or_else(|| undetermined(index, &cause))
        })
    }

    /// Returns the length of the text up to an answer, if the whole text starts with the prompt for it.
    fn prompt_len(&self, whole: &str, index: usize) -> Result<usize, String> {
        if index == 0 {
            return Err("no message precedes it".to_owned());
        }
        let prompt = self.render(&self.messages[..index], true);
        let prompt = prompt.map_err(|fault| format!("with only the messages before it, {fault}"))?.text;
        match whole.starts_with(&prompt) {
            true => Ok(prompt.len()),
            false => {
                Err("without it, the chat template renders the messages before it differently".to_owned())
            }
        }
    }
}

fn undetermined(index: usize, cause: &str) -> String {
    let message = index + 1;
    format!(
        "cannot tell which tokens of message {message} are the answer: {cause}. Mark them in the template by \
         {{% generation %}} (data.chat_template can name another template), or count all tokens: \
         data.loss_on = \"all\""
    )
}
