//! Every error has a kind.

use std::{io, path::PathBuf};

use super::*;
use crate::{
    digest::DigestKind,
    error::{
        ConversionFault, CoverageFault, DcpFault, FileAction, FormatFault, HeaderFault, NameDifferences,
        NativeFault, NestingFault, PlanFault, RankFault, TorchFault,
    },
    safetensors::TensorType,
};

fn path() -> PathBuf {
    "x".into()
}

fn text() -> String {
    "x".to_owned()
}

fn io_error(number: i32) -> Error {
    Error::Io { action: FileAction::Write, path: path(), cause: io::Error::from_raw_os_error(number) }
}

fn save(fault: SaveFault) -> Error {
    Error::Save { path: path(), fault: Box::new(fault) }
}

/// One of each kind of error about what was read or asked for.
fn of_input() -> Vec<Error> {
    let (tensor, rows, dtype) = (text(), 0..1, TensorType::F32);
    let native = Box::new(NativeFault::NotSealed);
    let coverage =
        CoverageFault::Missing { tensor: text(), shape: vec![1], elements: 0..1, files: Vec::new() };
    vec![
        Error::NotRegular { path: path(), what: "a named pipe" },
        Error::Malformed { path: path(), fault: HeaderFault::NoLength { file_len: 0 } },
        Error::Native { path: path(), fault: native },
        Error::CannotLayOut { path: path(), fault: HeaderFault::NoLength { file_len: 0 } },
        Error::CannotPlan { format: "x", fault: PlanFault::NoRanks },
        Error::UnknownTensor { path: path(), tensor: text(), tensor_count: 0 },
        Error::RowsOutsideTensor { path: path(), tensor: text(), rows, row_count: 0 },
        Error::BytesOutsideTensor { path: path(), tensor: text(), bytes: 0..1, len_bytes: 0 },
        Error::BufferLength { path: path(), tensor: text(), unit: "bytes", expected: 1, got: 0 },
        Error::NotConvertible { path: path(), tensor: text(), dtype },
        Error::ValueOutOfRange { path: path(), tensor: text(), element: 0, value: 1e9, target: dtype },
        Error::NoModel { dir: path(), found: Vec::new() },
        Error::TwoModels { wanted: path(), other: path() },
        Error::MalformedIndex { path: path(), detail: text() },
        Error::IndexEscapesDirectory { path: path(), tensor: text(), file: text() },
        Error::MissingFile { path: path(), file: path(), tensor: text(), tensor_count: 1 },
        Error::NotInFile { path: path(), file: path(), tensor: text() },
        Error::NotInIndex { path: path(), file: path(), tensor: text() },
        Error::InTwoFiles { tensor, first: path(), second: path() },
        Error::NamesDiffer { path: path(), differences: Box::new(NameDifferences::default()) },
        Error::NoFileName { path: path() },
        Error::Torch { path: path(), item: text(), fault: Box::new(TorchFault::NotAnArchive("x")) },
        Error::Dcp { path: path(), fault: Box::new(DcpFault::OtherTool { tool: "x" }) },
        Error::Coverage(coverage),
        Error::Nesting { path: path(), fault: NestingFault::NoDict },
        Error::Conversion(ConversionFault::EmptyName { name: text() }),
        Error::Format { path: path(), fault: FormatFault::EmptyFile },
        Error::Ranks { path: path(), fault: RankFault::NoRankFiles { example: "x" } },
        Error::TemporaryFileTaken { path: path(), in_use: false },
    ]
}

#[test]
fn damage_and_wrong_requests_are_input() {
    for error in of_input() {
        assert_eq!(error.kind(), FailureKind::Input, "{error}");
    }
}

#[test]
fn what_an_export_was_never_given_is_a_bug_that_stays() {
    let (rows, tensor) = (0..1, text());
    let table = [
        Error::RowsNotWritten { path: path(), tensor: tensor.clone(), rows: rows.clone() },
        Error::RowsWrittenTwice { path: path(), tensor, rows },
        Error::ForeignReceipt { expected: path(), got: path() },
    ];
    for error in table {
        assert_eq!(error.kind(), FailureKind::Permanent, "{error}");
    }
}

#[test]
fn what_the_operating_system_says_decides_for_files() {
    const EIO: i32 = 5;
    const ENOENT: i32 = 2;
    const ENOSPC: i32 = 28;
    assert_eq!(io_error(ENOSPC).kind(), FailureKind::Temporary);
    assert_eq!(io_error(EIO).kind(), FailureKind::Temporary);
    assert_eq!(io_error(ENOENT).kind(), FailureKind::Input);
    let several = |numbers: [i32; 2]| Error::Several { problems: numbers.map(io_error).into() };
    assert_eq!(several([EIO, ENOSPC]).kind(), FailureKind::Temporary);
    assert_eq!(several([EIO, ENOENT]).kind(), FailureKind::Input, "a retry does not bring the file back");
    let taken = Error::TemporaryFileTaken { path: path(), in_use: true };
    assert_eq!(taken.kind(), FailureKind::Temporary);
}

#[test]
fn every_way_of_a_save_to_fail_has_a_kind() {
    let (tensor, rows) = (text(), 0..1);
    let table = [
        (SaveFault::AlreadyThere, FailureKind::Input),
        (SaveFault::Linked, FailureKind::Input),
        (SaveFault::RankCount { tensor: tensor.clone(), expected: 1, got: 2 }, FailureKind::Permanent),
        (
            SaveFault::RowsOutside { rank: 0, tensor: tensor.clone(), rows: rows.clone(), row_count: 0 },
            FailureKind::Permanent,
        ),
        (SaveFault::RowsUncovered { tensor: tensor.clone(), rows: rows.clone() }, FailureKind::Permanent),
        (
            SaveFault::RowsDoubled { tensor: tensor.clone(), rows: rows.clone(), ranks: [0, 1] },
            FailureKind::Permanent,
        ),
        (SaveFault::OutOfOrder { tensor: tensor.clone(), expected: 1, got: 0 }, FailureKind::Permanent),
        (SaveFault::RowsNotWritten { tensor, rows }, FailureKind::Permanent),
        (SaveFault::OtherPlan { rank: 0 }, FailureKind::Permanent),
        (SaveFault::OtherFile { rank: 0 }, FailureKind::Permanent),
        (SaveFault::Locked, FailureKind::Temporary),
        (SaveFault::NoSpace { needed: 2, free: 1 }, FailureKind::Temporary),
        (SaveFault::Disappeared { rank: 1 }, FailureKind::Temporary),
    ];
    for (fault, expected) in table {
        assert_eq!(save(fault.clone()).kind(), expected, "{fault}");
    }
}

#[test]
fn every_way_of_a_transfer_to_fail_has_a_kind() {
    let digest = DigestKind::Crc64.of(b"x");
    let range = 0..1;
    let table = [
        (TransferFault::Canceled, FailureKind::Interrupted),
        (TransferFault::DestinationExists { path: path() }, FailureKind::Input),
        (TransferFault::DestinationIsLink { path: path() }, FailureKind::Input),
        (
            TransferFault::ChecksumMismatch {
                path: path(),
                what: text(),
                range: range.clone(),
                expected: digest,
                got: digest,
            },
            FailureKind::Input,
        ),
        (
            TransferFault::BrokenStream { path: path(), range: range.clone(), cause: io::Error::other("x") },
            FailureKind::Input,
        ),
        (TransferFault::StreamTooLong { path: path(), range: range.clone(), limit: 1 }, FailureKind::Input),
        (
            TransferFault::StreamTooShort { path: path(), range: range.clone(), needed: 2, got: 1 },
            FailureKind::Input,
        ),
        (TransferFault::BeyondSource { tensor: text(), path: path(), range, len: 0 }, FailureKind::Input),
    ];
    for (fault, expected) in table {
        assert_eq!(Error::from(fault).kind(), expected);
    }
}
