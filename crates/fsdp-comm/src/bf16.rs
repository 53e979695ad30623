//! Rounding to bfloat16, the upper half of an `f32`.

/// The bits of the bfloat16 next to `value`, ties to even; not-a-number stays so.
pub(crate) fn to_bits(value: f32) -> u16 {
    let bits = value.to_bits();
    if value.is_nan() {
        // Quiet, so that cutting the payload can not leave an infinity.
        return (bits >> 16) as u16 | 0x40;
    }
    ((u64::from(bits) + 0x7fff + u64::from(bits >> 16 & 1)) >> 16) as u16
}

/// The value of the bfloat16 with these bits, exactly.
pub(crate) fn from_bits(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_bfloat16_comes_back() {
        for bits in 0..=u16::MAX {
            let value = from_bits(bits);
            if !value.is_nan() {
                assert_eq!(to_bits(value), bits);
            }
        }
        assert!(from_bits(to_bits(f32::NAN)).is_nan());
        assert!(from_bits(to_bits(f32::from_bits(0x7f80_0001))).is_nan());
    }

    #[test]
    fn ties_go_to_even_and_the_rest_to_the_nearest() {
        assert_eq!(to_bits(f32::from_bits(0x3f80_8000)), 0x3f80);
        assert_eq!(to_bits(f32::from_bits(0x3f81_8000)), 0x3f82);
        assert_eq!(to_bits(f32::from_bits(0x3f80_8001)), 0x3f81);
        assert_eq!(to_bits(f32::from_bits(0x3f80_7fff)), 0x3f80);
        assert_eq!(to_bits(f32::MAX), 0x7f80);
    }
}
