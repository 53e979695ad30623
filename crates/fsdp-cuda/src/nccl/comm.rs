//! The communicator over NCCL.
//!
//! A collective is entered into the table of all ranks, issued in one group on the stream of its queue, and watched until
//! NCCL has launched it. [`Flight::wait_on`] orders another queue behind it with an event; the host does not wait.

use std::ffi::c_int;
use std::sync::Arc;
use std::time::Duration;
use std::{hint, thread};

use fsdp_core::comm::{CollectiveKind, CommError, Communicator, Completed, Fingerprint, InFlight, Purpose};
use fsdp_core::{DType, Error, Queue, Rank};

use super::NcclError;
use super::buffers::{Flying, IssueError};
use super::link::Link;
use super::table::{Failure, Seat};
use super::world::World;
use crate::device::DeviceMemory;
use crate::ffi::nccl::{Nccl, UniqueId};
use crate::ffi::nccl_comm::{Progress, RawComm};

/// How often NCCL is asked at once whether it is done, before the thread sleeps between questions: long enough for a
/// launch, which takes tens of microseconds, and not for connecting.
const SPINS: u32 = 1000;

/// How long a thread sleeps between questions.
const NAP: Duration = Duration::from_micros(20);

/// One rank's handle of a group of ranks, each of which is a thread of this process with a device of its own.
pub struct NcclComm<M: DeviceMemory> {
    world: Arc<World<M>>,
    link: Arc<Link>,
    /// Where the group comes from: which world communicator, then (position, color) of every split.
    path: Vec<u64>,
    name: String,
    members: Arc<[Rank]>,
    seat: Seat,
}

/// Which communicator of the whole world.
#[derive(Clone, Copy, Debug)]
pub(super) enum Root {
    Gathers,
    Reductions,
}

impl Root {
    fn name(self) -> &'static str {
        match self {
            Root::Gathers => "gathers",
            Root::Reductions => "reductions",
        }
    }
}

impl<M: DeviceMemory> NcclComm<M> {
    /// Connects `rank` with all ranks; blocks until all have come.
    pub(super) fn connect(
        world: &Arc<World<M>>,
        nccl: &Arc<Nccl>,
        root: Root,
        id: UniqueId,
        members: &Arc<[Rank]>,
        rank: Rank,
    ) -> Result<Self, CommError> {
        let (path, name) = (vec![root as u64], root.name().to_owned());
        let seat = world.seat(&path, &name, members, rank);
        let call = Fingerprint {
            sequence: 0,
            kind: CollectiveKind::Connect,
            purpose: Purpose::Setup,
            unit: None,
            dtype: DType::U32,
            elements: 0,
        };
        let position = world.enter(seat, call, None)?;
        let refused = |error: &NcclError| world.fail_nccl(rank, &call.to_string(), error);
        let raw = nccl.init(id, to_int(members.len()), to_int(rank.0)).map_err(|error| refused(&error))?;
        let comm = Self::of(world.clone(), raw, path, name, members.clone(), seat);
        comm.wait_until_ready(call)?;
        comm.check_facts(call)?;
        world.end_call(seat, position);
        Ok(comm)
    }

    fn of(
        world: Arc<World<M>>,
        raw: RawComm,
        path: Vec<u64>,
        name: String,
        members: Arc<[Rank]>,
        seat: Seat,
    ) -> Self {
        let link = Arc::new(Link::new(raw, seat));
        world.add_link(link.clone());
        Self { world, link, path, name, members, seat }
    }

    /// Calls into NCCL, unless the world has failed.
    fn call<T>(
        &self,
        doing: Fingerprint,
        work: impl FnOnce(&mut RawComm) -> Result<T, NcclError>,
    ) -> Result<T, CommError> {
        match self.link.call(work) {
            Some(Ok(value)) => Ok(value),
            Some(Err(error)) => {
                Err(self.world.fail_nccl(self.members[self.seat.index], &doing.to_string(), &error))
            }
            None => Err(self.world.check().expect_err("a communicator is taken away after a failure only")),
        }
    }

    /// Waits until NCCL has done what was started: it has connected, or given its work to the device.
    fn wait_until_ready(&self, doing: Fingerprint) -> Result<(), CommError> {
        let mut spins = 0;
        loop {
            self.world.check()?;
            if let Progress::Ready = self.call(doing, RawComm::poll)? {
                return Ok(());
            }
            spins += 1;
            if spins < SPINS { hint::spin_loop() } else { thread::sleep(NAP) }
        }
    }

    /// NCCL and the table must agree on who is who.
    fn check_facts(&self, doing: Fingerprint) -> Result<(), CommError> {
        let (size, index, device) = self.call(doing, RawComm::facts)?;
        let rank = self.members[self.seat.index];
        tracing::debug!(rank = rank.0, name = self.name, size, index, device, "connected");
        if (size, index) == (self.members.len(), self.seat.index) {
            return Ok(());
        }
        let (members, seat) = (self.members.len(), self.seat.index);
        let reason = format!("NCCL made {rank} number {index} of {size}, instead of {seat} of {members}");
        let error = CommError::Transport { rank, reason };
        self.world.fail(Failure { culprit: rank, error: error.clone() });
        Err(error)
    }

    fn start(
        &mut self,
        memory: &M,
        queue: Queue,
        call: Fingerprint,
        mut buffers: Flying<M::Buffer>,
    ) -> Result<Box<dyn InFlight<M>>, Error> {
        memory.bind()?;
        let rank = self.members[self.seat.index];
        let position = self.world.enter(self.seat, call, None)?;
        let issued = self.link.call(|raw| raw.issue(memory, queue, call.kind, call.dtype, &mut buffers));
        match issued {
            Some(Ok(())) => {}
            Some(Err(IssueError::Memory(error))) => {
                self.world.fail_rank(rank, &error);
                return Err(error);
            }
            Some(Err(IssueError::Nccl(error))) => {
                return Err(self.world.fail_nccl(rank, &call.to_string(), &error).into());
            }
            None => self.world.check()?,
        }
        self.wait_until_ready(call)?;
        let event = memory.record(queue);
        self.world.issued(self.seat, position, event.clone());
        Ok(Box::new(Flight { world: self.world.clone(), rank, call, buffers, event }))
    }

    /// Splits off NCCL's communicator and waits for it.
    fn split_raw(&self, call: Fingerprint, color: usize) -> Result<RawComm, CommError> {
        let key = to_int(self.seat.index);
        let splitting = self.call(call, |raw| raw.split(to_int(color), key))?;
        self.wait_until_ready(call)?;
        self.call(call, |raw| raw.finish_split(splitting))
    }
}

/// Ranks and colors are counts of devices.
fn to_int(value: usize) -> c_int {
    c_int::try_from(value).expect("a process has few devices")
}

impl<M: DeviceMemory> Communicator<M> for NcclComm<M> {
    fn rank(&self) -> usize {
        self.seat.index
    }

    fn size(&self) -> usize {
        self.members.len()
    }

    fn world_rank(&self) -> Rank {
        self.members[self.seat.index]
    }

    fn all_gather(
        &mut self,
        memory: &M,
        call: Fingerprint,
        inputs: Vec<M::Buffer>,
        outputs: Vec<M::Buffer>,
    ) -> Result<Box<dyn InFlight<M>>, Error> {
        self.start(memory, Queue::Gather, call, Flying::new(inputs, outputs))
    }

    fn reduce_scatter(
        &mut self,
        memory: &M,
        call: Fingerprint,
        inputs: Vec<M::Buffer>,
        outputs: Vec<M::Buffer>,
    ) -> Result<Box<dyn InFlight<M>>, Error> {
        self.start(memory, Queue::Reduce, call, Flying::new(inputs, outputs))
    }

    fn all_reduce(
        &mut self,
        memory: &M,
        call: Fingerprint,
        buffers: Vec<M::Buffer>,
    ) -> Result<Box<dyn InFlight<M>>, Error> {
        self.start(memory, Queue::Reduce, call, Flying::new(Vec::new(), buffers))
    }

    fn split(
        &mut self,
        memory: &M,
        call: Fingerprint,
        color: usize,
    ) -> Result<Box<dyn Communicator<M>>, Error> {
        memory.bind()?;
        let position = self.world.enter(self.seat, call, Some(color))?;
        let colors = self.world.notes(self.seat, position)?;
        let mut distinct = colors.clone();
        distinct.sort_unstable();
        distinct.dedup();
        let dense = distinct.binary_search(&color).expect("the color of this rank is among them");
        let same = self.members.iter().zip(&colors).filter(|&(_, &theirs)| theirs == color);
        let members: Arc<[Rank]> = same.map(|(&member, _)| member).collect();

        let raw = self.split_raw(call, dense)?;
        let mut path = self.path.clone();
        path.extend([position, color as u64]);
        let name = format!("{}/{color}", self.name);
        let seat = self.world.seat(&path, &name, &members, self.members[self.seat.index]);
        let comm = Self::of(self.world.clone(), raw, path, name, members, seat);
        comm.wait_until_ready(call)?;
        comm.check_facts(call)?;
        self.world.end_call(self.seat, position);
        Ok(Box::new(comm))
    }

    fn check(&self) -> Result<(), CommError> {
        self.world.check()
    }

    fn abort(&mut self, reason: &str) {
        let rank = self.members[self.seat.index];
        self.world
            .fail(Failure { culprit: rank, error: CommError::Aborted { rank, reason: reason.to_owned() } });
    }
}

impl<M: DeviceMemory> Drop for NcclComm<M> {
    fn drop(&mut self) {
        // A communicator of a rank that failed is aborted by the watcher.
        if thread::panicking() || self.world.check().is_err() {
            return;
        }
        if let Err(error) = self.link.close() {
            tracing::debug!(%error, name = self.name, "a communicator could not be finalized");
        }
    }
}

/// A collective that was given to the device.
struct Flight<M: DeviceMemory> {
    world: Arc<World<M>>,
    rank: Rank,
    call: Fingerprint,
    buffers: Flying<M::Buffer>,
    event: M::Event,
}

impl<M: DeviceMemory> InFlight<M> for Flight<M> {
    fn is_ready(&mut self) -> bool {
        true
    }

    fn wait_on(self: Box<Self>, memory: &M, queue: Queue) -> Result<Completed<M::Buffer>, Error> {
        self.world.check()?;
        memory.wait(queue, &self.event);
        let kind = self.call.kind;
        let Completed { mut inputs, outputs } = self.buffers.land();
        match kind {
            CollectiveKind::AllGather => inputs.clear(),
            _ => inputs.iter_mut().for_each(|input| memory.release(queue, input)),
        }
        Ok(Completed { outputs, inputs })
    }

    fn abandon(self: Box<Self>) {
        // A panic that drops it will be reported itself, with its message.
        if !thread::panicking() {
            let reason = format!("{} was given up before its end", self.call);
            let error = CommError::Aborted { rank: self.rank, reason };
            self.world.fail(Failure { culprit: self.rank, error });
        }
    }
}
