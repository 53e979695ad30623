//! Ahead of time: programs that are written down and compiled for devices that need not be here.

use std::fmt;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use fsdp_comm::launch::{LaunchFailure, Launcher, Seat};
use fsdp_comm::{ThreadOptions, Threads};
use fsdp_nn::HostMemory;

use crate::error::XlaError;
use crate::ffi::{Client, CompileOptions, MemoryNeed, Plugin, Setting, Topology};
use crate::flags::flags;
use crate::gpu;
use crate::hlo::Collective;
use crate::launch::{ProgramForm, host_threads, launch_with};
use crate::memory::XlaMemory;
use crate::optimized::Optimized;
use crate::trace::Trace;
use crate::world::Place;

/// The program of a step.
#[derive(Clone, Debug)]
pub struct Program {
    /// Its text, in StableHLO.
    pub text: String,
    /// How many operations it has, those of a loop counted once.
    pub operations: usize,
    /// Products among them.
    pub products: usize,
    /// Its collectives, in the order of the schedule; a loop has those of one round.
    pub collectives: Vec<Collective>,
    /// Its loops.
    pub loops: usize,
    /// Whether layers are among them.
    pub is_scanned: bool,
    replicas: usize,
}

/// Where programs go that nobody runs.
pub(crate) struct Paper {
    replicas: usize,
    scan_layers: bool,
    program: Mutex<Option<Program>>,
}

impl Paper {
    fn program(&self) -> MutexGuard<'_, Option<Program>> {
        self.program.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes a program down. What it would have made is nowhere.
    pub(crate) fn write(&self, trace: Trace) {
        let traced = trace.finish(self.replicas).module;
        let scanned = if self.scan_layers { traced.scanned() } else { None };
        let is_scanned = scanned.is_some();
        let module = scanned.unwrap_or(traced);
        let (text, operations, collectives) = (module.text(), module.operations(), module.collectives());
        let count = |kind| text.matches(kind).count();
        let (products, loops) = (count("stablehlo.dot_general "), count("stablehlo.while("));
        let replicas = self.replicas;
        *self.program() =
            Some(Program { text, operations, products, collectives, loops, is_scanned, replicas });
    }
}

/// Launches ranks whose steps are written down and not run: nothing is uploaded, and parameters take no memory. What the last
/// one wrote down is there afterwards.
pub struct Tracer {
    threads: Threads<HostMemory>,
    form: ProgramForm,
    paper: Mutex<Option<Arc<Paper>>>,
}

impl Tracer {
    /// Ranks whose programs have this form.
    pub fn new(form: ProgramForm, threads: ThreadOptions) -> Self {
        Self { threads: host_threads(threads), form, paper: Mutex::default() }
    }

    fn paper(&self) -> MutexGuard<'_, Option<Arc<Paper>>> {
        self.paper.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What was written down last, if anything was.
    pub fn into_program(self) -> Option<Program> {
        self.paper().as_ref()?.program().take()
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
        let paper = Arc::new(Paper { replicas: ranks, scan_layers, program: Mutex::default() });
        *self.paper() = Some(Arc::clone(&paper));
        let place = |_| Place::Paper(Arc::clone(&paper));
        launch_with(&self.threads, ranks, (reduction, &place), body)
    }
}

/// Devices that programs are compiled for.
pub struct Target {
    topology: Topology,
}

/// What a compiler has made of a program, and what it says of it. What a plugin does not say is none.
#[derive(Clone, Debug)]
pub struct CompileReport {
    /// How long it took.
    pub took: Duration,
    /// The program as it would run.
    pub optimized: Option<Optimized>,
    /// The memory of a device that it needs.
    pub memory: Option<MemoryNeed>,
    /// Floating-point operations of a device.
    pub flops: Option<f64>,
}

impl Target {
    /// Devices of a plugin, by a name of its own (`v4:2x2x1`), `cpu:4`: four devices of this processor, or `h100:1x1x8`: eight GPUs
    /// of one host.
    ///
    /// # Errors
    /// [`XlaError`]: the plugin can not be used, or knows no such topology.
    pub fn open(plugin: &Path, name: &str, options: Vec<(String, Setting)>) -> Result<Self, XlaError> {
        let opened = Arc::new(Plugin::open(plugin)?);
        if let Some(devices) = name.strip_prefix("cpu:").and_then(|devices| devices.parse::<u16>().ok()) {
            let count = ("cpu_device_count".to_owned(), Setting::Number(devices.into()));
            let client = Client::new(Arc::clone(&opened), vec![count])?;
            if client.platform()?[0] == "cpu" {
                return Ok(Self { topology: Topology::of_client(client)? });
            }
        }
        let options = if options.is_empty() { usual(name) } else { options };
        let topology = Topology::named(opened, name, options).map_err(|error| match error {
            XlaError::Call { message, .. } => {
                XlaError::Topology { path: plugin.into(), name: name.to_owned(), message }
            }
            other => other,
        })?;
        Ok(Self { topology })
    }

    /// How many devices there are.
    pub fn devices(&self) -> usize {
        self.topology.devices
    }

    /// What each of them is.
    pub fn kind(&self) -> &str {
        &self.topology.kind.name
    }

    /// Bytes of memory that programs may use on each, if the plugin says so.
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
    /// [`XlaError::Devices`]: it is for more ranks than there are devices; [`XlaError::Memory`]: it does not fit on them;
    /// [`XlaError::Compile`]: whatever else the compiler says.
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

/// The options of a topology to whom none are given.
fn usual(name: &str) -> Vec<(String, Setting)> {
    if name.starts_with("v4:") {
        // The two cores of a chip as one device.
        return vec![("chip_config_name".to_owned(), Setting::Text("megacore".to_owned()))];
    }
    gpu::options(name).unwrap_or_default()
}
