//! Recovers unused memory when a device is full.
//!
//! Every memory of this crate caches storage, and so does libtorch's allocator; without coordination, each would fail
//! while the other holds unused bytes. So a memory that finds its device full first trims all memories on it, then asks
//! the neighbors registered by [`ask_when_full`]; neighbors in turn call [`give_back`]. Giving back waits for the
//! device, which is slow, and the same bytes must be allocated again later, so it happens only where an allocation
//! would fail.

use std::sync::{Arc, Mutex, Weak};

use super::lock::lock;
use super::pool::Pool;
use crate::ffi::driver::Gpu;

/// A callback that returns another allocator's unused memory of a device to the driver; returns whether it had any.
pub type Neighbor = fn(device: usize) -> bool;

static POOLS: Mutex<Vec<Weak<Pool>>> = Mutex::new(Vec::new());
static NEIGHBORS: Mutex<Vec<Neighbor>> = Mutex::new(Vec::new());

/// Registers a neighbor that a memory asks when its device is full. Registering it again has no effect.
pub fn ask_when_full(neighbor: Neighbor) {
    let mut neighbors = lock(&NEIGHBORS);
    if !neighbors.iter().any(|&known| std::ptr::fn_addr_eq(known, neighbor)) {
        neighbors.push(neighbor);
    }
}

/// Returns the storage cached by the memories on a device to the driver; returns whether there was any. Waits for the
/// device.
pub fn give_back(device: usize) -> bool {
    // Not called under the lock, because giving back waits for the device.
    let known = lock(&POOLS).clone();
    let pools = known.iter().filter_map(Weak::upgrade).filter(|pool| pool.device() == device);
    pools.map(|pool| pool.trim()).fold(false, |any, freed| any | freed)
}

/// Whether less than 1/`part` of a device's memory is free.
pub fn is_scarce(device: usize, part: usize) -> bool {
    let memory = Gpu::open(device).and_then(|gpu| gpu.memory());
    memory.is_ok_and(|(free, total)| free < total / part)
}

/// Whether no memory of this process is on another device.
pub fn is_only(device: usize) -> bool {
    lock(&POOLS).iter().filter_map(Weak::upgrade).all(|pool| pool.device() == device)
}

/// Asks the neighbors for their unused memory of a device; returns whether one had any.
pub(super) fn ask_neighbors(device: usize) -> bool {
    let neighbors = lock(&NEIGHBORS).clone();
    neighbors.iter().map(|neighbor| neighbor(device)).fold(false, |any, freed| any | freed)
}

/// Registers a pool to be asked, for as long as it lives.
pub(super) fn register(pool: &Arc<Pool>) {
    let mut pools = lock(&POOLS);
    pools.retain(|known| known.strong_count() > 0);
    pools.push(Arc::downgrade(pool));
}
