//! Counters of collectives and of the bytes they moved.

use super::CollectiveKind;

/// Collectives issued through one [`Comm`](super::Comm) and the bytes this rank sent for them, by the usual convention:
/// `(n - 1) / n` of the unsharded bytes for all-gather, reduce-scatter and all-to-all, twice that for all-reduce. A broadcast also
/// counts as `(n - 1) / n` of its bytes: the average over the ranks, whatever route the data takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// All-gathers: calls.
    pub all_gathers: u64,
    /// All-gathers: bytes sent by this rank.
    pub all_gather_bytes: u64,
    /// Reduce-scatters: calls.
    pub reduce_scatters: u64,
    /// Reduce-scatters: bytes sent by this rank.
    pub reduce_scatter_bytes: u64,
    /// All-reduces: calls.
    pub all_reduces: u64,
    /// All-reduces: bytes sent by this rank.
    pub all_reduce_bytes: u64,
    /// All-to-alls: calls.
    pub all_to_alls: u64,
    /// All-to-alls: bytes sent by this rank.
    pub all_to_all_bytes: u64,
    /// Broadcasts: calls.
    pub broadcasts: u64,
    /// Broadcasts: bytes sent by this rank.
    pub broadcast_bytes: u64,
}

impl std::ops::AddAssign for Traffic {
    fn add_assign(&mut self, other: Self) {
        self.all_gathers += other.all_gathers;
        self.all_gather_bytes += other.all_gather_bytes;
        self.reduce_scatters += other.reduce_scatters;
        self.reduce_scatter_bytes += other.reduce_scatter_bytes;
        self.all_reduces += other.all_reduces;
        self.all_reduce_bytes += other.all_reduce_bytes;
        self.all_to_alls += other.all_to_alls;
        self.all_to_all_bytes += other.all_to_all_bytes;
        self.broadcasts += other.broadcasts;
        self.broadcast_bytes += other.broadcast_bytes;
    }
}

impl Traffic {
    /// Bytes sent by this rank in all collectives.
    pub fn bytes(&self) -> u64 {
        self.all_gather_bytes
            + self.reduce_scatter_bytes
            + self.all_reduce_bytes
            + self.all_to_all_bytes
            + self.broadcast_bytes
    }

    /// Counts one collective over `bytes` unsharded bytes in a group of `size` ranks.
    pub(super) fn count(&mut self, kind: CollectiveKind, bytes: usize, size: usize) {
        let sent = (bytes / size * (size - 1)) as u64;
        match kind {
            CollectiveKind::AllGather => {
                self.all_gathers += 1;
                self.all_gather_bytes += sent;
            }
            CollectiveKind::ReduceScatter(_) => {
                self.reduce_scatters += 1;
                self.reduce_scatter_bytes += sent;
            }
            CollectiveKind::AllReduce(_) => {
                self.all_reduces += 1;
                self.all_reduce_bytes += (2 * bytes * (size - 1) / size) as u64;
            }
            CollectiveKind::AllToAll => {
                self.all_to_alls += 1;
                self.all_to_all_bytes += sent;
            }
            CollectiveKind::Broadcast { .. } => {
                self.broadcasts += 1;
                self.broadcast_bytes += (bytes * (size - 1) / size) as u64;
            }
            CollectiveKind::Split | CollectiveKind::Connect => {}
        }
    }
}
