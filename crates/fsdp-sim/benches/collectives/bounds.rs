//! Measures how fast this machine copies: the bound that collectives are compared with.

use std::hint::black_box;
use std::sync::Barrier;
use std::thread;
use std::time::Instant;

/// Bytes per `memcpy`, few enough that it does not bypass the caches.
const CHUNK_BYTES: usize = 256 << 10;

/// Rate of copying a block repeatedly, in bytes read and written.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CopyRate {
    bytes_per_s: f64,
}

impl CopyRate {
    /// The best of several runs in which up to `threads` threads each copy a part of a block of `bytes` bytes. The
    /// block stays in caches that are large enough for it.
    pub(crate) fn measure(threads: usize, bytes: usize) -> Self {
        let copies = ((64 << 20) / bytes).max(4);
        let run = |threads| copy_seconds(threads, bytes / threads, copies);
        let seconds = (0..7).flat_map(|_| [run(1), run(threads)]).fold(f64::INFINITY, f64::min);
        Self { bytes_per_s: (2 * copies * bytes) as f64 / seconds }
    }

    /// The shortest time for moving `bytes` bytes.
    pub(crate) fn seconds(&self, bytes: f64) -> f64 {
        bytes / self.bytes_per_s
    }

    /// Gigabytes per second.
    pub(crate) fn gb_per_s(&self) -> f64 {
        self.bytes_per_s / 1e9
    }
}

/// The time from the first thread's first copy to the last thread's last.
fn copy_seconds(threads: usize, bytes: usize, copies: usize) -> f64 {
    let barrier = Barrier::new(threads);
    let copy = || {
        let (src, mut dst) = (vec![1_u8; bytes], vec![0_u8; bytes]);
        dst.copy_from_slice(&src);
        barrier.wait();
        let start = Instant::now();
        for _ in 0..copies {
            for (dst, src) in dst.chunks_mut(CHUNK_BYTES).zip(src.chunks(CHUNK_BYTES)) {
                dst.copy_from_slice(black_box(src));
                black_box(dst);
            }
        }
        (start, Instant::now())
    };
    let spans: Vec<_> = thread::scope(|scope| {
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(copy)).collect();
        threads.into_iter().map(|thread| thread.join().expect("copying does not panic")).collect()
    });
    crate::span(&spans).as_secs_f64()
}
