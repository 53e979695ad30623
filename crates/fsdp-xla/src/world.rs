//! Ranks that run one program together: their devices, the programs compiled for them, and how the ranks synchronize.
//! With several processes, each compiles the program, which is the same in all, and runs it on its own devices.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use fsdp_core::comm::Comm;
use fsdp_core::memory::Slice;
use fsdp_core::{Digest, Error};
use fsdp_nn::HostMemory;

use crate::assignment::Assignment;
use crate::buffer::{Content, DeviceStack, Source, Storage};
use crate::cache::Cache;
use crate::error::XlaError;
use crate::ffi::{CompileOptions, DeviceBuffer, Executable};
use crate::flags::flags;
use crate::hlo::{OutputKind, Shape};
use crate::program_event::{Listener, ProgramEvent};
use crate::trace::{Argument, Input, Interface, Module, Output, Trace, TraceSink, Traced};

/// The state shared by the ranks of a process.
pub(crate) struct World {
    devices: Assignment,
    programs: Programs,
    /// By the digest of what was traced.
    compiled: Mutex<BTreeMap<Digest, Compiled>>,
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

/// A compiled program.
#[derive(Clone)]
struct Compiled {
    /// The digest of its text.
    text: Digest,
    executable: Arc<Executable>,
    interface: Arc<Interface>,
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
    fn local_index(&self, rank: usize) -> usize {
        rank - self.devices.local.start
    }

    fn slot(&self, rank: usize) -> MutexGuard<'_, Slot> {
        self.slots[self.local_index(rank)].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts an input of a program on a rank's device, if it is not there yet.
    fn upload(
        &self,
        rank: usize,
        host: &HostMemory,
        shape: &Shape,
        sources: &[Source],
    ) -> Result<Arc<DeviceBuffer>, Error> {
        match sources {
            [Source::Device(buffer)] => return Ok(Arc::clone(buffer)),
            [Source::Element(stack, _), ..] if stack.consists_of(shape, sources) => {
                return Ok(Arc::clone(&stack.buffer));
            }
            _ => {}
        }
        let len = shape.byte_len() / sources.len();
        let mut bytes = Vec::with_capacity(shape.byte_len());
        for (position, source) in sources.iter().enumerate() {
            match source {
                Source::Zero => {}
                Source::Bytes(data) => bytes.extend_from_slice(data),
                Source::Host(buffer) => bytes.extend_from_slice(host.bytes(Slice::whole(buffer))?),
                Source::Element(stack, index) => bytes.extend_from_slice(stack.element(*index)?),
                Source::Device(buffer) => {
                    bytes.resize((position + 1) * len, 0);
                    buffer.download(&mut bytes[position * len..])?;
                }
            }
            // The rest is padding, or zeros.
            bytes.resize((position + 1) * len, 0);
        }
        Ok(Arc::new(self.devices.client.upload(self.local_index(rank), shape, &bytes)?))
    }

    fn compiled(&self) -> MutexGuard<'_, BTreeMap<Digest, Compiled>> {
        self.compiled.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Compiles a program with this digest, whose arguments are stored `together` in part.
    fn compile(&self, digest: Digest, traced: &Module, together: &[Vec<usize>]) -> Result<(), XlaError> {
        let in_parallel = self.devices.client.kind().runs_in_parallel();
        let scanned = self.programs.scan_layers.then(|| traced.scanned(together, in_parallel));
        if let Some(None) = scanned {
            (self.programs.listener)(&ProgramEvent::NotScanned);
        }
        let module = scanned.as_ref().and_then(Option::as_ref).unwrap_or(traced);
        let (text, interface) = (module.text(), Arc::new(module.interface()));
        let text_digest = Digest::of(&text);
        let known = self
            .compiled()
            .values()
            .find(|program| program.text == text_digest)
            .map(|program| Arc::clone(&program.executable));
        let executable = match known {
            Some(executable) => executable,
            None => self.load_or_compile(&text, module.operations())?,
        };
        self.compiled().insert(digest, Compiled { text: text_digest, executable, interface });
        Ok(())
    }

    /// Writes a program to the folder for texts, and loads or compiles it.
    fn load_or_compile(&self, text: &str, operations: usize) -> Result<Arc<Executable>, XlaError> {
        // The program is the same in all processes, so only the first one writes it.
        if let Some(folder) = self.programs.dump.as_ref().filter(|_| self.devices.local.start == 0) {
            let texts: BTreeSet<Digest> = self.compiled().values().map(|program| program.text).collect();
            let path = folder.join(format!("program-{}.mlir", texts.len()));
            std::fs::write(&path, text).map_err(|source| XlaError::Dump { path, source })?;
        }
        let executable = Arc::new(self.find_or_compile(text, operations)?);
        let (expected, got) = (self.devices.local_ids(), executable.devices()?);
        if got != expected {
            let (path, expected) = (self.devices.client.path().into(), expected.to_vec());
            return Err(XlaError::Placement { path, expected, got });
        }
        Ok(executable)
    }

    /// Finds a program in the compile cache, or compiles it.
    fn find_or_compile(&self, text: &str, operations: usize) -> Result<Executable, XlaError> {
        let begin = Instant::now();
        let (client, devices) = (&self.devices.client, self.devices.ids.clone());
        let options = &CompileOptions { devices, flags: flags(&client.kind().name) };
        let notify = &self.programs.listener;
        let entry = self.programs.cache.as_ref().map(|cache| (cache, cache.key(text, options)));
        if let Some((cache, key)) = &entry {
            match cache.find(client, *key) {
                Ok(Some(found)) => {
                    notify(&ProgramEvent::Found { operations, took: begin.elapsed() });
                    return Ok(found);
                }
                Ok(None) => {}
                Err(reason) => notify(&ProgramEvent::Unusable { reason }),
            }
        }
        let executable = client.compile(text, options)?;
        notify(&ProgramEvent::Compiled { operations, took: begin.elapsed() });
        if let Some(Err(reason)) = entry.map(|(cache, key)| cache.insert(key, &executable)) {
            notify(&ProgramEvent::NotKept { reason });
        }
        Ok(executable)
    }

    /// Runs a compiled program on the arguments of all ranks of this process.
    fn execute(&self, digest: Digest) -> Result<(), XlaError> {
        let executable = Arc::clone(&self.compiled()[&digest].executable);
        let arguments: Vec<Vec<Arc<DeviceBuffer>>> =
            self.devices.local.clone().map(|rank| std::mem::take(&mut self.slot(rank).arguments)).collect();
        let results = executable.execute(&arguments)?;
        for (rank, results) in self.devices.local.clone().zip(results) {
            self.slot(rank).results = results;
        }
        Ok(())
    }
}

/// What runs a rank's programs.
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
            Executor::Devices(seated) => !seated.world.devices.client.kind().is_cpu(),
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
    sync: Comm<HostMemory>,
}

impl Seated {
    pub(crate) fn new(world: Arc<World>, sync: Comm<HostMemory>) -> Self {
        Self { world, rank: sync.rank(), sync }
    }

    /// Whether it is the first rank of its process.
    fn is_first(&self) -> bool {
        self.world.local_index(self.rank) == 0
    }

    /// Compiles a program that is new to all ranks, between two barriers: all ranks of a process have looked it up
    /// before the first, and all processes have compiled the same programs.
    fn compile(&mut self, host: &HostMemory, digest: Digest, program: &Traced) -> Result<(), Error> {
        self.sync.agree(host, digest)?;
        if self.is_first() {
            self.world.compile(digest, &program.module, &program.together())?;
        }
        self.sync.agree(host, digest)
    }

    /// See [`Executor::run`].
    fn run(&mut self, host: &HostMemory, trace: Trace) -> Result<(), Error> {
        let program = trace.finish(self.world.devices.ids.len());
        // Arguments that are stored together stay so in the compiled program.
        let mut traced = program.module.text();
        write!(traced, "{:?}", program.together()).expect("writing to a string cannot fail");
        let digest = Digest::of(&traced);
        let world = Arc::clone(&self.world);
        // Compile before uploading anything: a compiler reports better than a device that memory is too small.
        if !world.compiled().contains_key(&digest) {
            self.compile(host, digest, &program)?;
        }
        let Traced { arguments, storages, results, .. } = program;
        let interface = Arc::clone(&world.compiled()[&digest].interface);
        let buffers = self.inputs(host, &interface, arguments)?;
        world.slot(self.rank).arguments = buffers.clone();
        self.sync.agree(host, digest)?;
        if self.is_first() {
            // On failure the engine tells the other ranks, which wait below.
            world.execute(digest)?;
        }
        self.sync.agree(host, digest)?;
        let result_buffers = std::mem::take(&mut world.slot(self.rank).results);
        assert_eq!(result_buffers.len(), interface.outputs.len(), "a program makes what was traced");
        // Outputs replace the contents of the inputs that change.
        for (input, buffer) in interface.inputs.iter().zip(buffers) {
            put_buffer(buffer, &input.shape, &input.storages(&storages));
        }
        for (Output { shape, kind }, buffer) in interface.outputs.iter().zip(result_buffers) {
            let storages: Vec<Option<&Arc<Storage>>> = match kind {
                OutputKind::Results(members) => {
                    members.iter().map(|&result| Some(&results[result])).collect()
                }
                OutputKind::Arguments(input) => interface.inputs[*input].storages(&storages),
            };
            put_buffer(Arc::new(buffer), shape, &storages);
        }
        Ok(())
    }

    /// Puts the inputs of a program on this rank's device.
    fn inputs(
        &self,
        host: &HostMemory,
        interface: &Interface,
        arguments: Vec<Argument>,
    ) -> Result<Vec<Arc<DeviceBuffer>>, Error> {
        let mut sources: Vec<Option<Source>> =
            arguments.into_iter().map(|argument| Some(argument.source)).collect();
        let mut buffers = Vec::with_capacity(interface.inputs.len());
        for input in &interface.inputs {
            let members = input.members.iter();
            let member_sources: Vec<Source> =
                members.map(|&member| sources[member].take().expect("an input is used once")).collect();
            buffers.push(self.world.upload(self.rank, host, &input.shape, &member_sources)?);
        }
        Ok(buffers)
    }
}

impl Input {
    /// The storages of the members, among those of all arguments.
    fn storages<'a>(&self, all: &'a [Option<Arc<Storage>>]) -> Vec<Option<&'a Arc<Storage>>> {
        self.members.iter().map(|&member| all[member].as_ref()).collect()
    }
}

/// Puts what a buffer of this shape holds into these storages: one, or those of a stack.
fn put_buffer(buffer: Arc<DeviceBuffer>, shape: &Shape, storages: &[Option<&Arc<Storage>>]) {
    if let [storage] = storages {
        storage.iter().for_each(|storage| storage.put(Content::Device(Arc::clone(&buffer), None)));
        return;
    }
    let stack = Arc::new(DeviceStack::new(buffer, shape, storages.len()));
    for (position, storage) in storages.iter().enumerate() {
        storage.iter().for_each(|storage| storage.put(Content::Element(Arc::clone(&stack), position)));
    }
}
