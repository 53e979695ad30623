//! Thread settings: the number of threads per operation, and the state that every computing thread needs.

use std::cell::Cell;
use std::sync::atomic::{AtomicI32, Ordering};

/// 0 if never set: libtorch's own default.
static INTRA_OP: AtomicI32 = AtomicI32::new(0);

thread_local! {
    /// The number of threads configured for this thread; -1 if none was yet.
    static CONFIGURED: Cell<i32> = const { Cell::new(-1) };
}

/// Sets the number of threads of each operation from now on, in every rank of this process. To be called before ranks
/// start: the number may determine how ATen splits a sum, and thus its bits.
pub fn set_intra_op(threads: usize) {
    INTRA_OP.store(i32::try_from(threads.max(1)).unwrap_or(i32::MAX), Ordering::Relaxed);
}

/// Prepares this thread for computing: disables the recording of gradients, and sets OpenMP's number of threads, which
/// is per thread.
pub(super) fn prepare() {
    let threads = INTRA_OP.load(Ordering::Relaxed);
    if CONFIGURED.get() == threads {
        return;
    }
    if CONFIGURED.get() < 0 {
        // Dropping the guard would enable recording again.
        std::mem::forget(tch::no_grad_guard());
    }
    if threads > 0 {
        tch::set_num_threads(threads);
    }
    CONFIGURED.set(threads);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prepared_thread_records_no_gradients() {
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
