//! Writes the values of a table: one function for each method of [`Reader`](super::reader::Reader) that reads a value.

use fsdp_core::schedule::Reshard;
use fsdp_core::wrap::WrapPolicy;
use serde::Serialize;
use serde::ser::SerializeStruct;

use super::kind::{FAMILY, NONE};
use super::named::Named;

pub(super) use self::{
    or as patterns, or as required, or as table, or as tables, or as required_unless, or_none as unless_none,
};

/// Writes a value as it is.
pub(super) fn or<F: SerializeStruct>(
    fields: &mut F,
    key: &'static str,
    value: &impl Serialize,
) -> Result<(), F::Error> {
    fields.serialize_field(key, value)
}

/// Writes a value, or [`NONE`], so that every key is in `resolved.toml`.
pub(super) fn or_none<F: SerializeStruct>(
    fields: &mut F,
    key: &'static str,
    value: &Option<impl Serialize>,
) -> Result<(), F::Error> {
    match value {
        Some(value) => or(fields, key, value),
        None => or(fields, key, &NONE),
    }
}

/// Writes a table, if present.
pub(super) fn table_or_none<F: SerializeStruct>(
    fields: &mut F,
    key: &'static str,
    value: &Option<impl Serialize>,
) -> Result<(), F::Error> {
    value.as_ref().map_or(Ok(()), |value| or(fields, key, value))
}

/// Writes patterns, or that the family of the model decides.
pub(super) fn patterns_or_family<F: SerializeStruct>(
    fields: &mut F,
    key: &'static str,
    patterns: &Option<Vec<String>>,
) -> Result<(), F::Error> {
    match patterns {
        Some(patterns) => or(fields, key, patterns),
        None => or(fields, key, &FAMILY),
    }
}

/// Writes a value by its name.
pub(super) fn named<F: SerializeStruct>(
    fields: &mut F,
    key: &'static str,
    value: &impl Named,
) -> Result<(), F::Error> {
    or(fields, key, &value.name())
}

/// Writes values by their names.
pub(super) fn names<F: SerializeStruct>(
    fields: &mut F,
    key: &'static str,
    values: &[impl Named],
) -> Result<(), F::Error> {
    let names: Vec<&str> = values.iter().map(|value| value.name()).collect();
    or(fields, key, &names)
}

/// Writes a value by its name, or [`NONE`].
pub(super) fn named_or_none<F: SerializeStruct>(
    fields: &mut F,
    key: &'static str,
    value: &Option<impl Named>,
) -> Result<(), F::Error> {
    or(fields, key, &value.map_or(NONE, Named::name))
}

/// Writes the wrap policy under its key: `key` for classes, `min_num_params` for a size.
pub(super) fn wrap<F: SerializeStruct>(
    fields: &mut F,
    key: &'static str,
    policy: &WrapPolicy,
) -> Result<(), F::Error> {
    match policy {
        WrapPolicy::Classes(classes) => or(fields, key, classes),
        WrapPolicy::MinParams(count) => or(fields, "min_num_params", count),
    }
}

/// A table that can be written as a list of strings where it is the only one.
pub(super) trait Short: Serialize + Sized {
    /// Returns that list; `None` if it does not say everything.
    fn short(&self) -> Option<&[String]>;
}

/// Writes evaluation sets as tables, or the set of a plain list of paths as that list.
pub(super) fn eval_sets<F: SerializeStruct>(
    fields: &mut F,
    key: &'static str,
    sets: &[impl Short],
) -> Result<(), F::Error> {
    match sets.first().filter(|_| sets.len() == 1).and_then(Short::short) {
        Some(paths) => or(fields, key, &paths),
        None => or(fields, key, &sets),
    }
}

/// Writes a boolean, `"auto"`, or the size of groups.
pub(super) fn reshard<F: SerializeStruct>(
    fields: &mut F,
    key: &'static str,
    policy: &Reshard,
) -> Result<(), F::Error> {
    match policy {
        Reshard::Never => or(fields, key, &false),
        Reshard::Always => or(fields, key, &true),
        Reshard::Auto => or(fields, key, &"auto"),
        Reshard::ToGroup(ranks) => or(fields, key, ranks),
    }
}
