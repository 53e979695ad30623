//! Every error has a kind.

use super::*;

fn path() -> PathBuf {
    "x".into()
}

fn io_error(number: i32) -> Error {
    Error::Io { action: FileAction::Write, path: path(), cause: io::Error::from_raw_os_error(number) }
}

#[test]
fn damage_and_bad_requests_are_input_failures() {
    let table = [
        Error::NotRegular { path: path(), what: "a named pipe" },
        Error::malformed("x", "it is damaged"),
        Error::NotWhole { tensor: "x".into(), elements: 0..1, reason: "they are missing".into() },
        Error::unsupported("x", "it is too new"),
        Error::wrong_path("x", "it is not a checkpoint"),
        Error::unknown_tensor("x", "x", 0),
        Error::NamesDiffer { path: path(), differences: "1 missing: `w`".into() },
        Error::bad_request("x", "no such rows"),
    ];
    for error in table {
        assert_eq!(error.kind(), FailureKind::Input, "{error}");
    }
}

#[test]
fn unplanned_export_is_permanent_failure() {
    assert_eq!(Error::unplanned("x", "rows were never written").kind(), FailureKind::Permanent);
}

#[test]
fn os_error_code_decides_kind_of_io_error() {
    const EIO: i32 = 5;
    const ENOENT: i32 = 2;
    const ENOSPC: i32 = 28;
    assert_eq!(io_error(ENOSPC).kind(), FailureKind::Temporary);
    assert_eq!(io_error(EIO).kind(), FailureKind::Temporary);
    assert_eq!(io_error(ENOENT).kind(), FailureKind::Input);
    let several = |numbers: [i32; 2]| Error::Several { problems: numbers.map(io_error).into() };
    assert_eq!(several([EIO, ENOSPC]).kind(), FailureKind::Temporary);
    assert_eq!(several([EIO, ENOENT]).kind(), FailureKind::Input, "a retry does not bring the file back");
}

#[test]
fn locked_files_and_full_disks_are_temporary_failures() {
    assert_eq!(Error::unavailable("x", "it is locked").kind(), FailureKind::Temporary);
    assert_eq!(Error::unavailable("x", "the disk is full").kind(), FailureKind::Temporary);
}

#[test]
fn cancellation_is_interrupted_failure() {
    assert_eq!(Error::Canceled.kind(), FailureKind::Interrupted);
}

#[test]
fn fault_offset_in_part_is_shifted_to_file_offset() {
    let fault = Fault::at(3, "a text is not UTF-8").of_part("its pickle is refused: ", 64);
    let error = fault.in_file("x.pt");
    assert_eq!(error.to_string(), "x.pt: its pickle is refused: a text is not UTF-8 (at byte 67)");
    assert!(matches!(error, Error::Malformed { offset: Some(67), .. }));
}
