//! Renames parameters in the settings and states of an optimizer that are no tensors.

use std::collections::{BTreeMap, BTreeSet};

use super::parameter;
use crate::{
    checkpoint::{Checkpoint, Object, Role, Value, join, with_parameter},
    error::Error,
};

impl Checkpoint {
    /// Renames parameters in values of the optimizer. A parameter may become several, and several may become one.
    ///
    /// # Errors
    /// [`Error::BadRequest`] if several that become one have different values, or are members of different groups.
    pub(super) fn rename_values(
        &mut self,
        renamed: impl Fn(&str) -> Option<Vec<String>>,
    ) -> Result<(), Error> {
        let mut values: BTreeMap<String, Object> = BTreeMap::new();
        let mut members = BTreeSet::new();
        for (name, mut object) in std::mem::take(&mut self.values) {
            if object.role != Role::Optimizer {
                values.insert(name, object);
                continue;
            }
            let mut new_members = BTreeSet::new();
            rename_members(&mut object.value, &renamed, &mut new_members);
            if let Some(twice) = new_members.iter().find(|member| members.contains(*member)) {
                return Err(self.refused(format!(
                    "the experts of `{twice}` are in different groups of the optimizer, so they cannot be stacked"
                )));
            }
            members.extend(new_members);
            let found = parameter(&object.path, object.role);
            let Some((span, names)) = found.and_then(|(span, name)| Some((span, renamed(&name)?))) else {
                values.insert(name, object);
                continue;
            };
            for new in names {
                let path = with_parameter(&object.path, span.clone(), &new);
                let held = values.entry(join(&path)).or_insert_with(|| Object { path, ..object.clone() });
                if held.value != object.value {
                    let reason = format!(
                        "`{name}` differs from that of other experts, and stacked experts have only one of it"
                    );
                    return Err(self.refused(reason));
                }
            }
        }
        self.values = values;
        Ok(())
    }
}

/// Renames parameters in the list of a group, at any depth; returns the new names.
fn rename_members(
    value: &mut Value,
    renamed: &impl Fn(&str) -> Option<Vec<String>>,
    members: &mut BTreeSet<String>,
) {
    match value {
        Value::List(items) | Value::Tuple(items) => {
            let mut all: Vec<Value> = Vec::with_capacity(items.len());
            for mut item in std::mem::take(items) {
                let new = if let Value::Str(name) = &item { renamed(name) } else { None };
                let Some(names) = new else {
                    rename_members(&mut item, renamed, members);
                    all.push(item);
                    continue;
                };
                // Several members that become one are kept once.
                let new = names.into_iter().filter(|name| members.insert(name.clone()));
                all.extend(new.map(Value::Str));
            }
            *items = all;
        }
        Value::Dict(items) => items.iter_mut().for_each(|(_, item)| rename_members(item, renamed, members)),
        _ => {}
    }
}
