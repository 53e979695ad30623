//! Numbers that somebody would write: whole factors, round norms.

/// Relative error up to which a factor counts as a whole number, or as that of clipping.
pub(super) const FACTOR_ERROR: f64 = 2e-3;

/// A number with a larger error may be any whole number.
const WHOLE_ERROR_MAX: f64 = 0.1;

/// The largest factor that is recognized as a number of ranks or micro-batches.
const WHOLE_MAX: f64 = 4096.0;

/// Relative error up to which a number counts as one of two digits.
pub(super) const DIGITS_ERROR: f64 = 1e-4;

/// Norms to which gradients are clipped most.
const USUAL_NORMS: [f64; 7] = [0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0];

/// The largest relative error up to which a number counts as a usual norm.
const USUAL_ERROR_MAX: f64 = 1e-2;

/// Whether a factor is the expected one.
pub(super) fn near(value: f64, expected: f64, error: f64) -> bool {
    (value - expected).abs() <= (FACTOR_ERROR * expected.abs()).max(error)
}

/// Whether somebody would write this number as a norm to clip to: it has at most two digits, or, where precision shows no
/// more, is one of the usual ones.
pub(super) fn is_round(value: f64, error: f64) -> bool {
    let written: f64 = format!("{value:.1e}").parse().unwrap_or(value);
    let is_near = |norm: f64, error: f64| (value - norm).abs() <= error * norm;
    is_near(written, DIGITS_ERROR)
        || error > DIGITS_ERROR && USUAL_NORMS.iter().any(|norm| is_near(*norm, error.min(USUAL_ERROR_MAX)))
}

/// Whether a factor, or one divided by it, is a whole number.
pub(super) fn is_whole(factor: f64, error: f64) -> bool {
    let whole = |value: f64| {
        let (rounded, error) = (value.round(), (error * value).max(DIGITS_ERROR));
        (1.0..=WHOLE_MAX).contains(&rounded) && error < WHOLE_ERROR_MAX && (value - rounded).abs() <= error
    };
    factor > 0.0 && (whole(factor) || whole(1.0 / factor))
}
