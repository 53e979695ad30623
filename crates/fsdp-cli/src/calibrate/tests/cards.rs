//! Fake GPUs: CUDA memory, queues and kernels, and the NCCL communicator, on stand-in libraries.
//!
//! Operations that a GPU runs through libtorch are computed by host kernels in the stand-in's memory.
#![expect(unsafe_code, reason = "it calls C functions of the stand-ins")]

use std::ffi::{c_int, c_void};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use fsdp_config::{Device, RunConfig};
use fsdp_core::{Error, Queue, Rank};
use fsdp_cuda::nccl::{GpuOptions, Gpus, Nccl};
use fsdp_cuda::{CudaMemory, CudaOptions, TimedEvent};
use libloading::os::unix::Library;

use super::fake_cuda::{self, FakeDevice};
use super::mixed::Mixed;
use crate::calibrate::ranks::Ranks;
use crate::device::Work;
use crate::device::clock::Clock;
use crate::error::CliError;

/// Bytes that the stand-in for NCCL transfers at once: an embedding and its gradient.
const TRANSFER_BYTES_MAX: usize = 1 << 20;

impl Clock for Mixed {
    type Mark = TimedEvent;

    fn mark(&self, queue: Queue) -> Result<TimedEvent, Error> {
        Ok(self.cuda.record_timed(queue)?)
    }

    fn milliseconds(&self, from: &TimedEvent, to: &TimedEvent) -> Result<f64, Error> {
        Ok(f64::from(to.milliseconds_since(from)?))
    }

    fn device_name(&self) -> Option<String> {
        Some(self.cuda.name().to_owned())
    }
}

/// A set of fake GPUs.
pub(super) struct Cards {
    nccl: Arc<Nccl>,
    devices: Vec<FakeDevice>,
}

impl Cards {
    pub(super) fn new(count: usize) -> Self {
        let devices = (0..count).map(|_| fake_cuda::device()).collect();
        Self { nccl: nccl(), devices }
    }
}

impl Ranks for Cards {
    fn run<W: Work>(&self, _run: &RunConfig, work: W) -> Result<W::Outcome, CliError> {
        let devices = self.devices.clone();
        let memory = move |rank: Rank, _| {
            let options = CudaOptions::new(devices[rank.0].ordinal);
            let mut memory = Mixed::new(CudaMemory::new(options)?);
            memory.head_chunks = Device::Cuda.head_chunks();
            Ok(Arc::new(memory))
        };
        let options = GpuOptions::new(self.devices.len());
        Ok(work.on(&Gpus::new(Arc::clone(&self.nccl), options, memory)))
    }
}

/// The stand-in for NCCL, whose operations follow the work of their streams.
fn nccl() -> Arc<Nccl> {
    type Finish = unsafe extern "C" fn(*mut c_void) -> c_int;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("libnccl.so.2");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fsdp-cuda/tests/fake_nccl/fake_nccl.c");
    let mut build = Command::new(std::env::var_os("CC").unwrap_or_else(|| "cc".into()));
    build.args(["-shared", "-fPIC", "-O1", "-pthread", "-o"]).arg(&file).arg(source);
    let built = build.arg(format!("-DDATA_MAX={TRANSFER_BYTES_MAX}")).status();
    assert!(built.expect("a C compiler is there, because Rust links with it").success());
    let nccl = Nccl::open(&[folder.path().to_owned()]).unwrap();
    // SAFETY: both libraries are stand-ins, and these are the types of their functions; neither is closed again.
    unsafe {
        let synchronize = *Library::this().get::<Finish>(b"cuStreamSynchronize").unwrap();
        let library = Library::new(file).unwrap();
        library.get::<unsafe extern "C" fn(Finish)>(b"fake_set_finish").unwrap()(synchronize);
        std::mem::forget(library);
    }
    nccl
}
