//! Checks that every error of the command has an exit code.

use fsdp_core::memory::Category;
use fsdp_core::{MemoryKind, OutOfMemory};

use super::*;

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

fn input() -> Vec<CliError> {
    vec![
        ConfigError::Override { argument: text() }.into(),
        fsdp_core::Mesh::of_world(3, 2, 1).unwrap_err().into(),
        fsdp_ckpt::Error::WrongPath { path: path(), reason: "x".into() }.into(),
        CliError::read(&path())(os(EACCES)),
        CliError::Model { origin: text(), source: fsdp_nn::hf::HfConfig::parse("1").unwrap_err() },
        CliError::Input(text()),
        CliError::Launched(Box::new(clap::Error::new(clap::error::ErrorKind::InvalidValue))),
        CliError::Start { what: text(), source: os(EACCES) },
        MpiError::NotFound { tried: Vec::new() }.into(),
        MpiError::Static.into(),
        ClusterError::NoToken.into(),
        CliError::Option { option: "--only", what: text() },
        CliError::create("--json", &path())(os(EACCES)),
        #[cfg(feature = "xla")]
        fsdp_xla::XlaError::NoPlugin.into(),
        DeviceError::NoDevice { device: 1, count: 1 }.into(),
        fsdp_cuda::device::TooManyRanks { ranks: 2, devices: 1 }.into(),
        CliError::LogFilter {
            source: "fsdp=loud".parse::<tracing_subscriber::filter::Targets>().unwrap_err(),
        },
        CliError::Write { what: text(), source: os(EACCES) },
    ]
}

fn failed() -> Vec<CliError> {
    let (kind, category) = (MemoryKind::Device, Category::Activation);
    let full = OutOfMemory { kind, category, bytes: None, in_use: text() };
    vec![fsdp_core::Error::from(full).into(), CliError::Signal { source: os(EIO) }]
}

fn temporary() -> Vec<CliError> {
    let cause = io::ErrorKind::StorageFull.into();
    let full = fsdp_ckpt::Error::Io { action: fsdp_ckpt::FileAction::Write, path: path(), cause };
    let lost = DeviceError::Call { call: "cuInit", device: 0, code: text(), what: text() };
    vec![
        ConfigError::Read { file: path(), source: os(EIO) }.into(),
        full.into(),
        CliError::read(&path())(os(EIO)),
        CliError::create("--json", &path())(os(EIO)),
        CliError::Write { what: text(), source: io::ErrorKind::QuotaExceeded.into() },
        lost.into(),
        CliError::Start { what: text(), source: os(EIO) },
        ClusterError::Io(os(EIO)).into(),
    ]
}

#[test]
fn every_error_maps_to_its_exit_code() {
    let canceled = fsdp_ckpt::Error::Canceled;
    let table = [(input(), 2), (failed(), 3), (temporary(), 75), (vec![CliError::Checkpoint(canceled)], 130)];
    for (errors, code) in table {
        for error in errors {
            assert_eq!(error.exit().code(), code, "{error}");
        }
    }
}
