//! Writes pickles of protocol 2, as torch does.
//!
//! The writer knows opcodes, not formats: callers name globals and nest calls. Short texts and all globals go through
//! the memo, so a name that occurs a hundred thousand times costs only a few bytes each time, both in the file and in
//! the reader. All opcodes are accepted by `torch.load(weights_only=True)`, except the one for integers of more than
//! 255 bytes, which have no other form.

use std::collections::HashMap;

use super::globals::Known;
use crate::checkpoint::{Global, Value};

/// Maximum length of a text in the memo. Longer texts rarely repeat.
const MEMO_TEXT_LEN_MAX: usize = 256;

/// A pickle under construction.
pub(crate) struct PickleWriter {
    out: Vec<u8>,
    texts: HashMap<String, u32>,
    globals: HashMap<Global, u32>,
    memo_len: u32,
}

impl PickleWriter {
    pub(crate) fn new() -> PickleWriter {
        let (texts, globals) = (HashMap::new(), HashMap::new());
        PickleWriter { out: vec![0x80, 2], texts, globals, memo_len: 0 }
    }

    /// The finished pickle.
    pub(crate) fn finish(mut self) -> Vec<u8> {
        self.out.push(b'.');
        self.out
    }

    pub(crate) fn none(&mut self) {
        self.out.push(b'N');
    }

    pub(crate) fn bool(&mut self, value: bool) {
        self.out.push(if value { 0x88 } else { 0x89 });
    }

    pub(crate) fn int(&mut self, value: i64) {
        if let Ok(byte) = u8::try_from(value) {
            self.out.extend([b'K', byte]);
        } else if let Ok(short) = u16::try_from(value) {
            self.out.push(b'M');
            self.out.extend(short.to_le_bytes());
        } else if let Ok(word) = i32::try_from(value) {
            self.out.push(b'J');
            self.out.extend(word.to_le_bytes());
        } else {
            self.long(&value.to_le_bytes());
        }
    }

    /// Writes a length, an offset or a dimension.
    pub(crate) fn count(&mut self, value: u64) {
        match i64::try_from(value) {
            Ok(value) => self.int(value),
            Err(_) => {
                let mut bytes = value.to_le_bytes().to_vec();
                bytes.push(0);
                self.long(&bytes);
            }
        }
    }

    /// Writes an integer given as little-endian two's complement.
    pub(crate) fn long(&mut self, bytes: &[u8]) {
        match u8::try_from(bytes.len()) {
            Ok(len) => self.out.extend([0x8a, len]),
            Err(_) => {
                self.out.push(0x8b);
                self.length(bytes.len());
            }
        }
        self.out.extend(bytes);
    }

    pub(crate) fn float(&mut self, value: f64) {
        self.out.push(b'G');
        self.out.extend(value.to_be_bytes());
    }

    pub(crate) fn text(&mut self, text: &str) {
        if let Some(&slot) = self.texts.get(text) {
            return self.get(slot);
        }
        self.out.push(b'X');
        self.length(text.len());
        self.out.extend(text.as_bytes());
        if text.len() <= MEMO_TEXT_LEN_MAX {
            let slot = self.put();
            self.texts.insert(text.to_owned(), slot);
        }
    }

    /// Writes the name of a class or function.
    pub(crate) fn global(&mut self, module: &str, name: &str) {
        let global = Global { module: module.to_owned(), name: name.to_owned() };
        if let Some(&slot) = self.globals.get(&global) {
            return self.get(slot);
        }
        self.out.extend(format!("c{module}\n{name}\n").as_bytes());
        let slot = self.put();
        self.globals.insert(global, slot);
    }

    /// Writes a tuple of the items that `items` writes.
    pub(crate) fn tuple(&mut self, items: impl FnOnce(&mut Self)) {
        self.out.push(b'(');
        items(self);
        self.out.push(b't');
    }

    /// Writes a list of the items that `items` writes.
    pub(crate) fn list(&mut self, items: impl FnOnce(&mut Self)) {
        self.out.extend(b"](");
        items(self);
        self.out.push(b'e');
    }

    /// Writes a dict of the keys and values that `items` writes in turn.
    pub(crate) fn dict(&mut self, items: impl FnOnce(&mut Self)) {
        self.out.extend(b"}(");
        items(self);
        self.out.push(b'u');
    }

    /// Writes a call of a function or class with the arguments that `args` writes.
    pub(crate) fn call(&mut self, module: &str, name: &str, args: impl FnOnce(&mut Self)) {
        self.global(module, name);
        self.tuple(args);
        self.out.push(b'R');
    }

    /// Writes an object of a class, made without arguments, with the state that `state` writes.
    pub(crate) fn object(&mut self, module: &str, name: &str, state: impl FnOnce(&mut Self)) {
        self.global(module, name);
        self.out.extend(b")\x81");
        state(self);
        self.out.push(b'b');
    }

    /// Writes an object stored outside of the pickle; `items` writes its identifier, a tuple.
    pub(crate) fn persistent(&mut self, items: impl FnOnce(&mut Self)) {
        self.tuple(items);
        self.out.push(b'Q');
    }

    /// Writes a `torch.Size`, as in PyTorch's metadata and pickled shapes.
    pub(crate) fn torch_size(&mut self, dims: &[u64]) {
        self.call("torch", "Size", |w| w.counts(dims));
    }

    /// Writes a tuple of integers.
    pub(crate) fn counts(&mut self, counts: &[u64]) {
        self.tuple(|w| counts.iter().for_each(|&count| w.count(count)));
    }

    /// Writes any value. Recursion is safe, since readers limit the depth of values.
    pub(crate) fn value(&mut self, value: &Value) {
        match value {
            Value::None => self.none(),
            Value::Bool(value) => self.bool(*value),
            Value::Int(value) => self.int(*value),
            Value::Long(bytes) => self.long(bytes),
            Value::Float(value) => self.float(*value),
            Value::Str(text) => self.text(text),
            Value::Bytes(bytes) => self.bytes(bytes),
            Value::List(items) => self.list(|w| w.values(items)),
            Value::Tuple(items) => self.tuple(|w| w.values(items)),
            Value::Set(items) => self.call("__builtin__", "set", |w| w.list(|w| w.values(items))),
            Value::Dict(pairs) => self.dict(|w| w.pairs(pairs)),
            Value::Global(Global { module, name }) => self.global(module, name),
            Value::Opaque(class) => unreachable!("conversions leave out what is opaque, such as a {class}"),
            Value::Object { class, args, state } => self.object_value(class, args, state.as_deref()),
        }
    }

    /// Writes an object as it was read: called with arguments, or made without arguments and given a state.
    fn object_value(&mut self, class: &Global, args: &[Value], state: Option<&Value>) {
        let known = Known::find(&class.module, &class.name);
        let is_made = known.is_some_and(|known| {
            known.may_be_made() && (!known.may_be_called() || (args.is_empty() && state.is_some()))
        });
        self.global(&class.module, &class.name);
        self.tuple(|w| w.values(args));
        self.out.push(if is_made { 0x81 } else { b'R' });
        if let Some(state) = state {
            self.value(state);
            self.out.push(b'b');
        }
    }

    fn values(&mut self, values: &[Value]) {
        values.iter().for_each(|value| self.value(value));
    }

    fn pairs(&mut self, pairs: &[(Value, Value)]) {
        for (key, value) in pairs {
            self.value(key);
            self.value(value);
        }
    }

    /// Writes bytes as a call that encodes text with the same code points, since protocol 2 has no bytes.
    fn bytes(&mut self, bytes: &[u8]) {
        let text: String = bytes.iter().map(|&byte| char::from(byte)).collect();
        self.call("_codecs", "encode", |w| {
            w.text(&text);
            w.text("latin1");
        });
    }

    fn length(&mut self, len: usize) {
        let len = u32::try_from(len).expect("texts and integers of a checkpoint are far below 4 GiB");
        self.out.extend(len.to_le_bytes());
    }

    fn put(&mut self) -> u32 {
        self.memo_len += 1;
        self.slot([b'q', b'r'], self.memo_len - 1);
        self.memo_len - 1
    }

    fn get(&mut self, slot: u32) {
        self.slot([b'h', b'j'], slot);
    }

    /// Writes an opcode for a memo slot, in the short form if the slot fits one byte.
    fn slot(&mut self, [short, long]: [u8; 2], slot: u32) {
        match u8::try_from(slot) {
            Ok(slot) => self.out.extend([short, slot]),
            Err(_) => {
                self.out.push(long);
                self.out.extend(slot.to_le_bytes());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pickle(write: impl FnOnce(&mut PickleWriter)) -> Vec<u8> {
        let mut writer = PickleWriter::new();
        write(&mut writer);
        writer.finish()
    }

    #[test]
    fn integers_use_shortest_encoding() {
        for (value, expected) in [
            (0, &b"K\0"[..]),
            (255, b"K\xff"),
            (256, b"M\0\x01"),
            (65_536, b"J\0\0\x01\0"),
            (-1, b"J\xff\xff\xff\xff"),
            (1 << 40, b"\x8a\x08\0\0\0\0\0\x01\0\0"),
        ] {
            assert_eq!(pickle(|w| w.int(value)), [b"\x80\x02", expected, b"."].concat(), "{value}");
        }
        assert_eq!(pickle(|w| w.count(u64::MAX)), b"\x80\x02\x8a\x09\xff\xff\xff\xff\xff\xff\xff\xff\0.");
    }

    #[test]
    fn repeated_texts_and_globals_are_memoized() {
        let got = pickle(|w| {
            w.tuple(|w| {
                w.text("ab");
                w.text("ab");
                w.global("torch", "Size");
                w.global("torch", "Size");
            })
        });
        assert_eq!(got, b"\x80\x02(X\x02\0\0\0abq\0h\0ctorch\nSize\nq\x01h\x01t.");
    }

    #[test]
    fn memo_index_beyond_one_byte_uses_long_opcodes() {
        let names: Vec<String> = (0..300).map(|i| format!("name{i}")).collect();
        let got = pickle(|w| {
            w.list(|w| names.iter().chain(&names[299..]).for_each(|name| w.text(name)));
        });
        assert!(got.ends_with(b"name299r\x2b\x01\0\0j\x2b\x01\0\0e."));
    }

    #[test]
    fn objects_are_written_as_reduce_or_newobj() {
        let object = |module: &str, name: &str, args, state| Value::Object {
            class: Global { module: module.to_owned(), name: name.to_owned() },
            args,
            state,
        };
        let device = object("torch", "device", vec![Value::Int(1)], None);
        assert_eq!(pickle(|w| w.value(&device)), b"\x80\x02ctorch\ndevice\nq\0(K\x01tR.");
        let namespace = object("argparse", "Namespace", Vec::new(), Some(Box::new(Value::Dict(Vec::new()))));
        assert_eq!(pickle(|w| w.value(&namespace)), b"\x80\x02cargparse\nNamespace\nq\0(t\x81}(ub.");
    }

    #[test]
    fn bytes_are_written_as_latin1_text() {
        let got = pickle(|w| w.value(&Value::Bytes(vec![0x41, 0xff])));
        assert_eq!(got, b"\x80\x02c_codecs\nencode\nq\0(X\x03\0\0\0A\xc3\xbfq\x01X\x06\0\0\0latin1q\x02tR.");
    }
}
