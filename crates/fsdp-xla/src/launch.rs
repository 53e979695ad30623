//! The launcher: ranks as threads of one process, each with a device of the plugin.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use fsdp_comm::launch::{FailureReason, LaunchFailure, Launcher, Seat};
use fsdp_comm::{ThreadOptions, Threads};
use fsdp_core::comm::Comm;
use fsdp_core::{Error, Rank};
use fsdp_nn::{HostMemory, HostOptions, HostPool};

use crate::cache::Cache;
use crate::comm::XlaComm;
use crate::error::XlaError;
use crate::ffi::{Client, Plugin};
use crate::memory::XlaMemory;
use crate::told::{Listener, Told};
use crate::world::{Place, Programs, Seated, World, client, expect_devices};

/// How gradients are added over ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reduction {
    /// By the tree that all other devices have: every rank gets all parts of what it adds.
    #[default]
    Tree,
    /// As the plugin likes.
    Native,
}

/// How programs are made.
#[derive(Clone, Debug, Default)]
pub struct ProgramOptions {
    /// How gradients are added.
    pub reduction: Reduction,
    /// A folder where the text of each program that is compiled is left, if anywhere: `program-0.mlir`, ..
    pub dump: Option<PathBuf>,
    /// A folder where compiled programs are kept from run to run, if anywhere.
    pub compile_cache: Option<PathBuf>,
}

/// Launches ranks on the devices of a PJRT plugin.
pub struct Devices {
    client: Arc<Client>,
    threads: Threads<HostMemory>,
    reduction: Reduction,
    programs: Programs,
}

/// What a plugin says of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PluginReport {
    /// Major and minor version of its API.
    pub api: (i32, i32),
    /// Name and version of the platform.
    pub platform: [String; 2],
    /// Devices that this process can use.
    pub devices: usize,
}

/// That a file is a plugin that can be opened here. No device is touched.
///
/// # Errors
/// [`XlaError`].
pub fn expect_plugin(path: &Path) -> Result<(), XlaError> {
    Plugin::found(path).map(drop)
}

/// Opens a plugin to see what it is.
///
/// # Errors
/// [`XlaError`].
pub fn inspect(plugin: &Path) -> Result<PluginReport, XlaError> {
    let client = client(plugin, 1)?;
    Ok(PluginReport { api: client.api_version(), platform: client.platform()?, devices: client.devices() })
}

impl Devices {
    /// So many ranks on the devices of a plugin.
    ///
    /// # Errors
    /// [`XlaError`]: the plugin can not be used, or has too few devices.
    pub fn new(
        plugin: &Path,
        ranks: usize,
        options: ProgramOptions,
        threads: ThreadOptions,
    ) -> Result<Self, XlaError> {
        let client = client(plugin, ranks)?;
        expect_devices(&client, ranks)?;
        let ProgramOptions { reduction, dump, compile_cache } = options;
        let cache = compile_cache.map(|folder| Cache::new(&folder, &client)).transpose()?.map(Arc::new);
        let programs = Programs { dump, cache, listener: Arc::new(|_: &Told| {}) };
        Ok(Self { client, threads: host_threads(threads), reduction, programs })
    }

    /// Who is told of programs. Without it nobody is.
    pub fn heard_by(mut self, listener: Listener) -> Self {
        self.programs.listener = listener;
        self
    }
}

/// How a rank has failed: before its code ran, or in it.
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

impl Launcher for Devices {
    type Memory = XlaMemory;

    fn launch<T: Send, E: Send + fmt::Debug + fmt::Display>(
        &self,
        ranks: usize,
        body: &(dyn Fn(Seat<XlaMemory>) -> Result<T, E> + Sync),
    ) -> Result<Vec<T>, LaunchFailure<E>> {
        let world = World::new(Arc::clone(&self.client), ranks, self.programs.clone());
        let world = world
            .map(Arc::new)
            .map_err(|error| LaunchFailure { rank: Rank(0), reason: FailureReason::Setup(error.into()) })?;
        let place = |ranks| Place::Devices(Seated::new(Arc::clone(&world), ranks));
        launch_with(&self.threads, ranks, (self.reduction, &place), body)
    }
}

/// Ranks as threads, whose memory does what happens on the host.
pub(crate) fn host_threads(threads: ThreadOptions) -> Threads<HostMemory> {
    let pool = HostPool::new();
    let host = move |_: Rank, _: usize| {
        let options = HostOptions { pool: Arc::clone(&pool), threads: 1, poison: false, resident: false };
        Ok(Arc::new(HostMemory::new(options)?))
    };
    Threads::new(threads, host)
}

/// Launches ranks whose steps become programs, which go to the place of each.
pub(crate) fn launch_with<T: Send, E: Send + fmt::Debug + fmt::Display>(
    threads: &Threads<HostMemory>,
    ranks: usize,
    (reduction, place): (Reduction, &(dyn Fn(Comm<HostMemory>) -> Place + Sync)),
    body: &(dyn Fn(Seat<XlaMemory>) -> Result<T, E> + Sync),
) -> Result<Vec<T>, LaunchFailure<E>> {
    let run = |seat: Seat<HostMemory>| -> Result<T, Failure<E>> {
        let seat = seat_of(seat, reduction, place).map_err(Failure::Setup)?;
        body(seat).map_err(Failure::Body)
    };
    threads.launch(ranks, &run).map_err(|LaunchFailure { rank, reason }| {
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

/// A rank's seat, made of that of a thread.
fn seat_of(
    seat: Seat<HostMemory>,
    reduction: Reduction,
    place: &dyn Fn(Comm<HostMemory>) -> Place,
) -> Result<Seat<XlaMemory>, Error> {
    let Seat { rank, memory, gathers, mut reductions } = seat;
    let meeting = reductions.split(&memory, 0)?;
    let host = Arc::into_inner(memory).expect("a rank has just been given its memory");
    let memory = Arc::new(XlaMemory::new(host, place(meeting)));
    let comm = |host| Comm::new(Box::new(XlaComm::world(host, reduction)));
    Ok(Seat { rank, memory, gathers: comm(gathers), reductions: comm(reductions) })
}
