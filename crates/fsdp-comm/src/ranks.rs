//! Runs the ranks of a process as threads, from their start to the report of their results. Used by every launcher.

use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;

use fsdp_core::Rank;

use crate::launch::{FailureReason, LaunchFailure};
use crate::rendezvous::Failure;

/// Stack of the thread of a rank that computes on the host, in bytes.
pub const STACK_BYTES: usize = 2 << 20;

/// Runs `body` for each of the ranks `local` on its own thread with `stack_bytes` of stack; returns the results in rank
/// order. Panics are caught. As soon as a rank has ended, or could not be started, `on_end` is called with the failure,
/// if any: it must notify the other ranks.
///
/// A thread cannot be stopped from outside, so this returns when every body has.
pub fn run_ranks<T: Send, E: fmt::Display + Send>(
    local: Range<usize>,
    stack_bytes: usize,
    body: impl Fn(Rank) -> Result<T, FailureReason<E>> + Sync,
    on_end: impl Fn(Rank, Option<&FailureReason<E>>) + Sync,
) -> Vec<Result<T, FailureReason<E>>> {
    let run = |rank| {
        let outcome = catch_unwind(AssertUnwindSafe(|| body(rank)));
        let outcome =
            outcome.unwrap_or_else(|panic| Err(FailureReason::Panic(panic_message(panic.as_ref()))));
        on_end(rank, outcome.as_ref().err());
        outcome
    };
    let run = &run;
    thread::scope(|scope| {
        let spawn = |rank: Rank| {
            let thread = thread::Builder::new().name(rank.to_string()).stack_size(stack_bytes);
            thread.spawn_scoped(scope, move || run(rank)).map_err(|error| {
                let reason = FailureReason::Spawn(error);
                on_end(rank, Some(&reason));
                reason
            })
        };
        let threads: Vec<_> = local.map(Rank).map(spawn).collect();
        let join = |thread: thread::ScopedJoinHandle<'_, _>| thread.join().expect("panics are caught");
        threads.into_iter().map(|thread| thread.and_then(join)).collect()
    })
}

fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(ToString::to_string);
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".to_owned())
}

/// Returns the results of the ranks `local`, or the failure of the rank that failed first in the world. If that rank is
/// in another process, returns the failure of the lowest rank here.
///
/// # Errors
/// [`LaunchFailure`].
pub fn first_failure<T, E>(
    local: Range<usize>,
    outcomes: Vec<Result<T, FailureReason<E>>>,
    failure: Option<Failure>,
) -> Result<Vec<T>, LaunchFailure<E>> {
    let (mut results, mut failures) = (Vec::new(), Vec::new());
    for (rank, outcome) in local.clone().map(Rank).zip(outcomes) {
        match outcome {
            Ok(result) => results.push(result),
            Err(reason) => failures.push(LaunchFailure { rank, reason }),
        }
    }
    let index_of =
        |rank: Rank, failures: &[LaunchFailure<E>]| failures.iter().position(|entry| entry.rank == rank);
    match failure.filter(|failure| local.contains(&failure.culprit.0)) {
        Some(Failure { culprit, error }) => Err(match index_of(culprit, &failures) {
            Some(index) => failures.swap_remove(index),
            None => LaunchFailure { rank: culprit, reason: FailureReason::Comm(error) },
        }),
        None => failures.into_iter().next().map_or(Ok(results), Err),
    }
}
