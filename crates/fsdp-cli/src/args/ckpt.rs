//! The arguments of `fsdp ckpt`, and their help pages.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use fsdp_ckpt::conversion::{Layout, Part, Rename, Target, Tied};
use fsdp_ckpt::safetensors::TensorType;

use super::positive;
use super::sizes::size;

/// What can be done with a checkpoint.
#[derive(Debug, Subcommand)]
pub(crate) enum CkptCommand {
    /// Show the format and contents of a checkpoint
    Inspect(InspectArgs),
    /// Convert a checkpoint of any format into another one
    Convert(ConvertArgs),
    /// Read all of a checkpoint and report what is damaged
    Verify(VerifyCkptArgs),
    /// Compare two checkpoints of any formats
    Diff(DiffArgs),
}

/// `fsdp ckpt inspect`.
#[derive(Debug, Args)]
#[command(
    after_help = "Only metadata is read, so this is quick for a checkpoint of any size; `fsdp ckpt verify` reads
the rest. The format is detected from what is in the files, not from their names. PATH is a file, or
the directory that all ranks wrote; if there is a file per rank, any one will do.

JSON keys: path, format, world_size (null where the format does not say), tensor_count,
tensor_bytes, files (path, bytes), groups (role, dtype, tensors, elements, bytes), run_state,
values, opaque (classes of objects that were not read, by name), notes, problems; with --tensors
also tensors (name, dtype, shape, role, bytes, chunks).

Examples:
  fsdp ckpt inspect runs/quickstart/checkpoints/step-00000050
  fsdp ckpt inspect checkpoint/ --tensors | less
  fsdp ckpt inspect checkpoint/ --json | jq .run_state"
)]
pub(crate) struct InspectArgs {
    /// The checkpoint
    #[arg(value_name = "PATH")]
    pub(crate) path: PathBuf,
    #[command(flatten)]
    pub(crate) reading: ReadArgs,
    /// List every tensor: type, shape, role, and the chunks that it is stored in
    #[arg(long)]
    pub(crate) tensors: bool,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// `fsdp ckpt convert`.
#[derive(Debug, Args)]
#[command(
    after_help = "Reads: native checkpoints; PyTorch DCP, plain or zstd; files of torch.save (.pth, .bin), also one
per rank with DTensors or FSDP1's ShardedTensors; PyTorch/XLA FSDP; DeepSpeed, ZeRO 0 to 3;
safetensors: one file, with an index, or shards of DCP; whole folders of accelerate and of the
Trainer of transformers.

Writes:
  safetensors  for transformers and others: a file if DST ends in .safetensors, else a directory
  dcp          a directory that torch.distributed.checkpoint of PyTorch 2.4 and later loads
  native       a directory as `fsdp train` saves it; it resumes if SRC holds the state of a run
  torch        a file for torch.load

Weights are never held in memory as a whole. Pickles are read as inert data; nothing in them is
run, and objects of classes that no checkpoint format uses are left out and listed. DST must not
exist; it appears when it is complete, or not at all, even after Ctrl-C.

Layouts, for readers of the optimizer (dcp, torch); without one, names stay as SRC has them:
  torchtitan       the model's names at the top, optimizer.state.<parameter>.<state>, flattened
  flat             one flat dict: the model's names, optim.state.<parameter>.<state>
  model-optimizer  {model, optimizer}, as get_state_dict of PyTorch returns them

Renaming: --strip-wrappers and --layout first, then --strip-prefix, then each --rename in order.
$1 or ${name} stand for groups. Parameter names inside the optimizer's state are changed too; a
pattern that does not match such a name may match the whole name of the state.

JSON keys: source, source_format, destination, target, tensors, values, bytes, files, checksums,
seconds, bytes_per_second, left_out (model, optimizer, other), dropped_values, tied (tensor,
same_as), opaque (classes of objects that were not read, by name), notes.

Examples:
  fsdp ckpt convert checkpoint/ model.safetensors --to safetensors
  fsdp ckpt convert checkpoint/ hf/ --to safetensors --dtype bf16 --strip-prefix model. \\
       --config config.json --max-shard-size 5GB
  fsdp ckpt convert checkpoint/ resharded/ --to dcp --world-size 8
  fsdp ckpt convert runs/a/checkpoints/step-00000050 titan/step-50 --to dcp --layout torchtitan
  fsdp ckpt convert weights.pth checkpoint/ --to native --rename '^blocks\\.(\\d+)=layers.$1'"
)]
pub(crate) struct ConvertArgs {
    /// The checkpoint to read
    #[arg(value_name = "SRC")]
    pub(crate) source: PathBuf,
    /// The file or directory to create
    #[arg(value_name = "DST")]
    pub(crate) destination: PathBuf,
    #[command(flatten)]
    pub(crate) reading: ReadArgs,
    /// The format to write
    #[arg(long, value_name = "FORMAT", value_enum)]
    pub(crate) to: TargetArg,
    /// Ranks to write the output for (dcp, native) [default: 1]
    #[arg(long, value_name = "N", value_parser = positive)]
    pub(crate) world_size: Option<usize>,
    /// Maximum bytes of tensors per file of a safetensors directory, such as 5GB or 500MiB
    /// [default: 5GB]
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub(crate) max_shard_size: Option<u64>,
    /// Convert the model's floating-point tensors; the optimizer keeps its types
    #[arg(long, value_name = "DTYPE", value_enum)]
    pub(crate) dtype: Option<FloatArg>,
    /// What to write [default: model for safetensors, else all]
    #[arg(long, value_name = "PART", value_enum)]
    pub(crate) only: Option<PartArg>,
    /// Where model and optimizer go (dcp, torch)
    #[arg(long, value_name = "LAYOUT", value_enum)]
    pub(crate) layout: Option<LayoutArg>,
    /// How many times tied weights are written [default: as in SRC]
    #[arg(long, value_name = "COUNT", value_enum)]
    pub(crate) tied: Option<TiedArg>,
    /// Form of the weights of experts [default: as in SRC]; separate names are those of the family in
    /// --config, else in a config.json in the directory SRC or beside the file SRC
    #[arg(long, value_name = "FORM", value_enum)]
    pub(crate) experts: Option<ExpertsArg>,
    /// Remove what module wrappers add to names (_orig_mod., module., _fsdp_wrapped_module.,
    /// _checkpoint_wrapped_module.)
    #[arg(long)]
    pub(crate) strip_wrappers: bool,
    /// Remove this from the beginning of names
    #[arg(long, value_name = "P")]
    pub(crate) strip_prefix: Option<String>,
    /// Replace what matches in names (may be repeated)
    #[arg(long, value_name = "REGEX=REPL", value_parser = Rename::parse)]
    pub(crate) rename: Vec<Rename>,
    /// A Hugging Face config.json to put beside the weights (directories of safetensors); it also says
    /// whether weights are tied, and with --experts, for any format, of which family the model is
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) memory: MemoryArgs,
    /// Do not wait until the output is durable: faster, but a power failure may lose it
    #[arg(long)]
    pub(crate) no_sync: bool,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// `fsdp ckpt verify`.
#[derive(Debug, Args)]
#[command(
    after_help = "Checks that every element of every tensor is stored exactly once, reads every file to its last
byte, and compares all checksums that the format keeps: those of native checkpoints cover every
byte, records of PyTorch's zip files have a CRC-32, safetensors have none. Bytes that nothing
protects are counted: damage there, if the file stays readable, cannot be found.

In a directory everything is considered: what belongs to the checkpoint, other checkpoints beside
it, and the rest, which is listed with the reason why it is not read.

Exit code: 0 if sound, 1 if something is damaged or missing, or no tensor was found, 2 if PATH is
not a checkpoint.

JSON keys: path, format (null if it cannot be opened), sound, tensors, read_bytes, checksums,
unprotected_bytes, unprotected (path, bytes, ranges), also_read, not_read (path, reason),
cannot_show (losses that the format hides), problems, opaque (classes by name), notes.

Examples:
  fsdp ckpt verify runs/quickstart/checkpoints/step-00000050
  fsdp ckpt verify checkpoint/ --json | jq .problems"
)]
pub(crate) struct VerifyCkptArgs {
    /// The checkpoint
    #[arg(value_name = "PATH")]
    pub(crate) path: PathBuf,
    /// Count objects of unknown classes as problems; else they are only listed
    #[arg(long)]
    pub(crate) strict: bool,
    #[command(flatten)]
    pub(crate) memory: MemoryArgs,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// `fsdp ckpt diff`.
#[derive(Debug, Args)]
#[command(
    after_help = "Tensors are matched by name and compared bit by bit; floating-point tensors of different types by
value. With a tolerance, values may differ by atol + rtol * |b|, where b is the value in B. A NaN
equals a NaN. Values that are not tensors are compared if both checkpoints have them. If they share
no name, a key is looked for under which one has exactly the tensors of the other.

Exit code: 0 if nothing differs, 1 if something does, 2 if a checkpoint cannot be read.

JSON keys: equal, first and second (path, format), tensors (by name: outcome, and what belongs to
it: dtypes, shapes, differing, beyond_tolerance, largest, at, values), values (names of those that
differ), run_state (facts of the run that differ: in A, in B), under (side, key: where one holds
the other's state under a key; else null). Outcomes: equal_bits, equal_values, within_tolerance,
differs, bits_differ, types_differ, shapes_differ, only_in_first, only_in_second.

Examples:
  fsdp ckpt diff checkpoint/ resharded/
  fsdp ckpt diff checkpoint/ model.safetensors --only model
  fsdp ckpt diff before.pth after.safetensors --rtol 0.01 --atol 1e-6"
)]
pub(crate) struct DiffArgs {
    /// A checkpoint
    #[arg(value_name = "A")]
    pub(crate) first: PathBuf,
    /// The other checkpoint
    #[arg(value_name = "B")]
    pub(crate) second: PathBuf,
    #[command(flatten)]
    pub(crate) reading: ReadArgs,
    /// Absolute part of the tolerance
    #[arg(long, value_name = "X", default_value_t = 0.0, allow_negative_numbers = true,
          value_parser = tolerance)]
    pub(crate) atol: f64,
    /// Part of the tolerance that is relative to the value in B
    #[arg(long, value_name = "Y", default_value_t = 0.0, allow_negative_numbers = true,
          value_parser = tolerance)]
    pub(crate) rtol: f64,
    /// What to compare
    #[arg(long, value_name = "PART", value_enum, default_value_t = PartArg::All)]
    pub(crate) only: PartArg,
    /// Compare names without what module wrappers add to them (see convert)
    #[arg(long)]
    pub(crate) strip_wrappers: bool,
    #[command(flatten)]
    pub(crate) memory: MemoryArgs,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// How checkpoints are read.
#[derive(Clone, Debug, Args)]
pub(crate) struct ReadArgs {
    /// Refuse objects of unknown classes; else they are left out and listed
    #[arg(long)]
    pub(crate) strict: bool,
    /// Read only what is under this key, such as `model` in {"model": ..}
    #[arg(long, value_name = "KEY")]
    pub(crate) from_key: Option<String>,
}

/// How much memory the work may take.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct MemoryArgs {
    /// Maximum size of all buffers together, not counting the descriptions of tensors
    #[arg(long = "memory", value_name = "SIZE", default_value = "256MiB", value_parser = size)]
    pub(crate) window_bytes: u64,
}

/// A format that is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum TargetArg {
    /// Hugging Face safetensors
    Safetensors,
    /// PyTorch's distributed checkpoints
    Dcp,
    /// Checkpoints of `fsdp train`
    Native,
    /// A file of torch.save
    Torch,
}

/// Which tensors and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum PartArg {
    /// The model
    Model,
    /// The state of the optimizer
    Optimizer,
    /// Everything
    All,
}

/// A floating-point type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum FloatArg {
    /// bfloat16
    Bf16,
    /// IEEE 754 half precision
    F16,
    /// IEEE 754 single precision
    F32,
}

/// Where model and optimizer go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum LayoutArg {
    /// As torchtitan saves them
    Torchtitan,
    /// In one flat dict
    Flat,
    /// As {model, optimizer}
    ModelOptimizer,
}

/// How often tied weights are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum TiedArg {
    /// Under one name
    Once,
    /// Under both names
    Twice,
}

/// The form of the weights of experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ExpertsArg {
    /// All experts of a layer in two tensors, as transformers 5 holds them in memory
    Fused,
    /// One by one, as published; the names follow from --config, or from a config.json beside SRC
    Separate,
}

impl From<LayoutArg> for Layout {
    fn from(layout: LayoutArg) -> Layout {
        match layout {
            LayoutArg::Torchtitan => Layout::Torchtitan,
            LayoutArg::Flat => Layout::Flat,
            LayoutArg::ModelOptimizer => Layout::ModelOptimizer,
        }
    }
}

impl From<TiedArg> for Tied {
    fn from(tied: TiedArg) -> Tied {
        match tied {
            TiedArg::Once => Tied::Once,
            TiedArg::Twice => Tied::Twice,
        }
    }
}

impl TargetArg {
    /// The name on the command line.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            TargetArg::Safetensors => "safetensors",
            TargetArg::Dcp => "dcp",
            TargetArg::Native => "native",
            TargetArg::Torch => "torch",
        }
    }
}

impl From<TargetArg> for Target {
    fn from(target: TargetArg) -> Target {
        match target {
            TargetArg::Safetensors => Target::Safetensors,
            TargetArg::Dcp => Target::Dcp,
            TargetArg::Native => Target::Native,
            TargetArg::Torch => Target::Torch,
        }
    }
}

impl From<PartArg> for Part {
    fn from(part: PartArg) -> Part {
        match part {
            PartArg::Model => Part::Model,
            PartArg::Optimizer => Part::Optimizer,
            PartArg::All => Part::All,
        }
    }
}

impl From<FloatArg> for TensorType {
    fn from(float: FloatArg) -> TensorType {
        match float {
            FloatArg::Bf16 => TensorType::Bf16,
            FloatArg::F16 => TensorType::F16,
            FloatArg::F32 => TensorType::F32,
        }
    }
}

fn tolerance(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if number >= 0.0 && number.is_finite() => Ok(number),
        _ => Err("expected a finite number of at least 0, such as 1e-6".to_owned()),
    }
}
