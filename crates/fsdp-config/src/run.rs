//! The `[run]` table: where a run executes and where its output goes.

use std::net::SocketAddr;

use fsdp_core::DType;
use fsdp_nn::backend::HeadChunks;

use super::error::ConfigError;
use super::kind::{BOOL, Kind, POSITIVE, RANKS, SIZE_OR_ZERO, TEXT};
use super::named::{Named, named};
use super::reader::{Origin, Reader};
use super::table::table;
use super::writer;

/// The limit exceeds the core count of any machine; more threads would only exhaust memory.
const THREADS: Kind<usize> = Kind {
    allowed: "an integer from 0 (one per core) to 1024",
    read: |value| (SIZE_OR_ZERO.read)(value).filter(|&threads| threads <= 1024),
};
/// Below 0.1 s, a rank may be late only because another process has its core. The upper limit is far within the range
/// of a `Duration`, about 1e19 seconds.
const SECONDS: Kind<f64> = Kind {
    allowed: "a number from 0.1 to 1e9",
    read: |value| (POSITIVE.read)(value).filter(|seconds| (0.1..=1e9).contains(seconds)),
};

const ADDRESS: Kind<SocketAddr> = Kind {
    allowed: "an address and a port, such as \"127.0.0.1:9100\"",
    read: |value| value.as_str()?.parse().ok(),
};

/// The name of a model's mixtures of experts among what a device [lacks](Device::lacks).
pub const MIXTURES: &str = "mixtures of experts";

/// The key of what a device without weights in 4 bits lacks.
pub(crate) const QUANTIZE: &str = "adapter.quantize";

/// The name of linear attention among what a device [lacks](Device::lacks).
pub const LINEAR_ATTENTION: &str = "linear attention";

/// Stands for a number of ranks that the file does not set.
pub(super) const RANKS_OF_DEVICE: usize = 0;

table! {
    /// The `[run]` table.
    pub struct RunConfig {
        /// Device that computes.
        device: Device = named(Device::Cpu),
        /// Number of ranks (world size).
        ranks: usize = or(RANKS, RANKS_OF_DEVICE),
        /// Whether all ranks share the first GPU and communicate through its memory; by default each has its own, with NCCL.
        share_gpu: bool = or(BOOL, false),
        /// Compute threads of all ranks of this process together; 0 means one per core.
        threads: usize = or(THREADS, 0),
        /// Whether to restrict libtorch to deterministic algorithms (`device = "cpu"` always is deterministic).
        deterministic: bool = or(BOOL, false),
        /// Settings of `device = "xla"`.
        xla: XlaConfig = table(XlaConfig::read),
        /// With libtorch devices: kernels to use for operations that have more than one.
        kernels: KernelChoice = named(KernelChoice::Fused),
        /// Output folder for metrics, checkpoints and models.
        out_dir: String = required(TEXT),
        /// Transport between ranks of different processes.
        transport: Transport = named(Transport::Auto),
        /// Seconds to wait for a rank before it is reported as missing.
        timeout_s: f64 = or(SECONDS, 600.0),
        /// Seconds between heartbeats of a process, if there are several; one without a heartbeat for 15 times as long is
        /// considered dead.
        heartbeat_s: f64 = or(SECONDS, 1.0),
        /// Peak TFLOP/s of one rank, from which MFU is computed; without it metrics have no MFU.
        peak_tflops: Option<f64> = or_none(POSITIVE),
        /// Formats in which metrics are written, besides `metrics.jsonl`.
        metrics: Vec<MetricsSink> = names(),
        /// Address at which the first rank serves Prometheus metrics; none means no server.
        metrics_listen: Option<SocketAddr> = or_none(ADDRESS),
        /// Weights to export.
        export_weights: ExportWeights = named(ExportWeights::Last),
        /// Dtype of the exported model; none means that of the files that training started from.
        export_dtype: Option<DType> = named_or_none(),
    }
}

table! {
    /// Settings of `device = "xla"`: the plugin, and how programs are made.
    pub struct XlaConfig {
        /// Shared library of a PJRT plugin, or `"cpu"`, `"tpu"` or `"cuda"` for that of a Python package; none means the one
        /// that `PJRT_PLUGIN_LIBRARY_PATH` names.
        plugin: Option<String> = or_none(TEXT),
        /// How gradients are reduced over ranks.
        reduction: XlaReduction = named(XlaReduction::Tree),
        /// Whether repeated layers become loops, so that deep models compile in less time and memory.
        scan_layers: bool = or(BOOL, false),
        /// Folder for the StableHLO text of each compiled program.
        dump: Option<String> = or_none(TEXT),
        /// Folder that caches compiled programs between runs.
        compile_cache: Option<String> = or_none(TEXT),
    }
}

impl RunConfig {
    /// The defaults of all keys, for a run with this output folder.
    pub fn in_folder(out_dir: &str) -> Self {
        let table = toml::Table::from_iter([("out_dir".to_owned(), out_dir.into())]);
        let origin = Origin::new(Vec::new());
        Self::read(&Reader::new(&origin, table)).expect("all other keys have defaults")
    }
}

/// Which weights of a run are exported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExportWeights {
    /// The parameters after the last step.
    Last,
    /// Their moving average (`train.ema_decay`).
    Ema,
}

/// Kernels for operations that have several.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KernelChoice {
    /// Our own, with one pass over the operands.
    Fused,
    /// Compositions of libtorch operations, for comparison.
    Aten,
}

/// A format in which metrics are written in addition to `metrics.jsonl`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetricsSink {
    /// `TensorBoard` event files, in the folder `tensorboard`.
    Tensorboard,
    /// CSV tables: `metrics.csv` and `evaluations.csv`.
    Csv,
    /// An `MLflow` run, in the folder `mlruns`.
    Mlflow,
}

/// How ranks of different processes communicate. Ranks of one process always share its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// NCCL between GPUs. Between CPUs, MPI if `mpirun` started the processes and a library is found, else TCP.
    Auto,
    /// NCCL.
    Nccl,
    /// MPI.
    Mpi,
    /// Our own TCP connections.
    Tcp,
}

/// The device that computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Device {
    /// Host threads, with our own kernels.
    Cpu,
    /// Host threads, with libtorch's kernels.
    TorchCpu,
    /// NVIDIA GPUs, with libtorch's kernels and our own.
    Cuda,
    /// Devices of a PJRT plugin, with steps compiled by XLA.
    Xla,
}

/// How XLA programs reduce gradients over ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum XlaReduction {
    /// With the same tree as all other devices.
    Tree,
    /// In the plugin's own order.
    Native,
}

named! {
    ExportWeights { "last": Last, "ema": Ema }
    KernelChoice { "fused": Fused, "aten": Aten }
    MetricsSink { "tensorboard": Tensorboard, "csv": Csv, "mlflow": Mlflow }
    Transport { "auto": Auto, "nccl": Nccl, "mpi": Mpi, "tcp": Tcp }
    Device { "cpu": Cpu, "torch-cpu": TorchCpu, "cuda": Cuda, "xla": Xla }
    XlaReduction { "tree": Tree, "native": Native }
}

impl Device {
    /// The name in run files.
    pub fn name(self) -> &'static str {
        Named::name(self)
    }

    /// What its backend has no way to run, by name: update rules, and families of a model's operations.
    pub const fn lacks(self) -> &'static [&'static str] {
        match self {
            Device::Cpu | Device::TorchCpu => &[],
            Device::Cuda => &["muon"],
            Device::Xla => &["adamw8bit", "muon", MIXTURES, LINEAR_ATTENTION, QUANTIZE],
        }
    }

    /// The logits chunking that its backend wants, to predict memory on machines without that backend.
    pub const fn head_chunks(self) -> HeadChunks {
        match self {
            Device::Cpu | Device::TorchCpu => HeadChunks::Small,
            Device::Cuda | Device::Xla => HeadChunks::Large,
        }
    }
}
