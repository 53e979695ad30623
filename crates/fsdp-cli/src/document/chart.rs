//! A line chart as SVG: axes with readable numbers, several series, gaps where a value is not finite.
//!
//! The number of points is limited by the resolution, however many steps a run has: in each column of pixels the first,
//! lowest, highest and last point are drawn, so that no peak is lost.

use std::fmt::Write;

use super::page::{Page, escaped};

/// The size of a chart, in pixels, and the margins for its axes.
const WIDTH: f64 = 640.0;
const HEIGHT: f64 = 250.0;
const LEFT: f64 = 62.0;
const RIGHT: f64 = 14.0;
const TOP: f64 = 12.0;
const BOTTOM: f64 = 36.0;

/// Columns of pixels in which points are drawn.
const COLUMNS: usize = 560;

/// Minimum ratio of the highest to the lowest value for a logarithmic axis.
const LOG_FROM: f64 = 100.0;

/// Dash patterns of series.
const DASHES: [&str; 4] = ["", "6 3", "2 3", "8 3 2 3"];

/// Number of colors on a page.
pub(crate) const COLORS: usize = 8;

/// Several series over the same axes.
#[derive(Debug)]
pub(crate) struct Chart {
    pub(crate) title: String,
    /// The quantity of the values, with its unit.
    pub(crate) unit: &'static str,
    /// The quantity of the horizontal axis, with its unit.
    pub(crate) across: &'static str,
    /// Whether the value axis may be logarithmic.
    pub(crate) may_be_log: bool,
    /// Whether the value axis begins at 0, so that heights are proportional.
    pub(crate) has_zero: bool,
    pub(crate) series: Vec<Series>,
}

/// Connected points, ordered by horizontal position.
#[derive(Debug)]
pub(crate) struct Series {
    pub(crate) name: String,
    pub(crate) color: usize,
    pub(crate) dash: usize,
    pub(crate) points: Vec<(f64, f64)>,
}

impl Series {
    /// Creates a series; points may be numerous, and values may be non-finite.
    pub(crate) fn of(name: String, color: usize, dash: usize, points: &[(f64, f64)]) -> Self {
        let mut points = points.to_vec();
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        Self { name, color: color % COLORS, dash: dash % DASHES.len(), points }
    }
}

/// An axis: maps a range of values to pixels.
#[derive(Clone, Copy, Debug)]
struct Axis {
    low: f64,
    high: f64,
    is_log: bool,
    /// The pixel positions of the ends.
    from: f64,
    to: f64,
}

impl Axis {
    fn pixel(self, value: f64) -> f64 {
        let scaled = |value: f64| if self.is_log { value.log10() } else { value };
        let part = (scaled(value) - scaled(self.low)) / (scaled(self.high) - scaled(self.low));
        self.from + part * (self.to - self.from)
    }

    /// Positions of the axis marks: about `count` round values.
    fn marks(self, count: f64) -> Vec<f64> {
        if self.is_log {
            let (first, last) = (self.low.log10().ceil(), self.high.log10().floor());
            let stride = ((last - first) / count).ceil().max(1.0);
            let decades = std::iter::successors(Some(first), |decade| Some(decade + stride));
            return decades.take_while(|&decade| decade <= last).map(|decade| 10_f64.powf(decade)).collect();
        }
        let rough = (self.high - self.low) / count;
        let unit = 10_f64.powf(rough.log10().floor());
        let stride = [1.0, 2.0, 5.0, 10.0].map(|round| round * unit).into_iter().find(|&s| s >= rough);
        let stride = stride.unwrap_or(10.0 * unit);
        let first = (self.low / stride).ceil();
        let numbers = std::iter::successors(Some(first), |number| Some(number + 1.0));
        // Repeated addition would accumulate rounding errors.
        let end = self.high + stride * 1e-6;
        numbers.map(|number| number * stride).take_while(|&mark| mark <= end).collect()
    }
}

impl Chart {
    /// A chart with linear axes.
    pub(crate) fn new(title: String, unit: &'static str, across: &'static str, series: Vec<Series>) -> Self {
        Self { title, unit, across, may_be_log: false, has_zero: false, series }
    }

    /// Draws the chart with its legend. Without finite values it says so; without series it draws nothing.
    pub(crate) fn draw(&self, page: &mut Page) {
        if self.series.is_empty() {
            return;
        }
        page.html(&format!("<figure><h3>{}</h3>", escaped(&self.title)));
        match self.svg() {
            None => page.text("No value is finite."),
            Some(svg) => page.html(&svg),
        }
        if self.series.len() > 1 {
            page.legend(self.series.iter().map(|series| (&*series.name, series.color, DASHES[series.dash])));
        }
        page.html("</figure>");
    }

    /// The chart as SVG, with the hover data as JSON; `None` if no value is finite.
    fn svg(&self) -> Option<String> {
        let points = || self.series.iter().flat_map(|series| &series.points);
        let finite = || points().filter(|(_, value)| value.is_finite());
        let x = axis(points().map(|point| point.0), false, (LEFT, WIDTH - RIGHT))?;
        let mut y = axis(finite().map(|point| point.1), self.may_be_log, (HEIGHT - BOTTOM, TOP))?;
        if self.has_zero && !y.is_log {
            (y.low, y.high) = (y.low.min(0.0), y.high.max(0.0));
        }
        let mut svg = format!(
            "<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"{}\">",
            escaped(&format!("{} by {}", self.title, self.across))
        );
        self.draw_axes(&mut svg, x, y);
        let drawn: Vec<Vec<(f64, f64)>> =
            self.series.iter().map(|series| decimated(&series.points, x.low, x.high)).collect();
        for (series, points) in self.series.iter().zip(&drawn) {
            draw_line(&mut svg, series, points, x, y);
        }
        svg += "<line class=\"at\" y1=\"12\" y2=\"214\" visibility=\"hidden\"/></svg>";
        let lost = points().count() - finite().count();
        if lost > 0 {
            let _ = write!(
                svg,
                "<p class=\"note\">{lost} values are not finite: gaps, marked below the axis.</p>"
            );
        }
        let _ = write!(svg, "<script type=\"application/json\">{}</script>", self.data(&drawn, x));
        Some(svg)
    }

    fn draw_axes(&self, svg: &mut String, x: Axis, y: Axis) {
        let bottom = HEIGHT - BOTTOM;
        for mark in y.marks(5.0) {
            let (at, text) = (y.pixel(mark), short(mark));
            let _ = write!(
                svg,
                "<line class=\"grid\" x1=\"{LEFT}\" x2=\"{:.0}\" y1=\"{at:.1}\" y2=\"{at:.1}\"/>\
                 <text x=\"{:.0}\" y=\"{:.1}\" text-anchor=\"end\">{text}</text>",
                WIDTH - RIGHT,
                LEFT - 6.0,
                at + 4.0
            );
        }
        for mark in x.marks(7.0).into_iter().filter(|mark| mark.fract() == 0.0) {
            let (at, text) = (x.pixel(mark), short(mark));
            let _ = write!(
                svg,
                "<line class=\"tick\" x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"{bottom:.0}\" y2=\"{:.0}\"/>\
                 <text x=\"{at:.1}\" y=\"{:.0}\" text-anchor=\"middle\">{text}</text>",
                bottom + 4.0,
                bottom + 17.0
            );
        }
        let _ = write!(
            svg,
            "<line class=\"axis\" x1=\"{LEFT}\" x2=\"{:.0}\" y1=\"{bottom:.0}\" y2=\"{bottom:.0}\"/>\
             <text x=\"{:.0}\" y=\"{:.0}\" text-anchor=\"end\">{}</text>\
             <text transform=\"translate(12 {:.0}) rotate(-90)\" text-anchor=\"middle\">{}{}</text>",
            WIDTH - RIGHT,
            WIDTH - RIGHT,
            HEIGHT - 5.0,
            escaped(self.across),
            f64::midpoint(TOP, bottom),
            escaped(self.unit),
            if y.is_log { ", log scale" } else { "" }
        );
    }

    /// The hover data of the drawn points: `[name, color, [steps], [values]]` per series.
    fn data(&self, drawn: &[Vec<(f64, f64)>], x: Axis) -> String {
        let series = self.series.iter().zip(drawn).map(|(series, points)| {
            let (steps, values): (Vec<f64>, Vec<Option<f64>>) =
                points.iter().map(|&(step, value)| (step, value.is_finite().then_some(value))).unzip();
            serde_json::json!([series.name, series.color, steps, values])
        });
        let series: Vec<serde_json::Value> = series.collect();
        let data = serde_json::json!({ "low": x.low, "high": x.high, "left": LEFT, "right": WIDTH - RIGHT, "series": series });
        // Within a script element only `<` could end it.
        data.to_string().replace('<', "\\u003c")
    }
}

/// The axis for some values; `None` if there are none.
fn axis(values: impl Iterator<Item = f64> + Clone, may_be_log: bool, (from, to): (f64, f64)) -> Option<Axis> {
    let low = values.clone().reduce(f64::min)?;
    let high = values.reduce(f64::max)?;
    let is_log = may_be_log && low > 0.0 && high / low >= LOG_FROM;
    // A single value, or a range within rounding error, gets room around it.
    let room = match high.abs() {
        size if high - low > size * 1e-9 => 0.0,
        0.0 => 0.5,
        size => size * 0.05,
    };
    Some(Axis { low: low - room, high: high + room, is_log, from, to })
}

/// Keeps the first, lowest, highest and last point in each column of pixels, and the first non-finite one.
fn decimated(points: &[(f64, f64)], low: f64, high: f64) -> Vec<(f64, f64)> {
    #[expect(clippy::cast_precision_loss, clippy::cast_possible_truncation, reason = "a column of pixels")]
    let column = |x: f64| ((x - low) / (high - low) * COLUMNS as f64) as i64;
    let mut kept = Vec::new();
    for points in points.chunk_by(|a, b| column(a.0) == column(b.0)) {
        let finite = || points.iter().enumerate().filter(|(_, point)| point.1.is_finite());
        let by_value = |a: &(usize, &(f64, f64)), b: &(usize, &(f64, f64))| a.1.1.total_cmp(&b.1.1);
        let ends =
            [finite().next(), finite().min_by(by_value), finite().max_by(by_value), finite().next_back()];
        let mut places: Vec<usize> = ends.into_iter().flatten().map(|(place, _)| place).collect();
        // A gap is drawn at the first non-finite value; more gaps would be invisible.
        places.extend(points.iter().position(|point| !point.1.is_finite()));
        places.sort_unstable();
        places.dedup();
        kept.extend(places.into_iter().map(|place| points[place]));
    }
    kept
}

fn draw_line(svg: &mut String, series: &Series, points: &[(f64, f64)], x: Axis, y: Axis) {
    let mut path = String::new();
    let mut is_open = false;
    for &(step, value) in points {
        if !value.is_finite() {
            is_open = false;
            let (at, top) = (x.pixel(step), HEIGHT - BOTTOM);
            let _ = write!(
                svg,
                "<line class=\"lost\" x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"{top:.0}\" y2=\"{:.0}\"/>",
                top + 7.0
            );
            continue;
        }
        let command = if is_open { 'L' } else { 'M' };
        let _ = write!(path, "{command}{:.1} {:.1}", x.pixel(step), y.pixel(value));
        is_open = true;
    }
    let class = series.color;
    let dash = match DASHES[series.dash] {
        "" => String::new(),
        dashes => format!(" stroke-dasharray=\"{dashes}\""),
    };
    let _ = write!(svg, "<path class=\"line c{class}\"{dash} d=\"{path}\"/>");
    // Dots show the position of few points, and make a single point visible.
    if points.len() <= 40 {
        for &(step, value) in points.iter().filter(|point| point.1.is_finite()) {
            let (at, height) = (x.pixel(step), y.pixel(value));
            let _ = write!(svg, "<circle class=\"c{class}\" cx=\"{at:.1}\" cy=\"{height:.1}\" r=\"2.5\"/>");
        }
    }
}

/// Formats a number for an axis mark.
fn short(value: f64) -> String {
    let size = value.abs();
    if size >= 1e4 {
        let (unit, letter) = [(1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")]
            .into_iter()
            .find(|&(unit, _)| size >= unit)
            .expect("it is large");
        return format!("{}{letter}", trimmed(value / unit, 3));
    }
    if size > 0.0 && size < 1e-3 {
        let power = size.log10().floor();
        return format!("{}e{power}", trimmed(value / 10_f64.powf(power), 2));
    }
    trimmed(value, 4)
}

/// Formats a number with at most `decimals` decimals, without trailing zeros.
fn trimmed(value: f64, decimals: usize) -> String {
    let text = format!("{value:.decimals$}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

#[cfg(test)]
mod tests;
