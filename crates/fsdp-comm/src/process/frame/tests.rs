use super::*;
use crate::process::message::Join;
use crate::process::world::{Facts, Failure};

use fsdp_core::{FailureKind, Rank};

const GENERATION: u64 = 0x0123_4567_89ab_cdef;

fn frame(message: Message) -> Frame {
    Frame { generation: GENERATION, message }
}

fn frames() -> Vec<Frame> {
    let facts = Facts {
        host: "n1".to_owned(),
        pid: 7,
        addresses: vec!["10.0.0.1:80".parse().unwrap(), "[::1]:81".parse().unwrap()],
        cpu_model: "a \"model\"".to_owned(),
        device: "cpu".to_owned(),
    };
    let join =
        Join { version: "1".to_owned(), process: 1, processes: 2, local_ranks: 3, nonce: u64::MAX, facts };
    let failure = |rank, kind| Failure { rank, cause: "c".to_owned(), kind, last_call: None };
    vec![
        frame(Message::Join(join)),
        frame(Message::Give { topic: "save 3".to_owned(), rank: 2, value: (0..=255).collect() }),
        frame(Message::Announce { topic: String::new(), value: Vec::new() }),
        frame(Message::Failed(failure(Some(Rank(3)), FailureKind::Permanent))),
        frame(Message::Failed(failure(None, FailureKind::Interrupted))),
        frame(Message::Go { round: 9 }),
        frame(Message::Heartbeat),
        frame(Message::Calling { call: "all-gather #7".to_owned() }),
    ]
}

#[test]
fn frames_round_trip_for_any_chunk_size() {
    let bytes: Vec<u8> = frames().iter().flat_map(Frame::encode).collect();
    for len in [1, 2, 15, 16, 17, 100, bytes.len()] {
        let mut decoder = Decoder::default();
        let mut decoded = Vec::new();
        for part in bytes.chunks(len) {
            decoder.push(part);
            while let Some(frame) = decoder.next().unwrap() {
                decoded.push(frame);
            }
        }
        assert_eq!(decoded, frames(), "in parts of {len}");
        decoder.end().unwrap();
    }
}

#[test]
fn frame_truncated_anywhere_is_torn() {
    let bytes = frames()[0].encode();
    for len in 1..bytes.len() {
        let mut decoder = Decoder::default();
        decoder.push(&bytes[..len]);
        assert_eq!(decoder.next().unwrap(), None);
        assert!(matches!(decoder.end(), Err(FrameError::Truncated)), "at {len}");
    }
}

/// The decoder's error for a frame, optionally after a valid first frame.
fn refused(first: Option<Message>, text: usize, value: usize, rest: &[u8]) -> String {
    let mut decoder = Decoder::default();
    decoder.push(&first.map(|message| frame(message).encode()).unwrap_or_default());
    while decoder.next().unwrap().is_some() {}
    decoder.push(&(text as u32).to_le_bytes());
    decoder.push(&(value as u32).to_le_bytes());
    decoder.push(&GENERATION.to_le_bytes());
    decoder.push(rest);
    decoder.next().unwrap_err().to_string()
}

#[test]
fn oversized_lengths_are_rejected_before_payload() {
    insta::assert_snapshot!(
        [
            refused(None, FIRST_TEXT_MAX + 1, 0, b""),
            refused(None, 2, 1, b""),
            refused(Some(Message::Joined), TEXT_MAX + 1, 0, b""),
            refused(Some(Message::Joined), 2, VALUE_MAX + 1, b""),
        ]
        .join("\n"),
        @r"
    it sent a message of 65537 + 0 bytes; the limit is 65536 + 0
    it sent a message of 2 + 1 bytes; the limit is 65536 + 0
    it sent a message of 16777217 + 0 bytes; the limit is 16777216 + 1073741824
    it sent a message of 2 + 1073741825 bytes; the limit is 16777216 + 1073741824
    "
    );
}

#[test]
fn malformed_messages_are_rejected() {
    insta::assert_snapshot!(
        [
            refused(None, 4, 0, b"\xff\xfe\0\0"),
            refused(None, 7, 0, b"\"Dance\""),
            refused(Some(Message::Joined), 11, 2, b"\"Heartbeat\"ab"),
        ]
        .join("\n"),
        @r"
    it sent an unknown message: expected value at line 1 column 1
    it sent an unknown message: unknown variant `Dance`, expected one of `Join`, `Ready`, `Failed`, `Give`, `Calling`, `Joined`, `Refused`, `Prepare`, `Go`, `Verdict`, `Announce`, `Heartbeat`, `Goodbye` at line 1 column 7
    it sent 2 bytes with a message (heartbeat) that carries none
    "
    );
}
