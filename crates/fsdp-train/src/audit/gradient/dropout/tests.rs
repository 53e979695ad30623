use proptest::prelude::*;

use super::*;

/// Parameters of a profile.
const PARAMS: usize = 12;

/// Profiles whose features are drawn from one distribution: the sum of some uniform numbers, times `width`.
fn profiles(count: usize, width: f64) -> impl Strategy<Value = Vec<Profile>> {
    let number = prop::array::uniform4(-1.0f64..1.0).prop_map(|parts| parts.iter().sum::<f64>() / 2.0);
    let feature = [number.clone(), number].prop_map(move |values| values.map(|value| width * value));
    let profile = prop::collection::vec(feature, PARAMS).prop_map(|features| Profile { mean: 0.0, features });
    prop::collection::vec(profile, count)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn profile_that_is_the_mean_of_others_is_usual(others in profiles(20, 0.3)) {
        let mean = |index: usize| {
            let of = |feature: usize| others.iter().map(|other| other.features[index][feature]).sum::<f64>() / 20.0;
            [of(0), of(1)]
        };
        let profile = Profile { mean: 0.0, features: (0..PARAMS).map(mean).collect() };
        prop_assert!(is_usual(&profile, &others));
    }

    #[test]
    fn profile_far_from_all_others_is_unusual(
        others in profiles(20, 0.3),
        mut profile in profiles(1, 0.3),
        feature in 0usize..2,
        at in 0usize..PARAMS,
    ) {
        // So many deviations in one parameter are some seven in the root mean square of all.
        profile[0].features[at][feature] += 0.3 * 0.577 * 24.0;
        prop_assert!(!is_usual(&profile[0], &others));
    }

    #[test]
    fn rate_follows_from_the_sizes_of_differences(rate in 0.02f64..0.5, other in 0.02f64..0.5) {
        // Squares of differences are as the odds of the rate.
        let of = |rate: f64| Profile { mean: 0.5 * (rate / (1.0 - rate)).ln(), features: Vec::new() };
        let found = of(rate).rate(&[of(other)], other).expect("somebody would use it");
        prop_assert!((found - rate).abs() < 1e-9, "{found} instead of {rate}");
        let tiny = Profile { mean: of(other).mean - 5.0, features: Vec::new() };
        prop_assert_eq!(tiny.rate(&[of(other)], other), None);
    }
}
