//! What can be wrong with a pickle: one variant per cause, each naming the byte where it was found.

/// A pickle that is not read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PickleFault {
    /// The stream ends before its STOP.
    #[error("it ends at byte {at} inside {what}")]
    Truncated {
        /// Where the missing bytes should begin.
        at: usize,
        /// What they should hold.
        what: &'static str,
    },
    /// Bytes follow the end of the pickle.
    #[error("{count} bytes follow its end at byte {at}")]
    Trailing {
        /// The byte after STOP.
        at: usize,
        /// Bytes that follow.
        count: usize,
    },
    /// The first opcode is not PROTO, or names a protocol that is not read.
    #[error("it is of no protocol from 2 to 5 (byte {at})")]
    UnknownProtocol {
        /// Where the protocol should be.
        at: usize,
    },
    /// An opcode that no checkpoint format uses.
    #[error("opcode {} at byte {at} is used by no checkpoint format", opcode_name(*opcode))]
    UnknownOpcode {
        /// Where it is.
        at: usize,
        /// The opcode.
        opcode: u8,
    },
    /// A global that is not in the table.
    #[error(
        "it names `{module}.{name}` at byte {at}, which is no part of a known checkpoint format; nothing of it was \
         run, and it is not read"
    )]
    UnknownGlobal {
        /// Where it is.
        at: usize,
        /// The module.
        module: String,
        /// The name in the module.
        name: String,
    },
    /// A known global is used in a way that the formats do not.
    #[error("`{global}` cannot be {used} (byte {at})")]
    WrongUse {
        /// Where it is.
        at: usize,
        /// The global.
        global: String,
        /// How it is used, as a participle: "called with these arguments".
        used: &'static str,
    },
    /// An opcode found something else on the stack than it needs.
    #[error("the opcode at byte {at} needs {expected} and finds {found}")]
    WrongOperand {
        /// Where the opcode is.
        at: usize,
        /// What it needs.
        expected: &'static str,
        /// What is there.
        found: &'static str,
    },
    /// An opcode reads below the bottom of the stack or below a mark.
    #[error("the opcode at byte {at} takes more from the stack than there is")]
    StackUnderflow {
        /// Where the opcode is.
        at: usize,
    },
    /// A memo entry is read that was never written.
    #[error("memo entry {index} is read at byte {at} before it is written")]
    UnknownMemo {
        /// Where it is read.
        at: usize,
        /// The entry.
        index: u64,
    },
    /// Text that is not UTF-8.
    #[error("the text at byte {at} is not UTF-8")]
    NotUtf8 {
        /// Where it begins.
        at: usize,
    },
    /// A key is given twice in one dict.
    #[error("a dict has the key `{key}` twice")]
    DuplicateKey {
        /// The key.
        key: String,
    },
    /// Something holds itself.
    #[error("an object holds itself, directly or through others")]
    Cycle,
    /// A limit is exceeded.
    #[error("it has more than {limit} {what} (byte {at})")]
    TooLarge {
        /// Where it was noticed.
        at: usize,
        /// What is counted.
        what: &'static str,
        /// The limit.
        limit: u64,
    },
    /// Shared parts repeat so often that the whole cannot be held.
    #[error("written out, its shared parts need more than {limit} bytes")]
    Expansion {
        /// The limit.
        limit: u64,
    },
}

/// The names of opcodes that pickles outside of checkpoints use.
fn opcode_name(opcode: u8) -> String {
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
