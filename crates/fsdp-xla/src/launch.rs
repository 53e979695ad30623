//! The launcher: each rank is a thread, in one process or several, with a device of the plugin.

use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use fsdp_comm::assembly::Assembly;
use fsdp_comm::launch::{FailureReason, LaunchFailure, Launcher, Seat};
use fsdp_comm::process::launch::Processes;
use fsdp_core::comm::Comm;
use fsdp_core::{Error, Rank};
use fsdp_nn::{HostMemory, HostOptions, HostPool};
use fsdp_sim::{ThreadOptions, Threads};

use crate::assignment::{Assignment, client};
use crate::cache::Cache;
use crate::comm::{Reduction, XlaComm};
use crate::error::XlaError;
use crate::ffi::Plugin;
use crate::memory::XlaMemory;
use crate::program_event::{Listener, ProgramEvent};
use crate::world::{Executor, Programs, Seated, World};

/// How programs are traced.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProgramForm {
    /// How gradients are summed.
    pub reduction: Reduction,
    /// Whether operations repeated in each layer become loops, so that programs do not grow with depth. Per-layer
    /// arguments are then passed as one for all layers.
    pub scan_layers: bool,
}

/// Options for compiling programs.
#[derive(Clone, Debug, Default)]
pub struct ProgramOptions {
    /// How programs are traced.
    pub form: ProgramForm,
    /// The folder for the text of each compiled program (`program-0.mlir`, ..); `None` to write none.
    pub dump: Option<PathBuf>,
    /// The folder that keeps compiled programs across runs; `None` to keep none.
    pub compile_cache: Option<PathBuf>,
}

/// Launches ranks on the devices of a PJRT plugin. The ranks of the launcher `L` do the work on the host and connect
/// the processes.
pub struct Devices<L = Threads<HostMemory>> {
    devices: Assignment,
    host: L,
    reduction: Reduction,
    programs: Programs,
}

/// The versions that an opened plugin reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PluginVersions {
    /// Major and minor version of its API.
    pub api: (i32, i32),
    /// The StableHLO version it supports, if it reports one.
    pub stablehlo: Option<[u64; 3]>,
}

/// What a started plugin reports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PluginReport {
    /// The versions, which are known without starting it.
    pub versions: PluginVersions,
    /// Name and version of the platform.
    pub platform: [String; 2],
    /// Number of devices that this process can use.
    pub devices: usize,
}

/// Opens a plugin, to check that it can be used here. Touches no device.
///
/// # Errors
/// [`XlaError`] if the plugin cannot be used.
pub fn versions(path: &Path) -> Result<PluginVersions, XlaError> {
    let plugin = Plugin::load(path)?;
    Ok(PluginVersions { api: plugin.version(), stablehlo: plugin.stablehlo() })
}

/// Whether the devices of a plugin are GPUs. Touches no device.
///
/// # Errors
/// [`XlaError`] if the plugin cannot be used.
pub fn is_for_gpus(path: &Path) -> Result<bool, XlaError> {
    Ok(Plugin::load(path)?.is_for_gpus())
}

/// Starts a plugin to find its devices.
///
/// # Errors
/// [`XlaError`] if the plugin cannot be used.
pub fn inspect(plugin: &Path) -> Result<PluginReport, XlaError> {
    let client = client(plugin, 1)?;
    let versions = PluginVersions { api: client.api_version(), stablehlo: client.stablehlo() };
    Ok(PluginReport { versions, platform: client.platform()?, devices: client.devices() })
}

impl Devices {
    /// Creates a launcher of up to `ranks` ranks on the devices of a plugin.
    ///
    /// # Errors
    /// [`XlaError`]: the plugin cannot be used, or has too few devices.
    pub fn new(
        plugin: &Path,
        ranks: usize,
        options: ProgramOptions,
        threads: ThreadOptions,
    ) -> Result<Self, XlaError> {
        Self::with_assignment(Assignment::single_process(plugin, ranks)?, host_threads(threads), options)
    }
}

impl Devices<Processes<HostMemory>> {
    /// Creates a launcher of the ranks of several processes, each of which holds one rank per device of its plugin. Of
    /// the GPUs that a process sees, it uses only the `visible` ones, if given. Waits up to `limit` for the other
    /// processes.
    ///
    /// # Errors
    /// [`XlaError`]: the plugin cannot be used, does not connect the processes, or its device count differs from that
    /// of ranks.
    pub fn among(
        plugin: &Path,
        host: Processes<HostMemory>,
        visible: Option<Range<usize>>,
        options: ProgramOptions,
        limit: Duration,
    ) -> Result<Self, XlaError> {
        // The argument is ignored: the processes determine the number of ranks.
        let assembly = host.assemble(0);
        Self::with_assignment(Assignment::among(plugin, &assembly, visible, limit)?, host, options)
    }
}

impl<L> Devices<L> {
    fn with_assignment(devices: Assignment, host: L, options: ProgramOptions) -> Result<Self, XlaError> {
        let ProgramOptions { form: ProgramForm { reduction, scan_layers }, dump, compile_cache } = options;
        if let Some(path) = &dump {
            let failed = |source| XlaError::Dump { path: path.clone(), source };
            std::fs::create_dir_all(path).map_err(failed)?;
        }
        let cache =
            compile_cache.map(|folder| Cache::new(&folder, &devices.client)).transpose()?.map(Arc::new);
        let programs = Programs { scan_layers, dump, cache, listener: Arc::new(|_: &ProgramEvent| {}) };
        Ok(Self { devices, host, reduction, programs })
    }

    /// Sets the listener for events about programs. By default there is none.
    pub fn with_listener(mut self, listener: Listener) -> Self {
        self.programs.listener = listener;
        self
    }
}

/// How a rank failed: before its code ran, or in it.
#[derive(Debug)]
enum Failure<E> {
    Setup(Error),
    Body(E),
}

impl<E: fmt::Display> fmt::Display for Failure<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::Setup(error) => error.fmt(f),
            Failure::Body(error) => error.fmt(f),
        }
    }
}

impl<L: Launcher<Memory = HostMemory>> Launcher for Devices<L> {
    type Memory = XlaMemory;

    fn ranks_on_machine(&self, world: usize) -> usize {
        self.host.ranks_on_machine(world)
    }

    fn assemble(&self, world: usize) -> Arc<dyn Assembly> {
        self.host.assemble(world)
    }

    fn launch<T: Send, E: Send + fmt::Debug + fmt::Display>(
        &self,
        ranks: usize,
        body: &(dyn Fn(Seat<XlaMemory>) -> Result<T, E> + Sync),
    ) -> Result<Vec<T>, LaunchFailure<E>> {
        let devices = self.devices.first(ranks).map_err(|error| {
            let reason = FailureReason::Setup(error.into());
            LaunchFailure { rank: Rank(self.devices.local.start), reason }
        })?;
        let world = Arc::new(World::new(devices, self.programs.clone()));
        let make_executor = |sync| Executor::Devices(Seated::new(Arc::clone(&world), sync));
        launch_with(&self.host, ranks, (self.reduction, &make_executor), body)
    }
}

/// Creates a launcher of ranks as threads, whose memory does the work on the host.
pub(crate) fn host_threads(threads: ThreadOptions) -> Threads<HostMemory> {
    let pool = HostPool::new();
    let host = move |_: Rank, _: usize| {
        let options = HostOptions { pool: Arc::clone(&pool), threads: 1, poison: false, resident: false };
        Ok(Arc::new(HostMemory::new(options)?))
    };
    Threads::new(threads, host)
}

/// Launches ranks that trace their steps; `make_executor` determines what runs each rank's programs.
pub(crate) fn launch_with<T: Send, E: Send + fmt::Debug + fmt::Display>(
    host: &impl Launcher<Memory = HostMemory>,
    ranks: usize,
    (reduction, make_executor): (Reduction, &(dyn Fn(Comm<HostMemory>) -> Executor + Sync)),
    body: &(dyn Fn(Seat<XlaMemory>) -> Result<T, E> + Sync),
) -> Result<Vec<T>, LaunchFailure<E>> {
    let run = |seat: Seat<HostMemory>| -> Result<T, Failure<E>> {
        let seat = seat_of(seat, reduction, make_executor).map_err(Failure::Setup)?;
        body(seat).map_err(Failure::Body)
    };
    host.launch(ranks, &run).map_err(|LaunchFailure { rank, reason }| {
        let reason = match reason {
            FailureReason::Error(Failure::Body(error)) => FailureReason::Error(error),
            FailureReason::Error(Failure::Setup(error)) => FailureReason::Setup(error.into()),
            FailureReason::Panic(message) => FailureReason::Panic(message),
            FailureReason::Comm(error) => FailureReason::Comm(error),
            FailureReason::Spawn(error) => FailureReason::Spawn(error),
            FailureReason::Setup(error) => FailureReason::Setup(error),
        };
        LaunchFailure { rank, reason }
    })
}

/// Makes a rank's seat from its seat on the host.
fn seat_of(
    seat: Seat<HostMemory>,
    reduction: Reduction,
    make_executor: &dyn Fn(Comm<HostMemory>) -> Executor,
) -> Result<Seat<XlaMemory>, Error> {
    let Seat { rank, memory, gathers, mut reductions } = seat;
    let sync = reductions.split(&memory, 0)?;
    let host = Arc::into_inner(memory).expect("a rank has just been given its memory");
    let memory = Arc::new(XlaMemory::new(host, make_executor(sync)));
    let comm = |host| Comm::new(Box::new(XlaComm::world(host, reduction)));
    Ok(Seat { rank, memory, gathers: comm(gathers), reductions: comm(reductions) })
}
