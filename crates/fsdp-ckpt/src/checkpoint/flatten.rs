//! Nested dicts and lists to flat names, and back.
//!
//! The rule is that of PyTorch's distributed checkpoints since 2.4, for every nested format, so that names agree
//! across formats. Keys of dicts become text and are descended always, so empty dicts vanish. A list is
//! descended only if somewhere in its lists there is a tensor or a dict; tuples never are. What is not descended
//! is one leaf.
//!
//! Names are the steps joined by dots. Two leaves of one name are an error: one of them could not be addressed.

use std::collections::{BTreeMap, BTreeSet};

use super::{Key, Value, join};
use crate::error::Fault;

/// Missing items of lists that are filled up when names are nested again.
const ABSENT_MAX: u64 = 4096;

/// What a node of a nested state dict is.
pub enum Nesting<'a, T> {
    /// A dict: keys and items in the order of the file.
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
    /// What it is.
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

/// The leaves of a nested state dict with their paths, in the order of the file.
///
/// Recursion is as deep as the tree; parsers limit that.
///
/// # Errors
/// When the root is no dict, a key of a dict is neither text, an integer, a bool nor `None`, or two leaves have
/// the same name.
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
    let rule = "keys that are text, integers, bools or None have names";
    Fault::unsupported(format!("the dict at `{at}` has the key {key}; {rule}"))
}

fn has_tensor_or_dict<T: Nested>(node: &T) -> bool {
    match node.nesting() {
        Nesting::Dict(_) | Nesting::Tensor => true,
        Nesting::List(items) => items.iter().any(has_tensor_or_dict),
        Nesting::Other => false,
    }
}

/// The key as Python's `str` gives it.
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
    /// A dict, in the order in which its keys first came.
    Dict(Vec<(String, Tree<L>)>),
    /// A list; `None` where no name leads to the item.
    List(Vec<Option<Tree<L>>>),
}

/// The nested dicts and lists of flat paths; the root is a dict.
///
/// What [`flatten`] has made comes back, except for what vanished there: empty dicts, and with them possibly
/// items of lists, which are `None`; and keys that were no text, which stay text.
///
/// # Errors
/// When one path is the beginning of another one or equal to it, the same place is both dict and list, or
/// more than 4096 items of lists are missing.
pub fn nest<L>(leaves: impl IntoIterator<Item = (Vec<Key>, L)>) -> Result<Tree<L>, Fault> {
    let mut root = Some(Node::for_key(&Key::Name(String::new())));
    for (path, leaf) in leaves {
        place(&mut root, &path, leaf)?;
    }
    let root = root.expect("the root was made a dict");
    root.into_tree(&mut 0)
}

/// A node that is being filled. A child is `None` only while a leaf is on its way to it.
enum Node<L> {
    Leaf(L),
    Dict { items: Vec<(String, Option<Node<L>>)>, places: BTreeMap<String, usize> },
    List(BTreeMap<u64, Option<Node<L>>>),
}

/// Puts a leaf at a path below a container, and containers on the way to it.
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

/// One place would have to be two of leaf, dict and list.
fn two_kinds(at: &[Key], name: &[Key]) -> Fault {
    let (at, name) = (join(at), join(name));
    let reason = format!(
        "the name `{name}` does not nest beside the others: `{at}` would be two kinds of things; rename one"
    );
    Fault::new(reason)
}

impl<L> Node<L> {
    /// The container that has such a key.
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
