//! A collective over a link: every message carries the fingerprint of its call.
//!
//! Ranks that meet with different calls thus detect it with their first message, instead of adding unrelated data. A
//! message is the fingerprint, little-endian (sequence, unit, elements: eight bytes each; root of a broadcast: four
//! bytes; kind, purpose, dtype: one byte each), followed by the data.

use fsdp_core::comm::{CollectiveKind, CommError, Fingerprint, Purpose, ReduceOp};
use fsdp_core::wrap::UnitId;
use fsdp_core::{DType, Rank};

use crate::link::{Exchanged, Header, Incoming, Link, Outgoing};

const NO_UNIT: u64 = u64::MAX;

/// The kinds, by their number in a header. The root in a header is 0 for kinds without one.
const KINDS: [CollectiveKind; 9] = [
    CollectiveKind::AllGather,
    CollectiveKind::ReduceScatter(ReduceOp::Sum),
    CollectiveKind::ReduceScatter(ReduceOp::Average),
    CollectiveKind::AllReduce(ReduceOp::Sum),
    CollectiveKind::AllReduce(ReduceOp::Average),
    CollectiveKind::Broadcast { root: 0 },
    CollectiveKind::Split,
    CollectiveKind::Connect,
    CollectiveKind::AllToAll,
];
const PURPOSES: [Purpose; 7] = [
    Purpose::Forward,
    Purpose::Backward,
    Purpose::Gradient,
    Purpose::Scalars,
    Purpose::UpdateRule,
    Purpose::Setup,
    Purpose::Activations,
];
const DTYPES: [DType; 7] =
    [DType::F32, DType::F64, DType::Bf16, DType::U32, DType::I64, DType::U8, DType::F16];

/// One call of one rank over a link.
pub(crate) struct Session<'a> {
    link: &'a mut dyn Link,
    call: Fingerprint,
    header: Header,
    scratch: &'a mut Vec<u8>,
}

impl<'a> Session<'a> {
    /// Creates the session of `call` over `link`. Allocating memory costs more than the work done in it, so `scratch`
    /// is reused from call to call.
    pub(crate) fn new(link: &'a mut dyn Link, call: Fingerprint, scratch: &'a mut Vec<u8>) -> Self {
        Self { link, call, header: encode(call), scratch }
    }

    /// The link.
    pub(crate) fn link(&self) -> &dyn Link {
        &*self.link
    }

    /// Calls `work` with scratch memory of this length, whose contents are unspecified.
    pub(crate) fn with_scratch<T>(
        &mut self,
        len_bytes: usize,
        work: impl FnOnce(&mut Self, &mut [u8]) -> T,
    ) -> T {
        let mut scratch = std::mem::take(self.scratch);
        if scratch.len() < len_bytes {
            // A fresh buffer, because the old contents need not be copied.
            scratch = vec![0; len_bytes];
        }
        let result = work(self, &mut scratch[..len_bytes]);
        *self.scratch = scratch;
        result
    }

    /// This rank's index in the group.
    pub(crate) fn rank(&self) -> usize {
        self.link.rank()
    }

    /// Number of ranks in the group.
    pub(crate) fn size(&self) -> usize {
        self.link.members().len()
    }

    /// Sends data to the rank `outgoing.0`, and receives data from the rank `incoming.0`, at the same time.
    ///
    /// # Errors
    /// The errors of [`Link::exchange`]; [`CommError::Missing`] after the time limit; [`CommError::Mismatch`] if the
    /// message belongs to another call; [`CommError::Transport`] if its length differs.
    pub(crate) fn exchange(
        &mut self,
        outgoing: Option<(usize, &[&[u8]])>,
        incoming: Option<(usize, &mut [&mut [u8]])>,
    ) -> Result<(), CommError> {
        let header = &self.header;
        let from = incoming.as_ref().map(|(from, _)| *from);
        let expected: usize =
            incoming.iter().flat_map(|(_, parts)| parts.iter()).map(|part| part.len()).sum();
        let outgoing = outgoing.map(|(to, parts)| Outgoing { to, header, parts });
        let incoming = incoming.map(|(from, parts)| Incoming { from, header, parts });
        match self.link.exchange(outgoing, incoming)? {
            Exchanged::Done => Ok(()),
            Exchanged::Late { peer } => {
                let missing = [self.member(peer)].into();
                Err(CommError::Missing { missing, call: self.call, status: [].into() })
            }
            Exchanged::Differs { header, len_bytes } => {
                let from = from.expect("only what is expected can differ");
                Err(self.unexpected(from, &header, len_bytes, expected))
            }
        }
    }

    /// Sends data to another rank.
    ///
    /// # Errors
    /// The errors of [`Session::exchange`].
    pub(crate) fn send(&mut self, to: usize, data: &[u8]) -> Result<(), CommError> {
        self.exchange(Some((to, &[data])), None)
    }

    /// Receives data from another rank.
    ///
    /// # Errors
    /// The errors of [`Session::exchange`].
    pub(crate) fn receive(&mut self, from: usize, data: &mut [u8]) -> Result<(), CommError> {
        self.exchange(None, Some((from, &mut [data])))
    }

    fn unexpected(&self, from: usize, header: &Header, len_bytes: u64, expected: usize) -> CommError {
        let (rank, peer) = (self.member(from), self.member(self.rank()));
        match decode(header) {
            Some(got) if got != self.call => CommError::Mismatch { rank, got, peer, expected: self.call },
            Some(_) => {
                let reason = format!("it sent {len_bytes} bytes in {}, expected {expected}", self.call);
                CommError::Transport { rank, reason }
            }
            None => CommError::Transport { rank, reason: "it sent a message without a header".to_owned() },
        }
    }

    fn member(&self, index: usize) -> Rank {
        self.link.members()[index]
    }
}

/// Encodes a call as a header.
pub(crate) fn encode(call: Fingerprint) -> Header {
    fn index<T: PartialEq>(table: &[T], value: T) -> u8 {
        table.iter().position(|entry| *entry == value).expect("the tables list every variant") as u8
    }
    let unit = call.unit.map_or(NO_UNIT, |unit| unit.0 as u64);
    let mut header = Header::default();
    for (field, number) in [call.sequence, unit, call.elements as u64].into_iter().enumerate() {
        header[8 * field..8 * field + 8].copy_from_slice(&number.to_le_bytes());
    }
    let (kind, root) = match call.kind {
        CollectiveKind::Broadcast { root } => (CollectiveKind::Broadcast { root: 0 }, root),
        kind => (kind, 0),
    };
    header[24..28].copy_from_slice(&root.to_le_bytes());
    header[28] = index(&KINDS, kind);
    header[29] = index(&PURPOSES, call.purpose);
    header[30] = index(&DTYPES, call.dtype);
    header
}

/// Decodes a header; `None` if it is not the header of a call.
pub(crate) fn decode(header: &Header) -> Option<Fingerprint> {
    let number = |field: usize| header[8 * field..].first_chunk().copied().map(u64::from_le_bytes);
    let unit = number(1)?;
    let kind = match *KINDS.get(usize::from(header[28]))? {
        CollectiveKind::Broadcast { .. } => {
            CollectiveKind::Broadcast { root: u32::from_le_bytes(*header[24..].first_chunk()?) }
        }
        kind => kind,
    };
    Some(Fingerprint {
        sequence: number(0)?,
        kind,
        purpose: *PURPOSES.get(usize::from(header[29]))?,
        unit: if unit == NO_UNIT { None } else { Some(UnitId(usize::try_from(unit).ok()?)) },
        dtype: *DTYPES.get(usize::from(header[30]))?,
        elements: usize::try_from(number(2)?).ok()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fingerprints_round_trip() {
        for kind in KINDS.into_iter().chain([CollectiveKind::Broadcast { root: 70_000 }]) {
            for purpose in PURPOSES {
                for dtype in DTYPES {
                    for unit in [None, Some(0), Some(usize::MAX >> 1)] {
                        let unit = unit.map(UnitId);
                        let call = Fingerprint { sequence: 7, kind, purpose, unit, dtype, elements: 1 << 40 };
                        assert_eq!(decode(&encode(call)), Some(call));
                    }
                }
            }
        }
    }

    #[test]
    fn unknown_codes_are_rejected() {
        for place in 28..size_of::<Header>() {
            let mut header = Header::default();
            header[place] = KINDS.len() as u8;
            assert_eq!(decode(&header), None);
        }
    }
}
