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
use crate::exchange::{Answer, Order};
use crate::ffi::{Mpi, MpiLibrary};
use crate::link::MpiLink;

/// What the links of a world share.
pub(crate) struct Shared {
    messages: Sender<Message>,
    pub(crate) rank: Rank,
    pub(crate) alarm: Arc<dyn Alarm>,
    /// One more than the greatest channel that this rank has used.
    channels: AtomicU64,
}

impl Shared {
    pub(crate) fn use_channel(&self, channel: u64) {
        self.channels.fetch_max(channel + 1, Ordering::Relaxed);
    }

    pub(crate) fn unused_channel(&self) -> u64 {
        self.channels.load(Ordering::Relaxed)
    }

    /// Has the thread of MPI do this, and waits for its answer.
    pub(crate) fn exchange(&self, order: Order) -> Result<Answer, CommError> {
        let (sender, answer) = mpsc::channel();
        let ended = || transport(self.rank, &MpiError::Ended);
        self.messages.send(Message::Exchange(order, sender)).map_err(|_| ended())?;
        answer.recv().map_err(|_| ended())
    }
}

/// This process as one rank of `MPI_COMM_WORLD`. There is one world per process.
///
/// A thread of its own initialises MPI and makes all calls. Links, any number and of any threads, hand it what they want to
/// send and receive and wait for it: short messages are copied, long ones go out of and into the caller's slices.
///
/// # Failures
/// An alarm that was raised, or the time limit, ends every exchange. What then is still being sent or received in a caller's
/// slices ends first, which is soon if the process on the other side lives. **If that process has died or hangs in the
/// middle of a long message, the exchange does not return**: MPI can not be told to leave the memory alone, so nobody may
/// have it back. The alarm tells everybody else, and whoever ends the process must not wait for the threads of its links.
///
/// After a failure MPI is never finalised, because that would wait for ranks that may not come. Dropping the world does not
/// finalise it either; see [`MpiWorld::finalise`].
pub struct MpiWorld {
    shared: Arc<Shared>,
    size: usize,
}

impl MpiWorld {
    /// Initialises MPI. Nobody waits longer than `timeout` for a message; `alarm` is what ends this world.
    ///
    /// A library that does not belong to the launcher sees a world of one rank: compare [`MpiWorld::size`] with what the
    /// launcher says.
    ///
    /// # Errors
    /// [`MpiError`].
    pub fn open(library: MpiLibrary, timeout: Duration, alarm: Arc<dyn Alarm>) -> Result<Self, MpiError> {
        let (messages, inbox) = mpsc::channel();
        let (sender, begun) = mpsc::channel();
        let for_engine = alarm.clone();
        let own = move || own(library, inbox, for_engine, timeout, &sender);
        thread::Builder::new().name("mpi".to_owned()).spawn(own).map_err(MpiError::Thread)?;
        let (rank, size) = begun.recv().map_err(|_| MpiError::Ended)??;
        let rank = Rank(rank as usize);
        let shared = Shared { messages, rank, alarm, channels: AtomicU64::default() };
        Ok(Self { shared: Arc::new(shared), size: size as usize })
    }

    /// This process.
    pub fn rank(&self) -> Rank {
        self.shared.rank
    }

    /// Processes in the world.
    pub fn size(&self) -> usize {
        self.size
    }

    /// The ends of this rank of connections among `members`, which include it. All of them name the same members, in the
    /// same order, and the same `channel`, which no two of them use for other links.
    ///
    /// # Panics
    /// When this rank is not a member.
    pub fn link(&self, channel: u64, members: Arc<[Rank]>) -> Box<dyn Link> {
        Box::new(MpiLink::new(self.shared.clone(), channel, members))
    }

    /// Ends MPI, which waits for all ranks to do the same: call it on every rank, when all of them have succeeded and all
    /// links are dropped.
    ///
    /// # Errors
    /// [`MpiError::Failed`] after the alarm, [`MpiError::Unfinished`] when messages have not been received within the time
    /// limit; then the process ends without it. Other [`MpiError`]s from MPI.
    pub fn finalise(self) -> Result<(), MpiError> {
        let (sender, ended) = mpsc::channel();
        self.shared.messages.send(Message::Finalise(sender)).map_err(|_| MpiError::Ended)?;
        ended.recv().map_err(|_| MpiError::Ended)?
    }
}

/// The life of the thread that owns MPI.
fn own(
    library: MpiLibrary,
    inbox: Receiver<Message>,
    alarm: Arc<dyn Alarm>,
    timeout: Duration,
    begun: &Sender<Result<(c_int, c_int), MpiError>>,
) {
    match Mpi::initialise(library) {
        Ok(mpi) => {
            // Whoever opens the world waits for this.
            drop(begun.send(Ok((mpi.rank(), mpi.size()))));
            Engine::new(mpi, inbox, alarm, timeout).run();
        }
        Err(error) => drop(begun.send(Err(error))),
    }
}
