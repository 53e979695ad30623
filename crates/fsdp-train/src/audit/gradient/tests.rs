use super::*;

#[test]
fn clipping_is_as_uncertain_as_the_norm() {
    let near =
        |got: f64, expected: f64| assert!((got - expected).abs() < 1e-9, "{got} instead of {expected}");
    near(clip_error(Some(1.0), 2.0, 2.0 * (1.0 + 1e-5)), 16.0 * 1e-5);
    near(clip_error(Some(1.0), 2.0, 2.0 * (1.0 - 1e-5)), 16.0 * 1e-5);
    // What is not clipped, or has no norm, is as exact as it was.
    near(clip_error(None, 2.0, 3.0), 0.0);
    near(clip_error(Some(3.0), 2.0, 2.0 * (1.0 + 1e-5)), 0.0);
    near(clip_error(Some(1.0), 0.0, 0.0), 0.0);
    // Just below the limit, the other program may clip.
    near(clip_error(Some(2.0001), 2.0, 2.0 * (1.0 + 1e-5)), 16.0 * 1e-5);
}
