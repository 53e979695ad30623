//! Values that are not tensors, as inert data.
//!
//! The content of a pickle or JSON text becomes one of these; nothing is ever constructed, imported or called.

use std::fmt;

/// The name of a global in a pickle: a class or function that the file names and that is never looked up.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Global {
    /// The module (`torch.distributed.checkpoint.metadata`).
    pub module: String,
    /// The name in the module (`Metadata`).
    pub name: String,
}

/// An inert value.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// `None`.
    None,
    /// `True` or `False`.
    Bool(bool),
    /// An integer that fits 64 bits.
    Int(i64),
    /// A larger integer: two's complement, little-endian.
    Long(Vec<u8>),
    /// A float.
    Float(f64),
    /// Text.
    Str(String),
    /// A byte string.
    Bytes(Vec<u8>),
    /// A list.
    List(Vec<Value>),
    /// A tuple.
    Tuple(Vec<Value>),
    /// A set, in the order of the file.
    Set(Vec<Value>),
    /// A dict, in the order of the file.
    Dict(Vec<(Value, Value)>),
    /// A class or function by name, such as `torch.float32`.
    Global(Global),
    /// A class or function that is not part of a checkpoint format, or an object of such a class: its content is not
    /// read, and conversions leave it out.
    Opaque(Global),
    /// An object: its class or constructor, the constructor's arguments, and its state.
    Object {
        /// The class or constructor.
        class: Global,
        /// Arguments of the constructor.
        args: Vec<Value>,
        /// The state that was set on it, if any.
        state: Option<Box<Value>>,
    },
}

impl Value {
    /// Returns the class of the first opaque object in the value, if any.
    pub fn opaque_class(&self) -> Option<&Global> {
        match self {
            Value::Opaque(class) => Some(class),
            Value::List(items) | Value::Tuple(items) | Value::Set(items) => {
                items.iter().find_map(Value::opaque_class)
            }
            Value::Dict(items) => {
                items.iter().find_map(|(key, item)| key.opaque_class().or_else(|| item.opaque_class()))
            }
            Value::Object { args, state, .. } => {
                args.iter().chain(state.as_deref()).find_map(Value::opaque_class)
            }
            _ => None,
        }
    }
}

impl fmt::Display for Global {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.module, self.name)
    }
}
