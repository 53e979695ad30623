use super::*;

#[expect(clippy::cast_precision_loss, reason = "a small number of points")]
fn points(count: usize, value: impl Fn(usize) -> f64) -> Vec<(f64, f64)> {
    (0..count).map(|step| (step as f64, value(step))).collect()
}

fn chart(points: &[(f64, f64)], may_be_log: bool) -> Chart {
    let series = vec![Series::of("a run".to_owned(), 0, 0, points)];
    Chart {
        title: "Loss".to_owned(),
        unit: "cross-entropy",
        across: "step",
        may_be_log,
        has_zero: false,
        series,
    }
}

#[test]
fn decimation_bounds_points_and_keeps_peaks() {
    let mut all = points(1_000_000, |step| (step as f64 / 1e5).sin());
    all[123_456].1 = 50.0;
    all[654_321].1 = -50.0;
    let kept = decimated(&all, 0.0, 999_999.0);
    assert!(kept.len() <= 4 * (COLUMNS + 1), "{}", kept.len());
    assert!(kept.contains(&all[123_456]) && kept.contains(&all[654_321]));
    assert_eq!((kept[0], kept[kept.len() - 1]), (all[0], all[999_999]));
    assert!(kept.is_sorted_by(|a, b| a.0 < b.0), "the order of steps");
    assert!(chart(&all, false).svg().unwrap().len() < 200_000);
}

#[test]
fn few_points_are_all_drawn() {
    let all = points(7, |step| step as f64);
    assert_eq!(decimated(&all, 0.0, 6.0), all);
    assert_eq!(chart(&all, false).svg().unwrap().matches("<circle").count(), 7);
}

#[test]
fn non_finite_values_become_reported_gap() {
    let mut all = points(100, |_| 1.0);
    (40..50).for_each(|step| all[step].1 = f64::NAN);
    let svg = chart(&all, false).svg().unwrap();
    let path = svg.split("class=\"line c0\"").nth(1).unwrap().split("/>").next().unwrap();
    assert_eq!(path.matches('M').count(), 2, "{path}");
    assert!(svg.contains("10 values are not finite") && !svg.contains("NaN"), "{svg}");
    assert!(svg.contains("class=\"lost\""));
    assert_eq!(chart(&points(5, |_| f64::NAN), false).svg(), None);
    assert_eq!(chart(&[], false).svg(), None);
}

#[test]
fn wide_positive_range_uses_log_scale_if_allowed() {
    let all = points(6, |step| 10_f64.powi(i32::try_from(step).unwrap()));
    assert!(chart(&all, true).svg().unwrap().contains("log scale"));
    assert!(!chart(&all, false).svg().unwrap().contains("log scale"));
    let with_zero = points(6, |step| step as f64 * 1e6);
    assert!(!chart(&with_zero, true).svg().unwrap().contains("log scale"));
}

#[test]
fn axis_marks_are_round_and_in_range() {
    let marks = |low, high| axis([low, high].into_iter(), false, (0.0, 1.0)).unwrap().marks(5.0);
    assert_eq!(marks(0.0, 10.0), [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]);
    assert_eq!(marks(2.31, 5.62), [3.0, 4.0, 5.0]);
    assert_eq!(marks(0.0, 3e-4).len(), 4);
    for (low, high) in [(5.5, 5.5), (0.0, 0.0), (-1e300, 1e300), (1e17, 1e17 + 32.0), (3e-4, 3e-4)] {
        let marks = marks(low, high);
        assert!(marks.len() < 20 && marks.iter().all(|mark| mark.is_finite()), "{low} {high}: {marks:?}");
    }
    let log = axis([0.002, 5e4].into_iter(), true, (0.0, 1.0)).unwrap().marks(5.0);
    assert!(log.first().is_some_and(|&mark| (mark - 0.01).abs() < 1e-12) && log.len() <= 7, "{log:?}");
}

#[test]
fn axis_numbers_are_abbreviated() {
    let shown = [0.0, 0.5, 12.0, 1234.5, 12_000.0, 2_500_000.0, 0.0003, -2e-7].map(short);
    assert_eq!(shown, ["0", "0.5", "12", "1234.5", "12k", "2.5M", "3e-4", "-2e-7"]);
}

#[test]
fn series_name_cannot_close_script_tag() {
    let mut chart = chart(&points(3, |_| 1.0), false);
    chart.series[0].name = "</script><b>".to_owned();
    let svg = chart.svg().unwrap();
    assert_eq!(svg.matches("</script>").count(), 1);
    assert!(!svg.contains("<b>"));
}
