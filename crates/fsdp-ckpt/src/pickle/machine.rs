//! The stack machine: runs the opcodes and builds the nodes.
//!
//! It follows Python's machine in what the formats use, with these differences: it knows no opcode that needs
//! an import, calls are objects, containers are filled only as what they are (items of a list go into a list, pairs into a
//! dict), a state is set once and only on objects that have one, and common small values are one node each.

use super::{
    MEMO_MAX, NODES_MAX,
    globals::Known,
    graph::{Node, NodeId, ObjectNode},
    input::Input,
    memo::Memo,
    opaque::{self, Unknown},
    opcode as op, rebuild, too_large,
};
use crate::{checkpoint::Global, error::Fault};

/// How many parts calls may copy out of their arguments, per byte of the pickle. Arguments are written for
/// one call each, so files need one at most; without a limit, a few bytes could copy the same long list again
/// and again.
const COPIES_PER_BYTE: usize = 16;
/// Integers from 0 that have one node each.
const SMALL_INTS: usize = 256;

/// Runs the pickle that `bytes` begin with; returns all nodes, the place of the result, and how long the pickle is.
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
    /// Where the opcode that runs begins.
    pub(super) at: usize,
    pub(super) nodes: Vec<Node>,
    stack: Vec<NodeId>,
    /// Lengths of the stack where marks were set.
    marks: Vec<usize>,
    memo: Memo,
    /// Places of values that are written once: integers, truth values, None and the empty tuple.
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

    /// Every pickle of these protocols begins by naming its protocol.
    fn header(&mut self) -> Result<(), Fault> {
        match (self.input.byte("the protocol")?, self.input.byte("the protocol")?) {
            (op::PROTO, 2..=5) => Ok(()),
            _ => Err(Fault::unsupported("it is of no protocol from 2 to 5")),
        }
    }

    /// Runs one opcode; true after the last one.
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

    /// The node of a value that takes nothing from the stack and is the same every time.
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

    /// The node that an opcode makes of its argument and of the stack.
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

    /// The object of an unknown class; none if the class is known.
    fn opaque(&self, class: NodeId, args: NodeId) -> Result<Option<Node>, Fault> {
        match (opaque::called(self, class, args), self.node(args)) {
            (Some(object), Node::Tuple(_)) => Ok(Some(object)),
            (Some(_), other) => Err(wrong_operand(self.at, "a tuple of arguments", other)),
            (None, _) => Ok(None),
        }
    }

    /// The class, if these are a class and a tuple.
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

    /// Adds a node, as long as there are not too many.
    pub(super) fn add(&mut self, node: Node) -> Result<NodeId, Fault> {
        if self.nodes.len() >= NODES_MAX {
            return Err(too_large(self.at, "values", NODES_MAX));
        }
        self.nodes.push(node);
        Ok(NodeId((self.nodes.len() - 1) as u32))
    }

    /// Counts parts that a call copies out of its arguments.
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

    /// The items of a tuple that was checked to be one.
    pub(super) fn args(&self, id: NodeId) -> &[NodeId] {
        match self.node(id) {
            Node::Tuple(args) => args,
            other => unreachable!("arguments were checked to be a tuple, not {}", other.kind()),
        }
    }

    /// Where the part of the stack begins that belongs to the last mark.
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

    /// The last `N` values, in the order they were pushed.
    pub(super) fn pop_many<const N: usize>(&mut self) -> Result<[NodeId; N], Fault> {
        let start = self.stack.len().checked_sub(N).filter(|&start| start >= self.bottom());
        let start = start.ok_or_else(|| underflow(self.at))?;
        let items = self.stack[start..].try_into().expect("N values are there");
        self.stack.truncate(start);
        Ok(items)
    }

    /// All values above the last mark, which is taken away.
    pub(super) fn pop_to_mark(&mut self) -> Result<Vec<NodeId>, Fault> {
        let mark = self.marks.pop().ok_or_else(|| underflow(self.at))?;
        Ok(self.stack.split_off(mark))
    }
}

/// An opcode found something else on the stack than it needs.
pub(super) fn wrong_operand(at: usize, expected: &str, found: &Node) -> Fault {
    Fault::at(at, format!("an opcode needs {expected} and finds {}", found.kind()))
}

/// A known global is used in a way that the formats do not: "called".
pub(super) fn wrong_use(at: usize, global: Known, used: &str) -> Fault {
    Fault::at(at, format!("`{}` cannot be {used}", global.path()))
}

/// An opcode reads below the bottom of the stack or below a mark.
pub(super) fn underflow(at: usize) -> Fault {
    Fault::at(at, "an opcode takes more from the stack than there is")
}
