//! Collectives of bytes over a link.
//!
//! | collective | algorithm | messages sent per rank | bytes sent per rank |
//! |---|---|---|---|
//! | all-gather | ring | n - 1 | (n - 1) / n of the result |
//! | reduce-scatter, n a power of two | recursive halving, neighbours first | log2 n | (n - 1) / n of the input |
//! | reduce-scatter, other n | every part straight to its owner | n - 1 | (n - 1) / n of the input |
//! | all-reduce | reduce-scatter, then all-gather | both | both |
//! | broadcast | a greeting to the next rank, then a binomial tree | 1, and up to log2 n | up to log2 n times the message |
//!
//! Sums follow the tree of [`fsdp_core::tree`] exactly, for every n. Halving meets the neighbour first: after
//! the exchange with `rank ^ 2^k` a rank holds sums over the aligned block of `2^(k+1)` ranks around it, which
//! are the nodes of the perfect tree. (Halving that meets the farthest rank first, the usual kind, adds in
//! another order.) Without a perfect tree the owner of a part folds all n pieces itself, in rank order, and
//! holds at most log2 n + 1 of them.

use fsdp_core::DType;
use fsdp_core::comm::CommError;
use fsdp_core::tree::Counter;

use crate::session::Session;
use crate::sums;

/// Every rank's `mine`, in rank order; lengths may differ.
///
/// # Errors
/// [`CommError`], as all collectives.
pub fn all_gather(session: &mut Session<'_>, mine: Vec<u8>) -> Result<Vec<Vec<u8>>, CommError> {
    let (rank, size) = (session.rank(), session.size());
    let mut parts = vec![Vec::new(); size];
    parts[rank] = mine;
    let (left, right) = ((rank + size - 1) % size, (rank + 1) % size);
    for step in 1..size {
        // The part that came in the step before goes on.
        session.send(right, &parts[(rank + size + 1 - step) % size])?;
        parts[(rank + size - step) % size] = session.recv(left)?;
    }
    Ok(parts)
}

/// This rank's part of the sum of all ranks' `parts` (one per rank, elements of `dtype`).
///
/// # Errors
/// [`CommError`].
///
/// # Panics
/// When there is not one part per rank.
pub fn reduce_scatter(
    session: &mut Session<'_>,
    dtype: DType,
    parts: Vec<Vec<u8>>,
) -> Result<Vec<u8>, CommError> {
    assert_eq!(parts.len(), session.size(), "a reduce-scatter has one part per rank");
    if session.size().is_power_of_two() {
        reduce_scatter_by_halving(session, dtype, parts)
    } else {
        reduce_scatter_directly(session, dtype, parts)
    }
}

/// The sum of all ranks' `data` (elements of `dtype`).
///
/// # Errors
/// [`CommError`].
///
/// # Panics
/// When `data` is not whole elements.
pub fn all_reduce(session: &mut Session<'_>, dtype: DType, data: &[u8]) -> Result<Vec<u8>, CommError> {
    let (size, width) = (session.size(), dtype.size_bytes());
    assert!(data.len().is_multiple_of(width), "an all-reduce adds whole elements");
    let elements = data.len() / width;
    // Parts differ by one element at most; which element is in which part does not matter to its sum.
    let border = |part: usize| part * elements / size * width;
    let parts = (0..size).map(|part| data[border(part)..border(part + 1)].to_vec()).collect();
    let mine = reduce_scatter(session, dtype, parts)?;
    Ok(all_gather(session, mine)?.concat())
}

/// The `message` of `root`, on every rank; those of other ranks are ignored.
///
/// # Errors
/// [`CommError`].
pub fn broadcast(session: &mut Session<'_>, root: usize, message: Vec<u8>) -> Result<Vec<u8>, CommError> {
    let (rank, size) = (session.rank(), session.size());
    if size > 1 {
        // Who is heard depends on the root: ranks that do not agree about it might wait for each other, or end with
        // different messages. So each first hears what its neighbour calls.
        session.send((rank + 1) % size, &[])?;
        session.recv((rank + size - 1) % size)?;
    }
    let place = (rank + size - root) % size;
    let rank_at = |place: usize| (place + root) % size;
    // A place hears from the one without its highest bit, and tells those with one more, higher bit.
    let highest = place.checked_ilog2();
    let message = match highest {
        None => message,
        Some(bit) => session.recv(rank_at(place - (1 << bit)))?,
    };
    let mut step = highest.map_or(1, |bit| 2 << bit);
    while place + step < size {
        session.send(rank_at(place + step), &message)?;
        step *= 2;
    }
    Ok(message)
}

fn reduce_scatter_by_halving(
    session: &mut Session<'_>,
    dtype: DType,
    mut parts: Vec<Vec<u8>>,
) -> Result<Vec<u8>, CommError> {
    let rank = session.rank();
    let mut distance = 1;
    while distance < session.size() {
        let partner = rank ^ distance;
        // Held are the parts that agree with this rank in all bits below `distance`; of these, those that
        // agree with the partner in the next bit go to it.
        let held = (0..parts.len()).filter(|part| part % distance == rank % distance);
        let (keep, give): (Vec<_>, Vec<_>) = held.partition(|part| part & distance == rank & distance);
        let message: Vec<_> = give.iter().map(|&part| std::mem::take(&mut parts[part])).collect();
        session.send(partner, &message.concat())?;
        let len_bytes = keep.iter().map(|&part| parts[part].len()).sum();
        let received = session.recv_exact(partner, len_bytes)?;
        let mut rest = received.as_slice();
        for part in keep {
            let (theirs, after) = rest.split_at(parts[part].len());
            sums::add(dtype, &mut parts[part], theirs);
            rest = after;
        }
        distance *= 2;
    }
    Ok(parts.swap_remove(rank))
}

fn reduce_scatter_directly(
    session: &mut Session<'_>,
    dtype: DType,
    mut parts: Vec<Vec<u8>>,
) -> Result<Vec<u8>, CommError> {
    let (rank, size) = (session.rank(), session.size());
    for step in 1..size {
        // Ranks start at different owners, so that none is flooded.
        let owner = (rank + step) % size;
        session.send(owner, &std::mem::take(&mut parts[owner]))?;
    }
    let mine = parts.swap_remove(rank);
    let len_bytes = mine.len();
    let mut mine = Some(mine);
    let mut sum = Counter::default();
    let mut add = |mut left: Vec<u8>, right: Vec<u8>| {
        sums::add(dtype, &mut left, &right);
        Ok(left)
    };
    for from in 0..size {
        let piece = match mine.take_if(|_| from == rank) {
            Some(mine) => mine,
            None => session.recv_exact(from, len_bytes)?,
        };
        sum.push(piece, &mut add)?;
    }
    Ok(sum.finish(add)?.expect("a group has a rank"))
}

#[cfg(test)]
mod tests;
