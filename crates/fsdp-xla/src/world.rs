//! Ranks that run one program together: the devices of a process, what was compiled for them, and how their threads meet.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use fsdp_core::comm::Comm;
use fsdp_core::memory::Slice;
use fsdp_core::{Digest, Error};
use fsdp_nn::HostMemory;

use crate::ahead::Paper;
use crate::buffer::Content;
use crate::cache::Cache;
use crate::error::XlaError;
use crate::ffi::{Client, CompileOptions, DeviceBuffer, Executable, Plugin, Setting};
use crate::flags::flags;
use crate::told::{Listener, Told};
use crate::trace::{Argument, Source, Trace, Traced};

/// What the ranks of a process share.
pub(crate) struct World {
    client: Arc<Client>,
    ranks: usize,
    programs: Programs,
    compiled: Mutex<BTreeMap<Digest, Arc<Executable>>>,
    /// What each rank brings to the program that runs next, and gets from it.
    slots: Vec<Mutex<Slot>>,
}

/// What becomes of programs beside running them.
#[derive(Clone)]
pub(crate) struct Programs {
    /// Where the text of each is written, if anywhere.
    pub(crate) dump: Option<PathBuf>,
    /// Where they are kept, if anywhere.
    pub(crate) cache: Option<Arc<Cache>>,
    pub(crate) listener: Listener,
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
    let plugin = Arc::new(Plugin::open(path)?);
    let client = Client::new(Arc::clone(&plugin), Vec::new())?;
    let [platform, _] = client.platform()?;
    if platform != "cpu" {
        return Ok(Arc::new(client));
    }
    // XLA's pool has a thread for each device, or for each core if there are more: with more devices than cores its threads are
    // in each other's way. And the pool, with it the blocking of products, is the same for all ranks up to the cores.
    let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
    let devices = ranks.max(cores) as i64;
    let options = vec![("cpu_device_count".to_owned(), Setting::Number(devices))];
    Ok(Arc::new(Client::new(plugin, options)?))
}

/// That a client has a device for each rank.
///
/// # Errors
/// [`XlaError::Devices`].
pub(crate) fn expect_devices(client: &Client, ranks: usize) -> Result<(), XlaError> {
    if client.devices() >= ranks {
        return Ok(());
    }
    let [platform, _] = client.platform()?;
    let (path, devices) = (client.path().into(), client.devices());
    Err(XlaError::Devices { path, platform, devices, ranks })
}

impl World {
    /// So many ranks on the first devices of a client.
    ///
    /// # Errors
    /// [`XlaError::Devices`] when there are fewer.
    pub(crate) fn new(client: Arc<Client>, ranks: usize, programs: Programs) -> Result<Self, XlaError> {
        expect_devices(&client, ranks)?;
        let slots = (0..ranks).map(|_| Mutex::default()).collect();
        Ok(Self { client, ranks, programs, compiled: Mutex::default(), slots })
    }

    fn slot(&self, rank: usize) -> MutexGuard<'_, Slot> {
        self.slots[rank].lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn upload(&self, rank: usize, host: &HostMemory, argument: Argument) -> Result<Arc<DeviceBuffer>, Error> {
        let Argument { shape, source, .. } = argument;
        Ok(match source {
            Source::Device(buffer) => buffer,
            Source::Zero => Arc::new(self.client.upload(rank, &shape, &vec![0; shape.byte_len()])?),
            Source::Bytes(bytes) => Arc::new(self.client.upload(rank, &shape, &bytes)?),
            Source::Host(buffer) => {
                let own = host.bytes(Slice::whole(&buffer))?;
                let mut bytes = Cow::Borrowed(own);
                if own.len() < shape.byte_len() {
                    bytes.to_mut().resize(shape.byte_len(), 0);
                }
                Arc::new(self.client.upload(rank, &shape, &bytes)?)
            }
        })
    }

    /// What is compiled of a program, once.
    fn executable(&self, digest: Digest, program: &Traced) -> Result<Arc<Executable>, XlaError> {
        let mut compiled = self.compiled.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(executable) = compiled.get(&digest) {
            return Ok(Arc::clone(executable));
        }
        if let Some(folder) = &self.programs.dump {
            let path = folder.join(format!("program-{}.mlir", compiled.len()));
            std::fs::write(&path, &program.text).map_err(|source| XlaError::Dump { path, source })?;
        }
        let executable = Arc::new(self.load_or_compile(program)?);
        compiled.insert(digest, Arc::clone(&executable));
        Ok(executable)
    }

    /// A program out of the folder of compiled ones, or compiled now.
    fn load_or_compile(&self, Traced { text, operations, .. }: &Traced) -> Result<Executable, XlaError> {
        let (begin, operations) = (Instant::now(), *operations);
        let options = &CompileOptions { replicas: self.ranks, flags: flags(&self.client.device_kind()?) };
        let tell = &self.programs.listener;
        let entry = self.programs.cache.as_ref().map(|cache| (cache, cache.key(text, options)));
        if let Some((cache, key)) = &entry {
            match cache.find(&self.client, *key) {
                Ok(Some(found)) => {
                    tell(&Told::Found { operations, took: begin.elapsed() });
                    return Ok(found);
                }
                Ok(None) => {}
                Err(reason) => tell(&Told::Unusable { reason }),
            }
        }
        let executable = self.client.compile(text, options)?;
        tell(&Told::Compiled { operations, took: begin.elapsed() });
        if let Some(Err(reason)) = entry.map(|(cache, key)| cache.keep(key, &executable)) {
            tell(&Told::NotKept { reason });
        }
        Ok(executable)
    }

    /// Runs the program on what all ranks have brought.
    fn execute(&self, digest: Digest, program: &Traced) -> Result<(), XlaError> {
        let executable = self.executable(digest, program)?;
        let arguments: Vec<Vec<Arc<DeviceBuffer>>> =
            (0..self.ranks).map(|rank| std::mem::take(&mut self.slot(rank).arguments)).collect();
        let results = executable.execute(&arguments)?;
        for (rank, results) in results.into_iter().enumerate() {
            self.slot(rank).results = results;
        }
        Ok(())
    }
}

/// Where the programs of a rank go.
pub(crate) enum Place {
    /// To devices, with those of other ranks.
    Devices(Seated),
    /// Nowhere: they are only written down.
    Paper(Arc<Paper>),
}

impl Place {
    /// Runs what was traced, with the other ranks, or writes it down. It may be under way on return.
    ///
    /// # Errors
    /// Those of the plugin and of communication.
    pub(crate) fn run(&mut self, host: &HostMemory, trace: Trace) -> Result<(), Error> {
        match self {
            Place::Devices(seated) => seated.run(host, trace),
            Place::Paper(paper) => {
                paper.write(trace);
                Ok(())
            }
        }
    }
}

/// A rank's seat in a world.
pub(crate) struct Seated {
    world: Arc<World>,
    rank: usize,
    /// With the other ranks, on the host: to meet before and after a program.
    ranks: Comm<HostMemory>,
}

impl Seated {
    pub(crate) fn new(world: Arc<World>, ranks: Comm<HostMemory>) -> Self {
        Self { world, rank: ranks.rank(), ranks }
    }

    /// As [`Place::run`].
    fn run(&mut self, host: &HostMemory, trace: Trace) -> Result<(), Error> {
        let mut program = trace.finish(self.world.ranks);
        let digest = Digest::of(&program.text);
        let world = Arc::clone(&self.world);
        let arguments: Vec<Arc<DeviceBuffer>> = std::mem::take(&mut program.arguments)
            .into_iter()
            .map(|one| world.upload(self.rank, host, one))
            .collect::<Result<_, _>>()?;
        for (number, storage) in std::mem::take(&mut program.unchanged) {
            storage.put(Content::Device(Arc::clone(&arguments[number]), None));
        }
        world.slot(self.rank).arguments = arguments;
        self.ranks.agree(host, digest)?;
        if self.rank == 0 {
            // What fails here the engine tells the others, which wait for it below.
            world.execute(digest, &program)?;
        }
        self.ranks.agree(host, digest)?;
        let made = std::mem::take(&mut world.slot(self.rank).results);
        assert_eq!(made.len(), program.results.len(), "a program makes what was traced");
        for (storage, buffer) in program.results.into_iter().zip(made) {
            storage.put(Content::Device(Arc::new(buffer), None));
        }
        Ok(())
    }
}
