//! Every error of a run has a kind.

use std::io;
use std::path::PathBuf;

use fsdp_comm::launch::{FailureReason, LaunchFailure};
use fsdp_config::ConfigError;
use fsdp_core::comm::CommError;
use fsdp_core::memory::Category;
use fsdp_core::{MemoryKind, OutOfMemory, Rank};
use fsdp_data::DataError;

use super::*;
use crate::error::Ending;

const EIO: i32 = 5;
const EACCES: i32 = 13;

fn path() -> PathBuf {
    "x".into()
}

fn text() -> String {
    "x".to_owned()
}

fn os(number: i32) -> io::Error {
    io::Error::from_raw_os_error(number)
}

fn of_rank(source: impl Into<TrainError>) -> TrainError {
    TrainError::RankFailed { rank: Rank(1), source: Box::new(source.into()) }
}

fn launch(reason: FailureReason<TrainError>) -> TrainError {
    LaunchFailure { rank: Rank(0), reason }.into()
}

fn set_up(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> TrainError {
    launch(FailureReason::Setup(error.into()))
}

/// A failure outside the computation has the same kind whether the state could be saved or not.
fn ended(source: TrainError) -> TrainError {
    TrainError::Ended { source: Box::new(source), ending: Ending { done: 1, state: Err(None) } }
}

fn wrong_input() -> Vec<TrainError> {
    vec![
        ConfigError::Override { argument: text() }.into(),
        ConfigError::Read { file: path(), source: os(EACCES) }.into(),
        DataError::NoSamples { set: text(), seq_len: 1 }.into(),
        DataError::Read { key: "data.train", file: path(), source: os(EACCES) }.into(),
        fsdp_nn::ModelError::NoMicroBatch { round: 1, rounds: 1 }.into(),
        fsdp_ckpt::Error::WrongPath { path: path(), reason: "x".into() }.into(),
        fsdp_core::Mesh::of_world(3, 2, 1).unwrap_err().into(),
        TrainError::Misfit { key: "fsdp.frozen", reason: text() },
        TrainError::Input(text()),
        TrainError::Io { action: "write", path: path(), source: os(EACCES) },
        ended(TrainError::Io { action: "write", path: path(), source: os(EACCES) }),
        of_rank(DataError::NoSamples { set: text(), seq_len: 1 }),
    ]
}

fn what_repeats() -> Vec<TrainError> {
    let (kind, category) = (MemoryKind::Device, Category::Activation);
    let full = || fsdp_core::Error::from(OutOfMemory { kind, category, bytes: None, in_use: text() });
    vec![
        full().into(),
        of_rank(full()),
        set_up(full()),
        TrainError::NotFinite { step: 1, loss: f64::NAN, grad_norm: 1.0 },
        TrainError::LossScale { step: 1, loss: f64::NAN, grad_norm: 1.0, skipped: 17 },
        of_rank(TrainError::NotFinite { step: 1, loss: f64::NAN, grad_norm: 1.0 }),
        TrainError::EvaluationNotFinite { set: text(), step: 1, loss: f64::NAN },
        TrainError::Diverged {
            source: Box::new(TrainError::EvaluationNotFinite { set: text(), step: 1, loss: f64::NAN }),
            advice: text(),
        },
        launch(FailureReason::Panic(text())),
        of_rank(fsdp_core::Error::from(CommError::Differs { ranks: vec![Rank(1)], reference: Rank(0) })),
    ]
}

fn what_can_pass() -> Vec<TrainError> {
    let late = fsdp_ckpt::Error::Unavailable { path: path(), reason: "x".into() };
    let device = || fsdp_core::Error::Device("the GPU fell off the bus".into());
    vec![
        ConfigError::Read { file: path(), source: os(EIO) }.into(),
        DataError::Read { key: "data.train", file: path(), source: os(EIO) }.into(),
        TrainError::Io { action: "write", path: path(), source: io::ErrorKind::StorageFull.into() },
        of_rank(TrainError::Io { action: "write", path: path(), source: os(EIO) }),
        of_rank(late),
        of_rank(device()),
        of_rank(fsdp_core::Error::from(CommError::Transport { rank: Rank(1), reason: text() })),
        TrainError::no_thread("x", &os(EIO)),
        TrainError::SaveUnfinished(text()),
        TrainError::Stopped,
        TrainError::NotSaved { step: 1, source: Box::new(TrainError::SaveUnfinished(text())) },
        ended(TrainError::Io { action: "write", path: path(), source: io::ErrorKind::StorageFull.into() }),
        ended(TrainError::NotExported { source: Box::new(TrainError::SaveUnfinished(text())) }),
        launch(FailureReason::Spawn(os(EIO))),
        set_up(device()),
        set_up("NCCL could not connect"),
    ]
}

#[test]
fn errors_have_expected_failure_kind() {
    let table = [
        (wrong_input(), FailureKind::Input),
        (what_repeats(), FailureKind::Permanent),
        (what_can_pass(), FailureKind::Temporary),
    ];
    for (errors, expected) in table {
        for error in errors {
            assert_eq!(error.kind(), expected, "{error}");
        }
    }
}
