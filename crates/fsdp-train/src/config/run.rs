//! The `[run]` table: where it runs and where its output goes.

use fsdp_nn::backend::HeadChunks;
use serde::{Deserialize, Serialize};
use toml::Table;

use super::error::ConfigError;
use super::kind::{BOOL, Kind, POSITIVE, RANKS, SIZE_OR_ZERO, TEXT, one_of, write_or_none};
use super::reader::{Origin, Reader};

const DEVICE: Kind<Device> = one_of("\"cpu\", \"torch-cpu\" or \"cuda\"");
const KERNELS: Kind<KernelChoice> = one_of("\"fused\" or \"aten\"");
const TRANSPORT: Kind<Transport> = one_of("\"auto\", \"nccl\", \"mpi\" or \"tcp\"");
/// More threads than any machine has cores would only exhaust its memory.
const THREADS: Kind<usize> = Kind {
    allowed: "an integer from 0 (one per core) to 1024",
    read: |value| (SIZE_OR_ZERO.read)(value).filter(|&threads| threads <= 1024),
};
/// Below a tenth of a second a rank may be late only because another process has the core. And a `Duration` holds no more
/// than some 1e19 seconds.
const SECONDS: Kind<f64> = Kind {
    allowed: "a number from 0.1 to 1e9",
    read: |value| (POSITIVE.read)(value).filter(|seconds| (0.1..=1e9).contains(seconds)),
};
const KEYS: &[&str] = &[
    "device",
    "ranks",
    "share_gpu",
    "threads",
    "deterministic",
    "kernels",
    "out_dir",
    "transport",
    "timeout_s",
    "heartbeat_s",
    "peak_tflops",
];

/// The `[run]` table.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RunConfig {
    /// What computes.
    pub device: Device,
    /// The world size.
    pub ranks: usize,
    /// Whether all ranks run on the first GPU, and communicate in its memory; else each has its own, with NCCL.
    pub share_gpu: bool,
    /// Threads that compute, over all ranks of this process; 0 means one per core.
    pub threads: usize,
    /// Whether libtorch may only use deterministic algorithms. (Those of `device = "cpu"` always are.)
    pub deterministic: bool,
    /// Whose kernels run, where libtorch computes, the operations that have several.
    pub kernels: KernelChoice,
    /// The folder for metrics and models.
    pub out_dir: String,
    /// What connects ranks of different processes.
    pub transport: Transport,
    /// Seconds after which a rank that never arrives is reported.
    pub timeout_s: f64,
    /// Seconds between two signs of life of a process, where there are several; after 15 times as long without one it is dead.
    pub heartbeat_s: f64,
    /// Peak TFLOP/s of one rank; without it the metrics have no MFU.
    #[serde(serialize_with = "write_or_none")]
    pub peak_tflops: Option<f64>,
}

/// Kernels of operations that have several.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum KernelChoice {
    /// Ours: one pass over the operands.
    Fused,
    /// Compositions of libtorch's operations, for comparison.
    Aten,
}

/// What connects ranks of different processes. Those of one process always share its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Transport {
    /// NCCL between GPUs; between CPUs MPI where `mpirun` has started the processes and a library is found, else TCP.
    Auto,
    /// NCCL.
    Nccl,
    /// MPI.
    Mpi,
    /// Connections of our own.
    Tcp,
}

/// What computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Device {
    /// Host threads, with kernels of ours.
    Cpu,
    /// Host threads, with libtorch's kernels.
    TorchCpu,
    /// GPUs of NVIDIA, with libtorch's kernels and ours.
    Cuda,
}

impl Device {
    /// The name in run files.
    pub const fn name(self) -> &'static str {
        match self {
            Device::Cpu => "cpu",
            Device::TorchCpu => "torch-cpu",
            Device::Cuda => "cuda",
        }
    }

    /// The chunks of logits that its backend wants, for predictions of memory on machines without it.
    pub const fn head_chunks(self) -> HeadChunks {
        match self {
            Device::Cpu | Device::TorchCpu => HeadChunks::Small,
            Device::Cuda => HeadChunks::Large,
        }
    }
}

impl RunConfig {
    /// `ranks` is the default of the world size.
    pub(super) fn read(
        origin: &Origin,
        table: Table,
        ranks: &dyn Fn(Device) -> usize,
    ) -> Result<RunConfig, ConfigError> {
        let reader = Reader::open(origin, "run", table, KEYS)?;
        let device = reader.or("device", DEVICE, Device::Cpu)?;
        Ok(RunConfig {
            device,
            ranks: reader.or("ranks", RANKS, ranks(device))?,
            share_gpu: reader.or("share_gpu", BOOL, false)?,
            threads: reader.or("threads", THREADS, 0)?,
            deterministic: reader.or("deterministic", BOOL, false)?,
            kernels: reader.or("kernels", KERNELS, KernelChoice::Fused)?,
            out_dir: reader.required("out_dir", TEXT)?,
            transport: reader.or("transport", TRANSPORT, Transport::Auto)?,
            timeout_s: reader.or("timeout_s", SECONDS, 600.0)?,
            heartbeat_s: reader.or("heartbeat_s", SECONDS, 1.0)?,
            peak_tflops: reader.or_none("peak_tflops", POSITIVE)?,
        })
    }
}
