//! How the values of a table are written: for each method of [`Reader`](super::reader::Reader) that reads one, a function.

use fsdp_core::schedule::Reshard;
use fsdp_core::wrap::WrapPolicy;
use serde::Serialize;
use serde::ser::SerializeStruct;

use super::eval::EvalSet;
use super::kind::NONE;
use super::named::Named;

pub(super) use self::{
    or as patterns, or as required, or as table, or as tables, or as unless, or_none as unless_none,
};

/// A value as it is.
pub(super) fn or<F: SerializeStruct>(
    fields: &mut F,
    key: &'static str,
    value: &impl Serialize,
) -> Result<(), F::Error> {
    fields.serialize_field(key, value)
}

/// A value, or [`NONE`], so that every key is in `resolved.toml`.
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

/// A table, if there is one.
pub(super) fn table_or_none<F: SerializeStruct>(
    fields: &mut F,
    key: &'static str,
    value: &Option<impl Serialize>,
) -> Result<(), F::Error> {
    value.as_ref().map_or(Ok(()), |value| or(fields, key, value))
}

/// A value by its name.
pub(super) fn named<F: SerializeStruct>(
    fields: &mut F,
    key: &'static str,
    value: &impl Named,
) -> Result<(), F::Error> {
    or(fields, key, &value.name())
}

/// Values by their names.
pub(super) fn names<F: SerializeStruct>(
    fields: &mut F,
    key: &'static str,
    values: &[impl Named],
) -> Result<(), F::Error> {
    let names: Vec<&str> = values.iter().map(|value| value.name()).collect();
    or(fields, key, &names)
}

/// A value by its name, or [`NONE`].
pub(super) fn named_or_none<F: SerializeStruct>(
    fields: &mut F,
    key: &'static str,
    value: &Option<impl Named>,
) -> Result<(), F::Error> {
    or(fields, key, &value.map_or(NONE, Named::name))
}

/// Units by class or by size: the one key that says it.
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

/// Sets by name; the one that a list of paths makes, as that list.
pub(super) fn eval_sets<F: SerializeStruct>(
    fields: &mut F,
    key: &'static str,
    sets: &[EvalSet],
) -> Result<(), F::Error> {
    match sets {
        [set] if *set == EvalSet::of_paths(set.paths.clone()) => or(fields, key, &set.paths),
        sets => or(fields, key, &sets),
    }
}

/// A boolean, `"auto"`, or the size of groups.
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
