use proptest::prelude::*;

use super::*;

fn points(of: &[(usize, &[f64], f64, f64)]) -> Points {
    let point = |&(ranks, size, work, seconds): &(usize, &[f64], f64, f64)| Point {
        ranks,
        size: size.to_vec(),
        work,
        seconds,
    };
    [("x".to_owned(), of.iter().map(point).collect())].into()
}

fn ask(points: &Points, ranks: usize, size: &[f64], work: f64) -> Estimate {
    estimate(points, Question { what: "x", ranks, size, work }).unwrap()
}

fn measured(calls: Points) -> Measured {
    Measured {
        machine: "a \"machine\" of tests".into(),
        device: "cpu".into(),
        version: "1.2.3".into(),
        date: "2026-11-23T00:00:00Z".into(),
        threads: 2,
        issue: 1e-6,
        between_calls: 2e-6,
        calls,
        operations: Points::new(),
        collectives: points(&[(2, &[1024.0], 1024.0, 1e-5)]),
        steps: points(&[]),
    }
}

#[test]
fn rate_between_two_points_is_interpolated() {
    let points = points(&[(1, &[100.0], 100.0, 1e-4), (1, &[10_000.0], 10_000.0, 1e-3)]);
    let result = ask(&points, 1, &[1000.0], 1000.0);
    // Equally far from both points: the geometric mean of 1e-6 and 1e-7.
    assert!((result.seconds / (1000.0 * 1e-13_f64.sqrt()) - 1.0).abs() < 1e-9, "{result:?}");
    assert!((result.distance - 10.0_f64.ln()).abs() < 1e-9);
}

#[test]
fn points_with_nearest_rank_count_are_used() {
    let points = points(&[(1, &[100.0], 100.0, 1.0), (4, &[100.0], 100.0, 7.0)]);
    assert_eq!(ask(&points, 1, &[100.0], 100.0).seconds.round(), 1.0);
    assert_eq!(ask(&points, 3, &[100.0], 100.0).seconds.round(), 7.0);
    assert_eq!(estimate(&points, Question { what: "y", ranks: 1, size: &[1.0], work: 1.0 }), None);
}

#[test]
fn left_out_is_relative_error_of_leave_one_out_estimates() {
    // Points of a constant rate predict each other; one that takes twice as long is off by half, and pulls the others.
    let even =
        points(&[(1, &[10.0], 10.0, 10.0), (1, &[100.0], 100.0, 100.0), (1, &[1000.0], 1000.0, 1000.0)]);
    assert!(left_out(&even).unwrap() < 1e-9);
    let odd = points(&[(1, &[10.0], 10.0, 10.0), (1, &[100.0], 100.0, 200.0)]);
    // The estimates are 20 instead of 10, and 100 instead of 200: (10 + 100) / 210.
    assert!((left_out(&odd).unwrap() - 110.0 / 210.0).abs() < 1e-9, "{:?}", left_out(&odd));
    assert_eq!(left_out(&points(&[(1, &[10.0], 10.0, 10.0)])), None);
}

#[test]
fn measured_points_round_trip_through_toml() {
    let before = measured(points(&[(1, &[100.0, 3.0], 100.0, 1.5e-4), (2, &[7.0, 1.0], 0.0, 2e-6)]));
    #[derive(Deserialize)]
    struct File {
        measured: Measured,
    }
    let File { measured: after } = toml::from_str(&before.to_toml()).unwrap();
    assert_eq!(before, after);
    assert_eq!(before.len(), 3);
    assert!(!before.is_empty());
    assert_eq!(before.impossible(), None);
}

#[test]
fn impossible_values_are_named_by_key() {
    let wrong = measured(points(&[(1, &[100.0], 100.0, 1.0), (1, &[100.0], 100.0, -1.0)]));
    assert_eq!(wrong.impossible(), Some(("measured.calls.\"x\"[1].seconds".to_owned(), -1.0)));
    let wrong = measured(points(&[(0, &[100.0], 100.0, 1.0)]));
    assert_eq!(wrong.impossible(), Some(("measured.calls.\"x\"[0].ranks".to_owned(), 0.0)));
    let wrong = Measured { issue: f64::NAN, ..measured(Points::new()) };
    assert_eq!(wrong.impossible().unwrap().0, "measured.issue");
}

#[test]
fn step_time_is_scaled_by_median_measured_overhead() {
    let mut of = measured(Points::new());
    assert_eq!(of.whole("tcp", 2, 0.25), 0.25);
    of.steps.insert("tcp".into(), vec![Measured::step(2, 0.1, 0.12), Measured::step(4, 0.1, 0.2)]);
    assert!((of.whole("tcp", 2, 0.25) - 0.3).abs() < 1e-9);
    assert!((of.whole("tcp", 4, 0.25) - 0.5).abs() < 1e-9);
    assert_eq!(of.whole("threads", 4, 0.25), 0.25);
    // One disturbed point does not change the median.
    let disturbed = [Measured::step(2, 1.0, 1.2), Measured::step(2, 0.3, 9.0)];
    of.steps.get_mut("tcp").unwrap().extend(disturbed);
    assert!((of.whole("tcp", 2, 0.25) - 0.3).abs() < 1e-9);
}

proptest! {
    #[test]
    fn constant_rate_is_estimated_everywhere(
        sizes in prop::collection::vec((1.0f64..1e6, 1.0f64..1e6), 1..20),
        rate in 1e-12f64..1e-3,
        target in (1.0f64..1e6, 1.0f64..1e6),
    ) {
        let of: Vec<([f64; 2], f64)> = sizes.iter().map(|&(m, n)| ([m, n], m * n)).collect();
        let of: Vec<(usize, &[f64], f64, f64)> =
            of.iter().map(|(size, work)| (1, size.as_slice(), *work, work * rate)).collect();
        let result = ask(&points(&of), 1, &[target.0, target.1], target.0 * target.1).seconds;
        prop_assert!((result / (target.0 * target.1 * rate) - 1.0).abs() < 1e-9);
    }

    #[test]
    fn estimate_at_measured_point_matches_it(
        sizes in prop::collection::btree_set(0u32..12, 1..10),
        seconds in prop::collection::vec(1e-6f64..1e-5, 10),
    ) {
        let size: Vec<[f64; 1]> = sizes.iter().map(|&power| [f64::from(4u32).powi(power as i32)]).collect();
        let of: Vec<(usize, &[f64], f64, f64)> =
            size.iter().zip(&seconds).map(|(size, &seconds)| (1, size.as_slice(), 1.0, seconds)).collect();
        let all = points(&of);
        for &(_, size, _, seconds) in &of {
            // The nearest other point is 28 times as far: 9 such points together weigh less than one part in two
            // thousand.
            prop_assert!((ask(&all, 1, size, 1.0).seconds / seconds - 1.0).abs() < 2e-3);
        }
    }
}
