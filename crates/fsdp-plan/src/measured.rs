//! What was measured on a machine, in place of constants: points, and what lies between them.
//!
//! A point is what one call, operation or collective took, with its sizes. Between points the time of a unit of work (an
//! operation of a product, a byte) is interpolated over the logarithms of sizes, so that what small sizes cost beside their
//! work is in the points themselves.

use std::collections::BTreeMap;
use std::fmt::Write;

use serde::{Deserialize, Serialize};

/// How fast the weight of a point falls with its distance.
const FALL: f64 = 3.0;

/// A point that is as near as this (a factor of e^0.05 in one size) is taken as it is.
const SAME: f64 = 0.05;

const MICROSECONDS: f64 = 1e6;

/// What was measured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Measured {
    /// The machine: its processor or card.
    pub machine: String,
    /// What computed, in the words of run files (`run.device`).
    pub device: String,
    /// The version of this program.
    pub version: String,
    /// When, as `2026-11-23T12:00:00Z`.
    pub date: String,
    /// Threads that computed, over all ranks of the machine.
    pub threads: usize,
    /// Seconds of the host for each operation of a schedule, beside what the operation takes.
    pub issue: f64,
    /// Seconds for each call of a block, beside what the call takes: its places are allocated.
    pub between_calls: f64,
    /// Calls within blocks, by their name and the element type of values: `linear f32`.
    pub calls: Points,
    /// Operations of schedules that call no block, by their name: `update`.
    pub operations: Points,
    /// Collectives, by their name and what carries them: `all-gather tcp`. `ranks` are those of the group.
    pub collectives: Points,
    /// Whole steps, by what carries collectives. Size and work are the microseconds that the other points say: the time beside
    /// them is what nothing else says, such as ranks that wait for each other. `ranks` are those of the world.
    pub steps: Points,
}

/// Points by what was measured.
pub type Points = BTreeMap<String, Vec<Point>>;

/// One measurement: of several that one which little has disturbed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Point {
    /// Ranks of the machine that did the same at the same time.
    pub ranks: usize,
    /// Of calls as [`Listed::size`](crate::Listed); of operations bytes and elements; of collectives bytes.
    pub size: Vec<f64>,
    /// Floating-point operations of products; of all else bytes.
    pub work: f64,
    /// What it took.
    pub seconds: f64,
}

/// What points say of something that was not measured itself.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Estimate {
    /// Seconds.
    pub seconds: f64,
    /// How far the nearest point is: the distance of the logarithms of sizes.
    pub distance: f64,
}

/// What is asked of points.
#[derive(Clone, Copy, Debug)]
pub struct Question<'a> {
    /// What.
    pub what: &'a str,
    /// With so many ranks.
    pub ranks: usize,
    /// As [`Point::size`].
    pub size: &'a [f64],
    /// As [`Point::work`].
    pub work: f64,
}

/// What points say; none if none is of that kind. Of points with other numbers of ranks those count whose number is nearest.
pub fn estimate(points: &Points, question: Question<'_>) -> Option<Estimate> {
    estimate_but(points, question, None)
}

/// The same without one of the points.
fn estimate_but(points: &Points, question: Question<'_>, without: Option<&Point>) -> Option<Estimate> {
    let others = points.get(question.what)?.iter().filter(|point| without.is_none_or(|left| left != *point));
    let (mut weights, mut sum, mut closest) = (0.0, 0.0, f64::INFINITY);
    for point in nearest(others, question.ranks) {
        let distance = distance(&point.size, question.size);
        let weight = distance.max(SAME).powf(-FALL);
        weights += weight;
        sum += weight * (point.seconds / point.work.max(1.0)).ln();
        closest = distance.min(closest);
    }
    (weights > 0.0)
        .then(|| Estimate { seconds: question.work.max(1.0) * (sum / weights).exp(), distance: closest })
}

/// The points whose number of ranks is nearest.
pub(crate) fn nearest<'a>(
    points: impl Iterator<Item = &'a Point> + Clone,
    ranks: usize,
) -> impl Iterator<Item = &'a Point> {
    let apart = |point: &&Point| (point.ranks as f64 / ranks as f64).ln().abs();
    let nearest = points.clone().min_by(|one, other| apart(one).total_cmp(&apart(other)));
    let nearest = nearest.map(|point| point.ranks);
    points.filter(move |point| Some(point.ranks) == nearest)
}

fn distance(one: &[f64], other: &[f64]) -> f64 {
    let squares = one.iter().zip(other).map(|(one, other)| (one.max(1.0) / other.max(1.0)).ln().powi(2));
    squares.sum::<f64>().sqrt()
}

/// How far points are from what all others of their kind say: the mean of the parts by which they differ, weighted by seconds.
/// None where no kind has several.
pub fn left_out(points: &Points) -> Option<f64> {
    let (mut off, mut all) = (0.0, 0.0);
    for (what, points_of) in points {
        for point in points_of {
            let Point { ranks, size, work, seconds } = point;
            let question = Question { what, ranks: *ranks, size, work: *work };
            if let Some(said) = estimate_but(points, question, Some(point)) {
                off += (said.seconds - seconds).abs();
                all += seconds;
            }
        }
    }
    (all > 0.0).then(|| off / all)
}

impl Measured {
    /// How many points there are.
    pub fn len(&self) -> usize {
        self.tables().iter().flat_map(|(_, points)| points.values()).map(Vec::len).sum()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Seconds of a whole step whose operations take so many together: longer or shorter by the median of what steps with
    /// the nearest number of ranks were.
    pub fn whole(&self, transport: &str, ranks: usize, seconds: f64) -> f64 {
        let steps = self.steps.get(transport).map_or(&[][..], Vec::as_slice);
        let mut ratios: Vec<f64> = nearest(steps.iter(), ranks)
            .map(|point| point.seconds * MICROSECONDS / point.work.max(1.0))
            .collect();
        ratios.sort_by(f64::total_cmp);
        seconds * ratios.get(ratios.len() / 2).unwrap_or(&1.0)
    }

    /// A point of a whole step: so many seconds, where the other points say `said`.
    pub fn step(ranks: usize, said: f64, seconds: f64) -> Point {
        let work = said * MICROSECONDS;
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

    /// As tables of a file, a line for each point.
    pub fn to_toml(&self) -> String {
        // A TOML string in JSON spelling: its escapes are TOML's too.
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

    /// The first number that can not be, as its key and value.
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
