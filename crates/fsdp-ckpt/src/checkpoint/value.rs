//! Values that are not tensors, as inert data.
//!
//! What a pickle or a JSON text holds becomes one of these; nothing is ever constructed, imported or called.

/// The name of a global of a pickle: a class or function that the file names and that is never looked up.
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
    /// Bytes.
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
    /// An object: its class or constructor, the arguments it was made of, and its state.
    Object {
        /// Class or constructor.
        class: Global,
        /// Arguments.
        args: Vec<Value>,
        /// State that was set on it.
        state: Option<Box<Value>>,
    },
}
