//! A communicator over links, for any memory.
//!
//! Starting a collective hands its buffers to the communicator's own thread, which communicates with the other ranks;
//! waiting takes the buffers back. Collectives thus overlap with computation: those of one communicator run in issue
//! order, those of different communicators independently. Buffers in host memory are sent and received in place. Data
//! in other memories is copied once on the way out and once on the way in, which is fine for tests but not for devices
//! with their own interconnect.

use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

use fsdp_core::comm::{CollectiveKind, CommError, Communicator, Completed, Fingerprint, InFlight};
use fsdp_core::{Error, FailureKind, Memory, Queue, Rank};

use crate::algorithms;
use crate::flight::FlightRecorder;
use crate::link::{Alarm, Link};
use crate::session::Session;
use crate::staging::{self, StagedBuffers};

/// How often a waiting thread checks whether the world has failed.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// How long the link's thread may take to return after the world has failed.
const STUCK_AFTER: Duration = Duration::from_secs(2);

/// Work for the thread that owns the link.
type Job = Box<dyn FnOnce(&mut dyn Link, &mut Vec<u8>) + Send>;

/// What the link's thread returns.
type Outcome<M> = Result<StagedBuffers<M>, CommError>;

/// One rank's handle of a group connected by links.
pub struct LinkComm {
    jobs: Sender<Job>,
    rank: usize,
    members: Vec<Rank>,
    alarm: Arc<dyn Alarm>,
    recorder: Arc<FlightRecorder>,
}

impl LinkComm {
    /// Creates the communicator of a link's group; its calls are recorded, but the record is not accessible.
    ///
    /// # Errors
    /// The errors of [`LinkComm::recorded`].
    pub fn new(link: Box<dyn Link>) -> Result<Self, CommError> {
        Self::recorded(link, Arc::new(FlightRecorder::new()))
    }

    /// Creates the communicator of a link's group; its calls and those of its subgroups go to `recorder`.
    ///
    /// # Errors
    /// [`CommError::Transport`] if its thread cannot be started.
    pub fn recorded(mut link: Box<dyn Link>, recorder: Arc<FlightRecorder>) -> Result<Self, CommError> {
        let (rank, members, alarm) = (link.rank(), link.members().to_vec(), link.alarm());
        let (jobs, queue) = mpsc::channel::<Job>();
        let work = move || {
            let mut scratch = Vec::new();
            queue.iter().for_each(|job| job(&mut *link, &mut scratch));
        };
        let name = format!("{} links", members[rank]);
        thread::Builder::new().name(name).spawn(work).map_err(|error| CommError::Transport {
            rank: members[rank],
            reason: format!("its thread could not be started: {error}"),
        })?;
        Ok(Self { jobs, rank, members, alarm, recorder })
    }

    /// Runs `work`, which performs `call`, on the link's thread; returns the receiver of its result. A failure raises
    /// the alarm.
    fn submit<T: Send + 'static>(
        &self,
        call: Fingerprint,
        work: impl FnOnce(&mut Session<'_>) -> Result<T, CommError> + Send + 'static,
    ) -> Result<Receiver<Result<T, CommError>>, CommError> {
        if let Some(error) = self.alarm.raised() {
            return Err(error);
        }
        let (sender, receiver) = mpsc::channel();
        let number = self.recorder.issue(self.members[self.rank], &self.members, &call);
        let recorder = Arc::clone(&self.recorder);
        let alarm = Arc::clone(&self.alarm);
        let job: Job = Box::new(move |link, scratch| {
            recorder.begin(number);
            let result = work(&mut Session::new(link, call, scratch));
            let result = result.inspect_err(|error| alarm.raise(error.clone()));
            recorder.end(number, result.as_ref().err().map(CommError::to_string));
            // The receiver is gone if the collective was abandoned, which raised the alarm.
            drop(sender.send(result));
        });
        self.jobs.send(job).map_err(|_| self.thread_ended())?;
        Ok(receiver)
    }

    fn thread_ended(&self) -> CommError {
        let reason = "its link thread has ended".to_owned();
        CommError::Transport { rank: self.members[self.rank], reason }
    }
}

/// The result from the link's thread; `None` if the thread has ended. If the world has failed and the thread is stuck
/// (MPI cannot be made to give memory back), returns the failure; the thread keeps the buffers it works on.
fn wait_for_result<T>(
    results: &Receiver<Result<T, CommError>>,
    alarm: &dyn Alarm,
) -> Option<Result<T, CommError>> {
    let mut failed_since: Option<Instant> = None;
    loop {
        match results.recv_timeout(POLL_INTERVAL) {
            Ok(result) => return Some(result),
            Err(RecvTimeoutError::Disconnected) => return None,
            Err(RecvTimeoutError::Timeout) => {}
        }
        let Some(error) = alarm.raised() else { continue };
        if failed_since.get_or_insert_with(Instant::now).elapsed() >= STUCK_AFTER {
            return Some(Err(error));
        }
    }
}

/// Performs a call with the other ranks.
fn run<M: Memory>(
    session: &mut Session<'_>,
    call: Fingerprint,
    staged: &mut StagedBuffers<M>,
) -> Result<(), CommError> {
    let (rank, size) = (session.rank(), session.size());
    let (moved, sums) = staged.bytes();
    match call.kind {
        CollectiveKind::AllGather => algorithms::all_gather(session, &mut staging::parts(moved, size)),
        CollectiveKind::ReduceScatter(_) => {
            let mut parts = staging::parts(moved, size);
            algorithms::reduce_scatter(session, call.dtype, &mut parts)?;
            sums.into_iter().zip(&parts[rank]).for_each(|(sum, part)| sum.copy_from_slice(part));
            Ok(())
        }
        CollectiveKind::AllToAll => algorithms::all_to_all(session, &mut staging::parts(moved, size)),
        CollectiveKind::AllReduce(_) => {
            moved.into_iter().try_for_each(|bytes| algorithms::all_reduce(session, call.dtype, bytes))
        }
        CollectiveKind::Broadcast { root } => {
            moved.into_iter().try_for_each(|bytes| algorithms::broadcast(session, root as usize, bytes))
        }
        CollectiveKind::Split | CollectiveKind::Connect => unreachable!("it moves no buffers"),
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

    fn start(
        &mut self,
        memory: &M,
        call: Fingerprint,
        inputs: Vec<M::Buffer>,
        outputs: Vec<M::Buffer>,
    ) -> Result<Box<dyn InFlight<M>>, Error> {
        let buffers = Completed { outputs, inputs };
        let mut staged = StagedBuffers::<M>::new(memory, call, self.rank, self.members.len(), buffers)?;
        let results = self.submit(call, move |session| {
            run(session, call, &mut staged)?;
            Ok(staged)
        })?;
        let (rank, alarm) = (self.members[self.rank], self.alarm.clone());
        Ok(Box::new(Flight::<M> { results, arrived: None, rank, alarm }))
    }

    fn split(
        &mut self,
        _memory: &M,
        call: Fingerprint,
        color: usize,
    ) -> Result<Box<dyn Communicator<M>>, Error> {
        let link = self.submit(call, move |session| {
            let (rank, size) = (session.rank(), session.size());
            let mut gathered = vec![[0; 2]; size];
            gathered[rank] = [color as u64, session.link().unused_channel()];
            let mut parts: Vec<_> =
                gathered.iter_mut().map(|entry| vec![bytemuck::cast_slice_mut(entry)]).collect();
            algorithms::all_gather(session, &mut parts)?;
            let link = session.link();
            let group = || gathered.iter().zip(link.members()).filter(|&(entry, _)| entry[0] == color as u64);
            let channel = group().map(|(entry, _)| entry[1]).max().expect("a rank is in its own group");
            Ok(link.subgroup(group().map(|(_, &member)| member).collect(), channel))
        })?;
        let link = wait_for_result(&link, &*self.alarm).ok_or_else(|| self.thread_ended())??;
        Ok(Box::new(LinkComm::recorded(link, Arc::clone(&self.recorder))?))
    }

    fn abort(&mut self, reason: &str, kind: FailureKind) {
        let rank = self.members[self.rank];
        self.alarm.raise(CommError::Aborted { rank, reason: reason.to_owned(), kind });
    }
}

/// A collective that the link's thread is running or has finished.
struct Flight<M: Memory> {
    results: Receiver<Outcome<M>>,
    arrived: Option<Outcome<M>>,
    rank: Rank,
    alarm: Arc<dyn Alarm>,
}

impl<M: Memory> InFlight<M> for Flight<M> {
    fn is_ready(&mut self) -> bool {
        self.arrived = self.arrived.take().or_else(|| self.results.try_recv().ok());
        self.arrived.is_some()
    }

    fn wait_on(mut self: Box<Self>, memory: &M, queue: Queue) -> Result<Completed<M::Buffer>, Error> {
        let arrived = self.arrived.take();
        let staged =
            arrived.or_else(|| wait_for_result(&self.results, &*self.alarm)).unwrap_or_else(|| {
                let reason = "its link thread has ended".to_owned();
                Err(CommError::Transport { rank: self.rank, reason })
            })?;
        staged.into_buffers(memory, queue)
    }

    fn abandon(self: Box<Self>, reason: String) {
        self.alarm.raise(CommError::Aborted { rank: self.rank, reason, kind: FailureKind::Temporary });
    }
}
