//! What a template may take of its process.
//!
//! The operating system ends a process that exceeds these. It counts the time that the processor spends on it, so a
//! machine that is busy, or a process that is stopped for a while, changes nothing.

use std::fs;
use std::time::Duration;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

/// What a template may take.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(in crate::chat) struct Limits {
    /// Memory beyond what the process has when it starts.
    pub(super) memory_bytes: u64,
    /// Time for one conversation, besides [`BYTE_TIME`]. Most take less than a millisecond.
    pub(super) time: Duration,
}

impl Limits {
    pub(in crate::chat) const USUAL: Limits = Limits { memory_bytes: 1 << 30, time: Duration::from_secs(10) };
}

/// Time for each byte of a conversation: 16 seconds for a megabyte. To find answers, a long one is rendered many times.
const BYTE_TIME: Duration = Duration::from_micros(16);

/// Length of a text, besides [`TEXT_TIMES`] the size of its conversation.
const TEXT_BYTES: usize = 1 << 18;

/// See [`TEXT_BYTES`].
const TEXT_TIMES: usize = 64;

/// The time that is left for the conversations of a process.
#[derive(Debug)]
pub(super) struct Clock {
    /// Time for one conversation.
    time: Duration,
    /// When the time of the next conversation begins, in time of the processor. After one that failed, that is not now:
    /// a template must not take hours to reject one conversation after the other.
    start: Duration,
    /// The limit that is set, in seconds.
    limit_secs: u64,
}

impl Clock {
    /// Limits the memory of this process and the time for what comes first: to compile the templates. Also keeps it
    /// from writing core dumps. Returns the memory that is left with it, which may be less than it should be.
    pub(super) fn start(limits: Limits) -> (Clock, u64) {
        limit(Resource::Core, 0);
        let left = address_space().map_or(limits.memory_bytes, |now| {
            limit(Resource::As, now.saturating_add(limits.memory_bytes)).saturating_sub(now)
        });
        let mut clock = Clock { time: limits.time, start: now(), limit_secs: 0 };
        clock.begin(0);
        (clock, left)
    }

    /// Begins with a conversation of this many bytes.
    pub(super) fn begin(&mut self, bytes: usize) {
        let end = self.start + self.time + byte_time(bytes);
        // The limit has whole seconds.
        let limit_secs = end.as_secs() + 1;
        if limit_secs != self.limit_secs {
            limit(Resource::Cpu, limit_secs);
            self.limit_secs = limit_secs;
        }
    }

    /// Ends it.
    pub(super) fn end(&mut self, bytes: usize, has_failed: bool) {
        let now = now();
        self.start = if has_failed { now.min(self.start + byte_time(bytes)) } else { now };
    }
}

/// Maximum length of the text of a conversation of this many bytes.
pub(super) fn text_bytes(bytes: usize) -> usize {
    TEXT_BYTES.saturating_add(bytes.saturating_mul(TEXT_TIMES))
}

fn byte_time(bytes: usize) -> Duration {
    BYTE_TIME.saturating_mul(u32::try_from(bytes).unwrap_or(u32::MAX))
}

/// The time that the processor has spent on this process.
fn now() -> Duration {
    // It is never negative.
    Duration::try_from(clock_gettime(ClockId::ProcessCPUTime)).unwrap_or_default()
}

/// Sets a limit, or the maximum of it that this process may have, and returns it.
fn limit(resource: Resource, most: u64) -> u64 {
    let maximum = getrlimit(resource).maximum;
    let current = maximum.map_or(most, |maximum| most.min(maximum));
    // A limit at or below the maximum can always be set.
    let _ = setrlimit(resource, Rlimit { current: Some(current), maximum });
    current
}

/// The address space of this process in bytes, where the system says it.
fn address_space() -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let size = status.lines().find_map(|line| line.strip_prefix("VmSize:"))?;
    let kib: u64 = size.trim().strip_suffix(" kB")?.parse().ok()?;
    Some(kib << 10)
}
