//! A communicator over links, for any memory.
//!
//! A start reads the inputs to the host and hands them to this communicator's own thread, which talks to the
//! other ranks; waiting writes what came back. So collectives are in flight while the rank computes, those of
//! one communicator in issue order, those of different communicators independently. All data passes through
//! host memory twice: right for processes on CPUs and for tests, not for devices with links of their own.

use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;

use fsdp_core::comm::{CommError, Communicator, Completed, Fingerprint, InFlight};
use fsdp_core::memory::{Buffer, SliceMut};
use fsdp_core::{Error, Memory, Queue, Rank};

use crate::algorithms;
use crate::link::{Alarm, Link};
use crate::session::Session;
use crate::{staging, sums};

/// Work for the thread that owns the link.
type Job = Box<dyn FnOnce(&mut dyn Link) + Send>;

/// What an algorithm brings back: one piece per rank, or one piece.
type Pieces = Result<Vec<Vec<u8>>, CommError>;

/// One rank's handle of a group that is connected by links.
pub struct LinkComm {
    jobs: Sender<Job>,
    rank: usize,
    members: Vec<Rank>,
    alarm: Arc<dyn Alarm>,
}

impl LinkComm {
    /// The group of a link.
    ///
    /// # Errors
    /// [`CommError::Transport`] when its thread can not be started.
    pub fn new(mut link: Box<dyn Link>) -> Result<Self, CommError> {
        let (rank, members, alarm) = (link.rank(), link.members().to_vec(), link.alarm());
        let (jobs, queue) = mpsc::channel::<Job>();
        let work = move || queue.iter().for_each(|job| job(&mut *link));
        let name = format!("{} links", members[rank]);
        thread::Builder::new().name(name).spawn(work).map_err(|error| CommError::Transport {
            rank: members[rank],
            reason: format!("its thread could not be started: {error}"),
        })?;
        Ok(Self { jobs, rank, members, alarm })
    }

    /// Runs `talk` on the thread of the link; where its result arrives. A failure raises the alarm.
    fn submit<T: Send + 'static>(
        &self,
        talk: impl FnOnce(&mut dyn Link) -> Result<T, CommError> + Send + 'static,
    ) -> Result<Receiver<Result<T, CommError>>, CommError> {
        if let Some(error) = self.alarm.raised() {
            return Err(error);
        }
        let (sender, receiver) = mpsc::channel();
        let job: Job = Box::new(move |link| {
            let result = talk(link).inspect_err(|error| link.alarm().raise(error.clone()));
            // Nobody listens any more when the collective was given up, which raised the alarm.
            drop(sender.send(result));
        });
        self.jobs.send(job).map_err(|_| self.thread_ended())?;
        Ok(receiver)
    }

    fn thread_ended(&self) -> CommError {
        let reason = "the thread of its links has ended".to_owned();
        CommError::Transport { rank: self.members[self.rank], reason }
    }

    fn start<M: Memory>(
        &self,
        call: Fingerprint,
        buffers: Completed<M::Buffer>,
        talk: impl FnOnce(&mut Session<'_>) -> Pieces + Send + 'static,
    ) -> Result<Box<dyn InFlight<M>>, Error> {
        let pieces = self.submit(move |link| talk(&mut Session::new(link, call)))?;
        let (rank, alarm) = (self.members[self.rank], self.alarm.clone());
        Ok(Box::new(Flight::<M> { pieces, arrived: None, buffers, call, rank, alarm }))
    }
}

/// All segments of a call, read to the host one after the other.
fn read_all<M: Memory>(memory: &M, queue: Queue, buffers: &[M::Buffer]) -> Result<Vec<Vec<u8>>, Error> {
    buffers.iter().map(|buffer| staging::read(memory, queue, buffer)).collect()
}

/// What a reduction makes of this rank's elements before they are added.
fn prepare(call: Fingerprint, ranks: usize, segments: &mut [Vec<u8>]) {
    if let Some(factor) = call.kind.reduce_op().and_then(|op| op.factor(ranks)) {
        segments.iter_mut().for_each(|segment| sums::scale(call.dtype, factor, segment));
    }
}

impl<M: Memory> Communicator<M> for LinkComm {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.members.len()
    }

    fn world_rank(&self) -> Rank {
        self.members[self.rank]
    }

    fn all_gather(
        &mut self,
        memory: &M,
        call: Fingerprint,
        inputs: Vec<M::Buffer>,
        outputs: Vec<M::Buffer>,
    ) -> Result<Box<dyn InFlight<M>>, Error> {
        let mine = read_all(memory, Queue::Gather, &inputs)?.concat();
        let buffers = Completed { outputs, inputs: Vec::new() };
        self.start(call, buffers, move |session| algorithms::all_gather(session, mine))
    }

    fn reduce_scatter(
        &mut self,
        memory: &M,
        call: Fingerprint,
        mut inputs: Vec<M::Buffer>,
        outputs: Vec<M::Buffer>,
    ) -> Result<Box<dyn InFlight<M>>, Error> {
        let mut segments = read_all(memory, Queue::Reduce, &inputs)?;
        inputs.iter_mut().for_each(|input| memory.release(Queue::Reduce, input));
        let size = self.members.len();
        prepare(call, size, &mut segments);
        let part = |bytes: &Vec<u8>, rank| bytes[bytes.len() / size * rank..][..bytes.len() / size].to_vec();
        let parts: Vec<Vec<u8>> =
            (0..size).map(|rank| segments.iter().flat_map(|bytes| part(bytes, rank)).collect()).collect();
        self.start(call, Completed { outputs, inputs }, move |session| {
            algorithms::reduce_scatter(session, call.dtype, parts).map(|sum| vec![sum])
        })
    }

    fn all_reduce(
        &mut self,
        memory: &M,
        call: Fingerprint,
        buffers: Vec<M::Buffer>,
    ) -> Result<Box<dyn InFlight<M>>, Error> {
        let mut segments = read_all(memory, Queue::Reduce, &buffers)?;
        prepare(call, self.members.len(), &mut segments);
        let mine = segments.concat();
        let buffers = Completed { outputs: buffers, inputs: Vec::new() };
        self.start(call, buffers, move |session| {
            algorithms::all_reduce(session, call.dtype, &mine).map(|sum| vec![sum])
        })
    }

    fn broadcast(
        &mut self,
        memory: &M,
        call: Fingerprint,
        root: usize,
        buffers: Vec<M::Buffer>,
    ) -> Result<Box<dyn InFlight<M>>, Error> {
        let message = match self.rank {
            rank if rank == root => read_all(memory, Queue::Reduce, &buffers)?.concat(),
            _ => Vec::new(),
        };
        let buffers = Completed { outputs: buffers, inputs: Vec::new() };
        self.start(call, buffers, move |session| {
            algorithms::broadcast(session, root, message).map(|message| vec![message])
        })
    }

    fn split(
        &mut self,
        _memory: &M,
        call: Fingerprint,
        color: usize,
    ) -> Result<Box<dyn Communicator<M>>, Error> {
        let color = (color as u64).to_le_bytes();
        let link = self.submit(move |link| {
            let colors = algorithms::all_gather(&mut Session::new(link, call), color.to_vec())?;
            let members: Vec<usize> = (0..colors.len()).filter(|&rank| colors[rank] == color).collect();
            Ok(link.subgroup(&members, [call.sequence, u64::from_le_bytes(color)]))
        })?;
        let link = link.recv().map_err(|_| self.thread_ended())??;
        Ok(Box::new(LinkComm::new(link)?))
    }

    fn abort(&mut self, reason: &str) {
        let rank = self.members[self.rank];
        self.alarm.raise(CommError::Aborted { rank, reason: reason.to_owned() });
    }
}

/// A collective that the thread of the links works on, or has finished.
struct Flight<M: Memory> {
    pieces: Receiver<Pieces>,
    arrived: Option<Pieces>,
    buffers: Completed<M::Buffer>,
    call: Fingerprint,
    rank: Rank,
    alarm: Arc<dyn Alarm>,
}

impl<M: Memory> InFlight<M> for Flight<M> {
    fn is_ready(&mut self) -> bool {
        self.arrived = self.arrived.take().or_else(|| self.pieces.try_recv().ok());
        self.arrived.is_some()
    }

    fn wait_on(mut self: Box<Self>, memory: &M, queue: Queue) -> Result<Completed<M::Buffer>, Error> {
        let pieces = self.arrived.take().or_else(|| self.pieces.recv().ok()).unwrap_or_else(|| {
            let reason = "the thread of its links has ended".to_owned();
            Err(CommError::Transport { rank: self.rank, reason })
        })?;
        let mut buffers = self.buffers;
        let mut offsets = vec![0; pieces.len()];
        for output in &mut buffers.outputs {
            let len = output.len() / pieces.len();
            let len_bytes = len * output.dtype().size_bytes();
            for (place, (piece, offset)) in pieces.iter().zip(&mut offsets).enumerate() {
                let dst = SliceMut::new(output, place * len, len);
                staging::write(memory, queue, &piece[*offset..*offset + len_bytes], dst)?;
                *offset += len_bytes;
            }
        }
        Ok(buffers)
    }

    fn abandon(self: Box<Self>) {
        let reason = format!("{} was given up before its end", self.call);
        self.alarm.raise(CommError::Aborted { rank: self.rank, reason });
    }
}
