//! The report of a process to the leader about the calls of its ranks, sent with every heartbeat.
//!
//! A line (one connection) is identified by the path of the first group that used it, which is the same in all
//! processes. Everything but the waits remains valid when it arrives late: calls have positions, and digests come with
//! the number of calls they cover.

use fsdp_core::comm::Fingerprint;
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::Position;
use crate::session::{decode as call_of, encode as header_of};

/// The calls of all ranks of a process.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// Ranks that have returned.
    pub(super) returned: Vec<usize>,
    pub(super) lines: Vec<LineReport>,
    /// A description of each rank's state; empty if no rank waits.
    pub(super) status: Vec<(usize, String)>,
    /// Whether all kept calls of a line are included, because the leader has asked for them.
    pub(super) is_full: bool,
}

/// The calls of a line.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct LineReport {
    pub(super) path: Vec<u64>,
    /// All ranks of the line, if a rank of this process waits; empty if these are all ranks of the world.
    pub(super) members: Vec<usize>,
    /// One row for each rank of this process.
    pub(super) rows: Vec<RowReport>,
    /// The last calls: from the first awaited one on, or all that are kept.
    pub(super) calls: Vec<CallReport>,
}

/// The progress of a rank.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct RowReport {
    pub(super) rank: usize,
    /// Number of calls it has entered.
    pub(super) entered: Position,
    /// Digest of these calls.
    pub(super) digest: [i64; 2],
    /// The first unfinished call, if it has been the first for a while.
    pub(super) wait: Option<WaitReport>,
}

/// The call that a rank waits for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct WaitReport {
    pub(super) position: Position,
    #[serde(with = "as_header")]
    pub(super) call: Fingerprint,
    pub(super) waited_ms: u64,
}

/// A call.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct CallReport {
    pub(super) position: Position,
    /// A rank that has entered it.
    pub(super) rank: usize,
    /// The path and name of its group.
    pub(super) path: Vec<u64>,
    pub(super) group: String,
    #[serde(with = "as_header")]
    pub(super) call: Fingerprint,
}

impl Report {
    /// Encodes the report.
    pub fn encode(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("a report is a tree of plain values")
    }

    /// Decodes a report.
    ///
    /// # Errors
    /// The bytes are not a report.
    pub fn decode(bytes: &[u8]) -> Result<Self, serde_json::Error> {
        serde_json::from_slice(bytes)
    }
}

mod as_header {
    use super::{Deserialize, Deserializer, Error, Fingerprint, Serialize, Serializer, call_of, header_of};

    pub(super) fn serialize<S: Serializer>(call: &Fingerprint, to: S) -> Result<S::Ok, S::Error> {
        header_of(*call).serialize(to)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Fingerprint, D::Error> {
        call_of(&Deserialize::deserialize(from)?).ok_or_else(|| D::Error::custom("not the bytes of a call"))
    }
}
