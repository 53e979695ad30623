//! The communicator over NCCL.
//!
//! A collective is entered into the table of all ranks, issued in one group on the stream of its queue, and polled
//! until NCCL has launched it. [`Flight::wait_on`] orders another queue after it with an event; the host does not wait.

use std::collections::BTreeSet;
use std::ffi::c_int;
use std::sync::Arc;
use std::thread;

use fsdp_comm::rendezvous::{Failure, Group, Seat};
use fsdp_core::comm::{CollectiveKind, CommError, Communicator, Completed, Fingerprint, InFlight, Purpose};
use fsdp_core::memory::{Category, HostSlice, HostSliceMut, Slice, SliceMut};
use fsdp_core::{DType, Error, FailureKind, Queue, Rank};

use super::NcclError;
use super::buffers::{InFlightBuffers, IssueError};
use super::connection::Connection;
use super::world::World;
use crate::device::DeviceMemory;
use crate::ffi::nccl::{Nccl, UniqueId};

/// One rank's handle of a group of ranks, which are threads of this or other processes, each with its own device.
pub struct NcclComm<M: DeviceMemory> {
    /// Shared with groups of the same ranks: those from which this one was split off, and those split off from it.
    connection: Arc<Connection<M>>,
    group: Group,
    seat: Seat,
}

impl<M: DeviceMemory> NcclComm<M> {
    /// Connects `rank` with all ranks; blocks until all have joined.
    pub(super) fn connect(
        world: &Arc<World<M>>,
        nccl: &Arc<Nccl>,
        group: Group,
        id: UniqueId,
        rank: Rank,
    ) -> Result<Self, CommError> {
        let seat = world.seat(&group, rank, None);
        let call = Fingerprint {
            sequence: 0,
            kind: CollectiveKind::Connect,
            purpose: Purpose::Setup,
            unit: None,
            dtype: DType::U32,
            elements: 0,
        };
        let entered = world.enter(seat, call)?;
        let fail = |error: &NcclError| world.fail_nccl(rank, &call.to_string(), error);
        let size = to_c_int(group.members.len());
        let raw = nccl.init(id, size, to_c_int(rank.0)).map_err(|error| fail(&error))?;
        let connection = Connection::establish(world, raw, seat, &group.members, call)?;
        world.end_call(seat, entered);
        Ok(Self { connection, group, seat })
    }

    fn world(&self) -> &Arc<World<M>> {
        &self.connection.world
    }

    /// Issues an entered call to the device; returns the event that follows it.
    fn issue(
        &self,
        memory: &M,
        queue: Queue,
        call: Fingerprint,
        buffers: &mut InFlightBuffers<M::Buffer>,
    ) -> Result<M::Event, Error> {
        let rank = self.world_rank();
        let ranks = self.group.members.len();
        let issued = self.connection.link.call(|raw| raw.issue(memory, queue, ranks, call.kind, buffers));
        match issued {
            Some(Ok(())) => {}
            Some(Err(IssueError::Memory(error))) => {
                self.world().fail_rank(rank, &error);
                return Err(error);
            }
            Some(Err(IssueError::Nccl(error))) => {
                return Err(self.world().fail_nccl(rank, &call.to_string(), &error).into());
            }
            None => self.world().check()?,
        }
        self.connection.wait_until_ready(call)?;
        Ok(memory.record(queue))
    }

    /// The colors that all ranks of the group have passed to a split.
    fn colors(&self, memory: &M, split: Fingerprint, color: usize) -> Result<Vec<usize>, Error> {
        let size = self.group.members.len();
        let mut local_color = memory.allocate(Category::CommStaging, DType::I64, 1)?;
        let queue = Queue::Gather;
        memory.write(queue, HostSlice::I64(&[color as i64]), SliceMut::whole(&mut local_color))?;
        let all = memory.allocate(Category::CommStaging, DType::I64, size)?;
        let mut buffers = InFlightBuffers::new(vec![local_color], vec![all]);
        let gather = Fingerprint { kind: CollectiveKind::AllGather, dtype: DType::I64, ..split };
        self.issue(memory, queue, gather, &mut buffers)?;
        let outputs = buffers.into_completed().outputs;
        let mut colors = vec![0; size];
        memory.read(queue, Slice::whole(&outputs[0]), HostSliceMut::I64(&mut colors))?;
        self.world().check()?;
        Ok(colors.into_iter().map(|color| color as usize).collect())
    }
}

/// Converts a rank or a color, which is at most the number of devices.
fn to_c_int(value: usize) -> c_int {
    c_int::try_from(value).expect("a process has few devices")
}

/// The index of a color among the distinct ones: NCCL needs small numbers.
fn color_index(colors: &[usize], color: usize) -> c_int {
    let distinct: BTreeSet<usize> = colors.iter().copied().collect();
    to_c_int(distinct.range(..color).count())
}

impl<M: DeviceMemory> Communicator<M> for NcclComm<M> {
    fn rank(&self) -> usize {
        self.seat.index
    }

    fn size(&self) -> usize {
        self.group.members.len()
    }

    fn world_rank(&self) -> Rank {
        self.group.members[self.seat.index]
    }

    fn start(
        &mut self,
        memory: &M,
        call: Fingerprint,
        inputs: Vec<M::Buffer>,
        outputs: Vec<M::Buffer>,
    ) -> Result<Box<dyn InFlight<M>>, Error> {
        memory.bind()?;
        let mut buffers = InFlightBuffers::new(inputs, outputs);
        let entered = self.world().enter(self.seat, call)?;
        let event = self.issue(memory, call.queue(), call, &mut buffers)?;
        self.world().issued(self.seat, entered, event.clone());
        let (world, rank) = (self.world().clone(), self.world_rank());
        Ok(Box::new(Flight { world, rank, call, buffers, event }))
    }

    fn split(
        &mut self,
        memory: &M,
        call: Fingerprint,
        color: usize,
    ) -> Result<Box<dyn Communicator<M>>, Error> {
        memory.bind()?;
        let entered = self.world().enter(self.seat, call)?;
        let colors = self.colors(memory, call, color)?;
        let (group, rank) = (self.group.split(entered.position, &colors, color), self.world_rank());
        let (connection, seat) = if group.members == self.group.members {
            (self.connection.clone(), self.world().seat(&group, rank, Some(self.seat)))
        } else {
            let raw = self.connection.split(call, color_index(&colors, color), to_c_int(self.seat.index))?;
            let seat = self.world().seat(&group, rank, None);
            (Connection::establish(self.world(), raw, seat, &group.members, call)?, seat)
        };
        self.world().end_call(self.seat, entered);
        Ok(Box::new(Self { connection, group, seat }))
    }

    fn check(&self) -> Result<(), CommError> {
        self.world().check()
    }

    fn abort(&mut self, reason: &str, kind: FailureKind) {
        let rank = self.world_rank();
        let error = CommError::Aborted { rank, reason: reason.to_owned(), kind };
        self.world().fail(Failure { culprit: rank, error });
    }
}

/// A collective that was issued to the device.
struct Flight<M: DeviceMemory> {
    world: Arc<World<M>>,
    rank: Rank,
    call: Fingerprint,
    buffers: InFlightBuffers<M::Buffer>,
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
        let Completed { mut inputs, outputs } = self.buffers.into_completed();
        if kind.gives_up_inputs() {
            inputs.iter_mut().for_each(|input| memory.release(queue, input));
        } else {
            inputs.clear();
        }
        Ok(Completed { outputs, inputs })
    }

    fn abandon(self: Box<Self>, reason: String) {
        // A panic that drops it is reported itself, with its message.
        if !thread::panicking() {
            let error = CommError::Aborted { rank: self.rank, reason, kind: FailureKind::Temporary };
            self.world.fail(Failure { culprit: self.rank, error });
        }
    }
}
