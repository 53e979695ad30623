//! Evaluates calls that stand for plain values: containers and bytes that a pickle writes as a call of their
//! constructor.
//!
//! Any other call stays an object with its class and arguments, and a call of an unknown class or function an opaque one.

use super::{
    globals::Known,
    graph::{Node, NodeId, ObjectNode},
    machine::{Machine, wrong_use},
    opaque::{OpaqueNode, Unknown},
};
use crate::{checkpoint::Global, error::Fault};

/// The result of calling `class` with a tuple of arguments.
pub(super) fn call(machine: &mut Machine<'_>, class: Known, args: NodeId) -> Result<Node, Fault> {
    if !class.may_be_called() {
        return Err(wrong_use(machine.at, class, "called"));
    }
    let object = Node::Object(ObjectNode { class, args, state: None });
    let plain = match (class.module(), class.name()) {
        ("builtins" | "__builtin__", "complex" | "slice" | "range") => return Ok(object),
        ("collections", "OrderedDict" | "Counter") => dict,
        ("collections", "defaultdict") => default_dict,
        ("builtins" | "__builtin__", "set" | "frozenset") => set,
        ("builtins" | "__builtin__", "bytearray") => bytes,
        ("builtins" | "__builtin__", "getattr") => {
            let part = part_of_class(machine, object, machine.args(args));
            return part.ok_or_else(|| wrong_arguments(machine, class));
        }
        ("builtins" | "__builtin__", "list") => empty_list,
        ("builtins" | "__builtin__", "dict") => dict,
        ("_codecs", "encode") => encode,
        _ => return Ok(object),
    };
    // A constructor copies at most the items of its first argument.
    let len = machine.args(args).first().map_or(0, |&first| machine.node(first).len());
    machine.count_copies(len)?;
    plain(machine, machine.args(args)).ok_or_else(|| wrong_arguments(machine, class))
}

fn wrong_arguments(machine: &Machine<'_>, class: Known) -> Fault {
    wrong_use(machine.at, class, "called with these arguments")
}

/// A dict of no arguments, of a dict, or of a list of pairs.
fn dict(machine: &Machine<'_>, args: &[NodeId]) -> Option<Node> {
    let pairs = match args {
        [] => Vec::new(),
        [source] => match machine.node(*source) {
            Node::Dict(pairs) => pairs.clone(),
            Node::List(items) => items.iter().map(|&item| pair(machine, item)).collect::<Option<_>>()?,
            _ => return None,
        },
        _ => return None,
    };
    Some(Node::Dict(pairs))
}

fn pair(machine: &Machine<'_>, item: NodeId) -> Option<(NodeId, NodeId)> {
    match machine.node(item) {
        Node::List(items) => <[NodeId; 2]>::try_from(items.as_slice()).ok(),
        Node::Tuple(items) => <[NodeId; 2]>::try_from(&items[..]).ok(),
        _ => None,
    }
    .map(|[key, value]| (key, value))
}

/// A dict with a default factory, which is dropped since all pairs are in the file.
fn default_dict(machine: &Machine<'_>, args: &[NodeId]) -> Option<Node> {
    match args {
        [] => Some(Node::Dict(Vec::new())),
        [default] if is_factory(machine.node(*default)) => Some(Node::Dict(Vec::new())),
        _ => None,
    }
}

fn is_factory(node: &Node) -> bool {
    matches!(node, Node::Global(_) | Node::None | Node::Unknown(_) | Node::Opaque(_))
}

fn set(machine: &Machine<'_>, args: &[NodeId]) -> Option<Node> {
    match args {
        [] => Some(Node::Set(Vec::new())),
        [items] => match machine.node(*items) {
            Node::List(items) => Some(Node::Set(items.clone())),
            Node::Tuple(items) => Some(Node::Set(items.to_vec())),
            _ => None,
        },
        _ => None,
    }
}

fn bytes(machine: &Machine<'_>, args: &[NodeId]) -> Option<Node> {
    match args {
        [] => Some(Node::Bytes(Box::default())),
        [bytes] => match machine.node(*bytes) {
            Node::Bytes(bytes) => Some(Node::Bytes(bytes.clone())),
            _ => None,
        },
        // Protocol 2 writes a `bytearray` as text with an encoding.
        [text, encoding] => encode(machine, &[*text, *encoding]),
        _ => None,
    }
}

/// Evaluates `getattr` of a class. Protocol 2 writes nested classes this way, and Python 3.11 enum members, which stay
/// unevaluated objects.
fn part_of_class(machine: &Machine<'_>, object: Node, args: &[NodeId]) -> Option<Node> {
    let [of, name] = args else { return None };
    if let Some(unknown) = attribute(machine, *of, *name) {
        return Some(unknown);
    }
    let (Node::Global(of), Node::Str(name)) = (machine.node(*of), machine.node(*name)) else { return None };
    match Known::find(of.module(), &format!("{}.{name}", of.name())) {
        Some(nested) => Some(Node::Global(nested)),
        None => of.is_enumeration().then_some(object),
    }
}

fn empty_list(_: &Machine<'_>, args: &[NodeId]) -> Option<Node> {
    args.is_empty().then(|| Node::List(Vec::new()))
}

/// Evaluates the call with which protocol 2 writes bytes: the encoding of Latin-1 text.
fn encode(machine: &Machine<'_>, args: &[NodeId]) -> Option<Node> {
    let [text, encoding] = args else { return None };
    match (machine.node(*text), machine.node(*encoding)) {
        (Node::Str(text), Node::Str(encoding)) if matches!(&**encoding, "latin1" | "latin-1") => {
            let bytes = text.chars().map(|char| u8::try_from(char).ok()).collect::<Option<Box<[u8]>>>()?;
            Some(Node::Bytes(bytes))
        }
        _ => None,
    }
}

/// The object that a call of an unknown class or function returns; `None` if the callee is known.
pub(super) fn opaque(machine: &Machine<'_>, callee: NodeId, args: NodeId) -> Option<Node> {
    let class = match machine.node(callee) {
        Node::Unknown(unknown) => made_class(machine, &unknown.global, args),
        Node::Opaque(object) => object.class.clone(),
        _ => return None,
    };
    Some(Node::Opaque(Box::new(OpaqueNode { class, parts: vec![args], pairs: Vec::new() })))
}

/// The class of the result: functions of `copyreg` make an object of their first argument.
fn made_class(machine: &Machine<'_>, callee: &Global, args: NodeId) -> Global {
    let makes_first = matches!(&callee.module[..], "copyreg" | "copy_reg");
    let first = match machine.node(args) {
        Node::Tuple(args) => args.first().map(|&first| machine.node(first)),
        _ => None,
    };
    match first {
        Some(Node::Unknown(class)) if makes_first => class.global.clone(),
        _ => callee.clone(),
    }
}

/// Evaluates `getattr` of an opaque value: a nested class, an enum member or a method.
fn attribute(machine: &Machine<'_>, of: NodeId, name: NodeId) -> Option<Node> {
    let Node::Str(name) = machine.node(name) else { return None };
    let global = match machine.node(of) {
        Node::Unknown(of) => &of.global,
        Node::Opaque(of) => &of.class,
        _ => return None,
    };
    let global = Global { module: global.module.clone(), name: format!("{}.{name}", global.name) };
    Some(Node::Unknown(Box::new(Unknown { global, offset: machine.at as u64 })))
}
