//! The watcher: one thread per process that sees to it that nothing fails in silence.
//!
//! It asks the devices which collectives have ended, NCCL for errors in the background, and the clock whether one of
//! them takes too long. After a failure it aborts all communicators; at the end it closes those that are left.

use std::sync::Arc;
use std::time::{Duration, Instant};

use fsdp_core::Rank;
use fsdp_core::comm::CommError;

use super::link::Link;
use super::table::Failure;
use super::world::{State, World};
use crate::device::DeviceMemory;

/// Between two looks at everything.
const PAUSE: Duration = Duration::from_millis(10);

/// How long communicators may take to close; those that take longer are aborted. All their work has ended before.
const CLOSE_LIMIT: Duration = Duration::from_secs(10);

/// Watches until all ranks have returned and all communicators are gone.
pub(super) fn watch<M: DeviceMemory>(world: &World<M>) {
    let mut idle_since = None;
    loop {
        let mut state = world.lock();
        let links = state.links.clone();
        let failure = match state.failure {
            Some(_) => None,
            None => state.failure_of_events(world.limit),
        };
        drop(state);
        failure.into_iter().for_each(|failure| world.fail(failure));
        links.iter().take_while(|_| world.check().is_ok()).for_each(|link| tend(world, link));
        if world.check().is_err() {
            abort(&links);
        }

        let mut state = world.lock();
        let has_news = state.links.len() > links.len();
        state.links.retain(|link| !link.is_gone());
        if state.stopping && state.links.is_empty() {
            return;
        }
        if state.stopping
            && state.table.is_idle()
            && idle_since.get_or_insert_with(Instant::now).elapsed() > CLOSE_LIMIT
        {
            abort(&links);
        }
        if !has_news {
            drop(world.pause(state, PAUSE));
        }
    }
}

/// Looks whether a communicator is well.
fn tend<M: DeviceMemory>(world: &World<M>, link: &Arc<Link>) {
    if let Err(error) = link.watch() {
        let (rank, doing) = {
            let state = world.lock();
            (state.table.members(link.seat())[link.seat().index], state.table.current(link.seat()))
        };
        let doing = doing.map_or_else(|| "no collective".to_owned(), |call| call.to_string());
        world.fail_nccl(rank, &doing, &error);
    }
}

fn abort(links: &[Arc<Link>]) {
    if let Err(error) = Link::abort_all(links) {
        tracing::debug!(%error, "a communicator could not be aborted");
    }
}

impl<M: DeviceMemory> State<M> {
    /// Settles what has ended; the failure if a device has failed or a collective takes too long.
    fn failure_of_events(&mut self, limit: Duration) -> Option<Failure> {
        let now = self.now();
        let memories = &self.memories;
        let settled = self.table.settle(now, |rank, event| {
            let memory = memories[rank.0].as_ref().expect("a rank has its memory before it communicates");
            memory.bind().and_then(|()| memory.is_complete(event))
        });
        match settled {
            Ok(()) => self.table.overdue(now, limit),
            Err((rank, error)) => Some(device_failed(rank, &error)),
        }
    }
}

fn device_failed(rank: Rank, error: &fsdp_core::Error) -> Failure {
    Failure { culprit: rank, error: CommError::PeerFailed { rank, reason: error.to_string() } }
}
