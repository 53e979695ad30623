use fsdp_config::MinLr;
use proptest::prelude::*;

use super::*;

const BASE: f64 = 3e-3;

fn warmup(steps: u64) -> Warmup {
    Warmup { steps, start_factor: 0.1 }
}

fn cosine(warmup_steps: u64, min_lr: f64) -> LrScheduleConfig {
    let min = MinLr::Absolute(min_lr);
    LrScheduleConfig { shape: LrShape::WarmupCosine { min }, warmup: warmup(warmup_steps) }
}

fn linear(warmup_steps: u64, min_lr: f64) -> LrScheduleConfig {
    let min = MinLr::Absolute(min_lr);
    LrScheduleConfig { shape: LrShape::Linear { min }, warmup: warmup(warmup_steps) }
}

fn assert_close(got: f64, expected: f64) {
    assert!((got - expected).abs() <= 1e-12 * expected.abs().max(1e-12), "got {got}, expected {expected}");
}

#[test]
fn constant_schedule_stays_at_base() {
    let config = LrScheduleConfig { shape: LrShape::Constant, warmup: warmup(0) };
    let schedule = LrSchedule::new(&config, BASE, 10);
    assert!((0..20).all(|step| schedule.lr(step) == BASE));
}

#[test]
fn warmup_rises_from_start_factor_to_base() {
    let schedule = LrSchedule::new(&cosine(20, 0.0), BASE, 200);
    assert_close(schedule.lr(0), 3e-4);
    assert_close(schedule.lr(10), 1.65e-3);
    assert_close(schedule.lr(19), 2.865e-3);
    assert_close(schedule.lr(20), BASE);
}

#[test]
fn cosine_quarter_points_match_hand_calculation() {
    let schedule = LrSchedule::new(&cosine(20, 1e-3), BASE, 220);
    assert_close(schedule.lr(120), 2e-3);
    assert_close(schedule.lr(70), 1e-3 + 2e-3 * (1.0 + 0.5f64.sqrt()) / 2.0);
    assert_close(schedule.lr(170), 1e-3 + 2e-3 * (1.0 - 0.5f64.sqrt()) / 2.0);
    assert_close(schedule.lr(220), 1e-3);
}

#[test]
fn linear_reaches_minimum_one_step_after_last() {
    let schedule = LrSchedule::new(&linear(0, 1e-3), BASE, 4);
    for (step, expected) in [3e-3, 2.5e-3, 2e-3, 1.5e-3, 1e-3, 1e-3].into_iter().enumerate() {
        assert_close(schedule.lr(step as u64), expected);
    }
}

#[test]
fn warmup_may_span_entire_run() {
    let schedule = LrSchedule::new(&cosine(10, 0.0), BASE, 10);
    assert_close(schedule.lr(9), BASE * (0.1 + 0.9 * 0.9));
}

#[test]
fn restarts_begin_at_base_and_last_cycle_ends_at_minimum() {
    let shape = LrShape::CosineWithRestarts { cycles: 7, min: MinLr::Ratio(0.1) };
    let schedule = LrSchedule::new(&LrScheduleConfig { shape, warmup: warmup(0) }, BASE, 49);
    for step in 0..49 {
        let is_base = (schedule.lr(step) - BASE).abs() < 1e-15;
        assert_eq!(is_base, step % 7 == 0, "step {step}");
        assert!(schedule.lr(step) > 0.1 * BASE);
    }
    assert_eq!(schedule.lr(49), 0.1 * BASE);
}

#[test]
fn stable_phase_lasts_from_warmup_to_decay() {
    let stable = |decay_share, warmup_steps| {
        let shape = LrShape::WarmupStableDecay {
            decay_share,
            decay: DecayCurve::OneMinusSqrt,
            min: MinLr::Ratio(0.0),
        };
        LrSchedule::new(&LrScheduleConfig { shape, warmup: warmup(warmup_steps) }, BASE, 100)
    };
    let schedule = stable(0.25, 10);
    assert!((10..=75).all(|step| schedule.lr(step) == BASE));
    assert_close(schedule.lr(76), BASE * 0.8);
    assert_close(schedule.lr(91), BASE * 0.2);
    assert_eq!(schedule.lr(100), 0.0);
    // The decay cannot take the whole run if a tenth of it is the warm-up.
    assert_eq!(stable(1.0, 10).lr(10), BASE);
    assert!(stable(1.0, 10).lr(11) < BASE);
}

#[test]
fn inverse_sqrt_halves_after_three_timescales_down_to_minimum() {
    let shape = LrShape::InverseSqrt { timescale: 20, min: MinLr::Ratio(0.2) };
    let schedule = LrSchedule::new(&LrScheduleConfig { shape, warmup: warmup(5) }, BASE, 100);
    assert_close(schedule.lr(5), BASE);
    assert_close(schedule.lr(65), BASE / 2.0);
    assert_eq!(schedule.lr(5000), 0.2 * BASE);
}

/// PyTorch's `LinearLR.get_lr`, one `scheduler.step()` after the other.
fn linear_recursive(base: f64, start: f64, end: f64, total: u64, step: u64) -> f64 {
    let mut lr = base * start;
    for t in 1..=step.min(total) {
        let (total, before) = (total as f64, (t - 1) as f64);
        lr *= 1.0 + (end - start) / (total * start + before * (end - start));
    }
    lr
}

/// PyTorch's `CosineAnnealingLR.get_lr`, one `scheduler.step()` after the other.
fn cosine_recursive(base: f64, min_lr: f64, t_max: u64, step: u64) -> f64 {
    let angle = |t: u64| PI * t as f64 / t_max as f64;
    (1..=step)
        .fold(base, |lr, t| (1.0 + angle(t).cos()) / (1.0 + angle(t - 1).cos()) * (lr - min_lr) + min_lr)
}

proptest! {
    #[test]
    fn closed_forms_match_pytorch_recursions(
        steps in 1u64..400, warmup_share in 0.0f64..1.0,
        start_factor in 0.01f64..=1.0, min_share in 0.0f64..1.0,
    ) {
        let warmup = Warmup { steps: (steps as f64 * warmup_share) as u64, start_factor };
        let min_lr = BASE * min_share;
        let linear = LrSchedule::new(&LrScheduleConfig { warmup, ..linear(0, min_lr) }, BASE, steps);
        let cosine = LrSchedule::new(&LrScheduleConfig { warmup, ..cosine(0, min_lr) }, BASE, steps);
        for step in 0..steps {
            let (line, curve) = match step.checked_sub(warmup.steps) {
                None => {
                    let lr = linear_recursive(BASE, start_factor, 1.0, warmup.steps, step);
                    (lr, lr)
                }
                Some(t) => (
                    linear_recursive(BASE, 1.0, min_share, steps - warmup.steps, t),
                    cosine_recursive(BASE, min_lr, steps - warmup.steps, t),
                ),
            };
            // Relative to the base where the recursion has cancelled towards a minimum of almost 0.
            prop_assert!((linear.lr(step) - line).abs() <= 1e-12 * line.max(1e-3 * BASE));
            prop_assert!((cosine.lr(step) - curve).abs() <= 1e-12 * curve.max(1e-3 * BASE));
        }
    }
}
