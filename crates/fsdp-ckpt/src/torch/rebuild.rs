//! Converts the graph of the pickle to a tree: calls that build tensors become tensors, and everything without tensors
//! stays a value.
//!
//! The functions are PyTorch's: `_rebuild_tensor_v2` and its relatives for plain tensors, parameters as the tensors
//! they hold, `_rebuild_from_type_v2` for subclasses.

use std::collections::BTreeSet;

use super::{
    container::Container,
    item::{Item, StoredTensor},
    storage::{dtype, storage, unread_storage},
};
use crate::{
    checkpoint::{Global, Value, key_text},
    error::Fault,
    pickle::{Budget, Graph, Known, Node, NodeId, ObjectNode, Unknown},
    safetensors::TensorType,
};

/// Converts a graph to a tree.
pub(super) struct Builder<'a> {
    pub(super) graph: &'a Graph,
    pub(super) container: &'a Container<'a>,
}

impl Builder<'_> {
    /// The tree of the value at `id`.
    pub(super) fn item(&self, id: NodeId, budget: &mut Budget) -> Result<Item, Fault> {
        let graph = self.graph;
        match &graph[id] {
            Node::List(items) => Ok(Item::List(self.items(items, budget)?)),
            Node::Tuple(items) => Ok(Item::Tuple(self.items(items, budget)?)),
            Node::Dict(pairs) => {
                budget.take(0)?;
                let pair = |&(key, value): &(NodeId, NodeId)| {
                    Ok((graph.value(key, budget)?, self.item(value, budget)?))
                };
                Ok(Item::Dict(pairs.iter().map(pair).collect::<Result<_, Fault>>()?))
            }
            Node::Object(object) => self.object(object, budget),
            Node::Opaque(object) => self.opaque(&object.class, &object.parts, &object.pairs, budget),
            Node::Persistent(_) => Err(bad("torch.save", "it holds a storage that belongs to no tensor")),
            _ => Ok(Item::Value(graph.value(id, budget)?)),
        }
    }

    fn items(&self, items: &[NodeId], budget: &mut Budget) -> Result<Vec<Item>, Fault> {
        budget.take(0)?;
        items.iter().map(|&item| self.item(item, budget)).collect()
    }

    /// A tensor, or an object with its arguments and state.
    fn object(&self, object: &ObjectNode, budget: &mut Budget) -> Result<Item, Fault> {
        let (class, args) = (object.class, self.graph.args(object));
        match (class.module(), class.name()) {
            ("torch._utils", "_rebuild_parameter" | "_rebuild_parameter_with_state") => match args {
                [tensor, ..] => self.item(*tensor, budget),
                [] => Err(bad(class.name(), "it has no arguments")),
            },
            ("torch._tensor", "_rebuild_from_type_v2") => self.subclass(args, budget),
            ("torch._utils", _) => self.rebuilt(class, args, budget),
            _ => {
                let args = self.items(args, budget)?;
                let state = match object.state {
                    Some(state) => Some(Box::new(self.item(state, budget)?)),
                    None => None,
                };
                Ok(Item::Object { class: class.to_global(), args, state }.compact())
            }
        }
    }

    /// Evaluates `_rebuild_from_type_v2(function, class, arguments, state)`.
    fn subclass(&self, args: &[NodeId], budget: &mut Budget) -> Result<Item, Fault> {
        let function = "_rebuild_from_type_v2";
        let [maker, class, maker_args, state] = args else {
            return Err(bad(function, "it does not have four arguments"));
        };
        let (maker, class) = match (&self.graph[*maker], &self.graph[*class]) {
            (Node::Global(maker), Node::Global(class)) => (maker, class),
            (Node::Global(maker), Node::Unknown(class)) => {
                return self.unknown_subclass(*maker, class, [*maker_args, *state], budget);
            }
            (Node::Unknown(class), _) => {
                return self.opaque(&class.global, &[*maker_args, *state], &[], budget);
            }
            _ => return Err(bad(function, "function and class are not names")),
        };
        if maker.is("torch._utils", "_rebuild_wrapper_subclass") {
            let state = Box::new(self.item(*state, budget)?);
            return Ok(Item::Wrapped { class: class.to_global(), state });
        }
        let args =
            self.graph.items(*maker_args).ok_or_else(|| bad(function, "the arguments are not a tuple"))?;
        let is_plain = matches!(
            (class.module(), class.name()),
            ("torch", "Tensor") | ("torch.nn.parameter", "Parameter" | "Buffer")
        );
        if !is_plain {
            return Err(unsupported_tensor(*class));
        }
        match (maker.name(), args) {
            ("_rebuild_parameter" | "_rebuild_parameter_with_state", [tensor, ..]) => {
                self.item(*tensor, budget)
            }
            _ => self.rebuilt(*maker, args, budget),
        }
    }

    /// The result of a PyTorch function: a plain tensor, or another kind of tensor, which is opaque. Sparse and nested
    /// tensors are made of plain tensors, which become their parts.
    fn rebuilt(&self, function: Known, args: &[NodeId], budget: &mut Budget) -> Result<Item, Fault> {
        let kind = match function.name() {
            "_rebuild_tensor" | "_rebuild_tensor_v2" | "_rebuild_tensor_v3" => {
                self.unread_kind(function, args)
            }
            _ => Some(function.to_global()),
        };
        let Some(kind) = kind else { return self.tensor(function, args, budget).map(Item::Tensor) };
        let is_made_of_tensors =
            matches!(function.name(), "_rebuild_sparse_tensor" | "_rebuild_nested_tensor");
        self.opaque(&kind, if is_made_of_tensors { args } else { &[] }, &[], budget)
    }

    /// The reason why a view of a storage is not a plain tensor; `None` if it is one. It is an unsupported element
    /// type, or an operation that PyTorch defers until the tensor is used (`torch.conj`).
    fn unread_kind(&self, function: Known, args: &[NodeId]) -> Option<Global> {
        if let Some(class) = unread_storage(self.graph, *args.first()?) {
            return Some(class.to_global());
        }
        let is_typed = function.name() == "_rebuild_tensor_v3";
        if let Some(Node::Global(name)) = args.get(6).filter(|_| is_typed).map(|&id| &self.graph[id])
            && dtype(*name).is_none()
        {
            return Some(name.to_global());
        }
        let metadata = *args.get(6 + usize::from(is_typed))?;
        let (operation, _) = *self.graph.pairs(metadata)?.first()?;
        Some(Global { module: "torch".to_owned(), name: self.graph.str(operation)?.to_owned() })
    }

    /// A tensor of an unknown class, with the plain tensors in it.
    fn unknown_subclass(
        &self,
        maker: Known,
        class: &Unknown,
        [args, state]: [NodeId; 2],
        budget: &mut Budget,
    ) -> Result<Item, Fault> {
        if maker.is("torch._utils", "_rebuild_wrapper_subclass") {
            return self.opaque(&class.global, &[state], &[], budget);
        }
        let args = self.graph.items(args).unwrap_or_default();
        let tensor = match (maker.name(), args) {
            ("_rebuild_parameter" | "_rebuild_parameter_with_state", [tensor, ..]) => {
                self.item(*tensor, budget)?
            }
            _ => self.rebuilt(maker, args, budget)?,
        };
        let parts = vec![(Value::Str("data".to_owned()), tensor)];
        Ok(Item::Opaque { class: class.global.clone(), parts })
    }

    /// An object of an unknown class, with the parts that hold tensors. Dicts among the parts, such as the object's
    /// attributes, contribute their keys as names; other parts are named by number.
    fn opaque(
        &self,
        class: &Global,
        parts: &[NodeId],
        pairs: &[(NodeId, NodeId)],
        budget: &mut Budget,
    ) -> Result<Item, Fault> {
        budget.take(class.module.len() + class.name.len())?;
        let mut named = Vec::new();
        for (number, &part) in (0..).zip(parts) {
            match self.item(part, budget)? {
                Item::Dict(items) => named.extend(items),
                // For a class with slots, the second item holds the attributes.
                Item::Tuple(two) => match <[Item; 2]>::try_from(two) {
                    Ok([_, Item::Dict(items)]) => named.extend(items),
                    Ok(two) => named.push((Value::Int(number), Item::Tuple(two.into()))),
                    Err(items) => named.push((Value::Int(number), Item::Tuple(items))),
                },
                item => named.push((Value::Int(number), item)),
            }
        }
        for &(key, item) in pairs {
            named.push((self.graph.value(key, budget)?, self.item(item, budget)?));
        }
        named.retain(|(_, item)| item.holds_tensor());
        if named.is_empty() {
            return Ok(Item::Value(Value::Opaque(class.clone())));
        }
        let mut taken = BTreeSet::new();
        for (number, (key, _)) in (0..).zip(&mut named) {
            if !key_text(key).is_some_and(|name| taken.insert(name)) {
                *key = Value::Str(format!("{number}"));
            }
        }
        Ok(Item::Opaque { class: class.clone(), parts: named })
    }

    /// A plain tensor, from `(storage, first element, shape, strides, ..)`.
    fn tensor(&self, function: Known, args: &[NodeId], budget: &mut Budget) -> Result<StoredTensor, Fault> {
        let graph = self.graph;
        let bad = |detail| bad(function.name(), detail);
        let (storage_id, offset, shape, strides, rest) = match args {
            [storage, offset, shape, strides, rest @ ..] => (*storage, *offset, *shape, *strides, rest),
            _ => return Err(bad("it has too few arguments")),
        };
        // These follow the gradient flag and the hooks, which only training needs.
        let (dtype, metadata) = match (function.name(), rest) {
            ("_rebuild_tensor", []) => (None, None),
            ("_rebuild_tensor_v2", [_, _]) => (None, None),
            ("_rebuild_tensor_v2", [_, _, metadata]) => (None, Some(*metadata)),
            ("_rebuild_tensor_v3", [_, _, dtype]) => (Some(self.dtype(*dtype)?), None),
            ("_rebuild_tensor_v3", [_, _, dtype, metadata]) => (Some(self.dtype(*dtype)?), Some(*metadata)),
            ("_rebuild_tensor" | "_rebuild_tensor_v2" | "_rebuild_tensor_v3", _) => {
                return Err(bad("it has a wrong number of arguments"));
            }
            _ => return Err(bad("it does not make a plain tensor")),
        };
        let is_lazy = |metadata| !matches!(graph[metadata], Node::None) && graph.pairs(metadata) != Some(&[]);
        if metadata.is_some_and(is_lazy) {
            return Err(bad("it is conjugated or negated lazily"));
        }
        let offset = graph.u64(offset).ok_or_else(|| bad("the first element is not an index"))?;
        let shape = graph.dims(shape).ok_or_else(|| bad("the shape is not a tuple of sizes"))?;
        let strides = graph.dims(strides).ok_or_else(|| bad("the strides are not a tuple of distances"))?;
        budget.take((shape.len() + strides.len()) * size_of::<u64>())?;
        storage(graph, self.container, storage_id)?.view(dtype, offset, shape, strides)
    }

    fn dtype(&self, id: NodeId) -> Result<TensorType, Fault> {
        let Node::Global(global) = self.graph[id] else {
            return Err(bad("_rebuild_tensor_v3", "the dtype is invalid"));
        };
        dtype(global).ok_or_else(|| unsupported_dtype(global))
    }
}

/// The fault for a call that makes tensors or storages from unknown arguments.
pub(super) fn bad(function: &str, detail: &str) -> Fault {
    Fault::new(format!("it calls {function} in an unknown way: {detail}"))
}

fn unsupported_tensor(class: Known) -> Fault {
    let way_out = "save it as a plain dense tensor";
    Fault::unsupported(format!("it holds a tensor that only {} can build; {way_out}", class.path()))
}

/// The fault for an unsupported element type.
pub(super) fn unsupported_dtype(name: Known) -> Fault {
    let way_out = "which is not supported; convert it to another type before saving";
    Fault::unsupported(format!("it holds a tensor of type {}, {way_out}", name.path()))
}

impl Item {
    /// Converts an object without tensors to a value.
    fn compact(self) -> Item {
        if self.holds_tensor() { self } else { Item::Value(self.to_value()) }
    }
}
