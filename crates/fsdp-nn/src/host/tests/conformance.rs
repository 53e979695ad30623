//! Runs the backend conformance suite on the host.

use std::path::Path;

use proptest::prelude::*;

use crate::HostMemory;
use crate::conformance::{self, Sizes, Subject, host};

fn subject() -> Subject<'static, HostMemory> {
    Subject { memory: &host, rounds_probabilities: false, adds_alike: true }
}

#[test]
fn operations_conform() {
    conformance::operations(&subject());
}

#[test]
fn operations_are_those_of_pytorch() {
    conformance::golden_operations(&subject(), &golden());
}

#[test]
fn models_are_those_of_pytorch() {
    conformance::golden_models(&subject(), &golden());
}

#[test]
fn gradients_of_adapters_are_slopes() {
    conformance::gradients_of_adapters_are_slopes(&subject());
}

#[test]
fn gradients_of_models_are_slopes() {
    conformance::gradients_of_models_are_slopes(&subject());
}

fn golden() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden")
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn gradients_of_random_sizes_are_slopes(
        rows in 1usize..24, inner in 1usize..20, outer in 1usize..20, seed in 0u64..1000,
    ) {
        conformance::gradients_are_slopes(&subject(), Sizes { rows, inner, outer, seed });
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    #[test]
    fn outputs_of_random_sizes_are_precise(
        rows in 1usize..40, inner in 1usize..70, outer in 1usize..70, seed in 0u64..1000,
    ) {
        conformance::outputs_are_precise(&subject(), Sizes { rows, inner, outer, seed });
    }
}
