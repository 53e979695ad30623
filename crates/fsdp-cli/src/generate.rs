//! `fsdp generate`.

use std::sync::Arc;
use std::time::{Duration, Instant};

use fsdp_data::Tokenizer;
use fsdp_nn::model::{Architecture, Session};
use fsdp_nn::sampling::Sampling;
use fsdp_nn::{HostMemory, HostOptions};
use fsdp_train::TrainError;
use fsdp_train::generate::{GenerateOptions, ends, generate_tokens, load};
use serde_json::json;

use crate::args::GenerateArgs;
use crate::device::host::total_threads;
use crate::error::CliError;
use crate::run_setup::{expect_model, read_model};
use crate::units::rate;
use crate::{logging, output};

/// Vocabulary size of a model whose tokens are bytes.
const BYTES: usize = 256;

/// Continues a text with a model, printing tokens as they are generated.
///
/// # Errors
/// [`CliError`]: the input is wrong, or the weights cannot be read.
pub(crate) fn run(args: &GenerateArgs) -> Result<(), CliError> {
    logging::install(None)?;
    expect_model("MODEL_DIR", &args.model, ", such as the folder `model` of a run")?;
    let model = read_model(&args.model)?.build().map_err(TrainError::from)?;
    let vocab = model.head().vocab;
    let tokenizer = tokenizer(args, vocab)?;
    let prompt = prompt(args, tokenizer.as_ref(), vocab)?;
    let length = prompt.len() + args.max_new_tokens;
    if let Some(positions) = model.positions_max().filter(|&positions| length > positions) {
        let what = format!(
            "{} after a prompt of {} exceed the model's {positions} positions; give fewer",
            args.max_new_tokens,
            prompt.len()
        );
        return Err(CliError::Option { option: "--max-new-tokens", what });
    }
    let sampling = args.temperature.map(|temperature| Sampling {
        temperature,
        top_k: args.top_k,
        top_p: args.top_p,
        seed: args.seed,
    });
    let ends = ends(&args.model, tokenizer.as_ref())?;
    let generate_options = GenerateOptions { max_new_tokens: args.max_new_tokens, sampling, ends };
    let options = HostOptions { threads: total_threads(0), ..HostOptions::default() };
    let memory = Arc::new(HostMemory::new(options).map_err(TrainError::from)?);
    let weights = load(&memory, &args.model, &model, args.dtype)?;
    let mut session = Session::new(memory, model, &weights, length).map_err(TrainError::from)?;
    let mut printer = TokenPrinter {
        args,
        tokenizer: tokenizer.as_ref(),
        options: &generate_options,
        tokens: Vec::new(),
        printed: 0,
    };
    let (begin, mut first, mut print_result) = (Instant::now(), None, Ok(()));
    let tokens = generate_tokens(&mut session, &prompt, &generate_options, |token| {
        first.get_or_insert_with(|| begin.elapsed());
        if print_result.is_ok() {
            print_result = printer.print_token(token);
        }
    })?;
    print_result?;
    printer.finish(&prompt, &tokens, [first.unwrap_or_default(), begin.elapsed()])
}

/// The tokenizer in the model's folder, if any; bytes if the vocabulary has 256 tokens.
fn tokenizer(args: &GenerateArgs, vocab: usize) -> Result<Option<Tokenizer>, CliError> {
    let file = args.model.join("tokenizer.json");
    let name = match file.exists() {
        true => file.display().to_string(),
        false if vocab == BYTES => "bytes".to_owned(),
        false => return Ok(None),
    };
    // Tokens in, tokens out needs no tokenizer, so a build without tokenizers supports it.
    let is_needed = args.prompt.is_some() || cfg!(feature = "tokenizers");
    Ok(is_needed.then(|| Tokenizer::load(&name)).transpose()?)
}

fn prompt(args: &GenerateArgs, tokenizer: Option<&Tokenizer>, vocab: usize) -> Result<Vec<u32>, CliError> {
    let (option, ids) = match (&args.prompt, tokenizer) {
        (None, _) => ("--prompt-ids", args.prompt_ids.clone()),
        (Some(text), Some(tokenizer)) => ("--prompt", tokenizer.prompt(text)?),
        (Some(_), None) => {
            let what = format!("{} has no tokenizer.json; give --prompt-ids", args.model.display());
            return Err(CliError::Option { option: "--prompt", what });
        }
    };
    let failed = |what: String| Err(CliError::Option { option, what });
    if ids.is_empty() {
        return failed("it has no tokens; a model needs at least one to continue".to_owned());
    }
    match ids.iter().find(|&&id| id as usize >= vocab) {
        Some(id) => failed(format!("it has token {id}, but the model has only {vocab} tokens")),
        None => Ok(ids),
    }
}

/// The output so far.
struct TokenPrinter<'a> {
    args: &'a GenerateArgs,
    tokenizer: Option<&'a Tokenizer>,
    options: &'a GenerateOptions,
    tokens: Vec<u32>,
    /// Bytes of the text that are printed.
    printed: usize,
}

impl TokenPrinter<'_> {
    /// Prints the text that a token adds; characters with missing bytes are held back.
    fn print_token(&mut self, token: u32) -> Result<(), CliError> {
        if self.args.json || self.options.ends.contains(&token) {
            return Ok(());
        }
        self.tokens.push(token);
        let Some(text) = self.text(&self.tokens)? else { return Ok(()) };
        let complete_len = text.trim_end_matches(char::REPLACEMENT_CHARACTER).len();
        if complete_len > self.printed {
            output::print(&text[self.printed..complete_len])?;
            self.printed = complete_len;
        }
        Ok(())
    }

    fn finish(&self, prompt: &[u32], tokens: &[u32], [first, total]: [Duration; 2]) -> Result<(), CliError> {
        let is_ended = tokens.last().is_some_and(|last| self.options.ends.contains(last));
        let text = self.text(&tokens[..tokens.len() - usize::from(is_ended)])?;
        #[expect(clippy::cast_precision_loss, reason = "numbers for people")]
        let speed = (tokens.len() - 1) as f64 / (total - first).as_secs_f64().max(1e-9);
        if self.args.json {
            let stopped = if is_ended { "end token" } else { "max_new_tokens" };
            let report = json!({
                "prompt_ids": prompt, "tokens": tokens, "text": text, "stopped_by": stopped,
                "first_token_s": first.as_secs_f64(), "tokens_per_s": speed,
            });
            return output::print(&format!("{report:#}\n"));
        }
        let rest = match text {
            Some(text) => text.get(self.printed..).unwrap_or_default().to_owned(),
            None => tokens.iter().map(u32::to_string).collect::<Vec<_>>().join(","),
        };
        output::print(&format!("{rest}\n"))?;
        output::note(&format!("{} tokens, {} tokens/s after the first", tokens.len(), rate(speed)));
        Ok(())
    }

    fn text(&self, tokens: &[u32]) -> Result<Option<String>, CliError> {
        Ok(self.tokenizer.map(|tokenizer| tokenizer.text(tokens)).transpose()?)
    }
}
