//! Whether gradients were rounded to 16 bits before the update.

use fsdp_core::DType;
use fsdp_core::model::ParamId;
use fsdp_nn::model::Architecture;

use super::{BF16_UNIT, Judge};
use crate::audit::report::{Cause, Finding};
use crate::audit::scale::Compared;
use crate::audit::state::blocks;
use crate::error::TrainError;

/// A number of `bf16` is nearer to the next one than this part of the largest rounding; others seldom are.
const NEAR: f64 = 1.0 / 16.0;

impl<A: Architecture + Clone> Judge<'_, A> {
    /// Finds gradients that were rounded to bfloat16 though the run file has more bits: their elements, before clipping, are its
    /// numbers, and differ from the expected ones by no more than roundings.
    pub(super) fn by_rounding(&mut self, compared: &Compared<'_>) -> Result<Option<Finding>, TrainError> {
        if !self.is_as_rounded(compared) {
            return Ok(None);
        }
        let (spec, clip) = (self.spec, compared.clip());
        let (mut left2, mut used2) = (0.0, 0.0);
        for id in (0..spec.params.len()).map(ParamId).filter(|id| spec.param(*id).trainable) {
            for rows in blocks(spec, id) {
                for value in self.around.used(id, rows)? {
                    left2 += (value - clip * rounded(value / clip)).powi(2);
                    used2 += value * value;
                }
            }
        }
        let text = "gradients were rounded to bfloat16 before the update, and the run file has more bits; if that is meant, \
                    fsdp.reduce_dtype = \"bf16\" states it";
        let explains = 1.0 - left2 / compared.distance2(clip);
        let finding = Finding::of_all(Cause::UpdateRule, explains, text.to_owned());
        Ok((left2 <= (NEAR * BF16_UNIT).powi(2) * used2).then_some(finding))
    }

    /// Whether all differences are as small as those of gradients in bfloat16, where the run file has more bits.
    pub(super) fn is_as_rounded(&self, compared: &Compared<'_>) -> bool {
        let is_wide = |dtype: DType| matches!(dtype, DType::F32 | DType::F64);
        let clip = compared.clip();
        is_wide(self.param_dtype)
            && is_wide(self.reduce_dtype)
            && compared.sums.iter().zip(compared.bounds).all(|(sums, bound)| {
                sums.distance2(clip).sqrt() <= bound + 2.0 * BF16_UNIT * clip * sums.ee.sqrt()
            })
    }
}

/// The nearest number of `bf16`, if exponents had any size.
fn rounded(value: f64) -> f64 {
    /// Of a float: its exponent and mantissa. Of the mantissa, `bf16` has the first bits.
    const EXPONENT: u64 = 0x7ff << 52;
    const MANTISSA_STEPS: f64 = 128.0;
    let step = f64::from_bits(value.to_bits() & EXPONENT) / MANTISSA_STEPS;
    if step > 0.0 { (value / step).round_ties_even() * step } else { value }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn rounds_as_the_format(bits in 0x3000_0000u32..0x4f00_0000, is_negative: bool) {
            let value = f32::from_bits(bits | u32::from(is_negative) << 31);
            // As PyTorch does it.
            let bits = value.to_bits();
            let expected = f32::from_bits((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff_0000);
            prop_assert_eq!(rounded(f64::from(value)), f64::from(expected));
        }
    }

    #[test]
    fn zero_is_a_number_of_the_format() {
        assert_eq!(rounded(0.0), 0.0);
    }
}
