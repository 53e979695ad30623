//! Messages between two ranks.

use std::thread;

use fsdp_comm::{Alarm, Exchanged, Header, Incoming, Link, Outgoing};
use fsdp_core::comm::CommError;
use fsdp_core::{FailureKind, Rank};
use fsdp_mpi::Family;

use crate::fake::{FAMILIES, LONG, Worlds};

pub(crate) const HEADER: Header = [7; 31];

/// Bytes that depend on their position and the seed.
pub(crate) fn pattern(seed: usize, len: usize) -> Vec<u8> {
    (0..len).map(|place| (place * 31 + place / 251 + seed * 101) as u8).collect()
}

pub(crate) fn send(link: &mut dyn Link, to: usize, data: &[u8]) -> Result<Exchanged, CommError> {
    link.exchange(Some(Outgoing { to, header: &HEADER, parts: &[data] }), None)
}

pub(crate) fn receive(link: &mut dyn Link, from: usize, data: &mut [u8]) -> Result<Exchanged, CommError> {
    link.exchange(None, Some(Incoming { from, header: &HEADER, parts: &mut [data] }))
}

/// Runs both ranks of a world concurrently.
pub(crate) fn both<A: Send, B: Send>(
    worlds: &Worlds,
    first: impl FnOnce(&mut dyn Link) -> A + Send,
    second: impl FnOnce(&mut dyn Link) -> B + Send,
) -> (A, B) {
    thread::scope(|scope| {
        let first = scope.spawn(|| first(&mut *worlds.link(0, 0)));
        let second = second(&mut *worlds.link(0, 1));
        (first.join().unwrap(), second)
    })
}

#[test]
fn simultaneous_messages_of_any_lengths_arrive() {
    const LENS: [usize; 8] = [0, 1, 4_097, 16_383, 16_384, 16_385, 70_000, 3_000_001];
    for family in FAMILIES {
        let worlds = Worlds::new(family, 2, LONG);
        let run = |link: &mut dyn Link| {
            let (me, peer) = (link.rank(), 1 - link.rank());
            let cases = LENS.iter().flat_map(|mine| LENS.iter().map(move |theirs| (*mine, *theirs)));
            for (case, (a, b)) in cases.enumerate() {
                let (sent, received) = if me == 0 { (a, b) } else { (b, a) };
                let data = pattern(2 * case + me, sent);
                let mut got = vec![0; received];
                // The two sides split the data differently, and have empty parts.
                let (left, right) = data.split_at(sent / 3);
                let (start, end) = got.split_at_mut(received / 2);
                let outgoing = Outgoing { to: peer, header: &HEADER, parts: &[left, &[], right] };
                let incoming = Incoming { from: peer, header: &HEADER, parts: &mut [start, &mut [], end] };
                assert_eq!(link.exchange(Some(outgoing), Some(incoming)), Ok(Exchanged::Done));
                assert!(
                    got == pattern(2 * case + peer, received),
                    "{family}: {sent} against {received} bytes"
                );
            }
        };
        both(&worlds, run, run);
    }
}

#[test]
fn message_longer_than_one_mpi_message_arrives() {
    let len = (64 << 20) + 5;
    let worlds = Worlds::new(Family::Mpich, 2, LONG);
    let data = pattern(0, len);
    let mut got = vec![0; len];
    let outcomes = both(&worlds, |link| send(link, 1, &data), |link| receive(link, 0, &mut got));
    assert_eq!(outcomes, (Ok(Exchanged::Done), Ok(Exchanged::Done)));
    assert!(got == data);
}

#[test]
fn short_sends_complete_before_receive() {
    let worlds = Worlds::new(Family::OpenMpi, 2, LONG);
    let (mut first, mut second) = (worlds.link(0, 0), worlds.link(0, 1));
    for seed in 0..3 {
        assert_eq!(send(&mut *first, 1, &pattern(seed, 16_384)), Ok(Exchanged::Done));
    }
    for seed in 0..3 {
        let mut got = vec![0; 16_384];
        assert_eq!(receive(&mut *second, 0, &mut got), Ok(Exchanged::Done));
        assert!(got == pattern(seed, 16_384), "messages keep their order");
    }
}

#[test]
fn mismatched_header_or_length_is_reported_and_not_received() {
    let other = [8; 31];
    for (header, len) in [(other, 5), (HEADER, 6), (other, 50_000), (HEADER, 50_001), (HEADER, 5)] {
        for expected in [5, 50_000] {
            if header == HEADER && len == expected {
                continue;
            }
            let worlds = Worlds::new(Family::Standard, 2, LONG);
            let data = pattern(0, len);
            let mut got = vec![9; expected];
            let raised = CommError::Aborted {
                rank: Rank(1),
                reason: "it was not expected".to_owned(),
                kind: FailureKind::Temporary,
            };
            let (sent, received) = both(
                &worlds,
                |link| link.exchange(Some(Outgoing { to: 1, header: &header, parts: &[&data] }), None),
                |link| {
                    let received = receive(link, 0, &mut got);
                    // The sender of a long message waits until it is ended by the alarm.
                    worlds.alarm.raise(raised.clone());
                    received
                },
            );
            assert_eq!(received, Ok(Exchanged::Differs { header, len_bytes: len as u64 }));
            assert!(got.iter().all(|byte| *byte == 9), "nothing was received");
            assert!(sent == Ok(Exchanged::Done) || sent == Err(raised), "{sent:?}");
        }
    }
}
