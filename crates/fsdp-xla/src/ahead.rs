//! Ahead-of-time compilation: programs traced and compiled for devices that need not be present.

use std::fmt;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use fsdp_comm::launch::{LaunchFailure, Launcher, Seat};
use fsdp_nn::HostMemory;
use fsdp_sim::{ThreadOptions, Threads};

use crate::error::XlaError;
use crate::ffi::{Client, CompileOptions, MemoryNeed, Plugin, Setting, Topology};
use crate::flags::flags;
use crate::gpu;
use crate::launch::{ProgramForm, host_threads, launch_with};
use crate::memory::XlaMemory;
use crate::optimized::Optimized;
use crate::trace::{Program, TraceSink};
use crate::world::Executor;

/// A launcher that traces the step on every rank without running it: nothing is uploaded, and parameters take no
/// memory. [`Tracer::into_program`] returns the last traced program.
pub struct Tracer {
    threads: Threads<HostMemory>,
    form: ProgramForm,
    in_parallel: bool,
    sink: Mutex<Option<Arc<TraceSink>>>,
}

impl Tracer {
    /// Creates a tracer of programs of this form. `in_parallel` says whether their devices may run operations beside a
    /// loop ([`Target::runs_in_parallel`]).
    pub fn new(form: ProgramForm, in_parallel: bool, threads: ThreadOptions) -> Self {
        Self { threads: host_threads(threads), form, in_parallel, sink: Mutex::default() }
    }

    fn sink(&self) -> MutexGuard<'_, Option<Arc<TraceSink>>> {
        self.sink.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The program traced last; `None` if none was.
    pub fn into_program(self) -> Option<Program> {
        self.sink().as_ref()?.program().take()
    }
}

impl Launcher for Tracer {
    type Memory = XlaMemory;

    fn launch<T: Send, E: Send + fmt::Debug + fmt::Display>(
        &self,
        ranks: usize,
        body: &(dyn Fn(Seat<XlaMemory>) -> Result<T, E> + Sync),
    ) -> Result<Vec<T>, LaunchFailure<E>> {
        let ProgramForm { reduction, scan_layers } = self.form;
        let in_parallel = self.in_parallel;
        let sink = TraceSink { replicas: ranks, scan_layers, in_parallel, program: Mutex::default() };
        let sink = Arc::new(sink);
        *self.sink() = Some(Arc::clone(&sink));
        let make_executor = |_| Executor::TraceSink(Arc::clone(&sink));
        launch_with(&self.threads, ranks, (reduction, &make_executor), body)
    }
}

/// Names of small topologies. Plugins cannot list theirs, so these are tried if a plugin does not know a name.
const KNOWN_TOPOLOGIES: [&str; 8] =
    ["v2:2x2", "v3:2x2", "v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1", "h100:1x1x8"];

/// The devices to compile programs for.
pub struct Target {
    topology: Topology,
}

/// A compiled program and the statistics that the plugin reports for it; a statistic it does not report is `None`.
#[derive(Clone, Debug)]
pub struct CompileReport {
    /// Compile time.
    pub took: Duration,
    /// The program after the compiler's optimizations.
    pub optimized: Option<Optimized>,
    /// The memory that it needs on each device.
    pub memory: Option<MemoryNeed>,
    /// Floating-point operations per device.
    pub flops: Option<f64>,
}

impl Target {
    /// Opens a topology of a plugin by one of the plugin's own names (`v4:2x2x1`), `cpu:4` (four devices of this CPU),
    /// or `h100:1x1x8` (eight GPUs of one host). `options` add to the usual ones of the topology, or replace them.
    ///
    /// # Errors
    /// [`XlaError`]: the plugin cannot be used, knows no such topology, or does not accept its options.
    pub fn open(plugin: &Path, name: &str, options: Vec<(String, Setting)>) -> Result<Self, XlaError> {
        let opened = Arc::new(Plugin::open(plugin)?);
        if let Some(devices) = name.strip_prefix("cpu:").and_then(|devices| devices.parse::<u16>().ok()) {
            let count = ("cpu_device_count".to_owned(), Setting::Number(devices.into()));
            let client = Client::new(Arc::clone(&opened), vec![count])?;
            if client.platform()?[0] == "cpu" {
                return Ok(Self { topology: Topology::of_client(client)? });
            }
        }
        let knows = |name: &str| Topology::named(Arc::clone(&opened), name, default_options(name)).is_ok();
        let has_options = !options.is_empty();
        let is_given = |key: &str| options.iter().any(|(given, _)| given == key);
        let mut all = default_options(name);
        all.retain(|(key, _)| !is_given(key));
        all.extend(options);
        let topology = Topology::named(Arc::clone(&opened), name, all).map_err(|error| match error {
            XlaError::Call { message, .. } if has_options && knows(name) => {
                XlaError::TopologyOptions { path: plugin.into(), name: name.to_owned(), message }
            }
            XlaError::Call { message, .. } => {
                let known =
                    KNOWN_TOPOLOGIES.into_iter().filter(|other| *other != name && knows(other)).collect();
                XlaError::Topology { path: plugin.into(), name: name.to_owned(), known, message }
            }
            other => other,
        })?;
        Ok(Self { topology })
    }

    /// Number of devices.
    pub fn devices(&self) -> usize {
        self.topology.devices
    }

    /// The device kind.
    pub fn kind(&self) -> &str {
        &self.topology.kind.name
    }

    /// Whether the devices may run operations beside a loop: only processors do.
    pub fn runs_in_parallel(&self) -> bool {
        self.topology.kind.runs_in_parallel()
    }

    /// Bytes available to programs on each device, if the plugin reports it.
    pub fn memory(&self) -> Option<u64> {
        self.topology.kind.memory
    }

    /// Major and minor version of the plugin's API.
    pub fn api(&self) -> (i32, i32) {
        self.topology.api_version()
    }

    /// Compiles a program.
    ///
    /// # Errors
    /// [`XlaError::Devices`]: the program has more ranks than there are devices; [`XlaError::Memory`]: it does not fit
    /// into their memory; [`XlaError::Compile`]: any other error of the compiler.
    pub fn compile(&self, program: &Program) -> Result<CompileReport, XlaError> {
        if program.replicas > self.topology.devices {
            let (path, platform) = (self.topology.path().into(), self.kind().to_owned());
            let (devices, ranks) = (self.topology.devices, program.replicas);
            return Err(XlaError::Devices { path, platform, devices, ranks });
        }
        let devices = (0..program.replicas as u64).collect();
        let options = CompileOptions { devices, flags: flags(self.kind()) };
        let begin = Instant::now();
        let compiled = self.topology.compile(&program.text, &options)?;
        let took = begin.elapsed();
        let optimized = compiled.optimized()?;
        Ok(CompileReport {
            took,
            optimized: optimized.and_then(|(format, bytes)| Optimized::read(&format, &bytes)),
            memory: compiled.memory()?,
            flops: compiled.flops()?,
        })
    }
}

/// The default options of a topology.
fn default_options(name: &str) -> Vec<(String, Setting)> {
    if name.starts_with("v4:") {
        // The two cores of a chip as one device.
        return vec![("chip_config_name".to_owned(), Setting::Text("megacore".to_owned()))];
    }
    gpu::options(name).unwrap_or_default()
}
