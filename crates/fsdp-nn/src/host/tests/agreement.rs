//! Tests that bits are identical for every number of threads and every alignment.

use fsdp_core::DType;
use proptest::prelude::*;

use crate::conformance::{Sizes, bits_are_equal};
use crate::{HostMemory, HostOptions};

fn memory(threads: usize) -> HostMemory {
    HostMemory::new(HostOptions { threads, poison: true, ..HostOptions::default() }).unwrap()
}

fn check(sizes: Sizes) {
    let all = [DType::F32, DType::F64, DType::Bf16, DType::F16];
    let others: [(usize, &dyn Fn() -> HostMemory); 4] =
        [(1, &|| memory(1)), (0, &|| memory(2)), (3, &|| memory(3)), (7, &|| memory(8))];
    bits_are_equal(sizes, &all, &|| memory(1), &others);
}

#[test]
fn bits_do_not_depend_on_threads_or_alignment() {
    check(Sizes { rows: 1, inner: 1, outer: 1, seed: 1 });
    check(Sizes { rows: 131, inner: 67, outer: 33, seed: 1 });
    check(Sizes { rows: 300, inner: 256, outer: 515, seed: 1 });
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    #[test]
    fn random_sizes_match_bitwise_across_threads_and_alignments(rows in 1usize..80, inner in 1usize..40, outer in 1usize..40, seed in 0u64..1000) {
        check(Sizes { rows, inner, outer, seed });
    }
}
