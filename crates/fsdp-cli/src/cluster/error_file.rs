//! Writes the file that tells torchrun why a process has failed.
//!
//! Of the files of all processes, torchrun shows the one with the earliest time as the root cause. It requires whole
//! seconds and fails on truncated files: so the file is written under another name and renamed, and processes that did
//! not fail themselves add a delay to the time.

use std::env;
use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

use fsdp_comm::process::Verdict;
use serde_json::json;

use crate::atomic_file;

/// Seconds added by a process that was only told of the failure.
const DELAY_S: u64 = 60;

/// Writes the file that torchrun has requested, if any: the failure that ended the process's world.
pub(super) fn write(verdict: &Verdict, process: usize) {
    write_at(|now| of_verdict(verdict, process, now));
}

/// Writes the file that torchrun has requested, if any, for a process that fails before joining others, or runs alone.
pub(crate) fn write_cause(cause: &str) {
    write_at(|now| text(cause, cause, now));
}

fn write_at(text: impl FnOnce(u64) -> String) {
    let Some(path) = env::var_os("TORCHELASTIC_ERROR_FILE").map(PathBuf::from) else { return };
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    if let Err(error) = atomic_file::replace(&path, &text(now)) {
        // torchrun then shows only the exit code.
        tracing::warn!("cannot write {}: {error}", path.display());
    }
}

fn of_verdict(verdict: &Verdict, process: usize, now: u64) -> String {
    let time = if verdict.process == process { now } else { now + DELAY_S };
    text(&verdict.failure.cause, &verdict.to_string(), time)
}

fn text(cause: &str, details: &str, time: u64) -> String {
    // Users are shown the "call stack".
    let extra = json!({ "py_callstack": details, "timestamp": time.to_string() });
    json!({ "message": { "message": cause, "extraInfo": extra } }).to_string()
}

#[cfg(test)]
mod tests {
    use fsdp_comm::process::Failure;
    use fsdp_core::{FailureKind, Rank};

    use super::*;

    #[test]
    fn failing_process_has_earlier_timestamp_than_others() {
        let cause = "loss is not finite".to_owned();
        let failure = Failure { rank: Some(Rank(1)), cause, kind: FailureKind::Permanent, last_call: None };
        let verdict = Verdict { process: 1, ranks: 1..2, host: "n1".to_owned(), pid: 7, failure };
        let text = |process| of_verdict(&verdict, process, 1000);
        assert_eq!(
            text(1),
            r#"{"message":{"message":"loss is not finite","extraInfo":{"py_callstack":"process 1 (pid 7 on host n1): loss is not finite","timestamp":"1000"}}}"#
        );
        assert!(text(0).contains(r#""timestamp":"1060""#));
    }
}
