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
    let mut reporters = world.peers.clone().map(|peers| HeartbeatReporter::new(world, peers));
    let mut idle_since = None;
    loop {
        let links = world.lock().links.clone();
        failure_of_events(world).into_iter().for_each(|failure| world.fail(failure));
        reporters.iter_mut().for_each(HeartbeatReporter::turn);
        links.iter().take_while(|_| world.check().is_ok()).for_each(|link| tend(world, link));
        if world.check().is_err() {
            abort(&links);
        }

        let mut state = world.lock();
        let has_news = state.links.len() > links.len();
        state.links.retain(|link| !link.is_gone());
        let is_over = state.stopping && reporters.as_ref().is_none_or(|reporters| reporters.are_over(&state));
        if is_over && state.links.is_empty() {
            return;
        }
        if is_over
            && state.rendezvous.table.is_idle()
            && idle_since.get_or_insert_with(Instant::now).elapsed() > CLOSE_LIMIT
        {
            abort(&links);
        }
        if !has_news {
            drop(world.pause(state, PAUSE));
        }
    }
}

/// Checks a communicator for errors.
fn tend<M: DeviceMemory>(world: &World<M>, link: &Arc<Link>) {
    if let Err(error) = link.watch() {
        let (rank, doing) = {
            let table = &world.lock().rendezvous.table;
            (table.rank(link.seat()), table.current(link.seat()))
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

/// Removes ended calls from the table; returns the failure if a device has failed or a collective takes too long.
fn failure_of_events<M: DeviceMemory>(world: &World<M>) -> Option<Failure> {
    let State { rendezvous, memories, .. } = &mut *world.lock();
    if rendezvous.failure().is_some() {
        return None;
    }
    let (now, limit) = (rendezvous.now(), rendezvous.limit());
    let settled = rendezvous.table.settle(now, |rank, issued| {
        let memory = memories[rank.0].as_ref().expect("a rank has its memory before it communicates");
        let is_past = memory.bind().and_then(|()| memory.is_complete(&issued.event))?;
        world.end_record(issued.record.filter(|_| is_past));
        Ok(is_past)
    });
    match settled {
        Ok(()) if world.peers.is_some() => None,
        Ok(()) => rendezvous.table.overdue(now, limit),
        Err((rank, error)) => Some(Failure::of_rank(rank, fsdp_core::Error::to_string(&error))),
    }
}
