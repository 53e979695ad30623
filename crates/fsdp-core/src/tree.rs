//! The reduction tree: the one order in which gradients are added, everywhere.
//!
//! `T(n)` over leaves `0..n` is a leaf for `n = 1`, else `T(left) + T(right)`, where `left` holds the largest
//! power of two of leaves below `n`. For a power of two it is the perfect binary tree. Because a sum over
//! `shards` inside a sum over `rounds` inside a sum over `replicas` cuts a perfect tree into perfect
//! subtrees, the same bits come out for every mesh whose axes are powers of two (docs/numerics.md).
//!
//! Three realisations live here, all of the same tree: [`fold`] (recursive, for the oracle), [`Counter`]
//! (leaves in order, logarithmically many partial sums, for accumulation), [`Arrivals`] (leaves in any
//! order, for communicators).

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

/// Partial sums kept at most when `count` leaves are pushed into a [`Counter`], the incoming one included.
pub fn accumulators(count: usize) -> usize {
    if count <= 1 { 1 } else { count.ilog2() as usize + 1 }
}

/// Adds leaves that arrive in order, as a binary counter does: partial sum `k` holds `2^k` leaves.
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
    /// Adds the next leaf; `add(left, right)` is called for every pair that is complete.
    ///
    /// # Errors
    /// Those of `add`; the partial sums handed to it are lost.
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

    /// The sum of all leaves pushed so far, or `None` of none; the counter is empty afterwards.
    ///
    /// # Errors
    /// Those of `add`; the partial sums handed to it are lost.
    pub fn take_total<E>(&mut self, mut add: impl FnMut(T, T) -> Result<T, E>) -> Result<Option<T>, E> {
        let mut sum = None;
        for partial in self.levels.drain(..).flatten() {
            sum = Some(match sum {
                None => partial,
                // Higher levels hold earlier leaves: they are the left operand.
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

/// Adds leaves that arrive in any order, each as soon as its sibling is there.
#[derive(Debug)]
pub struct Arrivals<T> {
    /// Per node its parent and whether it is the left child; leaves first, then inner nodes, the root last.
    parents: Vec<(usize, bool)>,
    waiting: Vec<Option<T>>,
    arrived: Vec<bool>,
}

/// What to do after [`Arrivals::arrive`].
#[derive(Debug, PartialEq, Eq)]
pub enum Arrival<T> {
    /// The sibling is not there yet: the value is kept.
    Kept,
    /// Add `left` and `right`, in this order, and let the sum arrive at `node`.
    Add {
        /// The earlier operand.
        left: T,
        /// The later operand.
        right: T,
        /// Where the sum arrives.
        node: usize,
    },
    /// The value is the sum of all leaves.
    Done(T),
}

impl<T> Arrivals<T> {
    /// The tree `T(count)`; leaf `i` is node `i`.
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

    /// A value arrives at a node: a leaf, or the node that an earlier [`Arrival::Add`] named.
    ///
    /// # Panics
    /// When a value arrived at `node` before.
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
