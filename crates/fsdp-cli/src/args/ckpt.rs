//! The arguments of `fsdp ckpt`, and their help pages.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use fsdp_ckpt::conversion::{Layout, Part, Rename, Target, Tied};
use fsdp_ckpt::safetensors::TensorType;

use super::sizes::size;
use super::values::{Named, one_of, positive};

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
    #[arg(long, value_name = "FORMAT", value_parser = one_of(&TARGETS))]
    pub(crate) to: Target,
    /// Ranks to write the output for (dcp, native) [default: 1]
    #[arg(long, value_name = "N", value_parser = positive)]
    pub(crate) world_size: Option<usize>,
    /// Maximum bytes of tensors per file of a safetensors directory, such as 5GB or 500MiB
    /// [default: 5GB]
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub(crate) max_shard_size: Option<u64>,
    /// Convert the model's floating-point tensors; the optimizer keeps its types
    #[arg(long, value_name = "DTYPE", value_parser = one_of(&FLOATS))]
    pub(crate) dtype: Option<TensorType>,
    /// What to write [default: model for safetensors, else all]
    #[arg(long, value_name = "PART", value_parser = one_of(&PARTS))]
    pub(crate) only: Option<Part>,
    /// Where model and optimizer go (dcp, torch)
    #[arg(long, value_name = "LAYOUT", value_parser = one_of(&LAYOUTS))]
    pub(crate) layout: Option<Layout>,
    /// How many times tied weights are written [default: as in SRC]
    #[arg(long, value_name = "COUNT", value_parser = one_of(&TIED))]
    pub(crate) tied: Option<Tied>,
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
    /// whether weights are tied, and with --experts, for any format, of which family the model is;
    /// names and shapes of Megatron become those of Hugging Face, in any format
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

With --model, weights are also compared with what that model wants, since most loaders leave absent
ones at random: what is missing, unexpected or of another shape, not finite, zero in every element,
or was never updated, while others were (by the moments of the optimizer), is a problem. Without
moments, weights that are distributed as at initialization are listed as doubts.

Exit code: 0 if sound, 1 if something is damaged or missing, or no tensor was found, 2 if PATH is
not a checkpoint.

JSON keys: path, format (null if it cannot be opened), sound, tensors, read_bytes, checksums,
unprotected_bytes, unprotected (path, bytes, ranges), also_read, not_read (path, reason),
cannot_show (losses that the format hides), problems, model (problems, doubts; null without
--model), opaque (classes by name), notes.

Examples:
  fsdp ckpt verify runs/quickstart/checkpoints/step-00000050
  fsdp ckpt verify checkpoint/ --model Llama-3.1-8B
  fsdp ckpt verify checkpoint/ --json | jq .problems"
)]
pub(crate) struct VerifyCkptArgs {
    /// The checkpoint
    #[arg(value_name = "PATH")]
    pub(crate) path: PathBuf,
    /// Compare with the model whose config.json is in a directory
    #[arg(long, value_name = "DIR")]
    pub(crate) model: Option<PathBuf>,
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
    #[arg(long, value_name = "PART", value_parser = one_of(&PARTS), default_value = "all")]
    pub(crate) only: Part,
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

/// Formats that are written.
const TARGETS: [Named<Target>; 4] = [
    ("safetensors", "Hugging Face safetensors", Target::Safetensors),
    ("dcp", "PyTorch's distributed checkpoints", Target::Dcp),
    ("native", "Checkpoints of `fsdp train`", Target::Native),
    ("torch", "A file of torch.save", Target::Torch),
];

/// Which tensors and values.
const PARTS: [Named<Part>; 3] = [
    ("model", "The model", Part::Model),
    ("optimizer", "The state of the optimizer", Part::Optimizer),
    ("all", "Everything", Part::All),
];

/// Floating-point types.
const FLOATS: [Named<TensorType>; 3] = [
    ("bf16", "bfloat16", TensorType::Bf16),
    ("f16", "IEEE 754 half precision", TensorType::F16),
    ("f32", "IEEE 754 single precision", TensorType::F32),
];

/// Where model and optimizer go.
const LAYOUTS: [Named<Layout>; 3] = [
    ("torchtitan", "As torchtitan saves them", Layout::Torchtitan),
    ("flat", "In one flat dict", Layout::Flat),
    ("model-optimizer", "As {model, optimizer}", Layout::ModelOptimizer),
];

/// How often tied weights are written.
const TIED: [Named<Tied>; 2] =
    [("once", "Under one name", Tied::Once), ("twice", "Under both names", Tied::Twice)];

/// The name of a format on the command line.
pub(crate) fn target_name(target: Target) -> &'static str {
    TARGETS.iter().find(|(.., other)| *other == target).map_or("", |(name, ..)| name)
}

/// The form of the weights of experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ExpertsArg {
    /// All experts of a layer in two tensors, as transformers 5 holds them in memory
    Fused,
    /// One by one, as published; the names follow from --config, or from a config.json beside SRC
    Separate,
}

fn tolerance(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if number >= 0.0 && number.is_finite() => Ok(number),
        _ => Err("expected a finite number of at least 0, such as 1e-6".to_owned()),
    }
}
