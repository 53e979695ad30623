//! Checks flattening against a direct implementation of its rule, nesting as its inverse, and the errors of both.

use proptest::prelude::*;

use super::*;

/// A nested state dict whose tensors are numbers.
#[derive(Clone, Debug, PartialEq)]
enum Node {
    Tensor(u32),
    Tuple(Vec<Node>),
    Number(i64),
    List(Vec<Node>),
    Dict(Vec<(Value, Node)>),
}

impl Nested for Node {
    fn nesting(&self) -> Nesting<'_, Node> {
        match self {
            Node::Tensor(_) => Nesting::Tensor,
            Node::Tuple(_) | Node::Number(_) => Nesting::Other,
            Node::List(items) => Nesting::List(items),
            Node::Dict(items) => Nesting::Dict(items),
        }
    }
}

fn text(name: &str) -> Value {
    Value::Str(name.to_owned())
}

fn name(name: &str) -> Key {
    Key::Name(name.to_owned())
}

/// Trees with keys that are unique as text and contain no dots, so that no two leaves have the same name.
fn nodes() -> impl Strategy<Value = Node> {
    let leaf = prop_oneof![
        any::<u32>().prop_map(Node::Tensor),
        any::<i64>().prop_map(Node::Number),
        any::<u32>().prop_map(|t| Node::Tuple(vec![Node::Tensor(t), Node::Dict(vec![])])),
    ];
    leaf.prop_recursive(4, 32, 4, |inner| {
        let items = prop::collection::vec(inner.clone(), 0..4);
        prop_oneof![items.prop_map(Node::List), dicts(inner)]
    })
}

fn dicts(inner: impl Strategy<Value = Node>) -> impl Strategy<Value = Node> {
    prop::collection::vec((any::<bool>(), inner), 0..4).prop_map(|items| {
        let key =
            |(i, is_text): (usize, bool)| if is_text { text(&format!("k{i}")) } else { Value::Int(i as i64) };
        Node::Dict(
            items.into_iter().enumerate().map(|(i, (is_text, item))| (key((i, is_text)), item)).collect(),
        )
    })
}

/// Whether a list is descended into: a direct implementation of the rule.
fn is_descended(items: &[Node]) -> bool {
    items.iter().any(|item| match item {
        Node::Tensor(_) | Node::Dict(_) => true,
        Node::List(inner) => is_descended(inner),
        _ => false,
    })
}

/// The rest of a tree after empty dicts vanish and keys become text; `None` if nothing is left.
fn without_empty(node: &Node) -> Option<Tree<Node>> {
    match node {
        Node::Dict(items) => {
            let items: Vec<_> = items
                .iter()
                .filter_map(|(key, item)| {
                    let name = match key {
                        Value::Str(text) => text.clone(),
                        Value::Int(number) => format!("{number}"),
                        other => panic!("{other:?} is not generated"),
                    };
                    Some((name, without_empty(item)?))
                })
                .collect();
            (!items.is_empty()).then_some(Tree::Dict(items))
        }
        Node::List(items) if is_descended(items) => {
            let mut items: Vec<_> = items.iter().map(without_empty).collect();
            while items.last().is_some_and(Option::is_none) {
                items.pop();
            }
            (!items.is_empty()).then_some(Tree::List(items))
        }
        leaf => Some(Tree::Leaf(leaf.clone())),
    }
}

proptest! {
    #[test]
    fn flatten_then_nest_restores_tree_without_empty_containers(root in dicts(nodes())) {
        let flat = flatten(&root).unwrap();
        for (path, leaf) in &flat {
            prop_assert!(!matches!(leaf, Node::Dict(_) | Node::Tensor(_)) || matches!(leaf, Node::Tensor(_)));
            prop_assert!(matches!(path[0], Key::Name(_)));
        }
        let nested = nest(flat.iter().map(|(path, leaf)| (path.clone(), (*leaf).clone()))).unwrap();
        let expected = without_empty(&root).unwrap_or(Tree::Dict(vec![]));
        prop_assert_eq!(nested, expected);
    }
}

#[test]
fn flattened_names_follow_dcp_rule() {
    let state = Node::Dict(vec![
        (text("model"), Node::Dict(vec![(text("w.x"), Node::Tensor(1)), (Value::Int(7), Node::Number(2))])),
        (text("empty"), Node::Dict(vec![])),
        (text("numbers"), Node::List(vec![Node::Number(1), Node::List(vec![Node::Number(2)])])),
        (text("mixed"), Node::List(vec![Node::List(vec![Node::Tensor(3)]), Node::Number(4)])),
        (text("tuple"), Node::Tuple(vec![Node::Tensor(5)])),
        (text("groups"), Node::List(vec![Node::Dict(vec![(Value::Bool(true), Node::Number(6))])])),
    ]);
    let names: Vec<String> = flatten(&state).unwrap().iter().map(|(path, _)| join(path)).collect();
    assert_eq!(names, ["model.w.x", "model.7", "numbers", "mixed.0.0", "mixed.1", "tuple", "groups.0.True"]);
}

#[test]
fn flattens_plain_values() {
    let value = Value::Dict(vec![(text("a"), Value::Dict(vec![(Value::None, Value::Int(1))]))]);
    let leaves = flatten(&value).unwrap();
    assert_eq!(leaves, [(vec![name("a"), name("None")], &Value::Int(1))]);
    assert!(flatten(&Value::Dict(vec![])).unwrap().is_empty());
}

fn same_name(name: &str) -> Fault {
    Fault::new(format!("two items have the name `{name}`; rename one of them where the checkpoint is saved"))
}

fn kinds(at: &str, name: &str) -> Fault {
    Fault::new(format!(
        "the name `{name}` conflicts with others: `{at}` would be two kinds of things; rename one"
    ))
}

#[test]
fn flatten_rejects_bad_roots_keys_and_duplicate_names() {
    assert_eq!(
        flatten(&Node::Tensor(1)),
        Err(Fault::new("its root is not a dict; save a dict of names and tensors"))
    );
    let odd = Node::Dict(vec![(text("a"), Node::Dict(vec![(Value::Tuple(vec![]), Node::Number(1))]))]);
    let expected = "the dict at `a` has the key Tuple([]); supported keys are text, integers, bools and None";
    assert_eq!(flatten(&odd), Err(Fault::unsupported(expected)));
    let twice = Node::Dict(vec![
        (text("a.b"), Node::Number(1)),
        (text("a"), Node::Dict(vec![(text("b"), Node::Number(2))])),
    ]);
    assert_eq!(flatten(&twice), Err(same_name("a.b")));
    let twice = Node::Dict(vec![(text("1"), Node::Number(1)), (Value::Int(1), Node::Number(2))]);
    assert_eq!(flatten(&twice), Err(same_name("1")));
}

#[test]
fn nest_rejects_conflicting_paths() {
    let both = [(vec![name("a"), name("b")], 1), (vec![name("a"), Key::Index(0)], 2)];
    assert_eq!(nest(both), Err(kinds("a", "a.0")));
    let below_a_leaf = [(vec![name("a")], 1), (vec![name("a"), name("b")], 2)];
    assert_eq!(nest(below_a_leaf), Err(kinds("a", "a.b")));
    let above_a_leaf = [(vec![name("a"), name("b")], 1), (vec![name("a")], 2)];
    assert_eq!(nest(above_a_leaf), Err(kinds("a", "a")));
    assert!(nest([(vec![], 1)]).unwrap_err().to_string().contains("two kinds of things"));
    assert!(nest([(vec![Key::Index(0)], 1)]).unwrap_err().to_string().contains("two kinds of things"));
    let far = [(vec![name("a"), Key::Index(u64::MAX)], 1)];
    let expected =
        format!("a list begins with item {}, or more than 4096 items of lists are missing", u64::MAX);
    assert_eq!(nest(far), Err(Fault::new(expected)));
    let empty: [(Vec<Key>, u8); 0] = [];
    assert_eq!(nest(empty), Ok(Tree::Dict(vec![])));
}
