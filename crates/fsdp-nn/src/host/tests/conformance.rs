//! Runs the backend conformance suite on the host.

use std::path::Path;

use proptest::prelude::*;

use crate::HostMemory;
use crate::conformance::{self, Sizes, Subject, host};

fn subject() -> Subject<'static, HostMemory> {
    Subject { memory: &host, rounds_probabilities: false, adds_alike: true }
}

#[test]
fn operations_pass_conformance_suite() {
    conformance::operations(&subject());
}

#[test]
fn operations_match_pytorch() {
    conformance::golden_operations(&subject(), &golden());
}

#[test]
fn models_match_pytorch() {
    conformance::golden_models(&subject(), &golden());
}

#[test]
fn rows_are_summed_by_the_tree() {
    conformance::rows_are_summed_by_the_tree(&subject());
}

#[test]
fn adapter_gradients_match_finite_differences() {
    conformance::adapter_gradients_match_finite_differences(&subject());
}

#[test]
fn model_gradients_match_finite_differences() {
    conformance::model_gradients_match_finite_differences(&subject());
}

fn golden() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden")
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn gradients_at_random_sizes_match_finite_differences(
        rows in 1usize..24, inner in 1usize..20, outer in 1usize..20, seed in 0u64..1000,
    ) {
        conformance::gradients_match_finite_differences(&subject(), Sizes { rows, inner, outer, seed });
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    #[test]
    fn outputs_at_random_sizes_are_precise(
        rows in 1usize..40, inner in 1usize..70, outer in 1usize..70, seed in 0u64..1000,
    ) {
        conformance::outputs_are_precise(&subject(), Sizes { rows, inner, outer, seed });
    }
}
