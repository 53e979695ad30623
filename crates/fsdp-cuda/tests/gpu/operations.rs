//! Runs the conformance suite of backends on the GPU, with the project's own kernels and with ATen's.

use std::path::Path;

use fsdp_core::memory::{Category, Memory, Slice, SliceMut};
use fsdp_core::{DType, Queue};
use fsdp_cuda::CudaMemory;
use fsdp_cuda::torch::{Kernels, Torch, attention_kernels, set_deterministic};
use fsdp_nn::backend::{AttentionDims, BatchFacts};
use fsdp_nn::conformance::{self, Calls, Subject};
use fsdp_nn::op::Scores;

use crate::card::memory;

/// Calls a check with both sets of kernels. Attention is always libtorch's.
fn each(check: impl Fn(&Subject<'_, Torch<CudaMemory>>)) {
    for kernels in [Kernels::Fused, Kernels::Aten] {
        check(&Subject { memory: &|| memory(kernels), rounds_probabilities: true, adds_alike: false });
    }
}

#[test]
fn operations_pass_conformance_suite() {
    each(conformance::operations);
}

#[test]
fn attention_is_precise_with_nondeterministic_kernels() {
    // The setting is process-wide, so tests run one at a time. libtorch chooses cuDNN's kernels only without it.
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
fn f32_grouped_queries_use_memory_efficient_kernel() {
    let memory = memory(Kernels::Fused);
    let dims = AttentionDims { batch: 1, seq: 160, heads: 4, kv_heads: 2, head_dim: 64 };
    let room = |len| memory.allocate(Category::Activation, DType::F32, len).unwrap();
    let mut qkv = room(dims.rows() * dims.packed());
    memory.zero(Queue::Compute, SliceMut::whole(&mut qkv)).unwrap();
    let (mut y, mut lse) = (room(dims.rows() * dims.heads * dims.head_dim), room(dims.rows() * dims.heads));
    let (y, lse) = (SliceMut::whole(&mut y), SliceMut::whole(&mut lse));
    memory.attention(dims, (Scores::default(), BatchFacts::default()), Slice::whole(&qkv), y, lse).unwrap();
    // Tests run one at a time, so this is the kernel of the call above. `attention_is_precise` checks the results.
    assert_eq!(attention_kernels(), Some("memory-efficient"));
}

#[test]
fn operations_and_models_match_pytorch() {
    let golden = Path::new("tests/golden");
    let golden = if golden.exists() { golden } else { Path::new("../../tests/golden") };
    each(|subject| conformance::golden_operations(subject, golden));
    each(|subject| conformance::golden_models(subject, golden));
}
