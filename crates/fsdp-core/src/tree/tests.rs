use std::convert::Infallible;

use proptest::prelude::*;

use super::*;

/// An expression that records which leaves were added, and in which order.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Tree {
    Leaf(usize),
    Node(Box<Tree>, Box<Tree>),
}

fn node(left: Tree, right: Tree) -> Tree {
    Tree::Node(Box::new(left), Box::new(right))
}

/// `T(count)` over leaves from `start`, by its definition.
fn defined(start: usize, count: usize) -> Tree {
    if count == 1 {
        return Tree::Leaf(start);
    }
    let mut left = 1;
    while left * 2 < count {
        left *= 2;
    }
    node(defined(start, left), defined(start + left, count - left))
}

fn folded(start: usize, count: usize) -> Tree {
    fold(start, count, &mut Tree::Leaf, &mut node)
}

fn add(left: Tree, right: Tree) -> Result<Tree, Infallible> {
    Ok(node(left, right))
}

fn counted(leaves: impl IntoIterator<Item = Tree>) -> Tree {
    let mut counter = Counter::default();
    for leaf in leaves {
        counter.push(leaf, add).unwrap();
    }
    counter.take_total(add).unwrap().expect("there are leaves")
}

/// Passes the leaves in the given order.
fn arrived(leaves: &[Tree], order: &[usize]) -> Tree {
    let mut arrivals = Arrivals::new(leaves.len());
    let mut sum = None;
    for &leaf in order {
        let (mut node_index, mut value) = (leaf, leaves[leaf].clone());
        loop {
            match arrivals.arrive(node_index, value) {
                Arrival::Kept => break,
                Arrival::Add { left, right, node: parent } => {
                    (node_index, value) = (parent, node(left, right));
                }
                Arrival::Done(total) => {
                    assert!(sum.replace(total).is_none(), "the sum is complete once");
                    break;
                }
            }
        }
    }
    sum.expect("all leaves arrived")
}

fn in_order(leaves: &[Tree]) -> Tree {
    arrived(leaves, &(0..leaves.len()).collect::<Vec<_>>())
}

fn leaves(count: usize) -> Vec<Tree> {
    (0..count).map(Tree::Leaf).collect()
}

/// All orders of `0..count`.
fn permutations(count: usize) -> Vec<Vec<usize>> {
    if count == 0 {
        return vec![Vec::new()];
    }
    let shorter = permutations(count - 1);
    shorter
        .iter()
        .flat_map(|order| {
            (0..count).map(move |at| {
                let mut longer = order.clone();
                longer.insert(at, count - 1);
                longer
            })
        })
        .collect()
}

#[test]
fn all_implementations_build_defined_tree() {
    for count in 1..=130 {
        assert_eq!(folded(0, count), defined(0, count));
        assert_eq!(folded(7, count), defined(7, count));
        assert_eq!(counted(leaves(count)), defined(0, count));
        assert_eq!(in_order(&leaves(count)), defined(0, count));
    }
}

#[test]
fn power_of_two_gives_perfect_tree() {
    fn depth(tree: &Tree) -> (usize, usize) {
        match tree {
            Tree::Leaf(_) => (0, 0),
            Tree::Node(left, right) => {
                let (a, b) = (depth(left), depth(right));
                (a.0.min(b.0) + 1, a.1.max(b.1) + 1)
            }
        }
    }
    for exponent in 0..8 {
        assert_eq!(depth(&folded(0, 1 << exponent)), (exponent, exponent));
    }
}

#[test]
fn up_to_seven_leaves_in_any_order_give_same_tree() {
    for count in 1..=7 {
        for order in permutations(count) {
            assert_eq!(arrived(&leaves(count), &order), defined(0, count), "{order:?}");
        }
    }
}

proptest! {
    #[test]
    fn leaves_in_random_order_give_same_tree(
        order in (1usize..80).prop_flat_map(|count| Just((0..count).collect::<Vec<_>>()).prop_shuffle()),
    ) {
        prop_assert_eq!(arrived(&leaves(order.len()), &order), defined(0, order.len()));
    }
}

#[test]
fn counter_peak_matches_accumulators() {
    for count in 1..=300 {
        let mut counter = Counter::default();
        let mut most = 0;
        for pushed in 0..count {
            // Plus the incoming leaf.
            most = most.max(counter.held() + 1);
            counter.push(pushed, |left, _| Ok::<_, Infallible>(left)).unwrap();
            if pushed + 1 < count {
                assert!(counter.held() < accumulators(count));
            }
            assert_eq!(counter.held(), (pushed + 1usize).count_ones() as usize);
        }
        assert_eq!(most, accumulators(count), "{count} leaves");
    }
    assert_eq!(accumulators(0), 1);
}

#[test]
fn counter_restarts_after_take_total() {
    let mut counter = Counter::default();
    assert_eq!(counter.take_total(add).unwrap(), None);
    for _ in 0..2 {
        for leaf in leaves(5) {
            counter.push(leaf, add).unwrap();
        }
        assert_eq!(counter.take_total(add).unwrap(), Some(defined(0, 5)));
        assert_eq!(counter.held(), 0);
    }
}

#[test]
fn addition_errors_are_returned() {
    let mut counter = Counter::default();
    counter.push(1, |_, _| Err("not called")).unwrap();
    assert_eq!(counter.push(2, |_, _| Err("full")), Err("full"));
    let mut counter = Counter::default();
    for leaf in 0..3 {
        counter.push(leaf, |left: i32, right| Ok::<_, &str>(left + right)).unwrap();
    }
    assert_eq!(counter.take_total(|_, _| Err("full")), Err("full"));
}

#[test]
fn zero_leaves_or_duplicate_leaf_panics() {
    assert!(std::panic::catch_unwind(|| folded(0, 0)).is_err());
    assert!(std::panic::catch_unwind(|| Arrivals::<()>::new(0)).is_err());
    for (count, order) in [(2, vec![0, 0]), (4, vec![0, 1, 1]), (1, vec![0, 0])] {
        let twice = std::panic::catch_unwind(|| {
            let mut arrivals = Arrivals::new(count);
            for &leaf in &order {
                arrivals.arrive(leaf, ());
            }
        });
        assert!(twice.is_err(), "{order:?}");
    }
}
