//! The tree of values in a `torch.save` file.

use crate::{
    checkpoint::{Global, Nested, Nesting, Value, key_text},
    safetensors::TensorType,
};

/// A node of the tree.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Item {
    /// A dict, in file order.
    Dict(Vec<(Value, Item)>),
    /// A list.
    List(Vec<Item>),
    /// A tuple.
    Tuple(Vec<Item>),
    /// A tensor or parameter.
    Tensor(StoredTensor),
    /// A tensor of a wrapper subclass, such as a distributed tensor: its class and its state.
    Wrapped {
        /// The class (`torch.distributed.tensor.DTensor`).
        class: Global,
        /// The attributes that make up the tensor.
        state: Box<Item>,
    },
    /// An object whose arguments or state hold tensors.
    Object {
        /// Class or constructor.
        class: Global,
        /// Arguments of the constructor.
        args: Vec<Item>,
        /// State that was set on the object.
        state: Option<Box<Item>>,
    },
    /// An object of an unknown class that holds tensors.
    Opaque {
        /// Its class.
        class: Global,
        /// The parts that hold tensors, with their names in the object.
        parts: Vec<(Value, Item)>,
    },
    /// Anything else.
    Value(Value),
}

/// A view of a storage.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct StoredTensor {
    /// Element type.
    pub(crate) dtype: TensorType,
    /// Dimensions, slowest first.
    pub(crate) shape: Vec<u64>,
    /// Strides in elements.
    pub(crate) strides: Vec<u64>,
    /// Byte offset of its first element, counted like the archive's section: in the file, or in memory. For a tensor
    /// without elements, the offset of its storage.
    pub(crate) offset: u64,
}

impl Item {
    /// The item under a text key of a dict; `None` if this is not a dict or lacks the key.
    pub(crate) fn get(&self, name: &str) -> Option<&Item> {
        let Item::Dict(items) = self else { return None };
        let mut found = items.iter().filter(|(key, _)| matches!(key, Value::Str(key) if key == name));
        found.next().map(|(_, item)| item)
    }

    /// The attributes in the state of an object. For a class with slots, the second item holds them.
    pub(crate) fn attributes(&self) -> &Item {
        match self {
            Item::Tuple(two) if two.len() == 2 => &two[1],
            state => state,
        }
    }

    /// Whether it is or holds a tensor.
    pub(crate) fn holds_tensor(&self) -> bool {
        match self {
            Item::Tensor(_) | Item::Wrapped { .. } | Item::Opaque { .. } => true,
            Item::Dict(items) => items.iter().any(|(_, item)| item.holds_tensor()),
            Item::List(items) | Item::Tuple(items) => items.iter().any(Item::holds_tensor),
            Item::Object { args, state, .. } => {
                args.iter().any(Item::holds_tensor) || state.as_ref().is_some_and(|item| item.holds_tensor())
            }
            Item::Value(_) => false,
        }
    }

    /// Whether it is a dict without tensors that has keys that cannot be names, so it stays one value.
    fn is_value(&self) -> bool {
        let Item::Dict(items) = self else { return false };
        items.iter().any(|(key, _)| key_text(key).is_none()) && !self.holds_tensor()
    }

    /// Converts it to a value. A tensor becomes an object with its dtype and shape, without its elements.
    pub(crate) fn to_value(&self) -> Value {
        let values = |items: &[Item]| items.iter().map(Item::to_value).collect();
        match self {
            Item::Dict(items) => {
                Value::Dict(items.iter().map(|(key, item)| (key.clone(), item.to_value())).collect())
            }
            Item::List(items) => Value::List(values(items)),
            Item::Tuple(items) => Value::Tuple(values(items)),
            Item::Tensor(tensor) => tensor.to_value(),
            Item::Wrapped { class, state } => Value::Object {
                class: class.clone(),
                args: Vec::new(),
                state: Some(Box::new(state.to_value())),
            },
            Item::Object { class, args, state } => Value::Object {
                class: class.clone(),
                args: values(args),
                state: state.as_ref().map(|state| Box::new(state.to_value())),
            },
            Item::Opaque { class, .. } => Value::Opaque(class.clone()),
            Item::Value(value) => value.clone(),
        }
    }
}

impl StoredTensor {
    fn to_value(&self) -> Value {
        let class = Global { module: "torch".to_owned(), name: "Tensor".to_owned() };
        let shape = self.shape.iter().map(|&dim| Value::Int(dim as i64)).collect();
        let args = vec![Value::Str(self.dtype.name().to_owned()), Value::Tuple(shape)];
        Value::Object { class, args, state: None }
    }
}

impl Nested for Item {
    fn nesting(&self) -> Nesting<'_, Item> {
        match self {
            Item::Dict(_) if self.is_value() => Nesting::Other,
            Item::Dict(items) | Item::Opaque { parts: items, .. } => Nesting::Dict(items),
            Item::List(items) => Nesting::List(items),
            // Distributed checkpoints keep such a tuple as one object. Here its tensors need names, so that they are
            // converted like all other tensors.
            Item::Tuple(items) if self.holds_tensor() => Nesting::List(items),
            Item::Tensor(_) | Item::Wrapped { .. } => Nesting::Tensor,
            Item::Tuple(_) | Item::Object { .. } | Item::Value(_) => Nesting::Other,
        }
    }
}
