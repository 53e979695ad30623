//! Arguments of `fsdp generate`.

use std::path::PathBuf;

use clap::Args as ClapArgs;
use fsdp_core::DType;

use super::values::{DTYPES, one_of, positive};

/// `fsdp generate`.
#[derive(Debug, ClapArgs)]
#[command(
    after_help = "To see what a run has learned: one text, in one process, on this machine's CPU. The model is a
Hugging Face directory, or the model/ that a run exports. The likeliest token is taken, unless
--temperature is given; the same seed gives the same text. It ends with the model's end token
(generation_config.json, config.json or the tokenizer) or after --max-new-tokens.

Text needs a tokenizer.json beside the model, or a model of 256 tokens, which are bytes.

Examples:
  fsdp generate runs/quickstart/model --prompt 'fn main() {'
  fsdp generate runs/a/model --prompt 'Once' --temperature 0.8 --top-p 0.95 --seed 7
  fsdp generate runs/a/model --prompt-ids 1,15043,3186 --json"
)]
pub(crate) struct GenerateArgs {
    /// The model
    #[arg(value_name = "MODEL_DIR")]
    pub(crate) model: PathBuf,
    /// The text to continue
    #[arg(long, value_name = "TEXT", required_unless_present = "prompt_ids")]
    pub(crate) prompt: Option<String>,
    /// Its token IDs, instead of --prompt
    #[arg(long, value_name = "ID,ID,...", value_delimiter = ',', conflicts_with = "prompt")]
    pub(crate) prompt_ids: Vec<u32>,
    /// Maximum number of tokens to add
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = positive)]
    pub(crate) max_new_tokens: usize,
    /// Sample tokens, with logits divided by this
    #[arg(long, value_name = "T", value_parser = above_zero)]
    pub(crate) temperature: Option<f64>,
    /// Sample from the likeliest tokens that together have this probability
    #[arg(long, value_name = "P", value_parser = share, requires = "temperature")]
    pub(crate) top_p: Option<f64>,
    /// Sample from this many of the likeliest tokens
    #[arg(long, value_name = "K", value_parser = positive, requires = "temperature")]
    pub(crate) top_k: Option<usize>,
    /// Seed of the samples
    #[arg(long, value_name = "S", default_value_t = 0, requires = "temperature")]
    pub(crate) seed: u64,
    /// Dtype of weights and of compute
    #[arg(long, value_name = "DTYPE", value_parser = one_of(&DTYPES), default_value = "f32")]
    pub(crate) dtype: DType,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

fn above_zero(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|number: &f64| *number > 0.0 && number.is_finite());
    number.ok_or_else(|| {
        "expected a number above 0; without the option the likeliest token is taken".to_owned()
    })
}

fn share(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|number: &f64| *number > 0.0 && *number <= 1.0);
    number.ok_or_else(|| "expected a number above 0 and at most 1".to_owned())
}
