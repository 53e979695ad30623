//! Converts nested dicts and lists to flat names, and back.
//!
//! The rule is the one of PyTorch's distributed checkpoints since 2.4, applied to every nested format, so that names
//! agree across formats. Dict keys become text, and dicts are always descended into, so empty dicts vanish. A list is
//! descended into only if it contains, directly or in nested lists, a tensor or a dict; a tuple never is. Everything
//! else is a single leaf.
//!
//! Names are the steps joined by dots. Two leaves of the same name are an error: one of them could not be addressed.

use std::collections::{BTreeMap, BTreeSet};

use super::{Key, Value, join};
use crate::error::Fault;

/// Maximum number of missing list items that are filled with `None` when names are nested again.
const ABSENT_MAX: u64 = 4096;

/// The kind of a node in a nested state dict.
pub enum Nesting<'a, T> {
    /// A dict: keys and items in file order.
    Dict(&'a [(Value, T)]),
    /// A list.
    List(&'a [T]),
    /// A tensor.
    Tensor,
    /// Anything else.
    Other,
}

/// A node of a nested state dict.
pub trait Nested: Sized {
    /// Returns the kind of the node.
    fn nesting(&self) -> Nesting<'_, Self>;
}

impl Nested for Value {
    fn nesting(&self) -> Nesting<'_, Value> {
        match self {
            Value::Dict(items) => Nesting::Dict(items),
            Value::List(items) => Nesting::List(items),
            _ => Nesting::Other,
        }
    }
}

/// Returns the leaves of a nested state dict with their paths, in file order.
///
/// Recursion is as deep as the tree; parsers limit its depth.
///
/// # Errors
/// If the root is not a dict, a dict key is not text, an integer, a bool or `None`, or two leaves have the same name.
pub fn flatten<T: Nested>(root: &T) -> Result<Vec<(Vec<Key>, &T)>, Fault> {
    if !matches!(root.nesting(), Nesting::Dict(_)) {
        return Err(Fault::new("its root is not a dict; save a dict of names and tensors"));
    }
    let mut leaves = Vec::new();
    descend(root, &mut Vec::new(), &mut leaves)?;
    let mut names = BTreeSet::new();
    for (path, _) in &leaves {
        let name = join(path);
        if names.contains(&name) {
            let reason =
                format!("two items have the name `{name}`; rename one of them where the checkpoint is saved");
            return Err(Fault::new(reason));
        }
        names.insert(name);
    }
    Ok(leaves)
}

fn descend<'a, T: Nested>(
    node: &'a T,
    path: &mut Vec<Key>,
    leaves: &mut Vec<(Vec<Key>, &'a T)>,
) -> Result<(), Fault> {
    match node.nesting() {
        Nesting::Dict(items) => {
            for (key, item) in items {
                path.push(Key::Name(key_text(key).ok_or_else(|| unsupported_key(path, key))?));
                descend(item, path, leaves)?;
                path.pop();
            }
        }
        Nesting::List(items) if items.iter().any(has_tensor_or_dict) => {
            for (index, item) in items.iter().enumerate() {
                path.push(Key::Index(index as u64));
                descend(item, path, leaves)?;
                path.pop();
            }
        }
        _ => leaves.push((path.clone(), node)),
    }
    Ok(())
}

fn unsupported_key(path: &[Key], key: &Value) -> Fault {
    let (at, key) = (join(path), format!("{key:?}").chars().take(100).collect::<String>());
    let rule = "supported keys are text, integers, bools and None";
    Fault::unsupported(format!("the dict at `{at}` has the key {key}; {rule}"))
}

fn has_tensor_or_dict<T: Nested>(node: &T) -> bool {
    match node.nesting() {
        Nesting::Dict(_) | Nesting::Tensor => true,
        Nesting::List(items) => items.iter().any(has_tensor_or_dict),
        Nesting::Other => false,
    }
}

/// Formats the key like Python's `str`. `None` if a key of this type is not supported.
pub(crate) fn key_text(key: &Value) -> Option<String> {
    match key {
        Value::Str(text) => Some(text.clone()),
        Value::Int(number) => Some(number.to_string()),
        Value::Bool(true) => Some("True".to_owned()),
        Value::Bool(false) => Some("False".to_owned()),
        Value::None => Some("None".to_owned()),
        _ => None,
    }
}

/// A nested state dict with leaves of any kind.
#[derive(Clone, Debug, PartialEq)]
pub enum Tree<L> {
    /// A leaf.
    Leaf(L),
    /// A dict, in the order in which its keys first appeared.
    Dict(Vec<(String, Tree<L>)>),
    /// A list; items that no name refers to are `None`.
    List(Vec<Option<Tree<L>>>),
}

/// Rebuilds nested dicts and lists from flat paths; the root is a dict.
///
/// This reverses [`flatten`], except that empty dicts stay lost (list items that were empty dicts become `None`), and
/// keys that were not text stay text.
///
/// # Errors
/// If one path is equal to or the beginning of another, the same node would be both dict and list, or more than 4096
/// list items are missing.
pub fn nest<L>(leaves: impl IntoIterator<Item = (Vec<Key>, L)>) -> Result<Tree<L>, Fault> {
    let mut root = Some(Node::for_key(&Key::Name(String::new())));
    for (path, leaf) in leaves {
        place(&mut root, &path, leaf)?;
    }
    let root = root.expect("the root was made a dict");
    root.into_tree(&mut 0)
}

/// A node under construction. A child is `None` only until its leaf is placed.
enum Node<L> {
    Leaf(L),
    Dict { items: Vec<(String, Option<Node<L>>)>, places: BTreeMap<String, usize> },
    List(BTreeMap<u64, Option<Node<L>>>),
}

/// Places a leaf at a path below a container, and creates the containers on the way.
fn place<L>(root: &mut Option<Node<L>>, path: &[Key], leaf: L) -> Result<(), Fault> {
    let mut slot = root;
    for (depth, key) in path.iter().enumerate() {
        slot = match (slot.get_or_insert_with(|| Node::for_key(key)), key) {
            (Node::Dict { items, places }, Key::Name(name)) => {
                let index = *places.entry(name.clone()).or_insert(items.len());
                if index == items.len() {
                    items.push((name.clone(), None));
                }
                &mut items[index].1
            }
            (Node::List(items), Key::Index(index)) => items.entry(*index).or_insert(None),
            _ => return Err(two_kinds(&path[..depth], path)),
        };
    }
    if slot.is_some() {
        return Err(two_kinds(path, path));
    }
    *slot = Some(Node::Leaf(leaf));
    Ok(())
}

/// The error for a node that would have to be two of leaf, dict and list.
fn two_kinds(at: &[Key], name: &[Key]) -> Fault {
    let (at, name) = (join(at), join(name));
    let reason =
        format!("the name `{name}` conflicts with others: `{at}` would be two kinds of things; rename one");
    Fault::new(reason)
}

impl<L> Node<L> {
    /// Returns a container for keys of this kind.
    fn for_key(key: &Key) -> Node<L> {
        match key {
            Key::Name(_) => Node::Dict { items: Vec::new(), places: BTreeMap::new() },
            Key::Index(_) => Node::List(BTreeMap::new()),
        }
    }

    fn into_tree(self, absent: &mut u64) -> Result<Tree<L>, Fault> {
        let filled = "every child is filled when its leaf has been placed";
        match self {
            Node::Leaf(leaf) => Ok(Tree::Leaf(leaf)),
            Node::Dict { items, .. } => {
                let items = items
                    .into_iter()
                    .map(|(name, item)| Ok((name, item.expect(filled).into_tree(absent)?)))
                    .collect::<Result<_, _>>()?;
                Ok(Tree::Dict(items))
            }
            Node::List(items) => {
                let mut list = Vec::new();
                for (index, item) in items {
                    *absent = absent.saturating_add(index - list.len() as u64);
                    if *absent > ABSENT_MAX {
                        let reason = format!(
                            "a list begins with item {index}, or more than {ABSENT_MAX} items of lists are missing"
                        );
                        return Err(Fault::new(reason));
                    }
                    list.resize_with(index as usize, || None);
                    list.push(Some(item.expect(filled).into_tree(absent)?));
                }
                Ok(Tree::List(list))
            }
        }
    }
}

#[cfg(test)]
mod tests;
