//! A communicator over links, for any memory.
//!
//! A start reads the inputs to the host and hands them to this communicator's own thread, which talks to the
//! other ranks; waiting writes what came back. So collectives are in flight while the rank computes, those of
//! one communicator in issue order, those of different communicators independently. All data is copied once on its
//! way out and once on its way in: right for processes on CPUs and for tests, not for devices with links of their own.

use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

use fsdp_core::comm::{CollectiveKind, CommError, Communicator, Completed, Fingerprint, InFlight};
use fsdp_core::{Error, Memory, Queue, Rank};

use crate::flight::FlightRecorder;
use crate::link::{Alarm, Link};
use crate::session::Session;
use crate::staging::{self, Wire};
use crate::{algorithms, sums};

/// How often somebody who waits looks whether the world has failed.
const LOOK: Duration = Duration::from_millis(100);

/// How long the thread of the links may take to come back when the world has failed.
const STUCK_AFTER: Duration = Duration::from_secs(2);

/// Work for the thread that owns the link.
type Job = Box<dyn FnOnce(&mut dyn Link) + Send>;

/// What an algorithm brings back: the bytes of the outputs.
type Bytes = Result<Wire, CommError>;

/// One rank's handle of a group that is connected by links.
pub struct LinkComm {
    jobs: Sender<Job>,
    rank: usize,
    members: Vec<Rank>,
    alarm: Arc<dyn Alarm>,
    recorder: Arc<FlightRecorder>,
}

impl LinkComm {
    /// The group of a link, whose calls nobody asks for afterwards.
    ///
    /// # Errors
    /// As [`LinkComm::recorded`].
    pub fn new(link: Box<dyn Link>) -> Result<Self, CommError> {
        Self::recorded(link, Arc::new(FlightRecorder::new()))
    }

    /// The group of a link, whose calls and those of its subgroups are recorded.
    ///
    /// # Errors
    /// [`CommError::Transport`] when its thread can not be started.
    pub fn recorded(mut link: Box<dyn Link>, recorder: Arc<FlightRecorder>) -> Result<Self, CommError> {
        let (rank, members, alarm) = (link.rank(), link.members().to_vec(), link.alarm());
        let (jobs, queue) = mpsc::channel::<Job>();
        let work = move || queue.iter().for_each(|job| job(&mut *link));
        let name = format!("{} links", members[rank]);
        thread::Builder::new().name(name).spawn(work).map_err(|error| CommError::Transport {
            rank: members[rank],
            reason: format!("its thread could not be started: {error}"),
        })?;
        Ok(Self { jobs, rank, members, alarm, recorder })
    }

    /// Runs `talk`, which is a call, on the thread of the link; where its result arrives. A failure raises the alarm.
    fn submit<T: Send + 'static>(
        &self,
        call: Fingerprint,
        talk: impl FnOnce(&mut dyn Link) -> Result<T, CommError> + Send + 'static,
    ) -> Result<Receiver<Result<T, CommError>>, CommError> {
        if let Some(error) = self.alarm.raised() {
            return Err(error);
        }
        let (sender, receiver) = mpsc::channel();
        let number = self.recorder.issue(self.members[self.rank], &self.members, &call);
        let recorder = Arc::clone(&self.recorder);
        let job: Job = Box::new(move |link| {
            recorder.begin(number);
            let result = talk(link).inspect_err(|error| link.alarm().raise(error.clone()));
            recorder.end(number, result.as_ref().err().map(CommError::to_string));
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

    /// The bytes that this rank brings to a call: what it gives, as it is added, and room for what it receives.
    fn brought<M: Memory>(
        &self,
        memory: &M,
        call: Fingerprint,
        inputs: &mut [M::Buffer],
        outputs: &[M::Buffer],
    ) -> Result<Wire, Error> {
        let (rank, size, queue) = (self.rank, self.members.len(), call.kind.queue());
        let room = || Wire::new(outputs.iter().map(staging::len_bytes));
        let mut wire = match call.kind {
            CollectiveKind::AllGather => {
                let mut wire = room();
                for (input, mine) in inputs.iter().zip(&mut wire.parts(size)[rank]) {
                    staging::read(memory, queue, input, mine)?;
                }
                wire
            }
            CollectiveKind::ReduceScatter(_) => {
                let wire = Wire::read(memory, queue, inputs)?;
                inputs.iter_mut().for_each(|input| memory.release(queue, input));
                wire
            }
            CollectiveKind::Broadcast { root } if root as usize != rank => room(),
            _ => Wire::read(memory, queue, outputs)?,
        };
        if let Some(factor) = call.kind.reduce_op().and_then(|op| op.factor(size)) {
            wire.segments_mut().into_iter().for_each(|segment| sums::scale(call.dtype, factor, segment));
        }
        Ok(wire)
    }
}

/// What the thread of the links brings back; `None` if it has ended. When the world has failed and it is stuck (MPI can not
/// be told to give memory back), the failure is the outcome: the thread keeps the bytes that it works on.
fn outcome<T>(results: &Receiver<Result<T, CommError>>, alarm: &dyn Alarm) -> Option<Result<T, CommError>> {
    let mut failed: Option<Instant> = None;
    loop {
        match results.recv_timeout(LOOK) {
            Ok(result) => return Some(result),
            Err(RecvTimeoutError::Disconnected) => return None,
            Err(RecvTimeoutError::Timeout) => {}
        }
        let Some(error) = alarm.raised() else { continue };
        if failed.get_or_insert_with(Instant::now).elapsed() >= STUCK_AFTER {
            return Some(Err(error));
        }
    }
}

/// Talks to the other ranks of a call; the bytes of the outputs.
fn run(session: &mut Session<'_>, call: Fingerprint, mut wire: Wire) -> Bytes {
    let (rank, size) = (session.rank(), session.size());
    match call.kind {
        CollectiveKind::AllGather => algorithms::all_gather(session, &mut wire.parts(size))?,
        CollectiveKind::ReduceScatter(_) => {
            let mut parts = wire.parts(size);
            algorithms::reduce_scatter(session, call.dtype, &mut parts)?;
            let mut sums = Wire::new(parts[rank].iter().map(|part| part.len()));
            let sums_and_parts = sums.segments_mut().into_iter().zip(&parts[rank]);
            sums_and_parts.for_each(|(sum, part)| sum.copy_from_slice(part));
            return Ok(sums);
        }
        CollectiveKind::AllReduce(_) => wire
            .segments_mut()
            .into_iter()
            .try_for_each(|segment| algorithms::all_reduce(session, call.dtype, segment))?,
        CollectiveKind::Broadcast { root } => wire
            .segments_mut()
            .into_iter()
            .try_for_each(|segment| algorithms::broadcast(session, root as usize, segment))?,
        CollectiveKind::Split | CollectiveKind::Connect => unreachable!("it moves no buffers"),
    }
    Ok(wire)
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

    fn start(
        &mut self,
        memory: &M,
        call: Fingerprint,
        mut inputs: Vec<M::Buffer>,
        outputs: Vec<M::Buffer>,
    ) -> Result<Box<dyn InFlight<M>>, Error> {
        let wire = self.brought(memory, call, &mut inputs, &outputs)?;
        let bytes = self.submit(call, move |link| run(&mut Session::new(link, call), call, wire))?;
        if call.kind == CollectiveKind::AllGather {
            inputs.clear();
        }
        let (rank, alarm) = (self.members[self.rank], self.alarm.clone());
        let buffers = Completed { outputs, inputs };
        Ok(Box::new(Flight::<M> { bytes, arrived: None, buffers, rank, alarm }))
    }

    fn split(
        &mut self,
        _memory: &M,
        call: Fingerprint,
        color: usize,
    ) -> Result<Box<dyn Communicator<M>>, Error> {
        let link = self.submit(call, move |link| {
            let (rank, size) = (link.rank(), link.members().len());
            let mut said = vec![[0; 2]; size];
            said[rank] = [color as u64, link.unused_channel()];
            let mut parts: Vec<_> =
                said.iter_mut().map(|said| vec![bytemuck::cast_slice_mut(said)]).collect();
            algorithms::all_gather(&mut Session::new(link, call), &mut parts)?;
            let same = || said.iter().zip(link.members()).filter(|&(said, _)| said[0] == color as u64);
            let channel = same().map(|(said, _)| said[1]).max().expect("a rank is in its own group");
            Ok(link.subgroup(same().map(|(_, &member)| member).collect(), channel))
        })?;
        let link = outcome(&link, &*self.alarm).ok_or_else(|| self.thread_ended())??;
        Ok(Box::new(LinkComm::recorded(link, Arc::clone(&self.recorder))?))
    }

    fn abort(&mut self, reason: &str) {
        let rank = self.members[self.rank];
        self.alarm.raise(CommError::Aborted { rank, reason: reason.to_owned() });
    }
}

/// A collective that the thread of the links works on, or has finished.
struct Flight<M: Memory> {
    bytes: Receiver<Bytes>,
    arrived: Option<Bytes>,
    buffers: Completed<M::Buffer>,
    rank: Rank,
    alarm: Arc<dyn Alarm>,
}

impl<M: Memory> InFlight<M> for Flight<M> {
    fn is_ready(&mut self) -> bool {
        self.arrived = self.arrived.take().or_else(|| self.bytes.try_recv().ok());
        self.arrived.is_some()
    }

    fn wait_on(mut self: Box<Self>, memory: &M, queue: Queue) -> Result<Completed<M::Buffer>, Error> {
        let arrived = self.arrived.take();
        let wire = arrived.or_else(|| outcome(&self.bytes, &*self.alarm)).unwrap_or_else(|| {
            let reason = "the thread of its links has ended".to_owned();
            Err(CommError::Transport { rank: self.rank, reason })
        })?;
        let mut buffers = self.buffers;
        for (index, output) in buffers.outputs.iter_mut().enumerate() {
            staging::write(memory, queue, wire.segment(index), output)?;
        }
        Ok(buffers)
    }

    fn abandon(self: Box<Self>, reason: String) {
        self.alarm.raise(CommError::Aborted { rank: self.rank, reason });
    }
}
