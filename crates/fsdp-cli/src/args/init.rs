//! Arguments of `fsdp init`.

use std::path::PathBuf;

use clap::Args as ClapArgs;
use fsdp_config::Device;

use super::values::{DEVICES, one_of, positive};

/// `fsdp init`.
#[derive(Debug, ClapArgs)]
#[command(
    after_help = "The run file has comments, and the keys that people change; all others have defaults. It trains
the whole model if the directory has weights, and new weights if it has only config.json. The
tokenizer is the directory's tokenizer.json, or bytes. The kind of data is detected from its name
and first records: conversations are packed, with the loss on answers; text is one stream.

At a terminal, init asks for what options leave open; elsewhere, and with --yes, it uses defaults,
and --model and --data must be given. The file is checked as by `fsdp check` before it is written:
if something is wrong, that is printed, nothing is written, and the exit code is 2.

Examples:
  fsdp init
  fsdp init chat.toml --model models/Qwen3-0.6B --data chats.jsonl --lora
  fsdp init --yes --model examples/llama-tiny --data 'docs/*.md' --ranks 2 --steps 100"
)]
pub(crate) struct InitArgs {
    /// The run file to write
    #[arg(value_name = "RUN.toml", default_value = "run.toml")]
    pub(crate) file: PathBuf,
    /// The model: a Hugging Face directory with config.json
    #[arg(long, value_name = "DIR")]
    pub(crate) model: Option<String>,
    /// Train LoRA adapters on the model, which stays unchanged
    #[arg(long)]
    pub(crate) lora: bool,
    /// Train LoRA adapters on the model, whose linear maps are kept in 4 bits (QLoRA)
    #[arg(long, conflicts_with = "lora")]
    pub(crate) qlora: bool,
    /// Train new weights even if the directory has some
    #[arg(long, conflicts_with_all = ["lora", "qlora"])]
    pub(crate) from_scratch: bool,
    /// What to train on: a file, a folder or a pattern (may be repeated)
    #[arg(long, value_name = "PATH")]
    pub(crate) data: Vec<String>,
    /// What to evaluate on while training (may be repeated)
    #[arg(long, value_name = "PATH")]
    pub(crate) eval: Vec<String>,
    /// Format of the files, if their names do not show it: a value of data.format, such as tokens-u16
    #[arg(long, value_name = "FORMAT")]
    pub(crate) format: Option<String>,
    /// The field or column with the document, if it is not called messages, text or input_ids
    #[arg(long, value_name = "NAME")]
    pub(crate) column: Option<String>,
    /// What computes [default: cuda if it can be used, else cpu]
    #[arg(long, value_name = "DEVICE", value_parser = one_of(&DEVICES))]
    pub(crate) device: Option<Device>,
    /// Ranks [default: one per GPU, or 1]
    #[arg(long, value_name = "N", value_parser = positive)]
    pub(crate) ranks: Option<usize>,
    /// Optimizer steps [default: by the size of the data]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) steps: Option<u64>,
    /// The output folder of the run [default: runs/NAME of NAME.toml]
    #[arg(long, value_name = "DIR")]
    pub(crate) out: Option<String>,
    /// Replace the file if it exists
    #[arg(long)]
    pub(crate) force: bool,
    /// Ask nothing
    #[arg(long, short)]
    pub(crate) yes: bool,
}
