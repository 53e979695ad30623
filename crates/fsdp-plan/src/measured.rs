//! Measurements of a machine, used in place of constants: points, and interpolation between them.
//!
//! A point is the duration of one call, operation or collective, with its sizes. Between points, the time per unit of
//! work (per floating-point operation of a product, or per byte) is interpolated over the logarithms of sizes, so the
//! overhead of small sizes is part of the points themselves.

use std::collections::BTreeMap;
use std::fmt::Write;

use serde::{Deserialize, Serialize};

/// The power with which the weight of a point falls with its distance.
const DISTANCE_POWER: f64 = 3.0;

/// Smallest distance that counts (a factor of e^0.05 in one size): nearer points all have the same weight.
const MIN_DISTANCE: f64 = 0.05;

const MICROSECONDS: f64 = 1e6;

/// All measurements of a machine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Measured {
    /// The machine's processor or card.
    pub machine: String,
    /// The device that computed, as named in run files (`run.device`).
    pub device: String,
    /// The version of this program that measured.
    pub version: String,
    /// Time of the measurement, as `2026-11-23T12:00:00Z`.
    pub date: String,
    /// Number of threads that computed, over all ranks of the machine.
    pub threads: usize,
    /// Seconds of host time to issue an operation of a schedule, in addition to the operation itself.
    pub issue: f64,
    /// Seconds per call within a block, in addition to the call itself: its buffers are allocated.
    pub between_calls: f64,
    /// Calls within blocks, by name and dtype of their values: `linear f32`.
    pub calls: Points,
    /// Operations of schedules that call no block, by name: `update`.
    pub operations: Points,
    /// Collectives, by name and transport: `all-gather tcp`. `ranks` are those of the group.
    pub collectives: Points,
    /// Whole steps, by transport of collectives. Size and work are the microseconds predicted from the other points;
    /// the difference is time that no other point covers, such as ranks waiting for each other. `ranks` are those of
    /// the world.
    pub steps: Points,
}

/// Points by the name of what was measured.
pub type Points = BTreeMap<String, Vec<Point>>;

/// One measurement: the least disturbed of several repetitions.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Point {
    /// Number of ranks of the machine that did the same at the same time.
    pub ranks: usize,
    /// Sizes: of calls as in [`Listed::size`](crate::Listed), of operations bytes and elements, of collectives bytes.
    pub size: Vec<f64>,
    /// Floating-point operations of products and attention; bytes of everything else.
    pub work: f64,
    /// Duration in seconds.
    pub seconds: f64,
}

/// The estimate for something that was not measured itself.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Estimate {
    /// Estimated duration in seconds.
    pub seconds: f64,
    /// Distance to the nearest point: Euclidean, over the logarithms of sizes.
    pub distance: f64,
}

/// A query for an estimate.
#[derive(Clone, Copy, Debug)]
pub struct Question<'a> {
    /// Name of the call, operation or collective: a key of [`Points`].
    pub what: &'a str,
    /// Number of ranks.
    pub ranks: usize,
    /// Sizes, as in [`Point::size`].
    pub size: &'a [f64],
    /// Work, as in [`Point::work`].
    pub work: f64,
}

/// Estimates a duration from points; `None` if there is none of that name. Only the points with the nearest number of
/// ranks count.
pub fn estimate(points: &Points, question: Question<'_>) -> Option<Estimate> {
    estimate_without(points, question, None)
}

/// As [`estimate`], without one of the points.
fn estimate_without(points: &Points, question: Question<'_>, excluded: Option<&Point>) -> Option<Estimate> {
    let others =
        points.get(question.what)?.iter().filter(|point| excluded.is_none_or(|excluded| excluded != *point));
    let (mut weights, mut sum, mut closest) = (0.0, 0.0, f64::INFINITY);
    for point in nearest(others, question.ranks) {
        let distance = distance(&point.size, question.size);
        let weight = distance.max(MIN_DISTANCE).powf(-DISTANCE_POWER);
        weights += weight;
        sum += weight * (point.seconds / point.work.max(1.0)).ln();
        closest = distance.min(closest);
    }
    (weights > 0.0)
        .then(|| Estimate { seconds: question.work.max(1.0) * (sum / weights).exp(), distance: closest })
}

/// The points with the nearest number of ranks.
pub(crate) fn nearest<'a>(
    points: impl Iterator<Item = &'a Point> + Clone,
    ranks: usize,
) -> impl Iterator<Item = &'a Point> {
    let rank_distance = |point: &&Point| (point.ranks as f64 / ranks as f64).ln().abs();
    let nearest = points.clone().min_by(|one, other| rank_distance(one).total_cmp(&rank_distance(other)));
    let nearest = nearest.map(|point| point.ranks);
    points.filter(move |point| Some(point.ranks) == nearest)
}

fn distance(one: &[f64], other: &[f64]) -> f64 {
    let squares = one.iter().zip(other).map(|(one, other)| (one.max(1.0) / other.max(1.0)).ln().powi(2));
    squares.sum::<f64>().sqrt()
}

/// How far points are from the estimates of all others of their name: the mean relative difference, weighted by
/// seconds. `None` if no name has several points.
pub fn left_out(points: &Points) -> Option<f64> {
    let (mut difference, mut total) = (0.0, 0.0);
    for (what, points_of) in points {
        for point in points_of {
            let Point { ranks, size, work, seconds } = point;
            let question = Question { what, ranks: *ranks, size, work: *work };
            if let Some(estimate) = estimate_without(points, question, Some(point)) {
                difference += (estimate.seconds - seconds).abs();
                total += seconds;
            }
        }
    }
    (total > 0.0).then(|| difference / total)
}

impl Measured {
    /// Number of points.
    pub fn len(&self) -> usize {
        self.tables().iter().flat_map(|(_, points)| points.values()).map(Vec::len).sum()
    }

    /// Whether there are no points.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Seconds of a whole step, given the seconds predicted from its operations: scaled by the median ratio of the
    /// measured steps with the nearest number of ranks.
    pub fn whole(&self, transport: &str, ranks: usize, seconds: f64) -> f64 {
        let steps = self.steps.get(transport).map_or(&[][..], Vec::as_slice);
        let mut ratios: Vec<f64> = nearest(steps.iter(), ranks)
            .map(|point| point.seconds * MICROSECONDS / point.work.max(1.0))
            .collect();
        ratios.sort_by(f64::total_cmp);
        seconds * ratios.get(ratios.len() / 2).unwrap_or(&1.0)
    }

    /// Creates the point of a whole step that took `seconds`, where the other points predict `predicted` seconds.
    pub fn step(ranks: usize, predicted: f64, seconds: f64) -> Point {
        let work = predicted * MICROSECONDS;
        Point { ranks, size: vec![work], work, seconds }
    }

    fn tables(&self) -> [(&'static str, &Points); 4] {
        [
            ("calls", &self.calls),
            ("operations", &self.operations),
            ("collectives", &self.collectives),
            ("steps", &self.steps),
        ]
    }

    /// Formats the measurements as tables of a cluster file, one line per point.
    pub fn to_toml(&self) -> String {
        // Formats a TOML string with JSON escapes, which are also valid in TOML.
        let text = |text: &str| toml::Value::from(text).to_string();
        let mut all = format!(
            "[measured]\nmachine = {}\ndevice = {}\nversion = {}\ndate = {}\nthreads = {}\nissue = {:.3e}\nbetween_calls = {:.3e}\n",
            text(&self.machine),
            text(&self.device),
            text(&self.version),
            text(&self.date),
            self.threads,
            self.issue,
            self.between_calls,
        );
        for (name, points) in self.tables() {
            let _ = write!(all, "\n[measured.{name}]\n");
            for (what, points) in points {
                let _ = writeln!(all, "{} = [", text(what));
                for Point { ranks, size, work, seconds } in points {
                    let size: Vec<String> = size.iter().map(|size| format!("{size:.1}")).collect();
                    let size = size.join(", ");
                    let _ = writeln!(
                        all,
                        "  {{ ranks = {ranks}, size = [{size}], work = {work:.6e}, seconds = {seconds:.4e} }},"
                    );
                }
                all.push_str("]\n");
            }
        }
        all
    }

    /// The first number outside of its allowed range, as its key and value.
    pub(crate) fn impossible(&self) -> Option<(String, f64)> {
        let is_time = |seconds: f64| seconds >= 0.0 && seconds.is_finite();
        for (key, seconds) in [("issue", self.issue), ("between_calls", self.between_calls)] {
            if !is_time(seconds) {
                return Some((format!("measured.{key}"), seconds));
            }
        }
        for (name, points) in self.tables() {
            for (what, points) in points {
                for (index, point) in points.iter().enumerate() {
                    let key = |key: &str| format!("measured.{name}.\"{what}\"[{index}].{key}");
                    let sizes = point.size.iter().map(|&size| ("size", size));
                    let positive = [("seconds", point.seconds), ("ranks", point.ranks as f64)];
                    let wrong = |&(_, value): &(&str, f64)| !(value > 0.0 && value.is_finite());
                    if let Some((of, value)) = positive.into_iter().chain(sizes).find(wrong) {
                        return Some((key(of), value));
                    }
                    if !is_time(point.work) {
                        return Some((key("work"), point.work));
                    }
                }
            }
        }
        (self.threads == 0).then(|| ("measured.threads".to_owned(), 0.0))
    }
}

#[cfg(test)]
mod tests;
