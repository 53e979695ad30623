//! Agreement between ranks: every rank must issue the same collectives in the same order.

use super::Violation;
use crate::dtype::DType;
use crate::rank::{Queue, Rank};
use crate::schedule::{BufferId, OpKind, Schedule};

/// Checks that all ranks (in rank order) issue the same collectives in the same order on every queue.
///
/// # Errors
/// [`Violation::Diverges`] with the first rank, queue and position that differ from rank 0.
pub fn check_ranks(schedules: &[&Schedule]) -> Result<(), Violation> {
    let Some(first) = schedules.first() else { return Ok(()) };
    for queue in Queue::ALL {
        let expected = collectives(first, queue);
        for (rank, schedule) in schedules.iter().enumerate().skip(1) {
            let got = collectives(schedule, queue);
            let longest = expected.len().max(got.len());
            let differs = (0..longest).find(|&index| expected.get(index) != got.get(index));
            if let Some(index) = differs {
                let text =
                    |list: &[Call]| list.get(index).map_or("nothing".into(), |call| format!("{call:?}"));
                return Err(Violation::Diverges {
                    rank: Rank(rank),
                    queue,
                    index,
                    expected: text(&expected),
                    got: text(&got),
                });
            }
        }
    }
    Ok(())
}

/// A collective, with the lengths and dtypes of the buffers it writes.
type Call = (OpKind, Vec<(Option<usize>, DType)>);

/// The collectives of a queue.
fn collectives(schedule: &Schedule, queue: Queue) -> Vec<Call> {
    let communicates = |kind: &OpKind| {
        kind.is_collective() || matches!(kind, OpKind::ReduceScalars | OpKind::ReduceStatistics(_))
    };
    let shape = |&id: &BufferId| (schedule.buffer(id).len, schedule.buffer(id).dtype);
    let of_queue = schedule.ops.iter().filter(|op| op.kind.queue() == queue && communicates(&op.kind));
    of_queue.map(|op| (op.kind, op.writes.iter().map(shape).collect())).collect()
}
