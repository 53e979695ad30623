//! The reduction tree: the one order in which gradients are added, everywhere.
//!
//! `T(n)` over leaves `0..n` is a leaf for `n = 1`, otherwise `T(left) + T(right)`, where `left` has as many leaves as
//! the largest power of two below `n`. For a power of two it is the perfect binary tree. A sum over `shards` inside a
//! sum over `rounds` inside a sum over `replicas` splits a perfect tree into perfect subtrees, so every mesh whose axes
//! are powers of two produces the same bits (docs/numerics.md).
//!
//! This module has three implementations of the tree: [`fold`] (recursive, for the oracle), [`Counter`] (leaves in
//! order with logarithmically many partial sums, for accumulation) and [`Arrivals`] (leaves in any order, for
//! communicators).

/// Number of leaves in the left subtree of `T(count)`, for `count >= 2`.
fn left_leaves(count: usize) -> usize {
    count.next_power_of_two() / 2
}

/// Folds leaves `start..start + count` recursively: `leaf(i)` makes a leaf, `add(left, right)` an inner node.
///
/// # Panics
/// When `count` is zero.
pub fn fold<T>(
    start: usize,
    count: usize,
    leaf: &mut impl FnMut(usize) -> T,
    add: &mut impl FnMut(T, T) -> T,
) -> T {
    assert!(count > 0, "a reduction tree has at least one leaf");
    if count == 1 {
        return leaf(start);
    }
    let left = left_leaves(count);
    let a = fold(start, left, leaf, add);
    let b = fold(start + left, count - left, leaf, add);
    add(a, b)
}

/// Maximum number of partial sums when `count` leaves are pushed into a [`Counter`], including the incoming leaf.
pub fn accumulators(count: usize) -> usize {
    if count <= 1 { 1 } else { count.ilog2() as usize + 1 }
}

/// Adds leaves that arrive in order, like a binary counter: partial sum `k` holds `2^k` leaves.
#[derive(Clone, Debug)]
pub struct Counter<T> {
    levels: Vec<Option<T>>,
}

impl<T> Default for Counter<T> {
    fn default() -> Self {
        Self { levels: Vec::new() }
    }
}

impl<T> Counter<T> {
    /// Adds the next leaf; calls `add(left, right)` for every completed pair.
    ///
    /// # Errors
    /// The errors of `add`; the partial sums passed to it are lost.
    pub fn push<E>(&mut self, leaf: T, mut add: impl FnMut(T, T) -> Result<T, E>) -> Result<(), E> {
        let mut carry = leaf;
        for level in &mut self.levels {
            match level.take() {
                Some(left) => carry = add(left, carry)?,
                None => {
                    *level = Some(carry);
                    return Ok(());
                }
            }
        }
        self.levels.push(Some(carry));
        Ok(())
    }

    /// Returns the sum of all leaves pushed so far, or `None` if there are none, and empties the counter.
    ///
    /// # Errors
    /// The errors of `add`; the partial sums passed to it are lost.
    pub fn take_total<E>(&mut self, mut add: impl FnMut(T, T) -> Result<T, E>) -> Result<Option<T>, E> {
        let mut sum = None;
        for partial in self.levels.drain(..).flatten() {
            sum = Some(match sum {
                None => partial,
                // Higher levels hold earlier leaves, so they are the left operand.
                Some(right) => add(partial, right)?,
            });
        }
        Ok(sum)
    }

    /// Number of partial sums held.
    pub fn held(&self) -> usize {
        self.levels.iter().flatten().count()
    }
}

/// Adds leaves that arrive in any order, each as soon as its sibling has arrived.
#[derive(Debug)]
pub struct Arrivals<T> {
    /// For each node its parent and whether it is the left child; leaves first, then inner nodes, the root last.
    parents: Vec<(usize, bool)>,
    waiting: Vec<Option<T>>,
    arrived: Vec<bool>,
}

/// The next action after [`Arrivals::arrive`].
#[derive(Debug, PartialEq, Eq)]
pub enum Arrival<T> {
    /// The sibling has not arrived: the value is stored.
    Kept,
    /// Add `left` and `right`, in this order, and pass the sum to [`Arrivals::arrive`] for `node`.
    Add {
        /// The earlier operand.
        left: T,
        /// The later operand.
        right: T,
        /// The node of the sum.
        node: usize,
    },
    /// The value is the sum of all leaves.
    Done(T),
}

impl<T> Arrivals<T> {
    /// Creates the tree `T(count)`; leaf `i` is node `i`.
    ///
    /// # Panics
    /// When `count` is zero.
    pub fn new(count: usize) -> Self {
        let mut parents = vec![(usize::MAX, false); count];
        fold(0, count, &mut |leaf| leaf, &mut |left, right| {
            let node = parents.len();
            parents.push((usize::MAX, false));
            parents[left] = (node, true);
            parents[right] = (node, false);
            node
        });
        let waiting = parents.iter().map(|_| None).collect();
        let arrived = vec![false; parents.len()];
        Self { parents, waiting, arrived }
    }

    /// Passes a value to a node: a leaf, or the node named by an earlier [`Arrival::Add`].
    ///
    /// # Panics
    /// When `node` already received a value.
    pub fn arrive(&mut self, node: usize, value: T) -> Arrival<T> {
        assert!(!std::mem::replace(&mut self.arrived[node], true), "a node of the tree arrives once");
        let (parent, is_left) = self.parents[node];
        if parent == usize::MAX {
            return Arrival::Done(value);
        }
        let sibling = self
            .waiting
            .iter_mut()
            .zip(&self.parents)
            .enumerate()
            .find(|&(other, (_, &(up, _)))| other != node && up == parent)
            .and_then(|(_, (waiting, _))| waiting.take());
        match sibling {
            None => {
                self.waiting[node] = Some(value);
                Arrival::Kept
            }
            Some(other) => {
                let (left, right) = if is_left { (value, other) } else { (other, value) };
                Arrival::Add { left, right, node: parent }
            }
        }
    }
}

#[cfg(test)]
mod tests;
