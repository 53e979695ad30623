//! A nested state dict, put together again from paths.
//!
//! Dicts have text keys, in the order of the text. A list takes its items by index; where flattening left
//! nothing of an item (an empty dict), `None` stands in its place, as with PyTorch's own loader.

use std::collections::BTreeMap;

use crate::{
    checkpoint::{Key, join},
    error::PlanFault,
};

/// How many items of a list may be missing. Paths come from files; one huge index must not become a huge list.
const MISSING_ITEMS_MAX: u64 = 65_536;

/// A part of a state dict.
#[derive(Debug, PartialEq)]
pub(super) enum Node<T> {
    /// Nothing was put here yet.
    Vacant,
    /// A tensor or value.
    Leaf(T),
    /// A dict.
    Dict(BTreeMap<String, Node<T>>),
    /// A list, by index.
    List(BTreeMap<u64, Node<T>>),
}

impl<T> Node<T> {
    /// Puts a leaf at the end of a path.
    ///
    /// # Errors
    /// When something else is in the way.
    pub(super) fn insert(&mut self, path: &[Key], leaf: T) -> Result<(), PlanFault> {
        let mut node = self;
        for (depth, key) in path.iter().enumerate() {
            node = node
                .child(key)
                .ok_or_else(|| PlanFault::PathsCollide { name: join(path), at: join(&path[..depth]) })?;
        }
        match node {
            Node::Vacant => *node = Node::Leaf(leaf),
            _ => return Err(PlanFault::PathsCollide { name: join(path), at: join(path) }),
        }
        Ok(())
    }

    fn child(&mut self, key: &Key) -> Option<&mut Node<T>> {
        if let Node::Vacant = self {
            *self = match key {
                Key::Name(_) => Node::Dict(BTreeMap::new()),
                Key::Index(_) => Node::List(BTreeMap::new()),
            };
        }
        match (self, key) {
            (Node::Dict(items), Key::Name(name)) => Some(items.entry(name.clone()).or_insert(Node::Vacant)),
            (Node::List(items), Key::Index(index)) => Some(items.entry(*index).or_insert(Node::Vacant)),
            _ => None,
        }
    }

    /// Checks that no list misses more items than can be written.
    ///
    /// # Errors
    /// With the place of the list.
    pub(super) fn check_lists(&self, path: &mut Vec<Key>) -> Result<(), PlanFault> {
        match self {
            Node::Vacant | Node::Leaf(_) => {}
            Node::Dict(items) => {
                for (name, item) in items {
                    path.push(Key::Name(name.clone()));
                    item.check_lists(path)?;
                    path.pop();
                }
            }
            Node::List(items) => {
                let last = items.last_key_value().map_or(0, |(&index, _)| index);
                if last.saturating_sub(items.len() as u64) > MISSING_ITEMS_MAX {
                    return Err(PlanFault::ListTooSparse { at: join(path), items: items.len(), last });
                }
                for (&index, item) in items {
                    path.push(Key::Index(index));
                    item.check_lists(path)?;
                    path.pop();
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(text: &str) -> Vec<Key> {
        let key = |step: &str| match step.parse() {
            Ok(index) => Key::Index(index),
            Err(_) => Key::Name(step.to_owned()),
        };
        text.split('.').map(key).collect()
    }

    fn collision(name: &str, at: &str) -> PlanFault {
        PlanFault::PathsCollide { name: name.to_owned(), at: at.to_owned() }
    }

    #[test]
    fn refuses_a_leaf_in_the_way_of_another() {
        let mut tree = Node::Vacant;
        tree.insert(&path("a.b"), 1).unwrap();
        assert_eq!(tree.insert(&path("a.b"), 2), Err(collision("a.b", "a.b")));
        assert_eq!(tree.insert(&path("a.b.c"), 2), Err(collision("a.b.c", "a.b")));
        assert_eq!(tree.insert(&path("a"), 2), Err(collision("a", "a")));
    }

    #[test]
    fn refuses_a_dict_that_is_also_a_list() {
        let mut tree = Node::Vacant;
        tree.insert(&path("a.b"), 1).unwrap();
        assert_eq!(tree.insert(&path("a.0"), 2), Err(collision("a.0", "a")));
    }

    #[test]
    fn refuses_a_list_of_nearly_nothing() {
        let mut tree = Node::Vacant;
        tree.insert(&path("a.3"), 1).unwrap();
        assert_eq!(tree.check_lists(&mut Vec::new()), Ok(()));
        tree.insert(&path("a.18446744073709551615"), 1).unwrap();
        let expected = PlanFault::ListTooSparse { at: "a".to_owned(), items: 2, last: u64::MAX };
        assert_eq!(tree.check_lists(&mut Vec::new()), Err(expected));
    }
}
