//! Horizontal bars as SVG: for each of some things a bar per run.

use std::fmt::Write;

use super::page::escaped;

const WIDTH: f64 = 640.0;
/// Where bars begin: names stand before them.
const LEFT: f64 = 190.0;
/// The longest bar; the number stands behind it.
const LONGEST: f64 = 350.0;
const BAR: f64 = 14.0;
const GAP: f64 = 8.0;

/// A bar: a colour, a length, and what stands behind it.
pub(crate) type Bar = (usize, f64, String);

/// Bars under their names.
pub(crate) fn svg(title: &str, rows: &[(String, Vec<Bar>)]) -> String {
    let longest = rows.iter().flat_map(|(_, bars)| bars).map(|bar| bar.1).fold(f64::MIN_POSITIVE, f64::max);
    let (mut body, mut top) = (String::new(), GAP);
    for (name, bars) in rows {
        let _ = write!(
            body,
            "<text x=\"{:.0}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
            LEFT - 8.0,
            top + BAR - 3.0,
            escaped(name)
        );
        for (colour, value, text) in bars {
            let (length, behind) = (value / longest * LONGEST, LEFT + value / longest * LONGEST + 6.0);
            let _ = write!(
                body,
                "<rect class=\"c{colour}\" x=\"{LEFT}\" y=\"{top:.1}\" width=\"{length:.1}\" height=\"{:.0}\"/>\
                 <text x=\"{behind:.1}\" y=\"{:.1}\">{}</text>",
                BAR - 2.0,
                top + BAR - 3.0,
                escaped(text)
            );
            top += BAR;
        }
        top += GAP;
    }
    let label = escaped(title);
    format!("<svg viewBox=\"0 0 {WIDTH} {top:.0}\" role=\"img\" aria-label=\"{label}\">{body}</svg>")
}
