//! Ranks that run one program together: their devices, the programs compiled for them, and how the ranks synchronize.
//! With several processes, each compiles the program, which is the same in all, and runs it on its own devices.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use fsdp_core::comm::Comm;
use fsdp_core::memory::Slice;
use fsdp_core::{Digest, Error};
use fsdp_nn::HostMemory;

use crate::ahead::TraceSink;
use crate::assignment::Assignment;
use crate::buffer::Content;
use crate::cache::Cache;
use crate::error::XlaError;
use crate::ffi::{CompileOptions, DeviceBuffer, Executable};
use crate::flags::flags;
use crate::program_event::{Listener, ProgramEvent};
use crate::trace::{Argument, Module, Source, Trace};

/// The state shared by the ranks of a process.
pub(crate) struct World {
    devices: Assignment,
    programs: Programs,
    compiled: Mutex<BTreeMap<Digest, Arc<Executable>>>,
    /// For each rank of this process, the arguments and results of the program that runs next.
    slots: Vec<Mutex<Slot>>,
}

/// Options for programs, apart from running them.
#[derive(Clone)]
pub(crate) struct Programs {
    /// Whether layers become loops.
    pub(crate) scan_layers: bool,
    /// The folder for the text of each program; `None` to write none.
    pub(crate) dump: Option<PathBuf>,
    /// The compile cache, if any.
    pub(crate) cache: Option<Arc<Cache>>,
    pub(crate) listener: Listener,
}

#[derive(Default)]
struct Slot {
    arguments: Vec<Arc<DeviceBuffer>>,
    results: Vec<DeviceBuffer>,
}

impl World {
    /// Creates the world of these devices.
    pub(crate) fn new(devices: Assignment, programs: Programs) -> Self {
        let slots = devices.local.clone().map(|_| Mutex::default()).collect();
        Self { devices, programs, compiled: Mutex::default(), slots }
    }

    /// The index of a rank, and of its device, within this process.
    fn place(&self, rank: usize) -> usize {
        rank - self.devices.local.start
    }

    fn slot(&self, rank: usize) -> MutexGuard<'_, Slot> {
        self.slots[self.place(rank)].lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn upload(&self, rank: usize, host: &HostMemory, argument: Argument) -> Result<Arc<DeviceBuffer>, Error> {
        let Argument { shape, source, .. } = argument;
        let (client, device) = (&self.devices.client, self.place(rank));
        Ok(match source {
            Source::Device(buffer) => buffer,
            Source::Zero => Arc::new(client.upload(device, &shape, &vec![0; shape.byte_len()])?),
            Source::Bytes(bytes) => Arc::new(client.upload(device, &shape, &bytes)?),
            Source::Host(buffer) => {
                let own = host.bytes(Slice::whole(&buffer))?;
                let mut bytes = Cow::Borrowed(own);
                if own.len() < shape.byte_len() {
                    bytes.to_mut().resize(shape.byte_len(), 0);
                }
                Arc::new(client.upload(device, &shape, &bytes)?)
            }
        })
    }

    fn compiled(&self) -> MutexGuard<'_, BTreeMap<Digest, Arc<Executable>>> {
        self.compiled.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Compiles a program.
    fn compile(&self, digest: Digest, traced: &Module) -> Result<(), XlaError> {
        let scanned = self.programs.scan_layers.then(|| traced.scanned());
        if let Some(None) = scanned {
            (self.programs.listener)(&ProgramEvent::NotScanned);
        }
        let module = scanned.as_ref().and_then(Option::as_ref).unwrap_or(traced);
        let text = module.text();
        // The program is the same in all processes, so only the first one writes it.
        if let Some(folder) = self.programs.dump.as_ref().filter(|_| self.devices.local.start == 0) {
            let path = folder.join(format!("program-{}.mlir", self.compiled().len()));
            std::fs::write(&path, &text).map_err(|source| XlaError::Dump { path, source })?;
        }
        let executable = Arc::new(self.load_or_compile(&text, module.operations())?);
        let (expected, got) = (self.devices.own_ids(), executable.devices()?);
        if got != expected {
            let (path, expected) = (self.devices.client.path().into(), expected.to_vec());
            return Err(XlaError::Placement { path, expected, got });
        }
        self.compiled().insert(digest, executable);
        Ok(())
    }

    /// Loads a program from the compile cache, or compiles it.
    fn load_or_compile(&self, text: &str, operations: usize) -> Result<Executable, XlaError> {
        let begin = Instant::now();
        let (client, devices) = (&self.devices.client, self.devices.ids.clone());
        let options = &CompileOptions { devices, flags: flags(&client.kind().name) };
        let tell = &self.programs.listener;
        let entry = self.programs.cache.as_ref().map(|cache| (cache, cache.key(text, options)));
        if let Some((cache, key)) = &entry {
            match cache.find(client, *key) {
                Ok(Some(found)) => {
                    tell(&ProgramEvent::Found { operations, took: begin.elapsed() });
                    return Ok(found);
                }
                Ok(None) => {}
                Err(reason) => tell(&ProgramEvent::Unusable { reason }),
            }
        }
        let executable = client.compile(text, options)?;
        tell(&ProgramEvent::Compiled { operations, took: begin.elapsed() });
        if let Some(Err(reason)) = entry.map(|(cache, key)| cache.keep(key, &executable)) {
            tell(&ProgramEvent::NotKept { reason });
        }
        Ok(executable)
    }

    /// Runs a compiled program on the arguments of all ranks of this process.
    fn execute(&self, digest: Digest) -> Result<(), XlaError> {
        let executable = Arc::clone(&self.compiled()[&digest]);
        let arguments: Vec<Vec<Arc<DeviceBuffer>>> =
            self.devices.local.clone().map(|rank| std::mem::take(&mut self.slot(rank).arguments)).collect();
        let results = executable.execute(&arguments)?;
        for (rank, results) in self.devices.local.clone().zip(results) {
            self.slot(rank).results = results;
        }
        Ok(())
    }
}

/// The destination of a rank's programs.
pub(crate) enum Executor {
    /// Devices, together with the other ranks.
    Devices(Seated),
    /// Nowhere: programs are only traced.
    TraceSink(Arc<TraceSink>),
}

impl Executor {
    /// Whether the results of a program should be read while the next one runs. The plugin for CPUs runs programs in the
    /// background too, but answers a read only after all programs that were started before it.
    pub(crate) fn is_asynchronous(&self) -> bool {
        match self {
            Executor::Devices(seated) => seated.world.devices.client.kind().name != "cpu",
            Executor::TraceSink(_) => true,
        }
    }

    /// Runs a traced program together with the other ranks, or only records it. It may still be running on return.
    ///
    /// # Errors
    /// Errors of the plugin and of communication.
    pub(crate) fn run(&mut self, host: &HostMemory, trace: Trace) -> Result<(), Error> {
        match self {
            Executor::Devices(seated) => seated.run(host, trace),
            Executor::TraceSink(sink) => {
                sink.write(trace);
                Ok(())
            }
        }
    }
}

/// A rank's seat in a world.
pub(crate) struct Seated {
    world: Arc<World>,
    rank: usize,
    /// The other ranks on the host, to synchronize with before and after a program.
    ranks: Comm<HostMemory>,
}

impl Seated {
    pub(crate) fn new(world: Arc<World>, ranks: Comm<HostMemory>) -> Self {
        Self { world, rank: ranks.rank(), ranks }
    }

    /// Whether it is the first rank of its process.
    fn is_first(&self) -> bool {
        self.world.place(self.rank) == 0
    }

    /// Compiles a program that is new to all ranks, between two barriers: all ranks of a process have looked it up
    /// before the first, and all processes have compiled the same programs.
    fn compile(&mut self, host: &HostMemory, digest: Digest, module: &Module) -> Result<(), Error> {
        self.ranks.agree(host, digest)?;
        if self.is_first() {
            self.world.compile(digest, module)?;
        }
        self.ranks.agree(host, digest)
    }

    /// See [`Executor::run`].
    fn run(&mut self, host: &HostMemory, trace: Trace) -> Result<(), Error> {
        let mut program = trace.finish(self.world.devices.ids.len());
        let digest = Digest::of(&program.module.text());
        let world = Arc::clone(&self.world);
        // Compile before uploading anything: a compiler reports better than a device that memory is too small.
        if !world.compiled().contains_key(&digest) {
            self.compile(host, digest, &program.module)?;
        }
        let arguments: Vec<Arc<DeviceBuffer>> = std::mem::take(&mut program.arguments)
            .into_iter()
            .map(|one| world.upload(self.rank, host, one))
            .collect::<Result<_, _>>()?;
        for (number, storage) in std::mem::take(&mut program.unchanged) {
            storage.put(Content::Device(Arc::clone(&arguments[number]), None));
        }
        world.slot(self.rank).arguments = arguments;
        self.ranks.agree(host, digest)?;
        if self.is_first() {
            // On failure the engine tells the other ranks, which wait below.
            world.execute(digest)?;
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
