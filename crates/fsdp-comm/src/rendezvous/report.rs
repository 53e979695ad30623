//! What a process tells the leader of the calls of its ranks, with each of its signs of life.
//!
//! A line, which is one connection, is known by the path of the first group that used it; it is the same in all
//! processes. Everything but waits stays true when it is told late: calls have their positions, and digests the number of
//! calls that they are of.

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
    /// What each rank does, in words; when there is somebody that waits.
    pub(super) status: Vec<(usize, String)>,
    /// Whether all calls of a line are told that are kept, because the leader has asked for them.
    pub(super) is_full: bool,
}

/// The calls of a line.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct LineReport {
    pub(super) path: Vec<u64>,
    /// All ranks of the line, when one of this process waits.
    pub(super) members: Vec<usize>,
    /// For each rank of this process.
    pub(super) rows: Vec<RowReport>,
    /// The last calls: those from the first on that somebody waits for, or all that are kept.
    pub(super) calls: Vec<CallReport>,
}

/// How far a rank is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct RowReport {
    pub(super) rank: usize,
    /// How many calls it has entered.
    pub(super) entered: Position,
    /// Of these calls.
    pub(super) digest: [i64; 2],
    /// The first call that has not ended, when it has been the first for a while.
    pub(super) wait: Option<WaitReport>,
}

/// What a rank waits for.
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
    /// The group of which it is a call: its path and its name.
    pub(super) path: Vec<u64>,
    pub(super) group: String,
    #[serde(with = "as_header")]
    pub(super) call: Fingerprint,
}

impl Report {
    /// As bytes.
    pub fn encode(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("a report is a tree of plain values")
    }

    /// Of bytes.
    ///
    /// # Errors
    /// They are no report.
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
        call_of(&Deserialize::deserialize(from)?).ok_or_else(|| D::Error::custom("these bytes are no call"))
    }
}
