//! Types and values of a program.

use std::fmt;

use fsdp_core::DType;

/// An element type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Element {
    F32,
    F64,
    Bf16,
    F16,
    U8,
    U32,
    U64,
    I32,
    I64,
    Bool,
}

impl Element {
    /// Its name in StableHLO.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Element::F32 => "f32",
            Element::F64 => "f64",
            Element::Bf16 => "bf16",
            Element::F16 => "f16",
            Element::U8 => "ui8",
            Element::U32 => "ui32",
            Element::U64 => "ui64",
            Element::I32 => "i32",
            Element::I64 => "i64",
            Element::Bool => "i1",
        }
    }

    pub(crate) fn is_float(self) -> bool {
        matches!(self, Element::F32 | Element::F64 | Element::Bf16 | Element::F16)
    }

    /// Whether it is a float narrower than single precision.
    pub(crate) fn is_narrow(self) -> bool {
        matches!(self, Element::Bf16 | Element::F16)
    }

    /// Bytes per element.
    pub(crate) fn byte_len(self) -> usize {
        match self {
            Element::Bool | Element::U8 => 1,
            Element::Bf16 | Element::F16 => 2,
            Element::F32 | Element::U32 | Element::I32 => 4,
            Element::F64 | Element::U64 | Element::I64 => 8,
        }
    }

    /// The type in which arithmetic on it is done.
    pub(crate) fn master(self) -> Element {
        if self.is_narrow() { Element::F32 } else { self }
    }
}

impl From<DType> for Element {
    fn from(dtype: DType) -> Self {
        match dtype {
            DType::F32 => Element::F32,
            DType::F64 => Element::F64,
            DType::Bf16 => Element::Bf16,
            DType::F16 => Element::F16,
            DType::U8 => Element::U8,
            DType::U32 => Element::U32,
            DType::I64 => Element::I64,
        }
    }
}

/// Dimensions and element type of a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) dims: Vec<usize>,
    pub(crate) element: Element,
}

impl Shape {
    pub(crate) fn new(dims: &[usize], element: Element) -> Self {
        Self { dims: dims.to_vec(), element }
    }

    /// Whether it has as many dimensions as another shape and the same element type, and no dimension is larger.
    pub(crate) fn is_within(&self, other: &Shape) -> bool {
        let fits = self.dims.iter().zip(&other.dims).all(|(size, limit)| size <= limit);
        self.element == other.element && self.dims.len() == other.dims.len() && fits
    }

    /// Number of elements.
    pub(crate) fn len(&self) -> usize {
        self.dims.iter().product()
    }

    /// Bytes of all elements.
    pub(crate) fn byte_len(&self) -> usize {
        self.len() * self.element.byte_len()
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("tensor<")?;
        self.dims.iter().try_for_each(|dim| write!(f, "{dim}x"))?;
        write!(f, "{}>", self.element.name())
    }
}

/// The name of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Name {
    /// An argument of the program.
    Argument(usize),
    /// The result of an operation.
    Result(usize),
    /// One of several results of an operation: the operation's number, and the index of the result.
    Part(usize, usize),
    /// A value carried by a loop, within its body: the loop's number, and the index of the value.
    Carried(usize, usize),
}

impl Name {
    /// The number of the operation that produces it; `None` for arguments and carried values.
    pub(super) fn number(self) -> Option<usize> {
        match self {
            Name::Result(number) | Name::Part(number, _) => Some(number),
            Name::Argument(_) | Name::Carried(..) => None,
        }
    }

    /// The name after renumbering operations to begin at `to` instead of `from`.
    pub(super) fn moved(self, from: usize, to: usize) -> Self {
        let moved = |number: usize| number - from + to;
        match self {
            Name::Argument(number) => Name::Argument(number),
            Name::Result(number) => Name::Result(moved(number)),
            Name::Part(number, part) => Name::Part(moved(number), part),
            Name::Carried(number, part) => Name::Carried(moved(number), part),
        }
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Name::Argument(number) => write!(f, "%arg{number}"),
            Name::Result(number) => write!(f, "%{number}"),
            Name::Part(number, part) => write!(f, "%{number}#{part}"),
            Name::Carried(number, part) => write!(f, "%in{number}_{part}"),
        }
    }
}

/// A value of the program: an argument or the result of an operation.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Value {
    pub(crate) name: Name,
    pub(crate) shape: Shape,
}

impl Value {
    pub(crate) fn dims(&self) -> &[usize] {
        &self.shape.dims
    }

    pub(crate) fn element(&self) -> Element {
        self.shape.element
    }

    pub(crate) fn len(&self) -> usize {
        self.shape.len()
    }
}
