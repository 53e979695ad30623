//! Horizontal bars as SVG: for each row, a bar per run.

use std::fmt::Write;

use super::page::escaped;

const WIDTH: f64 = 640.0;
/// Minimum and maximum left edge of the bars, which leaves room for names.
const LEFT: [f64; 2] = [190.0, 360.0];
/// Width of a letter in a name, with room to spare: they are 5 to 6.5 pixels wide.
const LETTER: f64 = 6.5;
/// Room for the label after a bar.
const NUMBER: f64 = 100.0;
const BAR: f64 = 14.0;
const GAP: f64 = 8.0;
/// Margins before and after a name, half of it each.
const MARGIN: f64 = 16.0;

/// A bar: color, length, and the label after it.
pub(crate) type Bar = (usize, f64, String);

/// Draws bars next to their names.
#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "letters"
)]
pub(crate) fn svg(title: &str, rows: &[(String, Vec<Bar>)]) -> String {
    let longest = rows.iter().flat_map(|(_, bars)| bars).map(|bar| bar.1).fold(f64::MIN_POSITIVE, f64::max);
    let letters = rows.iter().map(|(name, _)| name.chars().count()).max().unwrap_or(0);
    let left = (letters as f64 * LETTER + MARGIN).clamp(LEFT[0], LEFT[1]);
    let limit = ((left - MARGIN) / LETTER) as usize;
    let (mut body, mut top) = (String::new(), GAP);
    for (name, bars) in rows {
        let _ = write!(
            body,
            "<text x=\"{:.0}\" y=\"{:.1}\" text-anchor=\"end\">{}<title>{}</title></text>",
            left - MARGIN / 2.0,
            top + BAR - 3.0,
            escaped(&shortened(name, limit)),
            escaped(name)
        );
        for (color, value, text) in bars {
            let length = value / longest * (WIDTH - left - NUMBER);
            let behind = left + length + 6.0;
            let _ = write!(
                body,
                "<rect class=\"c{color}\" x=\"{left:.1}\" y=\"{top:.1}\" width=\"{length:.1}\" height=\"{:.0}\"/>\
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

/// A name of at most `limit` letters: long names keep their beginning and end, which distinguish them.
fn shortened(name: &str, limit: usize) -> String {
    let letters: Vec<char> = name.chars().collect();
    if letters.len() <= limit {
        return name.to_owned();
    }
    let (begin, end) = (limit / 2, limit - 1 - limit / 2);
    let text = |letters: &[char]| letters.iter().collect::<String>();
    format!("{}\u{2026}{}", text(&letters[..begin]), text(&letters[letters.len() - end..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first number after an attribute name, in pixels.
    fn number(svg: &str, attribute: &str) -> f64 {
        let rest = svg.split_once(attribute).unwrap().1;
        rest.split('"').next().unwrap().parse().unwrap()
    }

    #[test]
    fn names_of_any_length_and_numbers_fit() {
        for letters in [1, 20, 38, 52, 53, 400] {
            let name = "x".repeat(letters);
            let svg = svg("title", &[(name.clone(), vec![(0, 1.0, "1 day 2 hours".into())])]);
            let (end, left) = (number(&svg, "<text x=\""), number(&svg, "<rect class=\"c0\" x=\""));
            let shown = svg.split_once("text-anchor=\"end\">").unwrap().1.split('<').next().unwrap();
            assert!(end - shown.chars().count() as f64 * LETTER >= 0.0, "{letters}: {svg}");
            assert!(
                end < left && left + number(&svg, "width=\"") <= WIDTH - NUMBER + 0.1,
                "{letters}: {svg}"
            );
            assert!(svg.contains(&format!("<title>{name}</title>")));
        }
    }

    #[test]
    fn long_name_is_shortened_in_middle() {
        assert_eq!(shortened("all-gather of model.layers.17", 29), "all-gather of model.layers.17");
        assert_eq!(shortened("all-gather of model.layers.17", 11), "all-g\u{2026}rs.17");
    }
}
