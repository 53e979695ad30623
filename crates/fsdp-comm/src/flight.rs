//! A flight recorder: the last collectives of the ranks of a process, for diagnosis after a failure.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::sync::Mutex;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use fsdp_core::Rank;
use fsdp_core::comm::Fingerprint;
use serde::Serialize;

use crate::monitor::lock;

/// Maximum number of recorded calls.
const CALLS_MAX: usize = 1024;

/// Records when each call is issued, begins to communicate, and ends. Keeps a bounded number and drops the oldest.
pub struct FlightRecorder {
    begin: Instant,
    /// Time of `begin`, in seconds since 1970.
    begin_unix: f64,
    calls: Mutex<Calls>,
}

#[derive(Default)]
struct Calls {
    /// Number of the oldest call that is kept.
    first: u64,
    kept: VecDeque<Call>,
}

/// A call. Times are in seconds since 1970; `None` if it has not happened.
#[derive(Serialize)]
struct Call {
    rank: usize,
    /// The ranks of its group.
    group: Box<[usize]>,
    call: String,
    issued: f64,
    begun: Option<f64>,
    ended: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

/// Identifies a recorded call.
#[derive(Clone, Copy, Debug)]
pub struct CallNumber(u64);

impl FlightRecorder {
    /// Creates an empty recorder.
    #[expect(clippy::new_without_default, reason = "it begins to count time")]
    pub fn new() -> Self {
        let begin_unix =
            SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64());
        Self { begin: Instant::now(), begin_unix, calls: Mutex::default() }
    }

    /// Records that a rank has issued a call in a group.
    pub fn issue(&self, rank: Rank, group: &[Rank], call: &Fingerprint) -> CallNumber {
        let group = group.iter().map(|rank| rank.0).collect();
        let (call, issued) = (call.to_string(), self.now());
        let call = Call { rank: rank.0, group, call, issued, begun: None, ended: None, error: None };
        let mut calls = lock(&self.calls);
        calls.kept.push_back(call);
        if calls.kept.len() > CALLS_MAX {
            calls.kept.pop_front();
            calls.first += 1;
        }
        CallNumber(calls.first + calls.kept.len() as u64 - 1)
    }

    /// Records that the call begins to communicate with the other ranks.
    pub fn begin(&self, number: CallNumber) {
        let now = self.now();
        self.change(number, |call| call.begun = Some(now));
    }

    /// Records that the call has ended, and its error, if any.
    pub fn end(&self, number: CallNumber, error: Option<String>) {
        let now = self.now();
        self.change(number, |call| (call.ended, call.error) = (Some(now), error));
    }

    /// The most recently issued call that has not ended; if all have ended, the most recent one. Considers only the
    /// calls of `rank` if given. `None` if no call is recorded.
    pub fn last(&self, rank: Option<Rank>) -> Option<String> {
        let calls = lock(&self.calls);
        let of_rank = || calls.kept.iter().rev().filter(|call| rank.is_none_or(|rank| rank.0 == call.rank));
        let open = of_rank().find(|call| call.ended.is_none());
        open.or_else(|| of_rank().next()).map(|call| call.call.clone())
    }

    /// Writes the recorded calls, one JSON object per line, oldest first.
    ///
    /// # Errors
    /// The errors of `to`.
    pub fn write(&self, to: &mut dyn Write) -> io::Result<()> {
        let calls = lock(&self.calls);
        for call in &calls.kept {
            serde_json::to_writer(&mut *to, call)?;
            to.write_all(b"\n")?;
        }
        Ok(())
    }

    fn change(&self, CallNumber(number): CallNumber, change: impl FnOnce(&mut Call)) {
        let mut calls = lock(&self.calls);
        // The call may have been dropped already.
        let index = number.checked_sub(calls.first).and_then(|index| usize::try_from(index).ok());
        if let Some(call) = index.and_then(|index| calls.kept.get_mut(index)) {
            change(call);
        }
    }

    fn now(&self) -> f64 {
        self.begin_unix + self.begin.elapsed().as_secs_f64()
    }
}

#[cfg(test)]
mod tests {
    use fsdp_core::DType;
    use fsdp_core::comm::{CollectiveKind, Purpose};

    use super::*;

    fn call(sequence: u64) -> Fingerprint {
        let (kind, purpose) = (CollectiveKind::AllGather, Purpose::Forward);
        Fingerprint { sequence, kind, purpose, unit: None, dtype: DType::F32, elements: 1 }
    }

    fn lines(recorder: &FlightRecorder) -> Vec<serde_json::Value> {
        let mut bytes = Vec::new();
        recorder.write(&mut bytes).unwrap();
        let text = String::from_utf8(bytes).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    #[test]
    fn recorder_keeps_latest_calls_with_timestamps() {
        let recorder = FlightRecorder::new();
        let numbers: Vec<_> =
            (0..2000).map(|number| recorder.issue(Rank(1), &[Rank(1), Rank(3)], &call(number))).collect();
        for number in &numbers[..1999] {
            recorder.begin(*number);
            recorder.end(*number, None);
        }
        recorder.begin(numbers[1999]);
        let lines = lines(&recorder);
        assert_eq!(lines.len(), CALLS_MAX);
        let last = &lines[CALLS_MAX - 1];
        assert_eq!(last["call"], call(1999).to_string());
        assert_eq!((&last["rank"], &last["group"]), (&1.into(), &vec![1, 3].into()));
        assert!(last["begun"].is_f64() && last["ended"].is_null());
        let before = &lines[CALLS_MAX - 2];
        assert!(before["issued"].as_f64() <= before["begun"].as_f64());
        assert!(before["begun"].as_f64() <= before["ended"].as_f64());
    }

    #[test]
    fn last_call_prefers_unfinished_calls() {
        let recorder = FlightRecorder::new();
        assert_eq!(recorder.last(None), None);
        let numbers: Vec<_> =
            (0..4).map(|number| recorder.issue(Rank(number as usize % 2), &[], &call(number))).collect();
        recorder.end(numbers[3], None);
        assert_eq!(recorder.last(Some(Rank(1))), Some(call(1).to_string()));
        recorder.end(numbers[1], Some("it failed".to_owned()));
        assert_eq!(recorder.last(Some(Rank(1))), Some(call(3).to_string()));
        assert_eq!(recorder.last(None), Some(call(2).to_string()));
    }
}
