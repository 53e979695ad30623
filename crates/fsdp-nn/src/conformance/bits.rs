//! Checks that bits are identical for every number of threads and every alignment.

use fsdp_core::DType;

use super::cases::{Sizes, all};
use super::kit::{Case, Kit};
use crate::backend::Backend;

/// Returns outputs and gradients as bits.
fn bits<M>(case: &Case<M>, kit: &Kit<M>) -> Vec<Vec<u64>> {
    let mut all = (case.backward)(kit, &case.inputs, &case.doutput);
    all.push((case.forward)(kit, &case.inputs));
    all.into_iter().map(|values| values.into_iter().map(f64::to_bits).collect()).collect()
}

/// Checks that every operation gives the same bits on a memory made by `first` as on those made by `others`, each
/// with the offset of operands within their buffers.
///
/// # Panics
/// If bits differ.
pub fn bits_are_equal<M: Backend>(
    sizes: Sizes,
    dtypes: &[DType],
    first: &dyn Fn() -> M,
    others: &[(usize, &dyn Fn() -> M)],
) {
    let cases = all(sizes);
    for &dtype in dtypes {
        for case in &cases {
            let expected = bits(case, &Kit::new(first(), dtype));
            for (index, (shift, other)) in others.iter().enumerate() {
                let kit = Kit { shift: *shift, ..Kit::new(other(), dtype) };
                let got = bits(case, &kit);
                assert!(expected == got, "{} {dtype}: memory {index}, shift {shift}", case.name);
            }
        }
    }
}
