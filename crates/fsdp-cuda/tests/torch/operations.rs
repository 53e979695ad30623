//! Runs the conformance suite of backends with the project's own kernels and with ATen's: every operation in every
//! dtype, and whole models.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use fsdp_core::DType;
use fsdp_cuda::torch::{Kernels, Torch, set_intra_op};
use fsdp_nn::HostMemory;
use fsdp_nn::conformance::{self, Sizes, Subject, host};

fn memory(kernels: Kernels) -> Torch<HostMemory> {
    Torch::new(Arc::new(host()), kernels)
}

/// Calls a check with both sets of kernels.
fn each(check: impl Fn(&Subject<'_, Torch<HostMemory>>)) {
    for kernels in [Kernels::Fused, Kernels::Aten] {
        check(&Subject {
            memory: &|| memory(kernels),
            rounds_probabilities: kernels == Kernels::Aten,
            adds_alike: false,
        });
    }
}

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden")
}

#[test]
fn operations_pass_conformance_suite() {
    each(conformance::operations);
}

#[test]
fn operations_match_pytorch() {
    each(|subject| conformance::golden_operations(subject, &golden()));
}

#[test]
fn models_match_pytorch() {
    each(|subject| conformance::golden_models(subject, &golden()));
}

#[test]
fn rows_are_summed_by_the_tree() {
    each(conformance::rows_are_summed_by_the_tree);
}

#[test]
fn adapter_gradients_match_finite_differences() {
    each(conformance::adapter_gradients_match_finite_differences);
}

#[test]
fn model_gradients_match_finite_differences() {
    each(conformance::model_gradients_match_finite_differences);
}

#[test]
fn randomly_sized_operations_and_gradients_are_precise() {
    for seed in 0..8 {
        let random = |site, end: usize| {
            1 + (fsdp_nn::random::uniform(fsdp_nn::random::key(&[seed, site]), 0) * end as f64) as usize
        };
        let sizes = Sizes { rows: random(1, 40), inner: random(2, 70), outer: random(3, 70), seed };
        each(|subject| conformance::outputs_are_precise(subject, sizes));
        let small = Sizes { rows: random(4, 24), inner: random(5, 20), outer: random(6, 20), seed };
        each(|subject| conformance::gradients_match_finite_differences(subject, small));
    }
}

/// On one thread, libtorch's kernels give the same bits at every aligned operand address.
#[test]
fn results_are_bitwise_equal_at_any_aligned_address() {
    set_intra_op(1);
    let sizes = Sizes { rows: 131, inner: 64, outer: 96, seed: 1 };
    for kernels in [Kernels::Fused, Kernels::Aten] {
        let other: &dyn Fn() -> Torch<HostMemory> = &|| memory(kernels);
        let dtypes = [DType::F32, DType::F64, DType::Bf16, DType::F16];
        conformance::bits_are_equal(sizes, &dtypes, other, &[(0, other), (16, other)]);
    }
}
