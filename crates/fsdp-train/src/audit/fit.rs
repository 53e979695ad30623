//! The combination of two vectors that is nearest to a third.

/// Sums of products over the elements of vectors `a`, `b` and `d`: they say how far any combination `x a + y b` is from `d`,
/// and which one is nearest.
///
/// Where a combination is expected, `d` has to be the difference from it, and `x` and `y` are changes of it: as a difference of
/// large sums, a small distance would be lost in their rounding.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Fit {
    pub(super) aa: f64,
    pub(super) ab: f64,
    pub(super) bb: f64,
    pub(super) ad: f64,
    pub(super) bd: f64,
    pub(super) dd: f64,
}

/// Part of the product of the squares of `a` and `b` below which they count as parallel.
const PARALLEL: f64 = 1e-12;

impl Fit {
    /// Adds an element of each vector.
    pub(super) fn add(&mut self, a: f64, b: f64, d: f64) {
        self.aa += a * a;
        self.ab += a * b;
        self.bb += b * b;
        self.ad += a * d;
        self.bd += b * d;
        self.dd += d * d;
    }

    /// The sums over the elements of both.
    pub(super) fn with(self, other: Fit) -> Fit {
        Fit {
            aa: self.aa + other.aa,
            ab: self.ab + other.ab,
            bb: self.bb + other.bb,
            ad: self.ad + other.ad,
            bd: self.bd + other.bd,
            dd: self.dd + other.dd,
        }
    }

    /// The distance of `x a + y b` from `d`.
    pub(super) fn distance(&self, [x, y]: [f64; 2]) -> f64 {
        let change = x * x * self.aa + y * y * self.bb + 2.0 * x * y * self.ab;
        (self.dd + change - 2.0 * (x * self.ad + y * self.bd)).max(0.0).sqrt()
    }

    /// The nearest combination; `None` if `a` and `b` are parallel, or one of them is zero.
    pub(super) fn nearest(&self) -> Option<[f64; 2]> {
        let determinant = self.aa * self.bb - self.ab * self.ab;
        (determinant > PARALLEL * self.aa * self.bb).then(|| {
            [
                (self.ad * self.bb - self.bd * self.ab) / determinant,
                (self.bd * self.aa - self.ad * self.ab) / determinant,
            ]
        })
    }

    /// The multiple of `x a + y b` that is nearest; `None` if that is zero.
    pub(super) fn along(&self, [x, y]: [f64; 2]) -> Option<f64> {
        let length2 = x * x * self.aa + y * y * self.bb + 2.0 * x * y * self.ab;
        (length2 > 0.0).then(|| (x * self.ad + y * self.bd) / length2)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn planted_combination_is_found(
            rows in prop::collection::vec([-1.0f64..1.0, -1.0..1.0, -1.0..1.0], 3..9),
            planted in [-3.0f64..3.0, -3.0..3.0],
        ) {
            let mut fit = Fit::default();
            let target = |a: f64, b: f64| planted[0] * a + planted[1] * b;
            rows.iter().for_each(|&[a, b, _]| fit.add(a, b, target(a, b)));
            if let Some(found) = fit.nearest().filter(|_| fit.aa * fit.bb - fit.ab * fit.ab > 1e-3) {
                prop_assert!((0..2).all(|at| (found[at] - planted[at]).abs() < 1e-9), "{found:?}");
            }
        }

        #[test]
        fn no_neighbor_of_the_nearest_is_nearer(
            rows in prop::collection::vec([-1.0f64..1.0, -1.0..1.0, -1.0..1.0], 3..9),
            [x, y] in [-3.0f64..3.0, -3.0..3.0],
        ) {
            let mut fit = Fit::default();
            rows.iter().for_each(|&[a, b, d]| fit.add(a, b, d));
            // The slow way: element by element.
            let distance = |[x, y]: [f64; 2]| -> f64 {
                rows.iter().map(|&[a, b, d]| (d - x * a - y * b).powi(2)).sum::<f64>().sqrt()
            };
            prop_assert!((fit.distance([x, y]) - distance([x, y])).abs() < 1e-9);
            if let Some(nearest) = fit.nearest() {
                prop_assert!(distance(nearest) <= distance([x, y]) + 1e-9);
            }
            if let Some(along) = fit.along([x, y]) {
                prop_assert!(distance([along * x, along * y]) <= distance([x, y]) + 1e-9);
            }
        }
    }
}
