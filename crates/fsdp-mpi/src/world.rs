//! This process as one rank of an MPI world.

use std::ffi::c_int;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;
use std::time::Duration;

use fsdp_comm::{Alarm, Link};
use fsdp_core::Rank;
use fsdp_core::comm::CommError;

use crate::engine::{Engine, Message, transport};
use crate::error::MpiError;
use crate::exchange::{Answer, Transfer};
use crate::ffi::{Mpi, MpiLibrary};
use crate::link::MpiLink;

/// State shared by the links of a world.
pub(crate) struct Shared {
    messages: Sender<Message>,
    pub(crate) rank: Rank,
    pub(crate) alarm: Arc<dyn Alarm>,
    /// The greatest channel that this rank has used, plus one.
    channels: AtomicU64,
}

impl Shared {
    pub(crate) fn use_channel(&self, channel: u64) {
        self.channels.fetch_max(channel + 1, Ordering::Relaxed);
    }

    pub(crate) fn unused_channel(&self) -> u64 {
        self.channels.load(Ordering::Relaxed)
    }

    /// Passes the request to the MPI thread and waits for the answer.
    pub(crate) fn exchange(&self, transfer: Transfer) -> Result<Answer, CommError> {
        let (sender, answer) = mpsc::channel();
        let thread_ended = || transport(self.rank, &MpiError::Ended);
        self.messages.send(Message::Exchange(transfer, sender)).map_err(|_| thread_ended())?;
        answer.recv().map_err(|_| thread_ended())
    }
}

/// This process as one rank of `MPI_COMM_WORLD`. A process has one world.
///
/// A dedicated thread initializes MPI and makes all calls. Any number of links, on any threads, pass it their requests
/// and wait for completion. Short messages are copied; long messages are sent from and received into the caller's
/// slices.
///
/// # Failures
/// A raised alarm or the time limit ends every exchange. Operations in flight on a caller's slices end first, which
/// takes a moment if the peer process lives. **If the peer has died or hangs in the middle of a long message, the
/// exchange does not return**: MPI cannot be told to release the memory, so it cannot be given back. The alarm informs
/// all other exchanges, and the code that ends the process must not wait for the threads of its links.
///
/// After a failure MPI is never finalized, because that would wait for ranks that may not come. Dropping the world does
/// not finalize it either; see [`MpiWorld::finalize`].
pub struct MpiWorld {
    shared: Arc<Shared>,
    size: usize,
}

impl MpiWorld {
    /// Initializes MPI. No exchange waits longer than `timeout` for a message; raising `alarm` ends all exchanges.
    ///
    /// A library that does not belong to the launcher sees a world of one rank: compare [`MpiWorld::size`] with the
    /// size that the launcher reports.
    ///
    /// # Errors
    /// [`MpiError`].
    pub fn open(library: MpiLibrary, timeout: Duration, alarm: Arc<dyn Alarm>) -> Result<Self, MpiError> {
        let (messages, inbox) = mpsc::channel();
        let (sender, begun) = mpsc::channel();
        let engine_alarm = alarm.clone();
        let run = move || run_engine(library, inbox, engine_alarm, timeout, &sender);
        thread::Builder::new().name("mpi".to_owned()).spawn(run).map_err(MpiError::Thread)?;
        let (rank, size) = begun.recv().map_err(|_| MpiError::Ended)??;
        let rank = Rank(rank as usize);
        let shared = Shared { messages, rank, alarm, channels: AtomicU64::default() };
        Ok(Self { shared: Arc::new(shared), size: size as usize })
    }

    /// The rank of this process.
    pub fn rank(&self) -> Rank {
        self.shared.rank
    }

    /// Number of processes in the world.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Returns this rank's link to `members`, which must include this rank. All members pass the same list in the same
    /// order and the same `channel`, which no two of them use for another link.
    ///
    /// # Panics
    /// If this rank is not a member.
    pub fn link(&self, channel: u64, members: Arc<[Rank]>) -> Box<dyn Link> {
        Box::new(MpiLink::new(self.shared.clone(), channel, members))
    }

    /// Finalizes MPI, which waits for all ranks to do the same: call it on every rank after all of them have succeeded
    /// and all links are dropped.
    ///
    /// # Errors
    /// [`MpiError::Failed`] after the alarm; [`MpiError::Unfinished`] if messages have not been received within the
    /// time limit. In both cases the process ends without finalizing MPI. Other [`MpiError`]s come from MPI.
    pub fn finalize(self) -> Result<(), MpiError> {
        let (sender, ended) = mpsc::channel();
        self.shared.messages.send(Message::Finalize(sender)).map_err(|_| MpiError::Ended)?;
        ended.recv().map_err(|_| MpiError::Ended)?
    }
}

/// The main function of the thread that owns MPI.
fn run_engine(
    library: MpiLibrary,
    inbox: Receiver<Message>,
    alarm: Arc<dyn Alarm>,
    timeout: Duration,
    begun: &Sender<Result<(c_int, c_int), MpiError>>,
) {
    match Mpi::initialize(library) {
        Ok(mpi) => {
            // `MpiWorld::open` waits for this.
            drop(begun.send(Ok((mpi.rank(), mpi.size()))));
            Engine::new(mpi, inbox, alarm, timeout).run();
        }
        Err(error) => drop(begun.send(Err(error))),
    }
}
