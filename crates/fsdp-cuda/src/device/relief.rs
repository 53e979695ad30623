//! A full device: who keeps memory there that nobody uses, and is asked for it.
//!
//! Every memory of this crate keeps storage for its next user, and so does libtorch's allocator. Each would fail with
//! the other's unused bytes in sight. So a memory that finds the device full asks all memories on it, and then whoever
//! has joined by [`ask_when_full`]; and [`give_back`] is for those to ask us. Whoever gives back waits for the device,
//! which is slow, and gets the same bytes again from the driver later: so it happens only where an allocation would fail.

use std::sync::{Arc, Mutex, Weak};

use super::lock::lock;
use super::pool::Pool;
use crate::ffi::driver::Gpu;

/// Makes somebody else give back what he does not use of a device; returns whether he had anything.
pub type Neighbour = fn(device: usize) -> bool;

static POOLS: Mutex<Vec<Weak<Pool>>> = Mutex::new(Vec::new());
static NEIGHBOURS: Mutex<Vec<Neighbour>> = Mutex::new(Vec::new());

/// From now on a memory that finds its device full asks `neighbour` too, once for every neighbour.
pub fn ask_when_full(neighbour: Neighbour) {
    let mut neighbours = lock(&NEIGHBOURS);
    if !neighbours.iter().any(|&known| std::ptr::fn_addr_eq(known, neighbour)) {
        neighbours.push(neighbour);
    }
}

/// Gives the driver what the memories on a device keep for their next users; returns whether there was anything.
/// Waits for the device.
pub fn give_back(device: usize) -> bool {
    // Nobody is asked under the lock: giving back waits for the device.
    let known = lock(&POOLS).clone();
    let pools = known.iter().filter_map(Weak::upgrade).filter(|pool| pool.device() == device);
    pools.map(|pool| pool.trim()).fold(false, |any, had| any | had)
}

/// Whether less than one `part`th of a device's memory is free.
pub fn is_scarce(device: usize, part: usize) -> bool {
    let memory = Gpu::open(device).and_then(|gpu| gpu.memory());
    memory.is_ok_and(|(free, total)| free < total / part)
}

/// Whether no memory of this process lies on another device.
pub fn is_only(device: usize) -> bool {
    lock(&POOLS).iter().filter_map(Weak::upgrade).all(|pool| pool.device() == device)
}

/// Asks the neighbours for what they do not use of a device; returns whether one had anything.
pub(super) fn ask_neighbours(device: usize) -> bool {
    let neighbours = lock(&NEIGHBOURS).clone();
    neighbours.iter().map(|neighbour| neighbour(device)).fold(false, |any, had| any | had)
}

/// Makes a pool one of those that are asked, for as long as it lives.
pub(super) fn join(pool: &Arc<Pool>) {
    let mut pools = lock(&POOLS);
    pools.retain(|known| known.strong_count() > 0);
    pools.push(Arc::downgrade(pool));
}
