//! The result of parsing a pickle: a graph of values in which shared values occur once.
//!
//! A checked graph has no cycles, is shallow enough for recursion, and no dict in it repeats a text or integer key.

use std::ops::Index;

use super::{
    globals::Known,
    limits::{DEPTH_MAX, too_large},
    opaque::{OpaqueNode, Unknown},
};
use crate::error::Fault;

/// The index of a value in its graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct NodeId(pub(super) u32);

/// A value. It refers to its parts by index.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Node {
    None,
    Bool(bool),
    Int(i64),
    /// An integer that needs more than 64 bits: two's complement, little-endian.
    Long(Box<[u8]>),
    Float(f64),
    Str(Box<str>),
    Bytes(Box<[u8]>),
    List(Vec<NodeId>),
    Tuple(Box<[NodeId]>),
    Set(Vec<NodeId>),
    Dict(Vec<(NodeId, NodeId)>),
    Global(Known),
    Object(ObjectNode),
    /// A class or function that is not in the table.
    Unknown(Box<Unknown>),
    /// An object of a class that is not in the table.
    Opaque(Box<OpaqueNode>),
    /// An object stored outside of the pickle, by its identifier: a storage in a PyTorch file.
    Persistent(NodeId),
}

/// An object of a class, or the unevaluated call of a function.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct ObjectNode {
    pub(crate) class: Known,
    /// The arguments, which are a tuple.
    pub(crate) args: NodeId,
    /// The state that was set on the object.
    pub(crate) state: Option<NodeId>,
}

impl Node {
    /// The kind of value, for messages.
    pub(super) fn kind(&self) -> &'static str {
        match self {
            Node::None => "None",
            Node::Bool(_) => "a truth value",
            Node::Int(_) | Node::Long(_) => "an integer",
            Node::Float(_) => "a float",
            Node::Str(_) => "a text",
            Node::Bytes(_) => "bytes",
            Node::List(_) => "a list",
            Node::Tuple(_) => "a tuple",
            Node::Set(_) => "a set",
            Node::Dict(_) => "a dict",
            Node::Global(_) | Node::Unknown(_) => "a class or function",
            Node::Object(_) | Node::Opaque(_) => "an object",
            Node::Persistent(_) => "a storage",
        }
    }

    fn text(&self) -> Option<&str> {
        match self {
            Node::Str(text) => Some(text),
            _ => None,
        }
    }

    fn int(&self) -> Option<i64> {
        match self {
            Node::Int(int) => Some(*int),
            _ => None,
        }
    }

    /// Number of direct items or bytes.
    pub(super) fn len(&self) -> usize {
        match self {
            Node::Long(bytes) | Node::Bytes(bytes) => bytes.len(),
            Node::Str(text) => text.len(),
            Node::List(items) | Node::Set(items) => items.len(),
            Node::Tuple(items) => items.len(),
            Node::Dict(pairs) => pairs.len(),
            _ => 0,
        }
    }

    /// The part with this index, in a fixed order.
    fn part(&self, index: usize) -> Option<NodeId> {
        match self {
            Node::List(items) | Node::Set(items) => items.get(index).copied(),
            Node::Tuple(items) => items.get(index).copied(),
            Node::Dict(pairs) => {
                let (key, value) = *pairs.get(index / 2)?;
                Some(if index.is_multiple_of(2) { key } else { value })
            }
            Node::Object(object) => match index {
                0 => Some(object.args),
                1 => object.state,
                _ => None,
            },
            Node::Opaque(object) => object.part(index),
            Node::Persistent(id) => (index == 0).then_some(*id),
            _ => None,
        }
    }
}

/// The values of a pickle.
#[derive(Clone, Debug)]
pub(crate) struct Graph {
    nodes: Vec<Node>,
    root: NodeId,
    has_forgotten_parts: bool,
}

impl Index<NodeId> for Graph {
    type Output = Node;

    fn index(&self, id: NodeId) -> &Node {
        &self.nodes[id.0 as usize]
    }
}

impl Graph {
    /// Makes a graph of these values; fails if it has a cycle, is too deep or repeats a key.
    pub(super) fn checked(nodes: Vec<Node>, root: NodeId) -> Result<Graph, Fault> {
        let mut graph = Graph { nodes, root, has_forgotten_parts: false };
        if let Err(fault) = graph.check_depth() {
            // Objects may refer to each other in cycles. The contents of objects of unknown classes can be dropped.
            if !graph.forget_opaque_parts() {
                return Err(fault);
            }
            graph.check_depth()?;
        }
        graph.check_keys()?;
        Ok(graph)
    }

    /// The root value of the pickle.
    pub(crate) fn root(&self) -> NodeId {
        self.root
    }

    /// Whether the contents of objects of unknown classes were dropped, because some of these objects contain
    /// themselves or are nested too deeply.
    pub(crate) fn has_forgotten_parts(&self) -> bool {
        self.has_forgotten_parts
    }

    fn forget_opaque_parts(&mut self) -> bool {
        for node in &mut self.nodes {
            if let Node::Opaque(object) = node {
                self.has_forgotten_parts |= object.forget_parts();
            }
        }
        self.has_forgotten_parts
    }

    /// The identifiers of all objects stored outside of the pickle.
    pub(crate) fn persistent(&self) -> impl Iterator<Item = NodeId> {
        self.nodes.iter().filter_map(|node| match node {
            Node::Persistent(id) => Some(*id),
            _ => None,
        })
    }

    /// The first class or function that is not in the table.
    pub(crate) fn first_unknown(&self) -> Option<&Unknown> {
        self.nodes.iter().find_map(|node| match node {
            Node::Unknown(unknown) => Some(&**unknown),
            _ => None,
        })
    }

    /// Visits all nodes that the root reaches, each once and after its parts.
    fn check_depth(&self) -> Result<(), Fault> {
        const UNSEEN: u32 = 0;
        const OPEN: u32 = u32::MAX;
        // The depth of the subgraph of each node, from 1.
        let mut depths = vec![UNSEEN; self.nodes.len()];
        let mut open = vec![(self.root, 0)];
        depths[self.root.0 as usize] = OPEN;
        while let Some((id, index)) = open.last_mut() {
            let Some(part) = self[*id].part(*index) else {
                let depth = self.depth_above_parts(*id, &depths);
                if depth > DEPTH_MAX {
                    return Err(too_large(0, "levels of nesting", DEPTH_MAX as usize));
                }
                depths[id.0 as usize] = depth;
                open.pop();
                continue;
            };
            *index += 1;
            match depths[part.0 as usize] {
                UNSEEN => {
                    depths[part.0 as usize] = OPEN;
                    open.push((part, 0));
                }
                OPEN => return Err(Fault::new("an object holds itself, directly or through others")),
                _ => {}
            }
        }
        Ok(())
    }

    fn depth_above_parts(&self, id: NodeId, depths: &[u32]) -> u32 {
        let parts = (0..).map_while(|index| self[id].part(index));
        1 + parts.map(|part| depths[part.0 as usize]).max().unwrap_or(0)
    }

    fn check_keys(&self) -> Result<(), Fault> {
        for node in &self.nodes {
            let Node::Dict(pairs) = node else { continue };
            let keys = || pairs.iter().map(|(key, _)| &self[*key]);
            let mut texts: Vec<&str> = keys().filter_map(Node::text).collect();
            texts.sort_unstable();
            let mut ints: Vec<i64> = keys().filter_map(Node::int).collect();
            ints.sort_unstable();
            let text = texts.windows(2).find(|two| two[0] == two[1]).map(|two| two[0].to_owned());
            let int = || ints.windows(2).find(|two| two[0] == two[1]).map(|two| two[0].to_string());
            if let Some(key) = text.or_else(int) {
                return Err(Fault::new(format!("a dict has the key `{key}` twice")));
            }
        }
        Ok(())
    }

    /// The text at `id`; `None` for any other value.
    pub(crate) fn str(&self, id: NodeId) -> Option<&str> {
        self[id].text()
    }

    /// The integer at `id`; `None` if it is not an integer or is negative.
    pub(crate) fn u64(&self, id: NodeId) -> Option<u64> {
        self[id].int().and_then(|int| u64::try_from(int).ok())
    }

    /// The items of a list, a tuple or a `torch.Size`; `None` for any other value.
    pub(crate) fn items(&self, id: NodeId) -> Option<&[NodeId]> {
        match &self[id] {
            Node::List(items) => Some(items),
            Node::Tuple(items) => Some(items),
            Node::Object(object) if object.class.is("torch", "Size") => match self.args(object) {
                [items] => self.items(*items),
                _ => None,
            },
            _ => None,
        }
    }

    /// Dimensions or indices: a list, a tuple or a `torch.Size` of non-negative integers; `None` for any other value.
    pub(crate) fn dims(&self, id: NodeId) -> Option<Vec<u64>> {
        self.items(id)?.iter().map(|&item| self.u64(item)).collect()
    }

    /// The pairs of a dict; `None` for any other value.
    pub(crate) fn pairs(&self, id: NodeId) -> Option<&[(NodeId, NodeId)]> {
        match &self[id] {
            Node::Dict(pairs) => Some(pairs),
            _ => None,
        }
    }

    /// The value under a text key of a dict, or the attribute of an object whose state is a dict.
    pub(crate) fn field(&self, id: NodeId, name: &str) -> Option<NodeId> {
        let pairs = match &self[id] {
            Node::Dict(pairs) => pairs,
            Node::Object(object) => self.pairs(object.state?)?,
            _ => return None,
        };
        pairs.iter().find(|(key, _)| self.str(*key) == Some(name)).map(|(_, value)| *value)
    }

    /// The arguments of an object.
    pub(crate) fn args(&self, object: &ObjectNode) -> &[NodeId] {
        match &self[object.args] {
            Node::Tuple(args) => args,
            other => unreachable!("the machine takes only tuples as arguments, not {}", other.kind()),
        }
    }

    /// The object at `id`; `None` for any other value.
    pub(crate) fn object(&self, id: NodeId) -> Option<&ObjectNode> {
        match &self[id] {
            Node::Object(object) => Some(object),
            _ => None,
        }
    }
}
