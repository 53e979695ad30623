//! The stack machine: runs the opcodes and builds the nodes.
//!
//! It behaves as Python's machine for the opcodes that the formats use, with these differences: it has no opcode that
//! needs an import; a call becomes an object; containers can only be filled with what they hold (a list with items, a
//! dict with pairs); a state can be set only once, and only on an object that may have one; and common small values
//! share one node each.

use super::{
    globals::Known,
    graph::{Node, NodeId, ObjectNode},
    input::Input,
    limits::{MEMO_MAX, NODES_MAX, too_large},
    memo::Memo,
    opaque::Unknown,
    opcode as op, rebuild,
};
use crate::{checkpoint::Global, error::Fault};

/// Maximum number of parts that calls may copy out of their arguments, per byte of the pickle. A file needs at most
/// one, since arguments are written for one call each. Without a limit, a few bytes could copy the same long list again
/// and again.
const COPIES_PER_BYTE: usize = 16;
/// Number of integers, from 0, that share one node each.
const SMALL_INTS: usize = 256;

/// Runs the pickle at the start of `bytes`. Returns all nodes, the index of the result, and the pickle's length.
pub(super) fn run(bytes: &[u8]) -> Result<(Vec<Node>, NodeId, usize), Fault> {
    let mut machine = Machine::new(bytes);
    machine.header()?;
    while !machine.step()? {}
    let at = machine.input.at();
    let root = machine.pop()?;
    if !machine.stack.is_empty() {
        return Err(underflow(at));
    }
    Ok((machine.nodes, root, at))
}

pub(super) struct Machine<'a> {
    input: Input<'a>,
    /// Position of the current opcode.
    pub(super) at: usize,
    pub(super) nodes: Vec<Node>,
    stack: Vec<NodeId>,
    /// Stack lengths at which marks were set.
    marks: Vec<usize>,
    memo: Memo,
    /// Nodes of values that are shared: small integers, booleans, None and the empty tuple.
    small_ints: [Option<NodeId>; SMALL_INTS],
    constants: [Option<NodeId>; 4],
    copies_max: usize,
    copies: usize,
}

impl<'a> Machine<'a> {
    fn new(bytes: &'a [u8]) -> Machine<'a> {
        Machine {
            input: Input::new(bytes),
            at: 0,
            nodes: Vec::new(),
            stack: Vec::new(),
            marks: Vec::new(),
            memo: Memo::default(),
            small_ints: [None; SMALL_INTS],
            constants: [None; 4],
            copies_max: bytes.len() * COPIES_PER_BYTE,
            copies: 0,
        }
    }

    /// Reads the opcode that every pickle of these protocols begins with, which gives its protocol.
    fn header(&mut self) -> Result<(), Fault> {
        match (self.input.byte("the protocol")?, self.input.byte("the protocol")?) {
            (op::PROTO, 2..=5) => Ok(()),
            _ => Err(Fault::unsupported("its protocol is not 2, 3, 4 or 5")),
        }
    }

    /// Runs one opcode; returns true after the last one.
    fn step(&mut self) -> Result<bool, Fault> {
        self.at = self.input.at();
        let opcode = self.input.byte("an opcode")?;
        match opcode {
            op::STOP => return Ok(true),
            op::FRAME => _ = self.input.array::<8>("a frame")?,
            op::MARK => self.marks.push(self.stack.len()),
            op::POP => _ = self.pop()?,
            op::POP_MARK => _ = self.pop_to_mark()?,
            op::BINPUT => self.put::<1>()?,
            op::LONG_BINPUT => self.put::<4>()?,
            op::MEMOIZE => self.memoize(self.memo.len())?,
            op::BINGET => self.get::<1>()?,
            op::LONG_BINGET => self.get::<4>()?,
            op::APPEND => self.append_one()?,
            op::APPENDS => self.append_all()?,
            op::ADDITEMS => self.add_all()?,
            op::SETITEM => self.set_one()?,
            op::SETITEMS => self.set_all()?,
            op::BUILD => self.build()?,
            _ => {
                let id = match self.constant(opcode)? {
                    Some(id) => id,
                    None => self.made(opcode)?,
                };
                self.stack.push(id);
            }
        }
        Ok(false)
    }

    /// The shared node of a constant; `None` if the opcode does not push one.
    fn constant(&mut self, opcode: u8) -> Result<Option<NodeId>, Fault> {
        let (slot, node) = match opcode {
            op::NONE => (0, Node::None),
            op::NEWTRUE => (1, Node::Bool(true)),
            op::NEWFALSE => (2, Node::Bool(false)),
            op::EMPTY_TUPLE => (3, Node::Tuple(Box::default())),
            _ => return Ok(None),
        };
        if self.constants[slot].is_none() {
            self.constants[slot] = Some(self.add(node)?);
        }
        Ok(self.constants[slot])
    }

    /// The node that an opcode makes from its argument and the stack.
    fn made(&mut self, opcode: u8) -> Result<NodeId, Fault> {
        let node = match opcode {
            op::BININT => {
                let int = i32::from_le_bytes(self.input.array("an integer")?);
                return self.int(int.into());
            }
            op::BININT1 => return self.unsigned::<1>(),
            op::BININT2 => return self.unsigned::<2>(),
            op::LONG1 => self.long::<1>()?,
            op::LONG4 => self.long::<4>()?,
            op::BINFLOAT => Node::Float(f64::from_be_bytes(self.input.array("a float")?)),
            op::SHORT_BINUNICODE => Node::Str(self.input.text::<1>()?.into()),
            op::BINUNICODE => Node::Str(self.input.text::<4>()?.into()),
            op::BINUNICODE8 => Node::Str(self.input.text::<8>()?.into()),
            op::SHORT_BINBYTES => Node::Bytes(self.input.counted::<1>("bytes")?.into()),
            op::BINBYTES => Node::Bytes(self.input.counted::<4>("bytes")?.into()),
            op::BINBYTES8 | op::BYTEARRAY8 => Node::Bytes(self.input.counted::<8>("bytes")?.into()),
            op::EMPTY_LIST => Node::List(Vec::new()),
            op::EMPTY_DICT => Node::Dict(Vec::new()),
            op::EMPTY_SET => Node::Set(Vec::new()),
            op::FROZENSET => Node::Set(self.pop_to_mark()?),
            op::TUPLE => Node::Tuple(self.pop_to_mark()?.into()),
            op::TUPLE1 => Node::Tuple(self.pop_many::<1>()?.into()),
            op::TUPLE2 => Node::Tuple(self.pop_many::<2>()?.into()),
            op::TUPLE3 => Node::Tuple(self.pop_many::<3>()?.into()),
            op::GLOBAL => {
                let (module, name) = (self.input.line()?, self.input.line()?);
                self.global(module, name)
            }
            op::STACK_GLOBAL => self.stack_global()?,
            op::REDUCE => self.reduce()?,
            op::NEWOBJ => self.new_object()?,
            op::BINPERSID => Node::Persistent(self.pop()?),
            _ => {
                let (at, name) = (self.at, op::name(opcode));
                let reason = format!("opcode {name} at byte {at} is used by no checkpoint format");
                return Err(Fault::unsupported(reason));
            }
        };
        self.add(node)
    }

    fn unsigned<const N: usize>(&mut self) -> Result<NodeId, Fault> {
        let int = self.input.unsigned::<N>("an integer")?;
        self.int(int as i64)
    }

    fn int(&mut self, int: i64) -> Result<NodeId, Fault> {
        let Some(slot) = usize::try_from(int).ok().filter(|&slot| slot < SMALL_INTS) else {
            return self.add(Node::Int(int));
        };
        if self.small_ints[slot].is_none() {
            self.small_ints[slot] = Some(self.add(Node::Int(int))?);
        }
        Ok(self.small_ints[slot].expect("it was just set"))
    }

    /// An integer of any length, in two's complement.
    fn long<const N: usize>(&mut self) -> Result<Node, Fault> {
        let bytes = self.input.counted::<N>("an integer")?;
        let sign = if bytes.last().is_some_and(|byte| byte & 0x80 != 0) { 0xff } else { 0 };
        let mut wide = [sign; 8];
        match wide.get_mut(..bytes.len()) {
            Some(low) => low.copy_from_slice(bytes),
            None => return Ok(Node::Long(bytes.into())),
        }
        Ok(Node::Int(i64::from_le_bytes(wide)))
    }

    fn global(&self, module: &str, name: &str) -> Node {
        let global = || Global { module: module.to_owned(), name: name.to_owned() };
        let unknown = || Node::Unknown(Box::new(Unknown { global: global(), offset: self.at as u64 }));
        Known::find(module, name).map_or_else(unknown, Node::Global)
    }

    fn stack_global(&mut self) -> Result<Node, Fault> {
        let [module, name] = self.pop_many()?;
        match (self.node(module), self.node(name)) {
            (Node::Str(module), Node::Str(name)) => Ok(self.global(module, name)),
            (Node::Str(_), other) | (other, _) => Err(wrong_operand(self.at, "a text", other)),
        }
    }

    fn reduce(&mut self) -> Result<Node, Fault> {
        let [class, args] = self.pop_many()?;
        if let Some(object) = self.opaque(class, args)? {
            return Ok(object);
        }
        let class = self.check_class_and_args(class, args)?;
        rebuild::call(self, class, args)
    }

    fn new_object(&mut self) -> Result<Node, Fault> {
        let [class, args] = self.pop_many()?;
        if let Some(object) = self.opaque(class, args)? {
            return Ok(object);
        }
        let class = self.check_class_and_args(class, args)?;
        if !class.may_be_made() {
            return Err(wrong_use(self.at, class, "instantiated"));
        }
        Ok(Node::Object(ObjectNode { class, args, state: None }))
    }

    /// The object of an unknown class; `None` if the class is known.
    fn opaque(&self, class: NodeId, args: NodeId) -> Result<Option<Node>, Fault> {
        match (rebuild::opaque(self, class, args), self.node(args)) {
            (Some(object), Node::Tuple(_)) => Ok(Some(object)),
            (Some(_), other) => Err(wrong_operand(self.at, "a tuple of arguments", other)),
            (None, _) => Ok(None),
        }
    }

    /// Checks that these are a known class and a tuple; returns the class.
    fn check_class_and_args(&self, class: NodeId, args: NodeId) -> Result<Known, Fault> {
        match (self.node(class), self.node(args)) {
            (Node::Global(class), Node::Tuple(_)) => Ok(*class),
            (Node::Global(_), other) => Err(wrong_operand(self.at, "a tuple of arguments", other)),
            (other, _) => Err(wrong_operand(self.at, "a class or function", other)),
        }
    }

    fn put<const N: usize>(&mut self) -> Result<(), Fault> {
        let index = self.input.unsigned::<N>("a memo index")?;
        self.memoize(index)
    }

    fn memoize(&mut self, index: u64) -> Result<(), Fault> {
        let id = self.top()?;
        self.memo.insert(index, id);
        if self.memo.len() > MEMO_MAX as u64 {
            return Err(too_large(self.at, "memo entries", MEMO_MAX));
        }
        Ok(())
    }

    fn get<const N: usize>(&mut self) -> Result<(), Fault> {
        let index = self.input.unsigned::<N>("a memo index")?;
        let unknown = || Fault::at(self.at, format!("memo entry {index} is read before it is written"));
        let id = self.memo.get(index).ok_or_else(unknown)?;
        self.stack.push(id);
        Ok(())
    }

    /// Adds a node; fails if there are too many.
    pub(super) fn add(&mut self, node: Node) -> Result<NodeId, Fault> {
        if self.nodes.len() >= NODES_MAX {
            return Err(too_large(self.at, "values", NODES_MAX));
        }
        self.nodes.push(node);
        Ok(NodeId((self.nodes.len() - 1) as u32))
    }

    /// Counts the parts that a call copies out of its arguments.
    pub(super) fn count_copies(&mut self, count: usize) -> Result<(), Fault> {
        self.copies += count;
        if self.copies > self.copies_max {
            return Err(too_large(self.at, "copied arguments", self.copies_max));
        }
        Ok(())
    }

    pub(super) fn node(&self, id: NodeId) -> &Node {
        &self.nodes[id.0 as usize]
    }

    /// The items of a tuple whose kind was checked before.
    pub(super) fn args(&self, id: NodeId) -> &[NodeId] {
        match self.node(id) {
            Node::Tuple(args) => args,
            other => unreachable!("arguments were checked to be a tuple, not {}", other.kind()),
        }
    }

    /// The start of the stack above the last mark.
    fn bottom(&self) -> usize {
        self.marks.last().copied().unwrap_or(0)
    }

    pub(super) fn top(&self) -> Result<NodeId, Fault> {
        self.stack[self.bottom()..].last().copied().ok_or_else(|| underflow(self.at))
    }

    pub(super) fn pop(&mut self) -> Result<NodeId, Fault> {
        let id = self.top()?;
        self.stack.pop();
        Ok(id)
    }

    /// Pops the last `N` values, in the order in which they were pushed.
    pub(super) fn pop_many<const N: usize>(&mut self) -> Result<[NodeId; N], Fault> {
        let start = self.stack.len().checked_sub(N).filter(|&start| start >= self.bottom());
        let start = start.ok_or_else(|| underflow(self.at))?;
        let items = self.stack[start..].try_into().expect("N values are there");
        self.stack.truncate(start);
        Ok(items)
    }

    /// Pops the last mark and all values above it.
    pub(super) fn pop_to_mark(&mut self) -> Result<Vec<NodeId>, Fault> {
        let mark = self.marks.pop().ok_or_else(|| underflow(self.at))?;
        Ok(self.stack.split_off(mark))
    }
}

/// The fault for an opcode that needs another kind of value than it finds on the stack.
pub(super) fn wrong_operand(at: usize, expected: &str, found: &Node) -> Fault {
    Fault::at(at, format!("an opcode needs {expected} but finds {}", found.kind()))
}

/// The fault for a use of a known global that no format makes. `used` is a participle such as "called".
pub(super) fn wrong_use(at: usize, global: Known, used: &str) -> Fault {
    Fault::at(at, format!("`{}` cannot be {used}", global.path()))
}

/// The fault for an opcode that reads below the bottom of the stack or below a mark.
pub(super) fn underflow(at: usize) -> Fault {
    Fault::at(at, "an opcode takes more from the stack than there is")
}
