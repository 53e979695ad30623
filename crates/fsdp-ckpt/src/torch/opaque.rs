//! Finds the opaque objects in a tree.

use std::collections::BTreeMap;

use super::Item;
use crate::checkpoint::{Global, Key, Nested, Nesting, Value, join, key_text};

/// Adds the names and classes of all opaque objects in a tree to `found`. The names begin with `path`.
pub(crate) fn add_opaque(root: &Item, path: &[Key], found: &mut BTreeMap<String, Global>) {
    in_item(root, &mut path.to_vec(), found);
}

fn in_item(item: &Item, path: &mut Vec<Key>, found: &mut BTreeMap<String, Global>) {
    if let Item::Opaque { class, .. } = item {
        found.insert(join(path), class.clone());
    }
    match (item, item.nesting()) {
        (Item::Value(value), _) => in_value(value, path, found),
        (Item::Object { .. }, _) => in_value(&item.to_value(), path, found),
        (_, Nesting::Dict(items)) => items.iter().for_each(|(key, item)| {
            within(path, key_of(key), |path| in_item(item, path, found));
        }),
        (Item::List(items) | Item::Tuple(items), _) => (0..).zip(items).for_each(|(index, item)| {
            within(path, Key::Index(index), |path| in_item(item, path, found));
        }),
        // A dict with keys that cannot be names is one value.
        (Item::Dict(_), _) => in_value(&item.to_value(), path, found),
        _ => {}
    }
}

fn in_value(value: &Value, path: &mut Vec<Key>, found: &mut BTreeMap<String, Global>) {
    match value {
        Value::Opaque(class) => drop(found.insert(join(path), class.clone())),
        Value::List(items) | Value::Tuple(items) | Value::Set(items) => {
            (0..).zip(items).for_each(|(index, item)| {
                within(path, Key::Index(index), |path| in_value(item, path, found));
            });
        }
        Value::Dict(items) => items.iter().for_each(|(key, item)| {
            within(path, key_of(key), |path| [key, item].map(|part| in_value(part, path, found)));
        }),
        Value::Object { args, state, .. } => {
            args.iter().chain(state.as_deref()).for_each(|part| in_value(part, path, found));
        }
        _ => {}
    }
}

/// The key as part of a name.
fn key_of(key: &Value) -> Key {
    Key::Name(key_text(key).unwrap_or_else(|| "?".to_owned()))
}

fn within<T>(path: &mut Vec<Key>, key: Key, visit: impl FnOnce(&mut Vec<Key>) -> T) {
    path.push(key);
    visit(path);
    path.pop();
}
