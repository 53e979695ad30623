//! Options for clients and compilations.

use super::api::Word;

/// The value of an option.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Setting {
    /// An integer.
    Number(i64),
    /// A string.
    Text(String),
    /// A list of integers.
    Numbers(Vec<i64>),
}

/// Named values in the API's form: seven words each.
pub(super) struct Settings {
    words: Vec<Word>,
    /// Owns the memory that the words point to.
    _values: Vec<(String, Setting)>,
}

impl Settings {
    pub(super) fn new(values: Vec<(String, Setting)>) -> Self {
        // Size, extension, name, name length, kind (0: string, 1: integer, 2: integers), value, value length.
        let words = |(name, value): &(String, Setting)| {
            let (kind, value, len) = match value {
                Setting::Number(number) => (1, *number as Word, 1),
                Setting::Text(text) => (0, text.as_ptr() as Word, text.len()),
                Setting::Numbers(numbers) => (2, numbers.as_ptr() as Word, numbers.len()),
            };
            [56, 0, name.as_ptr() as Word, name.len(), kind, value, len]
        };
        Self { words: values.iter().flat_map(words).collect(), _values: values }
    }

    pub(super) fn words(&self) -> *const Word {
        self.words.as_ptr()
    }

    pub(super) fn count(&self) -> usize {
        self.words.len() / 7
    }
}

/// How to compile a program: for replicas of one partition, each on one device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CompileOptions {
    /// The device ID of each replica.
    pub(crate) devices: Vec<u64>,
    /// Compiler flags to turn on.
    pub(crate) flags: Vec<&'static str>,
}

impl CompileOptions {
    /// Encodes a `CompileOptionsProto` (xla/pjrt/proto/compile_options.proto). It sets only a few fields, so it is
    /// written by hand instead of by code that a build script generates from a copy of its definition.
    pub(crate) fn to_proto(&self) -> Vec<u8> {
        let replicas = self.devices.len() as u64;
        let mut ids = Message::default();
        self.devices.iter().for_each(|id| ids.varint(*id));
        let computation = Message::default().bytes(1, &ids.0);
        let assignment = Message::default().int(1, replicas).int(2, 1).bytes(3, &computation.0);
        // The device ordinal, for single-device compilations: -1, since the assignment lists the devices.
        let build = Message::default().int(1, u64::MAX).int(4, replicas).int(5, 1).bytes(9, &assignment.0);
        let flags = self.flags.iter().fold(Message::default().bytes(3, &build.0), |message, name| {
            // As text: some flags that are Boolean in newer TPU compilers have more than two values in older ones.
            let enabled = Message::default().bytes(1, b"true");
            let entry = Message::default().bytes(1, name.as_bytes()).bytes(2, &enabled.0);
            message.bytes(7, &entry.0)
        });
        flags.0
    }
}

/// The bytes of a protocol buffers message.
#[derive(Default)]
struct Message(Vec<u8>);

impl Message {
    fn varint(&mut self, mut number: u64) {
        while number >= 128 {
            self.0.push(number as u8 | 128);
            number >>= 7;
        }
        self.0.push(number as u8);
    }

    fn int(mut self, field: u64, number: u64) -> Self {
        self.varint(field << 3);
        self.varint(number);
        self
    }

    fn bytes(mut self, field: u64, bytes: &[u8]) -> Self {
        self.varint(field << 3 | 2);
        self.varint(bytes.len() as u64);
        self.0.extend_from_slice(bytes);
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn compile_options_match_protobuf_encoding() {
        let mut options = CompileOptions { devices: vec![0, 1], flags: Vec::new() };
        // As serialized by `xla.CompileOptionsProto` of Python's protobuf.
        let assignment = [8, 2, 16, 1, 26, 4, 10, 2, 0, 1];
        let nowhere = [8, 255, 255, 255, 255, 255, 255, 255, 255, 255, 1];
        let build: Vec<u8> = [&nowhere[..], &[32, 2, 40, 1, 74, 10], &assignment].concat();
        let plain = [&[26, 27][..], &build].concat();
        assert_eq!(options.to_proto(), plain);
        options.flags = vec!["a", "bc"];
        let on = [18, 6, 10, 4, b't', b'r', b'u', b'e'];
        let flags = [&[58, 11, 10, 1, b'a'][..], &on, &[58, 12, 10, 2, b'b', b'c'], &on].concat();
        assert_eq!(options.to_proto(), [plain, flags].concat());
    }
}
