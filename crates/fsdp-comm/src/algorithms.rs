//! Collectives of bytes over a link, in place.
//!
//! | collective | algorithm | messages sent per rank | bytes sent per rank |
//! |---|---|---|---|
//! | all-gather, n a power of two | recursive doubling, farthest first | log2 n | (n - 1) / n of the result |
//! | all-gather, other n | ring | n - 1 | (n - 1) / n of the result |
//! | reduce-scatter, n a power of two | recursive halving, neighbors first | log2 n | (n - 1) / n of the input |
//! | reduce-scatter, other n | every part directly to its owner | n - 1 | (n - 1) / n of the input |
//! | all-reduce | reduce-scatter, then all-gather | both | both |
//! | all-to-all | exchange with every rank | n - 1 | (n - 1) / n of the input |
//! | broadcast | empty message to the next rank, binomial tree | 1, and up to log2 n | up to log2 n times the message |
//!
//! Sums follow the tree of [`fsdp_core::tree`] exactly, for every n. Halving starts with the nearest rank: after the
//! exchange with `rank ^ 2^k`, a rank holds sums over the aligned block of `2^(k+1)` ranks around it, and these blocks
//! are the nodes of the perfect tree. (The usual variant, which starts with the farthest rank, adds in another order.)
//! The largest messages thus go to the nearest ranks, which are usually on the same node; doubling is the mirror image
//! and has the same property. If n is not a power of two, the owner of a part adds the pieces in tree order as they
//! arrive.

use fsdp_core::DType;
use fsdp_core::comm::CommError;
use fsdp_core::tree::{Arrival, Arrivals};

use crate::link::scatter;
use crate::session::Session;
use crate::sums;

/// The data of one rank: slices of a buffer, one per segment.
pub(crate) type Part<'a> = Vec<&'a mut [u8]>;

/// Fills `parts`, one per rank; on entry only this rank's own part is filled. Lengths may differ between parts, but
/// every rank must pass the same ones.
///
/// # Errors
/// [`CommError`], as for all collectives.
///
/// # Panics
/// Panics if there is not one part per rank.
pub(crate) fn all_gather(session: &mut Session<'_>, parts: &mut [Part<'_>]) -> Result<(), CommError> {
    assert_eq!(parts.len(), session.size(), "an all-gather has one part per rank");
    if session.size().is_power_of_two() {
        all_gather_by_doubling(session, parts)
    } else {
        all_gather_around_ring(session, parts)
    }
}

/// Replaces this rank's part by its sum over all ranks (elements of `dtype`); other parts are overwritten.
///
/// # Errors
/// [`CommError`].
///
/// # Panics
/// Panics if there is not one part per rank.
pub(crate) fn reduce_scatter(
    session: &mut Session<'_>,
    dtype: DType,
    parts: &mut [Part<'_>],
) -> Result<(), CommError> {
    assert_eq!(parts.len(), session.size(), "a reduce-scatter has one part per rank");
    if session.size().is_power_of_two() {
        reduce_scatter_by_halving(session, dtype, parts)
    } else {
        reduce_scatter_directly(session, dtype, parts)
    }
}

/// Replaces `data` (elements of `dtype`) by its sum over all ranks.
///
/// # Errors
/// [`CommError`].
///
/// # Panics
/// Panics if the length of `data` is not a multiple of the element size.
pub(crate) fn all_reduce(session: &mut Session<'_>, dtype: DType, data: &mut [u8]) -> Result<(), CommError> {
    let (size, width) = (session.size(), dtype.size_bytes());
    assert!(data.len().is_multiple_of(width), "an all-reduce adds whole elements");
    let elements = data.len() / width;
    // Parts differ by one element at most; an element's sum does not depend on the part it falls into.
    let boundary = |part: usize| part * elements / size * width;
    let mut rest = data;
    let mut parts = Vec::with_capacity(size);
    for part in 0..size {
        let len = boundary(part + 1) - boundary(part);
        parts.push(vec![rest.split_off_mut(..len).expect("the last border is the end")]);
    }
    reduce_scatter(session, dtype, &mut parts)?;
    all_gather(session, &mut parts)
}

/// Exchanges `parts`, one per rank: part `i` becomes what rank `i` had for this rank.
///
/// # Errors
/// [`CommError`].
pub(crate) fn all_to_all(session: &mut Session<'_>, parts: &mut [Part<'_>]) -> Result<(), CommError> {
    let (rank, size) = (session.rank(), session.size());
    // In every step, pairs of ranks exchange their parts.
    for partner in (0..size).map(|step| (size + step - rank) % size).filter(|&partner| partner != rank) {
        let part = &mut parts[partner];
        session.with_scratch(len_bytes(part), |session, received| {
            let give: Vec<&[u8]> = part.iter().map(|slice| &**slice).collect();
            session.exchange(Some((partner, &give)), Some((partner, &mut [&mut *received])))?;
            scatter(received, part);
            Ok(())
        })?;
    }
    Ok(())
}

/// Copies the `message` of `root` to every rank.
///
/// # Errors
/// [`CommError`].
pub(crate) fn broadcast(session: &mut Session<'_>, root: usize, message: &mut [u8]) -> Result<(), CommError> {
    let (rank, size) = (session.rank(), session.size());
    if size > 1 {
        // The root decides from whom a rank receives, so ranks that disagree about it might wait for each other, or end
        // with different messages. An exchange with the neighbors first compares the calls.
        session.exchange(Some(((rank + 1) % size, &[])), Some(((rank + size - 1) % size, &mut [])))?;
    }
    let place = (rank + size - root) % size;
    let rank_at = |place: usize| (place + root) % size;
    // A place receives from the place without its highest set bit, and sends to the places with one additional, higher
    // bit.
    let highest = place.checked_ilog2();
    if let Some(bit) = highest {
        session.receive(rank_at(place - (1 << bit)), message)?;
    }
    let mut step = highest.map_or(1, |bit| 2 << bit);
    while place + step < size {
        session.send(rank_at(place + step), message)?;
        step *= 2;
    }
    Ok(())
}

fn all_gather_by_doubling(session: &mut Session<'_>, parts: &mut [Part<'_>]) -> Result<(), CommError> {
    let rank = session.rank();
    let mut distance = session.size() / 2;
    while distance > 0 {
        // This rank holds the parts of the ranks that agree with it in all bits below `2 * distance`; its partner holds
        // those that differ in the highest of these bits.
        let (mut held, mut missing) = (Vec::new(), Vec::new());
        for (place, part) in parts.iter_mut().enumerate() {
            match (place ^ rank) % (2 * distance) {
                0 => held.extend(part.iter().map(|slice| &**slice)),
                difference if difference == distance => {
                    missing.extend(part.iter_mut().map(|slice| &mut **slice))
                }
                _ => {}
            }
        }
        let partner = rank ^ distance;
        session.exchange(Some((partner, &held)), Some((partner, &mut missing)))?;
        distance /= 2;
    }
    Ok(())
}

fn all_gather_around_ring(session: &mut Session<'_>, parts: &mut [Part<'_>]) -> Result<(), CommError> {
    let (rank, size) = (session.rank(), session.size());
    let (left, right) = ((rank + size - 1) % size, (rank + 1) % size);
    for step in 1..size {
        // Forwards the part received in the previous step.
        let (held, missing) = ((rank + size + 1 - step) % size, (rank + size - step) % size);
        let [held, missing] = parts.get_disjoint_mut([held, missing]).expect("neighbors differ");
        let held: Vec<&[u8]> = held.iter().map(|slice| &**slice).collect();
        let mut missing: Part<'_> = missing.iter_mut().map(|slice| &mut **slice).collect();
        session.exchange(Some((right, &held)), Some((left, &mut missing)))?;
    }
    Ok(())
}

fn reduce_scatter_by_halving(
    session: &mut Session<'_>,
    dtype: DType,
    parts: &mut [Part<'_>],
) -> Result<(), CommError> {
    let rank = session.rank();
    let mut distance = 1;
    while distance < session.size() {
        let partner = rank ^ distance;
        // This rank still works on the parts whose ranks agree with it in all bits below `distance`; it gives those
        // that agree with the partner in the next bit to the partner.
        let (mut keep, mut give) = (Vec::new(), Vec::new());
        for (place, part) in parts.iter_mut().enumerate() {
            match (place ^ rank) % (2 * distance) {
                0 => keep.extend(part.iter_mut().map(|slice| &mut **slice)),
                difference if difference == distance => give.extend(part.iter().map(|slice| &**slice)),
                _ => {}
            }
        }
        session.with_scratch(len_bytes(&keep), |session, received| {
            session.exchange(Some((partner, &give)), Some((partner, &mut [&mut *received])))?;
            add(dtype, &mut keep, received);
            Ok(())
        })?;
        distance *= 2;
    }
    Ok(())
}

fn reduce_scatter_directly(
    session: &mut Session<'_>,
    dtype: DType,
    parts: &mut [Part<'_>],
) -> Result<(), CommError> {
    let (rank, size) = (session.rank(), session.size());
    let len_bytes = len_bytes(&parts[rank]);
    let mut tree = Arrivals::new(size);
    let mine = parts[rank].iter().flat_map(|slice| slice.iter().copied()).collect();
    let mut sum = arrive(dtype, &mut tree, rank, mine);
    for step in 1..size {
        // Every rank starts with a different owner, so that no owner is flooded.
        let (owner, from) = ((rank + step) % size, (rank + size - step) % size);
        let give: Vec<&[u8]> = parts[owner].iter().map(|slice| &**slice).collect();
        let mut piece = vec![0; len_bytes];
        session.exchange(Some((owner, &give)), Some((from, &mut [&mut piece])))?;
        sum = arrive(dtype, &mut tree, from, piece);
    }
    let sum = sum.expect("all leaves have arrived");
    scatter(&sum, &mut parts[rank]);
    Ok(())
}

/// Adds a leaf to the tree; returns the sum if it was the last leaf.
fn arrive(dtype: DType, tree: &mut Arrivals<Vec<u8>>, leaf: usize, value: Vec<u8>) -> Option<Vec<u8>> {
    let (mut node, mut value) = (leaf, value);
    loop {
        match tree.arrive(node, value) {
            Arrival::Kept => return None,
            Arrival::Done(sum) => return Some(sum),
            Arrival::Add { mut left, right, node: parent } => {
                sums::add(dtype, &mut left, &right);
                (node, value) = (parent, left);
            }
        }
    }
}

fn add(dtype: DType, sums: &mut [&mut [u8]], mut received: &[u8]) {
    for sum in sums {
        let theirs = received.split_off(..sum.len()).expect("as many bytes are received as kept");
        sums::add(dtype, sum, theirs);
    }
}

fn len_bytes(slices: &[&mut [u8]]) -> usize {
    slices.iter().map(|slice| slice.len()).sum()
}

#[cfg(test)]
mod tests;
