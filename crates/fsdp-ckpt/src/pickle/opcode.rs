//! The supported opcodes: those of protocol 2, and those that protocols 4 and 5 use instead.
//!
//! Deliberately not supported, since no checkpoint format needs them: the text opcodes of protocol 0, INST and OBJ
//! (classes of Python 2), the extension registry, out-of-band buffers, and keyword arguments of constructors.

pub(super) const MARK: u8 = b'(';
pub(super) const STOP: u8 = b'.';
pub(super) const POP: u8 = b'0';
pub(super) const POP_MARK: u8 = b'1';
pub(super) const PROTO: u8 = 0x80;
pub(super) const FRAME: u8 = 0x95;

pub(super) const NONE: u8 = b'N';
pub(super) const NEWTRUE: u8 = 0x88;
pub(super) const NEWFALSE: u8 = 0x89;
pub(super) const BININT: u8 = b'J';
pub(super) const BININT1: u8 = b'K';
pub(super) const BININT2: u8 = b'M';
pub(super) const LONG1: u8 = 0x8a;
pub(super) const LONG4: u8 = 0x8b;
pub(super) const BINFLOAT: u8 = b'G';

pub(super) const BINUNICODE: u8 = b'X';
pub(super) const SHORT_BINUNICODE: u8 = 0x8c;
pub(super) const BINUNICODE8: u8 = 0x8d;
pub(super) const BINBYTES: u8 = b'B';
pub(super) const SHORT_BINBYTES: u8 = b'C';
pub(super) const BINBYTES8: u8 = 0x8e;
pub(super) const BYTEARRAY8: u8 = 0x96;

pub(super) const EMPTY_LIST: u8 = b']';
pub(super) const APPEND: u8 = b'a';
pub(super) const APPENDS: u8 = b'e';
pub(super) const EMPTY_TUPLE: u8 = b')';
pub(super) const TUPLE: u8 = b't';
pub(super) const TUPLE1: u8 = 0x85;
pub(super) const TUPLE2: u8 = 0x86;
pub(super) const TUPLE3: u8 = 0x87;
pub(super) const EMPTY_DICT: u8 = b'}';
pub(super) const SETITEM: u8 = b's';
pub(super) const SETITEMS: u8 = b'u';
pub(super) const EMPTY_SET: u8 = 0x8f;
pub(super) const ADDITEMS: u8 = 0x90;
pub(super) const FROZENSET: u8 = 0x91;

pub(super) const BINPUT: u8 = b'q';
pub(super) const LONG_BINPUT: u8 = b'r';
pub(super) const BINGET: u8 = b'h';
pub(super) const LONG_BINGET: u8 = b'j';
pub(super) const MEMOIZE: u8 = 0x94;

pub(super) const GLOBAL: u8 = b'c';
pub(super) const STACK_GLOBAL: u8 = 0x93;
pub(super) const REDUCE: u8 = b'R';
pub(super) const NEWOBJ: u8 = 0x81;
pub(super) const BUILD: u8 = b'b';
pub(super) const BINPERSID: u8 = b'Q';

/// The names of unsupported opcodes, for messages.
pub(super) fn name(opcode: u8) -> String {
    let name = match opcode {
        b'i' => "INST",
        b'o' => "OBJ",
        0x82 => "EXT1",
        0x83 => "EXT2",
        0x84 => "EXT4",
        b'P' => "PERSID",
        0x92 => "NEWOBJ_EX",
        0x97 => "NEXT_BUFFER",
        0x98 => "READONLY_BUFFER",
        b'I' | b'L' | b'F' | b'S' | b'V' | b'd' | b'l' | b'p' | b'g' => "of protocol 0",
        _ => return format!("0x{opcode:02x}"),
    };
    format!("{name} (0x{opcode:02x})")
}
