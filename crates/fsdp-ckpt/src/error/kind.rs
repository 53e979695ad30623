//! What each error calls for: see [`FailureKind`].
//!
//! No `match` here has a wildcard: a new variant does not compile before it is classified.

use fsdp_core::FailureKind;

use super::{Error, SaveFault, TransferFault};

impl Error {
    /// What this failure calls for. Damage and wrong requests are input; what the operating system says may pass.
    pub fn kind(&self) -> FailureKind {
        match self {
            Error::Io { cause, .. } => FailureKind::of_io(cause),
            Error::Save { fault, .. } => fault.kind(),
            Error::Transfer(fault) => fault.kind(),
            Error::Several { problems } => {
                problems.iter().map(Error::kind).max().unwrap_or(FailureKind::Input)
            }
            // Another process has it, and will be done with it.
            Error::TemporaryFileTaken { in_use: true, .. } => FailureKind::Temporary,
            Error::TemporaryFileTaken { in_use: false, .. }
            | Error::NotRegular { .. }
            | Error::Malformed { .. }
            | Error::Native { .. }
            | Error::CannotLayOut { .. }
            | Error::CannotPlan { .. }
            | Error::UnknownTensor { .. }
            | Error::RowsOutsideTensor { .. }
            | Error::BytesOutsideTensor { .. }
            | Error::BufferLength { .. }
            | Error::NotConvertible { .. }
            | Error::ValueOutOfRange { .. }
            | Error::NoModel { .. }
            | Error::TwoModels { .. }
            | Error::MalformedIndex { .. }
            | Error::IndexEscapesDirectory { .. }
            | Error::MissingFile { .. }
            | Error::NotInFile { .. }
            | Error::NotInIndex { .. }
            | Error::InTwoFiles { .. }
            | Error::NamesDiffer { .. }
            | Error::NoFileName { .. }
            | Error::Torch { .. }
            | Error::Dcp { .. }
            | Error::Coverage(_)
            | Error::Nesting { .. }
            | Error::Conversion(_)
            | Error::Format { .. }
            | Error::Ranks { .. } => FailureKind::Input,
            Error::RowsNotWritten { .. } | Error::RowsWrittenTwice { .. } | Error::ForeignReceipt { .. } => {
                FailureKind::Permanent
            }
        }
    }
}

impl SaveFault {
    /// What this failure calls for. What another rank or process did is not known to happen again.
    pub fn kind(&self) -> FailureKind {
        match self {
            SaveFault::AlreadyThere | SaveFault::Linked | SaveFault::TwoRuns => FailureKind::Input,
            SaveFault::RankCount { .. }
            | SaveFault::RowsOutside { .. }
            | SaveFault::RowsUncovered { .. }
            | SaveFault::RowsDoubled { .. }
            | SaveFault::OutOfOrder { .. }
            | SaveFault::RowsNotWritten { .. }
            | SaveFault::OtherPlan { .. }
            | SaveFault::OtherFile { .. } => FailureKind::Permanent,
            SaveFault::Locked | SaveFault::NoSpace { .. } | SaveFault::Disappeared { .. } => {
                FailureKind::Temporary
            }
        }
    }
}

impl TransferFault {
    /// What this failure calls for.
    pub fn kind(&self) -> FailureKind {
        match self {
            TransferFault::Canceled => FailureKind::Interrupted,
            TransferFault::BrokenStream { cause, .. } => FailureKind::of_io(cause),
            TransferFault::DestinationExists { .. }
            | TransferFault::DestinationIsLink { .. }
            | TransferFault::ChecksumMismatch { .. }
            | TransferFault::StreamTooLong { .. }
            | TransferFault::StreamTooShort { .. }
            | TransferFault::BeyondSource { .. } => FailureKind::Input,
        }
    }
}

#[cfg(test)]
mod tests;
