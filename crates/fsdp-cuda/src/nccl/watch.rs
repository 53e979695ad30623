//! The watcher: one thread per process that detects failures which no rank reports.
//!
//! It asks the devices which collectives have ended, polls NCCL for asynchronous errors, and checks whether a
//! collective takes too long; with several processes, the [leader's watcher](super::remote) checks that. After a
//! failure it aborts all communicators; at the end it closes those that are left.

use std::sync::Arc;
use std::time::{Duration, Instant};

use fsdp_comm::rendezvous::Failure;

use super::link::Link;
use super::remote::HeartbeatReporter;
use super::world::{State, World};
use crate::device::DeviceMemory;

/// Pause between two rounds of checks.
pub(super) const PAUSE: Duration = Duration::from_millis(10);

/// Time limit for closing communicators, whose work has ended before; those that take longer are aborted.
const CLOSE_LIMIT: Duration = Duration::from_secs(10);

/// Watches until all ranks have returned, including those of other processes, and all communicators are gone.
pub(super) fn watch<M: DeviceMemory>(world: &World<M>) {
    let mut reporter = world.peers.clone().map(|peers| HeartbeatReporter::new(world, peers));
    let mut idle_since = None;
    loop {
        let links = world.lock().links.clone();
        find_failure(world).into_iter().for_each(|failure| world.fail(failure));
        reporter.iter_mut().for_each(HeartbeatReporter::tick);
        links.iter().take_while(|_| world.check().is_ok()).for_each(|link| check_link(world, link));
        if world.check().is_err() {
            abort(&links);
        }

        let mut state = world.lock();
        let has_new_links = state.links.len() > links.len();
        state.links.retain(|link| !link.is_gone());
        let is_over = state.stopping && reporter.as_ref().is_none_or(|reporter| reporter.is_finished(&state));
        if is_over && state.links.is_empty() {
            return;
        }
        if is_over
            && state.rendezvous.table.is_idle()
            && idle_since.get_or_insert_with(Instant::now).elapsed() > CLOSE_LIMIT
        {
            abort(&links);
        }
        if !has_new_links {
            drop(world.pause(state, PAUSE));
        }
    }
}

/// Checks a communicator for errors.
fn check_link<M: DeviceMemory>(world: &World<M>, link: &Arc<Link>) {
    if let Err(error) = link.watch() {
        let (rank, context) = {
            let table = &world.lock().rendezvous.table;
            (table.rank(link.seat()), table.current(link.seat()))
        };
        let context = context.map_or_else(|| "no collective".to_owned(), |call| call.to_string());
        world.fail_nccl(rank, &context, &error);
    }
}

fn abort(links: &[Arc<Link>]) {
    if let Err(error) = Link::abort_all(links) {
        tracing::debug!(%error, "a communicator could not be aborted");
    }
}

/// Removes ended calls from the table; returns the failure if a device has failed or a collective takes too long.
fn find_failure<M: DeviceMemory>(world: &World<M>) -> Option<Failure> {
    let State { rendezvous, memories, .. } = &mut *world.lock();
    if rendezvous.failure().is_some() {
        return None;
    }
    let (now, limit) = (rendezvous.now(), rendezvous.limit());
    let result = rendezvous.table.settle(now, |rank, issued| {
        let memory = memories[rank.0].as_ref().expect("a rank has its memory before it communicates");
        let has_ended = memory.bind().and_then(|()| memory.is_complete(&issued.event))?;
        world.end_record(issued.record.filter(|_| has_ended));
        Ok(has_ended)
    });
    match result {
        Ok(()) if world.peers.is_some() => None,
        Ok(()) => rendezvous.table.overdue(now, limit),
        Err((rank, error)) => Some(Failure::of_rank(rank, fsdp_core::Error::to_string(&error))),
    }
}
