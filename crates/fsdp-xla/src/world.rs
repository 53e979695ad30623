//! Ranks that run one program together: the devices of a process, what was compiled for them, and how their threads meet.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use fsdp_core::comm::Comm;
use fsdp_core::memory::Slice;
use fsdp_core::{Digest, Error};
use fsdp_nn::HostMemory;

use crate::buffer::Content;
use crate::error::XlaError;
use crate::ffi::{Client, CompileOptions, DeviceBuffer, Executable, Plugin};
use crate::trace::{Argument, Source, Trace, Traced};

/// Devices of a processor that a client is made with. Its pool of threads, and with it the blocking of products, depends on
/// their number, so that runs on fewer ranks have the same.
const CPU_DEVICES: usize = 8;

/// What the ranks of a process share.
pub(crate) struct World {
    client: Arc<Client>,
    ranks: usize,
    /// Where the text of each program is written, if anywhere.
    dump: Option<PathBuf>,
    compiled: Mutex<BTreeMap<Digest, Arc<Executable>>>,
    /// What each rank brings to the program that runs next, and gets from it.
    slots: Vec<Mutex<Slot>>,
}

#[derive(Default)]
struct Slot {
    arguments: Vec<Arc<DeviceBuffer>>,
    results: Vec<DeviceBuffer>,
}

/// The devices of a plugin.
///
/// # Errors
/// What the plugin says.
pub(crate) fn client(path: &Path, ranks: usize) -> Result<Arc<Client>, XlaError> {
    let client = Client::new(Plugin::open(path)?, Vec::new())?;
    let [platform, _] = client.platform()?;
    if platform != "cpu" {
        return Ok(Arc::new(client));
    }
    let devices = ranks.max(CPU_DEVICES) as i64;
    let options = vec![("cpu_device_count".to_owned(), devices)];
    Ok(Arc::new(Client::new(Plugin::open(path)?, options)?))
}

impl World {
    /// So many ranks on the first devices of a client.
    ///
    /// # Errors
    /// [`XlaError::Devices`] when there are fewer.
    pub(crate) fn new(client: Arc<Client>, ranks: usize, dump: Option<PathBuf>) -> Result<Self, XlaError> {
        if client.devices() < ranks {
            let [platform, _] = client.platform()?;
            let (path, devices) = (client.path().into(), client.devices());
            return Err(XlaError::Devices { path, platform, devices, ranks });
        }
        let slots = (0..ranks).map(|_| Mutex::default()).collect();
        Ok(Self { client, ranks, dump, compiled: Mutex::default(), slots })
    }

    fn slot(&self, rank: usize) -> MutexGuard<'_, Slot> {
        self.slots[rank].lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn upload(&self, rank: usize, host: &HostMemory, argument: Argument) -> Result<Arc<DeviceBuffer>, Error> {
        let Argument { shape, source, .. } = argument;
        Ok(match source {
            Source::Device(buffer) => buffer,
            Source::Bytes(bytes) => Arc::new(self.client.upload(rank, &shape, &bytes)?),
            Source::Host(buffer) => {
                Arc::new(self.client.upload(rank, &shape, host.bytes(Slice::whole(&buffer))?)?)
            }
        })
    }

    /// The program of a text, compiled once.
    fn executable(&self, digest: Digest, text: &str) -> Result<Arc<Executable>, XlaError> {
        let mut compiled = self.compiled.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(executable) = compiled.get(&digest) {
            return Ok(Arc::clone(executable));
        }
        if let Some(folder) = &self.dump {
            let path = folder.join(format!("program-{}.mlir", compiled.len()));
            std::fs::write(&path, text).map_err(|source| XlaError::Dump { path, source })?;
        }
        let (begin, options) = (Instant::now(), CompileOptions { replicas: self.ranks });
        let executable = Arc::new(self.client.compile(text, options)?);
        let (took, operations) = (begin.elapsed(), text.lines().count());
        tracing::info!(target: "fsdp", ?took, operations, "a program was compiled");
        compiled.insert(digest, Arc::clone(&executable));
        Ok(executable)
    }

    /// Runs the program on what all ranks have brought.
    fn execute(&self, digest: Digest, text: &str) -> Result<(), XlaError> {
        let executable = self.executable(digest, text)?;
        let arguments: Vec<Vec<Arc<DeviceBuffer>>> =
            (0..self.ranks).map(|rank| std::mem::take(&mut self.slot(rank).arguments)).collect();
        let results = executable.execute(&arguments)?;
        for (rank, results) in results.into_iter().enumerate() {
            self.slot(rank).results = results;
        }
        Ok(())
    }
}

/// A rank's place in a world.
pub(crate) struct Place {
    world: Arc<World>,
    rank: usize,
    /// With the other ranks, on the host: to meet before and after a program.
    ranks: Comm<HostMemory>,
}

impl Place {
    pub(crate) fn new(world: Arc<World>, ranks: Comm<HostMemory>) -> Self {
        Self { world, rank: ranks.rank(), ranks }
    }

    /// Runs what was traced, with the other ranks. It may be under way on return.
    ///
    /// # Errors
    /// Those of the plugin and of communication.
    pub(crate) fn run(&mut self, host: &HostMemory, trace: Trace) -> Result<(), Error> {
        let Traced { text, arguments, results, unchanged } = trace.finish(self.world.ranks);
        let digest = Digest::of(&text);
        let world = Arc::clone(&self.world);
        let arguments: Vec<Arc<DeviceBuffer>> =
            arguments.into_iter().map(|one| world.upload(self.rank, host, one)).collect::<Result<_, _>>()?;
        for (number, storage) in unchanged {
            storage.put(Content::Device(Arc::clone(&arguments[number]), None));
        }
        world.slot(self.rank).arguments = arguments;
        self.ranks.agree(host, digest)?;
        let failure = if self.rank == 0 { world.execute(digest, &text).err() } else { None };
        if let Some(error) = failure {
            self.ranks.abort(&error.to_string());
            return Err(error.into());
        }
        self.ranks.agree(host, digest)?;
        let made = std::mem::take(&mut world.slot(self.rank).results);
        assert_eq!(made.len(), results.len(), "a program makes what was traced");
        for (storage, buffer) in results.into_iter().zip(made) {
            storage.put(Content::Device(Arc::new(buffer), None));
        }
        Ok(())
    }
}
