//! Threads: how many one operation uses, and what every thread that computes must have set.

use std::cell::Cell;
use std::sync::atomic::{AtomicI32, Ordering};

/// 0: never set, so libtorch's own default.
static INTRA_OP: AtomicI32 = AtomicI32::new(0);

thread_local! {
    /// The number of threads that this thread was told, -1 before it was told anything.
    static TOLD: Cell<i32> = const { Cell::new(-1) };
}

/// Sets how many threads each operation uses from now on, in every rank of this process. To be called before ranks
/// start: the number may decide how ATen cuts a sum, and with it bits.
pub fn set_intra_op(threads: usize) {
    INTRA_OP.store(i32::try_from(threads.max(1)).unwrap_or(i32::MAX), Ordering::Relaxed);
}

/// Prepares this thread to compute: no gradients are recorded, and OpenMP knows its number of threads (which it keeps per
/// thread).
pub(super) fn prepare() {
    let wanted = INTRA_OP.load(Ordering::Relaxed);
    if TOLD.get() == wanted {
        return;
    }
    if TOLD.get() < 0 {
        // Dropping the guard would turn recording on again.
        std::mem::forget(tch::no_grad_guard());
    }
    if wanted > 0 {
        tch::set_num_threads(wanted);
    }
    TOLD.set(wanted);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_thread_that_computes_records_gradients() {
        let recording =
            || tch::Tensor::ones([1], (tch::Kind::Float, tch::Device::Cpu)).set_requires_grad(true);
        std::thread::spawn(move || {
            prepare();
            assert!(!(recording() * 2.0).requires_grad());
            prepare();
            assert!(!(recording() * 2.0).requires_grad());
        })
        .join()
        .expect("nothing is recorded");
    }
}
