use fsdp_core::model::ParamSpec;
use fsdp_core::scalars::Tallies;
use proptest::prelude::*;

use super::*;

/// Elements of each parameter.
const LEN: usize = 5;

/// Relative difference that precision makes.
const ERROR: f64 = 1e-5;

fn spec(count: usize) -> ModelSpec {
    let param = |index: usize| ParamSpec {
        fqn: format!("p{index}"),
        aliases: Vec::new(),
        shape: vec![LEN],
        trainable: true,
        expert: None,
        quantized: None,
        keep_f32: false,
    };
    let params = (0..count).map(param).collect();
    ModelSpec { params, modules: Vec::new(), blocks: Vec::new(), tallies: Tallies::default() }
}

type Gradient = Vec<[f64; LEN]>;

fn norm(gradient: &[[f64; LEN]]) -> f64 {
    gradient.iter().flatten().map(|value| value * value).sum::<f64>().sqrt()
}

fn times(gradient: &Gradient, factors: &[f64]) -> Gradient {
    gradient.iter().zip(factors).map(|(values, factor)| values.map(|value| factor * value)).collect()
}

/// What is found if `used` was used.
fn found(expected: &Gradient, used: &Gradient, grad_clip: Option<f64>) -> Option<Vec<Finding>> {
    found_within(expected, used, grad_clip, &vec![ERROR; expected.len()])
}

/// The same with the relative difference that precision makes in each parameter.
fn found_within(
    expected: &Gradient,
    used: &Gradient,
    grad_clip: Option<f64>,
    errors: &[f64],
) -> Option<Vec<Finding>> {
    let coefficient = clip(grad_clip, norm(expected));
    let of = |(expected, used): (&[f64; LEN], &[f64; LEN])| {
        let mut sums = Sums { clip: coefficient, ..Sums::default() };
        for (e, u) in expected.iter().zip(used) {
            let d = u - coefficient * e;
            let of_all = Sums { peak: e.abs(), abs: e.abs(), ..Sums::default() };
            sums = sums + Sums { uu: u * u, ee: e * e, dd: d * d, de: d * e, ..of_all };
        }
        sums
    };
    let sums: Vec<Sums> = expected.iter().zip(used).map(of).collect();
    let bound = |(sums, error): (&Sums, &f64)| error * sums.ee.sqrt() * coefficient;
    let bounds: Vec<f64> = sums.iter().zip(errors).map(bound).collect();
    let spec = spec(expected.len());
    let compared = Compared { spec: &spec, sums: &sums, bounds: &bounds, grad_clip };
    if compared.outside(compared.clip()).is_empty() {
        return Some(Vec::new());
    }
    compared.explained()
}

fn gradient(params: usize) -> impl Strategy<Value = Gradient> {
    let value = || prop_oneof![-2.0f64..-0.1, 0.1..2.0];
    prop::collection::vec(prop::array::uniform5(value()), params)
}

/// Parameters, and the group of each: more than half are in group 0.
fn grouped() -> impl Strategy<Value = (Gradient, Vec<usize>)> {
    (5usize..9).prop_flat_map(|params| {
        let others = (params - 1) / 2;
        let groups = prop::collection::vec(0usize..4, others).prop_map(move |mut groups| {
            groups.resize(params, 0);
            groups
        });
        (gradient(params), groups.prop_shuffle())
    })
}

proptest! {
    #[test]
    fn planted_factors_of_groups_are_recovered(
        (expected, groups) in grouped(),
        factors in prop::sample::subsequence(vec![0.0, 0.25, 0.5, 3.0, 7.3], 3),
        grad_clip in prop_oneof![Just(None), Just(Some(0.4))],
    ) {
        let planted: Vec<f64> = groups.iter().map(|&group| if group == 0 { 1.0 } else { factors[group - 1] }).collect();
        let scaled = times(&expected, &planted);
        let used = times(&scaled, &vec![clip(grad_clip, norm(&scaled)); scaled.len()]);
        let mut got: Vec<(Vec<String>, f64)> = found(&expected, &used, grad_clip)
            .expect("factors explain it")
            .into_iter()
            .map(|finding| (finding.params, finding.factor.unwrap()))
            .collect();
        // The slow way: the parameters of each group.
        let of_group = |group: usize| -> Vec<String> {
            (0..groups.len()).filter(|&index| groups[index] == group).map(|index| format!("p{index}")).collect()
        };
        let mut wanted: Vec<(Vec<String>, f64)> = (1..4).map(|group| (of_group(group), factors[group - 1])).collect();
        wanted.retain(|(params, _)| !params.is_empty());
        let order = |left: &(Vec<String>, f64), right: &(Vec<String>, f64)| left.1.total_cmp(&right.1);
        got.sort_by(order);
        wanted.sort_by(order);
        prop_assert_eq!(got.len(), wanted.len(), "{:?} instead of {:?}", got, wanted);
        for (got, wanted) in got.iter().zip(&wanted) {
            prop_assert_eq!(&got.0, &wanted.0);
            prop_assert!((got.1 - wanted.1).abs() <= 1e-9, "{} instead of {}", got.1, wanted.1);
        }
    }

    #[test]
    fn gradients_are_missing_in_most_parameters(
        expected in gradient(6),
        used in 0usize..4,
        grad_clip in prop_oneof![Just(None), Just(Some(0.4))],
    ) {
        let factors: Vec<f64> = (0..6).map(|index| f64::from(u8::from(index < used))).collect();
        let left = times(&expected, &factors);
        let used_gradient = times(&left, &[clip(grad_clip, norm(&left)); 6]);
        let findings = found(&expected, &used_gradient, grad_clip).expect("factors explain it");
        prop_assert_eq!(findings.len(), 1, "{:?}", findings);
        prop_assert_eq!(findings[0].cause, Cause::GradientMissing, "{}", findings[0].text);
        prop_assert_eq!(findings[0].params.len(), 6 - used);
    }

    #[test]
    fn parameters_without_a_factor_of_their_own_are_not_called_scaled(
        expected in gradient(6),
        planted in prop_oneof![Just(0.0), Just(0.2), Just(4.0)],
        noise in prop::collection::vec(-0.01f64..0.01, 6),
        is_small: bool,
    ) {
        // Only the first two have factors of their own, or all but these.
        let errors: Vec<f64> = (0..6).map(|index| if (index < 2) != is_small { 1e-2 } else { 0.3 }).collect();
        let factor = |index: usize| (if index < 2 { planted } else { 1.0 }) + noise[index];
        let used = times(&expected, &(0..6).map(factor).collect::<Vec<_>>());
        if let Some(findings) = found_within(&expected, &used, None, &errors) {
            let is_right = findings.is_empty() || findings.len() == 1 && findings[0].params == ["p0", "p1"];
            prop_assert!(is_right, "{:?}", findings);
        }
    }

    #[test]
    fn differences_within_the_bound_are_none(
        expected in gradient(4),
        noise in prop::collection::vec(-0.1f64..0.1, 4),
        grad_clip in prop_oneof![Just(None), Just(Some(0.4))],
    ) {
        let factors: Vec<f64> = noise.iter().map(|noise| 1.0 + noise * ERROR).collect();
        let sound = times(&expected, &[clip(grad_clip, norm(&expected)); 4]);
        prop_assert_eq!(found(&expected, &times(&sound, &factors), grad_clip), Some(Vec::new()));
    }

    #[test]
    fn another_limit_of_clipping_is_named(
        expected in gradient(4),
        stated in prop_oneof![Just(None), Just(Some(0.1)), Just(Some(0.4)), Just(Some(0.5))],
        limit in prop::sample::select(vec![0.05, 0.25, 0.2, 0.3, 0.8]),
    ) {
        let (norm, inverse) = (norm(&expected), norm(&expected) / limit);
        prop_assume!(norm > limit);
        // Where nothing is clipped, a factor of one whole number may be just that.
        let is_clipped = stated.is_some_and(|stated| norm > stated);
        prop_assume!(is_clipped || (inverse - inverse.round()).abs() > 1e-2);
        // Nor may it be that of another norm.
        let sizes = || expected.iter().flatten().map(|value| value.abs());
        let others = [sizes().sum::<f64>(), sizes().fold(0.0, f64::max)];
        prop_assume!(others.iter().all(|other| (stated.unwrap_or(1.0) / other * inverse - 1.0).abs() > 1e-3));
        let used = times(&expected, &[clip(Some(limit), norm); 4]);
        let findings = found(&expected, &used, stated).expect("a factor explains it");
        prop_assert_eq!(findings[0].cause, Cause::Clipping, "{}", findings[0].text);
        let text = format!("clipped to the norm {limit},");
        prop_assert!(findings[0].text.contains(&text), "{}", findings[0].text);
    }

    #[test]
    fn norms_of_other_kinds_are_named(expected in gradient(4), by_sum: bool) {
        let sizes = || expected.iter().flatten().map(|value| value.abs());
        let (other, what) = match by_sum {
            true => (sizes().sum::<f64>(), "the sum of all elements"),
            false => (sizes().fold(0.0, f64::max), "the largest element"),
        };
        let used = times(&expected, &[clip(Some(0.07), other); 4]);
        let findings = found(&expected, &used, Some(0.07)).expect("a factor explains it");
        prop_assert_eq!(findings.len(), 1);
        prop_assert_eq!(findings[0].cause, Cause::Clipping, "{}", findings[0].text);
        prop_assert!(findings[0].text.contains(what), "{}", findings[0].text);
    }

    #[test]
    fn groups_clipped_by_their_own_norm_are_clipping(
        (expected, groups) in grouped(),
        is_rest_clipped: bool,
        // Without effect where one group alone is clipped, which says nothing about a limit that nobody stated.
        other in prop_oneof![Just(None), Just(Some(0.5))],
        is_stated: bool,
    ) {
        let is_several = groups.contains(&1) && groups.contains(&2);
        let stated = if is_stated || !is_several { Some(0.05) } else { other };
        prop_assume!(groups.iter().any(|group| *group > 0));
        let members = |group: usize| -> Gradient {
            (0..groups.len()).filter(|&index| groups[index] == group).map(|index| expected[index]).collect()
        };
        // Groups of one norm have one factor, and look like one.
        let norms: Vec<f64> = (0..4).map(|group| norm(&members(group))).collect();
        prop_assume!((0..4).all(|left| (0..left).all(|right| {
            norms[left] == 0.0 || (norms[left] / norms[right] - 1.0).abs() > 1e-2
        })));
        let own = |&group: &usize| {
            if group == 0 && !is_rest_clipped { 1.0 } else { clip(Some(0.05), norms[group]) }
        };
        let factors: Vec<f64> = groups.iter().map(own).collect();
        let findings = found(&expected, &times(&expected, &factors), stated).expect("factors explain it");
        prop_assert_eq!(findings.len(), 1);
        prop_assert!(findings[0].text.contains("not by the norm of all together"), "{}", findings[0].text);
    }
}
