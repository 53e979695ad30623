//! The `[run]` table: where it runs and where its output goes.

use std::net::SocketAddr;

use fsdp_core::DType;
use fsdp_nn::backend::HeadChunks;

use super::error::ConfigError;
use super::kind::{BOOL, Kind, POSITIVE, RANKS, SIZE_OR_ZERO, TEXT};
use super::named::{Named, named};
use super::reader::Reader;
use super::table::table;
use super::written;

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

const ADDRESS: Kind<SocketAddr> = Kind {
    allowed: "an address and a port, such as \"127.0.0.1:9100\"",
    read: |value| value.as_str()?.parse().ok(),
};

/// A number of ranks that the file does not say.
pub(super) const RANKS_OF_DEVICE: usize = 0;

table! {
    /// The `[run]` table.
    pub struct RunConfig {
        /// What computes.
        device: Device = named(Device::Cpu),
        /// The world size.
        ranks: usize = or(RANKS, RANKS_OF_DEVICE),
        /// Whether all ranks run on the first GPU, and communicate in its memory; else each has its own, with NCCL.
        share_gpu: bool = or(BOOL, false),
        /// Threads that compute, over all ranks of this process; 0 means one per core.
        threads: usize = or(THREADS, 0),
        /// Whether libtorch may only use deterministic algorithms. (Those of `device = "cpu"` always are.)
        deterministic: bool = or(BOOL, false),
        /// The plugin of `device = "xla"`.
        xla: XlaConfig = table(XlaConfig::read),
        /// Whose kernels run, where libtorch computes, the operations that have several.
        kernels: KernelChoice = named(KernelChoice::Fused),
        /// The folder for metrics and models.
        out_dir: String = required(TEXT),
        /// What connects ranks of different processes.
        transport: Transport = named(Transport::Auto),
        /// Seconds after which a rank that never arrives is reported.
        timeout_s: f64 = or(SECONDS, 600.0),
        /// Seconds between two signs of life of a process, where there are several; after 15 times as long without one it is
        /// dead.
        heartbeat_s: f64 = or(SECONDS, 1.0),
        /// Peak TFLOP/s of one rank; without it the metrics have no MFU.
        peak_tflops: Option<f64> = or_none(POSITIVE),
        /// Where metrics are written beside `metrics.jsonl`.
        metrics: Vec<MetricsSink> = names(),
        /// Where the first rank answers Prometheus; without it nobody listens.
        metrics_listen: Option<SocketAddr> = or_none(ADDRESS),
        /// Which weights are exported.
        export_weights: ExportWeights = named(ExportWeights::Last),
        /// Element type of the exported model; without it that of the files that training began with.
        export_dtype: Option<DType> = named_or_none(),
    }
}

table! {
    /// The plugin of `device = "xla"`, and how its programs are made.
    pub struct XlaConfig {
        /// The shared library of a PJRT plugin, or `"cpu"`, `"tpu"` or `"cuda"` for that of a Python package; without it the one
        /// that `PJRT_PLUGIN_LIBRARY_PATH` names.
        plugin: Option<String> = or_none(TEXT),
        /// How gradients are added over ranks.
        reduction: XlaReduction = named(XlaReduction::Tree),
        /// Whether layers become loops in programs, so that those of deep models compile in less time and memory.
        scan_layers: bool = or(BOOL, false),
        /// A folder for the text of each program that is compiled.
        dump: Option<String> = or_none(TEXT),
        /// A folder where compiled programs are kept from run to run.
        compile_cache: Option<String> = or_none(TEXT),
    }
}

impl Default for XlaConfig {
    fn default() -> Self {
        Self {
            plugin: None,
            reduction: XlaReduction::Tree,
            scan_layers: false,
            dump: None,
            compile_cache: None,
        }
    }
}

/// Which weights of a run are exported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExportWeights {
    /// The parameters after the last step.
    Last,
    /// Their average (`train.ema_decay`).
    Ema,
}

/// Kernels of operations that have several.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KernelChoice {
    /// Ours: one pass over the operands.
    Fused,
    /// Compositions of libtorch's operations, for comparison.
    Aten,
}

/// A form of metrics beside `metrics.jsonl`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetricsSink {
    /// Event files of `TensorBoard`, in the folder `tensorboard`.
    Tensorboard,
    /// Tables: `metrics.csv` and `evaluations.csv`.
    Csv,
    /// A run of `MLflow`, in the folder `mlruns`.
    Mlflow,
}

/// What connects ranks of different processes. Those of one process always share its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Device {
    /// Host threads, with kernels of ours.
    Cpu,
    /// Host threads, with libtorch's kernels.
    TorchCpu,
    /// GPUs of NVIDIA, with libtorch's kernels and ours.
    Cuda,
    /// Devices of a PJRT plugin, with steps that XLA compiles.
    Xla,
}

/// How XLA's programs add gradients over ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum XlaReduction {
    /// By the tree of all other devices.
    Tree,
    /// As the plugin does.
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

    /// The chunks of logits that its backend wants, for predictions of memory on machines without it.
    pub const fn head_chunks(self) -> HeadChunks {
        match self {
            Device::Cpu | Device::TorchCpu => HeadChunks::Small,
            Device::Cuda | Device::Xla => HeadChunks::Large,
        }
    }
}
