//! The test suite that every backend must pass.
//!
//! Each check is a function of a [`Subject`], which creates memories of the backend; it panics with its findings.
//! Results are compared with the host's kernels in double precision and with numbers from PyTorch (`tests/golden`),
//! within bounds derived from the number of roundings; gradients are compared with central differences.
//! [`operations`] runs the checks of single operations.
//!
//! Memories should fill unwritten storage with NaN if they can, which exposes reads of it.

mod adapter_cases;
mod attention;
mod bits;
mod calls;
mod cases;
mod copy_cases;
pub(crate) mod decoders;
mod delta_cases;
mod expert_cases;
mod finite_differences;
pub(crate) mod golden;
mod golden_operations;
mod gradients;
pub(crate) mod kit;
mod mixtures;
pub(crate) mod models;
mod packed;
mod precision;
pub(crate) mod routed;
mod router_cases;
pub(crate) mod safetensors;
pub(crate) mod sum_rows;

pub use attention::attention_is_precise;
pub use bits::bits_are_equal;
pub use calls::Calls;
pub use cases::Sizes;
pub use finite_differences::{
    adapter_gradients_match_finite_differences, model_gradients_match_finite_differences,
};
pub use golden::golden_models;
pub use golden_operations::golden_operations;
pub use gradients::{accumulation_adds, gradients_match_finite_differences};
pub use kit::host;
pub use mixtures::cut_mixtures_are_precise;
pub use packed::packed_weights_are_exact;
pub use precision::{outputs_are_precise, slots_may_have_any_float_dtype};
pub use sum_rows::rows_are_summed_by_the_tree;

use crate::backend::Backend;

/// A backend under test.
pub struct Subject<'a, M> {
    /// Creates a memory.
    pub memory: &'a dyn Fn() -> M,
    /// Whether attention without dropout rounds probabilities to the dtype of its operands before it multiplies them
    /// by values.
    pub rounds_probabilities: bool,
    /// Whether a gradient is summed in the same order for every dtype of its slot.
    pub adds_alike: bool,
}

/// Checks every operation, at sizes that span several blocks and are not multiples of them.
///
/// # Panics
/// If a check fails.
pub fn operations<M: Backend>(subject: &Subject<'_, M>) {
    for (rows, inner, outer) in [(1, 1, 1), (2, 3, 5), (150, 17, 7), (67, 64, 129)] {
        let sizes = Sizes { rows, inner, outer, seed: 5 };
        gradients_match_finite_differences(subject, sizes);
        outputs_are_precise(subject, sizes);
    }
    attention_is_precise(subject);
    cut_mixtures_are_precise(subject);
    packed_weights_are_exact(subject);
    accumulation_adds(subject, Sizes { rows: 13, inner: 10, outer: 11, seed: 2 });
    slots_may_have_any_float_dtype(subject, Sizes { rows: 9, inner: 12, outer: 7, seed: 3 });
    slots_may_have_any_float_dtype(subject, Sizes { rows: 20, inner: 600, outer: 530, seed: 3 });
}
