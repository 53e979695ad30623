//! Every error has a kind.

use super::*;

fn path() -> PathBuf {
    "x".into()
}

fn io_error(number: i32) -> Error {
    Error::Io { action: FileAction::Write, path: path(), cause: io::Error::from_raw_os_error(number) }
}

#[test]
fn damage_and_wrong_requests_are_input() {
    let table = [
        Error::NotRegular { path: path(), what: "a named pipe" },
        Error::malformed("x", "it is damaged"),
        Error::NotWhole { tensor: "x".into(), elements: 0..1, reason: "they are missing".into() },
        Error::unsupported("x", "it is too new"),
        Error::wrong_path("x", "it is no checkpoint"),
        Error::unknown_tensor("x", "x", 0),
        Error::NamesDiffer { path: path(), differences: Box::default() },
        Error::bad_request("x", "no such rows"),
    ];
    for error in table {
        assert_eq!(error.kind(), FailureKind::Input, "{error}");
    }
}

#[test]
fn what_an_export_was_never_given_is_a_bug_that_stays() {
    assert_eq!(Error::unplanned("x", "rows were never written").kind(), FailureKind::Permanent);
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
}

#[test]
fn what_others_hold_and_full_disks_may_pass() {
    assert_eq!(Error::unavailable("x", "it is locked").kind(), FailureKind::Temporary);
    assert_eq!(Error::NoSpace { path: path(), needed: 2, free: 1 }.kind(), FailureKind::Temporary);
}

#[test]
fn an_interruption_is_one() {
    assert_eq!(Error::Canceled.kind(), FailureKind::Interrupted);
}

#[test]
fn a_fault_of_a_part_counts_its_bytes_in_the_whole() {
    let fault = Fault::at(3, "a text is not UTF-8").of_part("its pickle is refused: ", 64);
    let error = fault.in_file("x.pt");
    assert_eq!(error.to_string(), "x.pt: its pickle is refused: a text is not UTF-8 (at byte 67)");
    assert!(matches!(error, Error::Malformed { offset: Some(67), .. }));
}
