//! Searches the size of a fault.

/// Part of the range of known places within which another one is the same.
const SAME: f64 = 1e-9;

/// How far outside of the known places the next one may be, in their range.
const OUTSIDE_MAX: f64 = 4.0;

/// The place where squared distances, known as `[place, distance2]`, seem to be smallest: the vertex of the parabola through
/// those around the smallest one. `None` if no distance is or seems to be below `promising`, or nothing new is left.
pub(super) fn next(known: &[[f64; 2]], promising: f64) -> Option<f64> {
    let mut known = known.to_vec();
    known.sort_by(|left, right| left[0].total_cmp(&right[0]));
    known.dedup_by(|left, right| left[0] == right[0]);
    if known.len() < 3 {
        return None;
    }
    let smallest = (0..known.len()).min_by(|left, right| known[*left][1].total_cmp(&known[*right][1]))?;
    let first = smallest.saturating_sub(1).min(known.len() - 3);
    let [[x0, y0], [x1, y1], [x2, y2]] = [known[first], known[first + 1], known[first + 2]];
    let (left, right) = ((y1 - y0) / (x1 - x0), (y2 - y1) / (x2 - x1));
    let curvature = (right - left) / (x2 - x0);
    let is_inside = smallest > 0 && smallest < known.len() - 1;
    if curvature <= 0.0 && !is_inside {
        return None;
    }
    let vertex = f64::midpoint(x0, x1) - left / (2.0 * curvature);
    let depth = y0 + left * (vertex - x0) + curvature * (vertex - x0) * (vertex - x1);
    if known[smallest][1].min(depth) >= promising {
        return None;
    }
    let range = x2 - x0;
    let vertex = vertex.clamp(x0 - OUTSIDE_MAX * range, x2 + OUTSIDE_MAX * range);
    known.iter().all(|[x, _]| (vertex - x).abs() > SAME * range).then_some(vertex)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn vertex_of_a_parabola_is_found_at_once(
            vertex in -5.0f64..5.0,
            (curvature, depth) in (0.1f64..9.0, 0.0f64..0.1),
            places in prop::sample::subsequence((0..12).collect::<Vec<i32>>(), 3),
        ) {
            let distance2 = |x: f64| depth + curvature * (x - vertex).powi(2);
            let known: Vec<[f64; 2]> = places.iter().map(|x| f64::from(*x)).map(|x| [x, distance2(x)]).collect();
            prop_assume!(known.iter().all(|[x, _]| (x - vertex).abs() > 1e-3));
            prop_assume!(vertex > known[0][0] - 4.0 * (known[2][0] - known[0][0]));
            let found = next(&known, f64::INFINITY).expect("there is one");
            prop_assert!((found - vertex).abs() < 1e-6, "{found} instead of {vertex}");
            prop_assert_eq!(next(&known, depth / 2.0), None);
        }

        #[test]
        fn size_is_found_in_a_few_steps(at in 0.3f64..3.7, bend in 0.0f64..0.4) {
            // A distance that grows unevenly on both sides, and ends at 1.
            let distance2 = |x: f64| {
                let far = (x - at) * (1.0 + bend * (x - at).tanh());
                far * far / (1.0 + far * far)
            };
            let mut known: Vec<[f64; 2]> = [0.0, 1.0, 2.0, 3.0, 4.0].map(|x| [x, distance2(x)]).into();
            for _ in 0..12 {
                let Some(x) = next(&known, 1.0) else { break };
                known.push([x, distance2(x)]);
            }
            let best = known.iter().map(|[_, y]| *y).fold(1.0, f64::min);
            prop_assert!(best < 1e-10, "{best}");
        }
    }

    #[test]
    fn two_places_say_nothing() {
        assert_eq!(next(&[[0.0, 1.0], [1.0, 0.5]], 1.0), None);
    }
}
