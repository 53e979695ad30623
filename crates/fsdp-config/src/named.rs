//! Values that a run file writes by name.
//!
//! The types of `fsdp-core` get their names here, because that crate does not deal with files.

use fsdp_core::DType;
use fsdp_core::comm::ReduceOp;
use fsdp_core::schedule::{Accumulation, AccumulationOrder, Checkpointing, Offload};
use toml::Value;

/// A type whose values have names.
pub(super) trait Named: Copy + PartialEq + 'static {
    /// All values that can be written, with their names.
    const NAMES: &'static [(&'static str, Self)];

    /// Returns the name of a value that can be written.
    fn name(self) -> &'static str {
        let named = Self::NAMES.iter().find(|(_, value)| *value == self);
        named.expect("a configuration holds values that can be written").0
    }

    /// Returns the value that a TOML string names.
    fn of(value: &Value) -> Option<Self> {
        let named = Self::NAMES.iter().find(|(name, _)| value.as_str() == Some(name));
        named.map(|&(_, value)| value)
    }
}

/// Implements [`Named`] for types, given the names of their values.
macro_rules! named {
    ($($type:ident { $($name:literal: $value:ident),* $(,)? })*) => {
        $(impl $crate::named::Named for $type {
            const NAMES: &'static [(&'static str, Self)] = &[$(($name, $type::$value)),*];
        })*
    };
}

pub(super) use named;

named! {
    Accumulation { "reduce": Reduce, "unsharded": Unsharded }
    AccumulationOrder { "tree": Tree, "running": Running }
    DType { "f32": F32, "bf16": Bf16, "f16": F16, "f64": F64 }
    ReduceOp { "sum": Sum, "average": Average }
    Checkpointing { "none": None, "selective": Selective, "full": Full }
    Offload { "none": None, "cpu": Cpu }
}

/// Lists the allowed names for an error: `"a", "b" or "c"`.
pub(super) fn one_of<'n>(names: impl IntoIterator<Item = &'n str>) -> String {
    let quoted: Vec<String> = names.into_iter().map(|name| format!("\"{name}\"")).collect();
    match quoted.split_last() {
        Some((last, [])) => last.clone(),
        Some((last, others)) => format!("{} or {last}", others.join(", ")),
        None => unreachable!("a type has values"),
    }
}
