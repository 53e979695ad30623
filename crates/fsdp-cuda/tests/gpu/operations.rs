//! The suite of backends on the card: our kernels and ATen's.

use std::path::Path;

use fsdp_cuda::CudaMemory;
use fsdp_cuda::torch::{Kernels, Torch, set_deterministic};
use fsdp_nn::conformance::{self, Subject};

use crate::card::memory;

/// Calls a check with both sets of kernels. Attention is libtorch's either way.
fn each(check: impl Fn(&Subject<'_, Torch<CudaMemory>>)) {
    for kernels in [Kernels::Fused, Kernels::Aten] {
        check(&Subject { memory: &|| memory(kernels), rounds_probabilities: true, adds_alike: false });
    }
}

#[test]
fn operations_conform() {
    each(conformance::operations);
}

#[test]
fn attention_conforms_with_kernels_that_are_not_deterministic_too() {
    // The setting is the process's, so tests run one at a time. cuDNN's kernels are chosen only without it.
    struct Restored;
    impl Drop for Restored {
        fn drop(&mut self) {
            set_deterministic(true).unwrap_or_else(|error| panic!("{error}"));
        }
    }
    let memory = || memory(Kernels::Fused);
    drop(memory());
    set_deterministic(false).unwrap_or_else(|error| panic!("{error}"));
    let _restored = Restored;
    let subject = Subject { memory: &memory, rounds_probabilities: true, adds_alike: false };
    conformance::attention_is_precise(&subject);
}

#[test]
fn operations_and_models_are_those_of_pytorch() {
    let golden = Path::new("tests/golden");
    let golden = if golden.exists() { golden } else { Path::new("../../tests/golden") };
    each(|subject| conformance::golden_operations(subject, golden));
    each(|subject| conformance::golden_models(subject, golden));
}
