//! Wire format of the control plane's messages.
//!
//! ```text
//! u32  length of the text          all numbers are little-endian
//! u32  length of the value
//! u64  generation of the world     0 in a join, whose sender does not know it
//!      text                        JSON: the message without its value
//!      value                       raw bytes that are given or announced
//! ```

use super::message::Message;

const HEADER_LEN: usize = 16;

/// The roster of ten thousand processes takes a tenth of this.
const TEXT_MAX: usize = 16 << 20;

/// The maximum length, in bytes, of a value given or announced across processes.
pub const VALUE_MAX: usize = 1 << 30;

/// The first message in each direction is short and has no value.
const FIRST_TEXT_MAX: usize = 64 << 10;
const FIRST_VALUE_MAX: usize = 0;

/// A message on a connection, with the generation of its sender.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Frame {
    pub(super) generation: u64,
    pub(super) message: Message,
}

/// Why bytes are not a valid frame.
#[derive(Debug, thiserror::Error)]
pub(super) enum FrameError {
    #[error("it sent a message of {text} + {value} bytes; the limit is {text_max} + {value_max}")]
    Length { text: usize, value: usize, text_max: usize, value_max: usize },
    #[error("it sent an unknown message: {0}")]
    Unknown(#[from] serde_json::Error),
    #[error("it sent {len} bytes with a message ({message:?}) that carries none")]
    Value { message: Message, len: usize },
    #[error("its connection was closed in the middle of a message")]
    Truncated,
}

impl Frame {
    /// Encodes this frame.
    pub(super) fn encode(&self) -> Vec<u8> {
        let text = serde_json::to_vec(&self.message).expect("messages are trees of plain values");
        let value = self.message.value();
        assert!(text.len() <= TEXT_MAX && value.len() <= VALUE_MAX, "a value that is given is below 1 GiB");
        let mut bytes = Vec::with_capacity(HEADER_LEN + text.len() + value.len());
        bytes.extend((text.len() as u32).to_le_bytes());
        bytes.extend((value.len() as u32).to_le_bytes());
        bytes.extend(self.generation.to_le_bytes());
        bytes.extend(text);
        bytes.extend(value);
        bytes
    }
}

/// Decodes frames from a stream of bytes. Buffers no more than it has received.
#[derive(Default)]
pub(super) struct Decoder {
    bytes: Vec<u8>,
    /// Start of the next frame in `bytes`.
    start: usize,
    is_begun: bool,
}

impl Decoder {
    /// Appends received bytes.
    pub(super) fn push(&mut self, bytes: &[u8]) {
        self.bytes.drain(..self.start);
        self.start = 0;
        self.bytes.extend_from_slice(bytes);
    }

    /// Returns the next frame, or `None` while it is incomplete.
    pub(super) fn next(&mut self) -> Result<Option<Frame>, FrameError> {
        let rest = &self.bytes[self.start..];
        let Some((header, rest)) = rest.split_first_chunk::<HEADER_LEN>() else {
            return Ok(None);
        };
        let [text, value, low, high] = std::array::from_fn(|word| {
            u32::from_le_bytes(std::array::from_fn(|byte| header[4 * word + byte]))
        });
        let (text, value) = (text as usize, value as usize);
        let (text_max, value_max) =
            if self.is_begun { (TEXT_MAX, VALUE_MAX) } else { (FIRST_TEXT_MAX, FIRST_VALUE_MAX) };
        if text > text_max || value > value_max {
            return Err(FrameError::Length { text, value, text_max, value_max });
        }
        let Some((body, _)) = rest.split_at_checked(text + value) else {
            return Ok(None);
        };
        let mut message: Message = serde_json::from_slice(&body[..text])?;
        match message.value_mut() {
            Some(bytes) => bytes.extend_from_slice(&body[text..]),
            None if value > 0 => return Err(FrameError::Value { message, len: value }),
            None => {}
        }
        self.start += HEADER_LEN + text + value;
        self.is_begun = true;
        Ok(Some(Frame { generation: u64::from(high) << 32 | u64::from(low), message }))
    }

    /// Checks, at the end of the stream, that no partial frame is left.
    pub(super) fn end(&self) -> Result<(), FrameError> {
        if self.start == self.bytes.len() { Ok(()) } else { Err(FrameError::Truncated) }
    }
}

#[cfg(test)]
mod tests;
