//! MXFP4: 4-bit floats in blocks of 32, each with a power of two (Open Compute Project, Microscaling Formats 1.0).

/// Elements with a common scale.
pub(super) const BLOCK: usize = 32;

/// The 4-bit floats: a sign, two bits of exponent and one of mantissa.
pub(super) const VALUES: [f32; 16] =
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// The power of two of a block; not a number for the code that says so.
pub(super) fn power(scale: u8) -> f32 {
    match scale {
        // A number below the smallest normal one.
        0 => f32::from_bits(1 << 22),
        u8::MAX => f32::NAN,
        exponent => f32::from_bits(u32::from(exponent) << 23),
    }
}

/// The exponent of a block by its largest magnitude: with it, that element is between 4 and 8.
pub(super) fn exponent(largest: f32) -> u8 {
    ((largest.to_bits() >> 23) as u8).saturating_sub(2)
}

/// The code of the nearest of the 4-bit floats; of two equally near ones, the one with an even code.
pub(super) fn nearest(value: f32) -> u8 {
    let size = value.abs();
    let above = [size > 0.25, size >= 0.75, size > 1.25, size >= 1.75, size > 2.5, size >= 3.5, size > 5.0];
    let code: u8 = above.into_iter().map(u8::from).sum();
    code | u8::from(value.is_sign_negative()) << 3
}
