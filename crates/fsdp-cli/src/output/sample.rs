//! Formats a sample of the data, with the tokens that count in the loss.

use fsdp_data::Preview;

use super::paint::Paint;

/// Maximum characters shown at the beginning and at the end of a part: about a page in total for most samples.
const SHOWN: usize = 600;

/// Marks around tokens that count, if there are no colors.
const MARKS: [&str; 2] = ["\u{27e6}", "\u{27e7}"];

/// Formats the sample, with colors or marks.
pub(super) fn text(preview: &Preview, paint: Paint) -> String {
    let Preview { parts, tokens, counted, is_open } = preview;
    let [open, close] = MARKS;
    let how = if paint.is_on { paint.good("green") } else { format!("in {open}{close}") };
    let mut text = format!("first sample: {tokens} tokens, of which {counted} count ({how})");
    if *is_open {
        text += "; no token that stops generation ends an answer";
    }
    let mut line = String::new();
    for (part, counts) in parts {
        let part = shortened(part);
        line += &match (counts, paint.is_on) {
            (true, true) => each_line(&part, |line| paint.good(line)),
            (false, true) => each_line(&part, |line| paint.dim(line)),
            (true, false) => format!("{open}{part}{close}"),
            (false, false) => part,
        };
    }
    text += "\n  ";
    text += &line.trim_end().replace('\n', "\n  ");
    text
}

/// Colors each line separately, since indentation begins a new one.
fn each_line(text: &str, paint: impl Fn(&str) -> String) -> String {
    text.split('\n')
        .map(|line| if line.is_empty() { String::new() } else { paint(line) })
        .collect::<Vec<_>>()
        .join("\n")
}

/// The beginning and end of a long text.
fn shortened(text: &str) -> String {
    let count = text.chars().count();
    if count <= 2 * SHOWN {
        return text.to_owned();
    }
    let begin: String = text.chars().take(SHOWN).collect();
    let end: String = text.chars().skip(count - SHOWN).collect();
    format!("{begin} [.. {} characters ..] {end}", count - 2 * SHOWN)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn preview(parts: &[(&str, bool)]) -> Preview {
        let parts = parts.iter().map(|&(text, counts)| (text.to_owned(), counts)).collect();
        Preview { parts, tokens: 9, counted: 4, is_open: false }
    }

    #[test]
    fn counted_tokens_are_marked_or_colored() {
        let preview =
            preview(&[("user\nHi\nassistant\n", false), ("Hello\n\nyou<end>", true), ("\n", false)]);
        let plain = "first sample: 9 tokens, of which 4 count (in \u{27e6}\u{27e7})\n  user\n  Hi\n  assistant\n  \u{27e6}Hello\n  \n  you<end>\u{27e7}";
        assert_eq!(text(&preview, Paint { is_on: false }), plain);
        let colored = text(&preview, Paint { is_on: true });
        assert!(colored.contains("\n  \x1b[2mHi\x1b[0m\n"), "{colored:?}");
        assert!(colored.contains("\n  \x1b[32mHello\x1b[0m\n  \n  \x1b[32myou<end>\x1b[0m"), "{colored:?}");
    }

    #[test]
    fn answers_without_end_are_pointed_out() {
        let preview = Preview { is_open: true, ..preview(&[("Hi", false), ("Hello", true)]) };
        let shown = text(&preview, Paint { is_on: false });
        assert!(shown.contains("); no token that stops generation ends an answer\n"), "{shown}");
    }

    #[test]
    fn long_sample_is_shortened_in_middle() {
        let long = "a".repeat(SHOWN) + &"b".repeat(5) + &"c".repeat(SHOWN);
        let text = text(&preview(&[(&long, true)]), Paint { is_on: false });
        assert!(text.contains("a [.. 5 characters ..] c") && !text.contains('b'), "{text}");
    }
}
