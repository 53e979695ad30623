//! Tests that every error has a kind.

use std::sync::Arc;

use super::*;
use crate::checker::Violation;
use crate::comm::{CollectiveKind, CommError, Fingerprint, Purpose, ReduceOp};
use crate::dtype::DType;
use crate::error::Error;
use crate::memory::Category;
use crate::out_of_memory::{MemoryKind, OutOfMemory};
use crate::rank::Rank;

const CALL: Fingerprint = Fingerprint {
    sequence: 7,
    kind: CollectiveKind::AllReduce(ReduceOp::Sum),
    purpose: Purpose::Scalars,
    unit: None,
    dtype: DType::I64,
    elements: 1,
};

fn text() -> String {
    "x".to_owned()
}

#[test]
fn every_core_error_has_expected_kind() {
    let (rank, peer) = (Rank(0), Rank(1));
    let (len, dtype) = (1, DType::F32);
    let missing = CommError::Missing { missing: [peer].into(), call: CALL, status: [].into() };
    let category = Category::Activation;
    let full = |kind| OutOfMemory { kind, category, bytes: Some(4), in_use: text() };
    let program = Error::Program { block: text(), source: "no such token".into() };
    let [param, alias, first, second] = std::array::from_fn(|_| text());
    let table = [
        (crate::Mesh::of_world(3, 2, 1).unwrap_err(), FailureKind::Input),
        (Error::Model { what: text() }, FailureKind::Input),
        (Error::WrapClass { class: text(), known: Vec::new() }, FailureKind::Input),
        (Error::TiedAcrossUnits { param, alias, first, second }, FailureKind::Input),
        (Error::Policy { key: "reduce_dtype", value: text(), expected: text() }, FailureKind::Input),
        (Error::Schedule(Violation::BadWait { op: text(), target: 3 }), FailureKind::Permanent),
        (Error::Viewed { unit: text() }, FailureKind::Permanent),
        (Error::BufferInUse { buffer: 3, name: text() }, FailureKind::Permanent),
        (Error::Shared { len, dtype, readers: 1 }, FailureKind::Permanent),
        (Error::Released { len, dtype }, FailureKind::Permanent),
        (full(MemoryKind::Device).into(), FailureKind::Permanent),
        (full(MemoryKind::Host).into(), FailureKind::Temporary),
        (Error::Parameter { block: text(), param: text(), why: "is sharded" }, FailureKind::Permanent),
        (program, FailureKind::Permanent),
        (Error::Device("the GPU fell off the bus".into()), FailureKind::Temporary),
        (Error::Refused("the step does not fit".into()), FailureKind::Input),
        (Error::Comm(missing), FailureKind::Temporary),
        (Error::Comm(CommError::Differs { ranks: vec![peer], reference: rank }), FailureKind::Permanent),
    ];
    for (error, expected) in table {
        assert_eq!(error.kind(), expected, "{error}");
    }
}

#[test]
fn every_collective_error_has_expected_kind() {
    let (rank, peer, call, reason) = (Rank(0), Rank(1), CALL, text());
    let (segment, status, missing) = (0, Arc::default(), Arc::from([peer]));
    let (group, peer_group) = (text(), text());
    let table = [
        (CommError::Mismatch { rank, got: call, peer, expected: call }, FailureKind::Permanent),
        (CommError::Order { rank, call, group, peer, peer_group }, FailureKind::Permanent),
        (CommError::Differs { ranks: vec![rank], reference: peer }, FailureKind::Permanent),
        (CommError::Length { rank, call, segment, expected: 1, got: 2 }, FailureKind::Permanent),
        (
            CommError::Type { rank, call, segment, expected: DType::F32, got: DType::Bf16 },
            FailureKind::Permanent,
        ),
        (CommError::IntegerAverage { rank, call }, FailureKind::Permanent),
        (CommError::Shared { rank, call, segment }, FailureKind::Permanent),
        (CommError::PeerFailed { rank, reason: reason.clone() }, FailureKind::Temporary),
        (
            CommError::Missing { missing: Arc::clone(&missing), call, status: Arc::clone(&status) },
            FailureKind::Temporary,
        ),
        (CommError::TimedOut { rank, call, seconds: 600, missing, status }, FailureKind::Temporary),
        (CommError::Aborted { rank, reason: reason.clone(), kind: FailureKind::Input }, FailureKind::Input),
        (CommError::Transport { rank, reason }, FailureKind::Temporary),
    ];
    for (error, expected) in table {
        assert_eq!(error.kind(), expected, "{error}");
    }
}

#[test]
fn disk_io_errors_are_temporary_and_path_errors_are_input() {
    // EIO, EAGAIN, ENOMEM, EBUSY, ENFILE, EMFILE, ENOSPC, ENOLCK, ENOTCONN, ETIMEDOUT, ESTALE, EREMOTEIO, EDQUOT.
    for number in [5, 11, 12, 16, 23, 24, 28, 37, 107, 110, 116, 121, 122] {
        let error = io::Error::from_raw_os_error(number);
        assert_eq!(FailureKind::of_io(&error), FailureKind::Temporary, "{error}");
    }
    // EPERM, ENOENT, ENXIO, EACCES, ENOTDIR, EISDIR, EINVAL, EFBIG (a limit that the user has set), EROFS, ENAMETOOLONG.
    for number in [1, 2, 6, 13, 20, 21, 22, 27, 30, 36] {
        let error = io::Error::from_raw_os_error(number);
        assert_eq!(FailureKind::of_io(&error), FailureKind::Input, "{error}");
    }
    let cut_off = io::Error::from(io::ErrorKind::UnexpectedEof);
    assert_eq!(FailureKind::of_io(&cut_off), FailureKind::Input);
}

#[test]
fn failure_kinds_are_ordered_by_precedence() {
    let kinds =
        [FailureKind::Temporary, FailureKind::Permanent, FailureKind::Input, FailureKind::Interrupted];
    assert!(kinds.is_sorted());
}
