//! What can go wrong with checkpoint files.
//!
//! Every message is a complete sentence fragment: it names the file, the tensor, what was expected and found,
//! and the way out. Causes are part of the message and not chained behind `source()`, so a report prints
//! them once. What is wrong inside a safetensors header has its own type, [`HeaderFault`], because the parser
//! sees bytes and knows no path.

mod conversion_fault;
mod coverage_fault;
mod dcp_fault;
mod file_action;
mod format_fault;
mod header_fault;
mod kind;
mod names;
mod native_fault;
mod nesting_fault;
mod pickle_fault;
mod plan_fault;
mod rank_fault;
mod save_fault;
mod torch_fault;
mod transfer_fault;
mod zip_fault;

use std::{io, ops::Range, path::PathBuf};

pub use conversion_fault::ConversionFault;
pub use coverage_fault::CoverageFault;
pub use dcp_fault::DcpFault;
pub use file_action::FileAction;
pub use format_fault::FormatFault;
pub use header_fault::HeaderFault;
pub use names::{DtypeDifference, NameDifferences, ShapeDifference};
pub use native_fault::NativeFault;
pub use nesting_fault::NestingFault;
pub use pickle_fault::PickleFault;
pub use plan_fault::PlanFault;
pub use rank_fault::RankFault;
pub use save_fault::SaveFault;
pub use torch_fault::TorchFault;
pub use transfer_fault::TransferFault;
pub use zip_fault::ZipFault;

use crate::safetensors::TensorType;
use file_action::advice;

/// A checkpoint file, or a request made of one, that cannot be served.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The operating system refused a file operation.
    #[error("failed to {action} {}: {cause}{}", path.display(), advice(cause))]
    Io {
        /// What was attempted.
        action: FileAction,
        /// The file or directory.
        path: PathBuf,
        /// What the operating system said.
        cause: io::Error,
    },
    /// A pipe, device or socket where a file is read.
    #[error("{} is {what}, not a regular file; nothing else is read, so copy its content into a file", path.display())]
    NotRegular {
        /// The path.
        path: PathBuf,
        /// What it is, in words.
        what: &'static str,
    },
    /// The bytes are not a valid safetensors file.
    #[error("{} is not a valid safetensors file: {fault}; fetch or export the file again", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong with its header.
        fault: HeaderFault,
    },
    /// A native checkpoint is damaged, incomplete or of another version.
    #[error("{}: {fault}", path.display())]
    Native {
        /// The file of the checkpoint.
        path: PathBuf,
        /// What is wrong with it.
        fault: Box<NativeFault>,
    },
    /// A native checkpoint cannot be saved.
    #[error("{}: {fault}", path.display())]
    Save {
        /// The directory or file of the save.
        path: PathBuf,
        /// Why not.
        fault: Box<SaveFault>,
    },
    /// The tensors of an export cannot be laid out as a safetensors file.
    #[error("cannot lay out {}: {fault}", path.display())]
    CannotLayOut {
        /// The file that was to be planned.
        path: PathBuf,
        /// The rule of the format that would be broken.
        fault: HeaderFault,
    },
    /// What was selected cannot be laid out in a format.
    #[error("cannot write {format}: {fault}")]
    CannotPlan {
        /// The format, in words.
        format: &'static str,
        /// What is in the way.
        fault: PlanFault,
    },
    /// A tensor was asked for that the file, model or plan does not have.
    #[error(
        "{} has no tensor `{tensor}` (it has {tensor_count}); `names()` lists those it has", path.display()
    )]
    UnknownTensor {
        /// The file, model or planned file.
        path: PathBuf,
        /// The name that was asked for.
        tensor: String,
        /// How many tensors there are.
        tensor_count: usize,
    },
    /// Rows were named that the tensor does not have.
    #[error(
        "rows {}..{} of tensor `{tensor}` in {} do not exist: it has {row_count} rows",
        rows.start, rows.end, path.display()
    )]
    RowsOutsideTensor {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// The rows that were asked for.
        rows: Range<usize>,
        /// How many rows the tensor has.
        row_count: usize,
    },
    /// Bytes were named that the tensor does not have.
    #[error(
        "bytes {}..{} of tensor `{tensor}` in {} do not exist: it has {len_bytes} bytes",
        bytes.start, bytes.end, path.display()
    )]
    BytesOutsideTensor {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// The bytes that were asked for, relative to the tensor.
        bytes: Range<u64>,
        /// How many bytes the tensor has.
        len_bytes: u64,
    },
    /// The caller's buffer does not hold exactly the rows that were named.
    #[error(
        "{expected} {unit} were expected for rows of tensor `{tensor}` in {}, the buffer has {got}", path.display()
    )]
    BufferLength {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// What is counted: `"bytes"` or `"elements"`.
        unit: &'static str,
        /// Length that the rows need (for a write: a multiple of this, one row).
        expected: u64,
        /// Length of the buffer.
        got: u64,
    },
    /// The tensor's file dtype is not a floating-point type that is converted here.
    #[error(
        "tensor `{tensor}` in {} is {dtype}, but only F64, F32, BF16 and F16 convert to and from floating-point \
         values; read or write its bytes with `read_rows` or `write_rows`",
        path.display()
    )]
    NotConvertible {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its dtype in the file.
        dtype: TensorType,
    },
    /// A finite value would become infinite in the narrower type.
    #[error(
        "tensor `{tensor}` in {}: {value:e} (element {element}) does not fit in {target}; choose a type with a \
         larger range",
        path.display()
    )]
    ValueOutOfRange {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Index of the element in the whole tensor.
        element: u64,
        /// The value.
        value: f64,
        /// The type it does not fit in.
        target: TensorType,
    },
    /// A directory holds no model in a form that can be read.
    #[error(
        "{} holds neither model.safetensors nor model.safetensors.index.json{}; save the model as safetensors, or \
         name the file itself", dir.display(), found_list(found)
    )]
    NoModel {
        /// The directory.
        dir: PathBuf,
        /// Weight files of other names or formats that lie there.
        found: Vec<String>,
    },
    /// A directory holds, or after an export would hold, both a single model file and a sharded one.
    #[error(
        "{} would be ambiguous beside {}: one is a single file, the other a sharded model; remove the one that is \
         not wanted, or name a file or another directory", wanted.display(), other.display()
    )]
    TwoModels {
        /// The file that was to be read or written.
        wanted: PathBuf,
        /// The other file.
        other: PathBuf,
    },
    /// A model index is not the JSON object that it should be.
    #[error("{} is not a valid model index: {detail}; fetch or export the model again", path.display())]
    MalformedIndex {
        /// The index file.
        path: PathBuf,
        /// What the JSON reader says, with line and column.
        detail: String,
    },
    /// A model index names a file outside its directory.
    #[error(
        "{} maps tensor `{tensor}` to `{file}`, which is not a plain file name; files of a model lie beside their \
         index", path.display()
    )]
    IndexEscapesDirectory {
        /// The index file.
        path: PathBuf,
        /// A tensor mapped to that file.
        tensor: String,
        /// The file name as the index gives it.
        file: String,
    },
    /// A file named by a model index does not exist.
    #[error(
        "{} is missing: {} places {tensor_count} tensors in it (`{tensor}`, ..); fetch it again",
        file.display(), path.display()
    )]
    MissingFile {
        /// The index file.
        path: PathBuf,
        /// The file that is not there.
        file: PathBuf,
        /// One of the tensors that it should hold.
        tensor: String,
        /// How many tensors it should hold.
        tensor_count: usize,
    },
    /// A tensor is not in the file where the index places it.
    #[error(
        "{} places tensor `{tensor}` in {}, which does not hold it; index and files are of different exports",
        path.display(), file.display()
    )]
    NotInFile {
        /// The index file.
        path: PathBuf,
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
    },
    /// A file of the model holds a tensor that the index does not list.
    #[error(
        "{} holds tensor `{tensor}`, which {} does not list; index and files are of different exports",
        file.display(), path.display()
    )]
    NotInIndex {
        /// The index file.
        path: PathBuf,
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
    },
    /// Two files of one model hold the same tensor.
    #[error(
        "tensor `{tensor}` is in both {} and {}; remove one and correct the index", first.display(), second.display()
    )]
    InTwoFiles {
        /// The tensor.
        tensor: String,
        /// One file.
        first: PathBuf,
        /// The other file.
        second: PathBuf,
    },
    /// The tensors of a model are not those that were expected.
    #[error("the tensors in {} are not those of the model that was asked for: {differences}", path.display())]
    NamesDiffer {
        /// The model.
        path: PathBuf,
        /// All differences.
        differences: Box<NameDifferences>,
    },
    /// The path of an export does not end in a file name.
    #[error("{} does not end in a file name; give a path such as model.safetensors", path.display())]
    NoFileName {
        /// The path.
        path: PathBuf,
    },
    /// The temporary file of an export is in use, or is something else than a file.
    #[error(
        "the temporary file {} {}; wait for the other export or remove that path", path.display(),
        if *in_use { "is being written by another export" } else { "is not a regular file of the planned length" }
    )]
    TemporaryFileTaken {
        /// The temporary file.
        path: PathBuf,
        /// Whether another export holds it.
        in_use: bool,
    },
    /// An export was committed although some rows were never written.
    #[error(
        "rows {}..{} of tensor `{tensor}` were never written to {}; every row needs one writer before the commit",
        rows.start, rows.end, path.display()
    )]
    RowsNotWritten {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// The first run of rows that is not covered.
        rows: Range<usize>,
    },
    /// An export was committed although some rows were written twice.
    #[error(
        "rows {}..{} of tensor `{tensor}` in {} were written more than once; every row needs exactly one writer",
        rows.start, rows.end, path.display()
    )]
    RowsWrittenTwice {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// The first run of rows with two writers.
        rows: Range<usize>,
    },
    /// A file of PyTorch, or an item in one, is not read.
    #[error("cannot read {}{}: {fault}", path.display(), in_item(item))]
    Torch {
        /// The file.
        path: PathBuf,
        /// The item in the file, as it is to be shown (a name in backticks); empty for the file itself.
        item: String,
        /// What is wrong with it.
        fault: Box<TorchFault>,
    },
    /// A distributed checkpoint is not read.
    #[error("cannot read {}: {fault}", path.display())]
    Dcp {
        /// The file: the metadata, or one with items.
        path: PathBuf,
        /// What is wrong with it.
        fault: Box<DcpFault>,
    },
    /// A receipt of another export was handed to a commit.
    #[error("a receipt for {} was given to the commit of {}", got.display(), expected.display())]
    ForeignReceipt {
        /// The export that is being committed.
        expected: PathBuf,
        /// The export that the receipt belongs to.
        got: PathBuf,
    },
    /// The chunks of a tensor do not hold each of its elements once.
    #[error("{0}")]
    Coverage(CoverageFault),
    /// The nested dicts and lists of a checkpoint have no flat names, or names do not nest.
    #[error("{}: {fault}", path.display())]
    Nesting {
        /// The file or directory.
        path: PathBuf,
        /// What is wrong.
        fault: NestingFault,
    },
    /// A conversion that was asked for makes no sense.
    #[error("{0}")]
    Conversion(ConversionFault),
    /// A path cannot be opened as a checkpoint.
    #[error("cannot open {} as a checkpoint: {fault}", path.display())]
    Format {
        /// The file or directory.
        path: PathBuf,
        /// Why not.
        fault: FormatFault,
    },
    /// Files of ranks do not make up one checkpoint.
    #[error("{}: {fault}", path.display())]
    Ranks {
        /// The file or directory.
        path: PathBuf,
        /// What is wrong.
        fault: RankFault,
    },
    /// Several things are wrong with one checkpoint.
    #[error("{}", joined(problems))]
    Several {
        /// Each of them.
        problems: Vec<Error>,
    },
    /// Bytes could not be moved, or must not be.
    #[error("{0}")]
    Transfer(TransferFault),
}

impl Error {
    /// None of these errors, the only one, or all of them as one.
    pub(crate) fn all_of(mut problems: Vec<Error>) -> Result<(), Error> {
        match problems.pop() {
            None => Ok(()),
            Some(error) if problems.is_empty() => Err(error),
            Some(last) => {
                problems.push(last);
                Err(Error::Several { problems })
            }
        }
    }

    /// The problems that this error consists of, in most cases itself.
    pub fn into_problems(self) -> Vec<Error> {
        match self {
            Error::Several { problems } => problems,
            error => vec![error],
        }
    }
}

/// Problems that a message lists.
const LISTED_MAX: usize = 4;

fn joined(problems: &[Error]) -> String {
    let shown: Vec<String> = problems.iter().take(LISTED_MAX).map(Error::to_string).collect();
    match problems.len() - shown.len() {
        0 => shown.join("; "),
        more => format!("{}; and {more} more problems (verify lists all)", shown.join("; ")),
    }
}

impl From<ConversionFault> for Error {
    fn from(fault: ConversionFault) -> Error {
        Error::Conversion(fault)
    }
}

impl From<TransferFault> for Error {
    fn from(fault: TransferFault) -> Error {
        Error::Transfer(fault)
    }
}

fn found_list(found: &[String]) -> String {
    if found.is_empty() { String::new() } else { format!(" (it holds {})", found.join(", ")) }
}

fn in_item(item: &str) -> String {
    if item.is_empty() { String::new() } else { format!(", item {item}") }
}
