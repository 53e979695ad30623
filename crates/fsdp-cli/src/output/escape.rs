//! Escapes untrusted names for display on a terminal.
//!
//! Names of files and tensors, and messages with such names, may contain anything: escape sequences that clear the
//! screen or forge lines, characters that reverse the direction of text. They are shown as JSON escapes, so that JSON
//! keeps its meaning. Bytes that are not UTF-8 have already been replaced, by `Path::display`. All other text is
//! unchanged.

/// Whether a character is invisible but affects the text around it.
fn is_hidden(character: char) -> bool {
    let is_mark_of_direction = matches!(
        character,
        // The second range includes the line and paragraph separators.
        '\u{61c}' | '\u{200e}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}'
    );
    character.is_control() || is_mark_of_direction
}

/// Escapes text of several lines; of the hidden characters only newlines and tabs remain.
pub(crate) fn shown(text: &str) -> String {
    escaped(text, |character| is_hidden(character) && !matches!(character, '\n' | '\t'))
}

/// Escapes a name, or a message with names, to a single line.
pub(crate) fn one_line(text: &str) -> String {
    escaped(text, is_hidden)
}

fn escaped(text: &str, is_escaped: impl Fn(char) -> bool) -> String {
    let mut out = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            _ if !is_escaped(character) => out.push(character),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            // All of them are below 2^16, so four digits suffice.
            _ => out.push_str(&format!("\\u{:04x}", u32::from(character))),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ordinary_text_in_any_script_is_unchanged() {
        for text in ["", "größe", "日本語", "שלום", "مرحبا", "👩\u{200d}💻", "e\u{301}", "C:\\tensors\\w"]
        {
            assert_eq!(one_line(text), text);
        }
        assert_eq!(shown("a\tb\nc"), "a\tb\nc");
    }

    #[test]
    fn only_terminal_control_characters_are_escaped() {
        for character in (0..=0x10_ffff).filter_map(char::from_u32) {
            let code = u32::from(character);
            let acts = code < 0x20
                || (0x7f..=0x9f).contains(&code)
                || [0x61c, 0x200e, 0x200f].contains(&code)
                || (0x2028..=0x202e).contains(&code)
                || (0x2066..=0x2069).contains(&code);
            let text = one_line(&character.to_string());
            assert_eq!(text != character.to_string(), acts, "{text}");
            assert!(!text.chars().any(is_hidden), "{text}");
        }
    }

    #[test]
    fn escaped_json_parses_to_same_value() {
        let hostile = "a\0\x1b[2J\u{7f}\u{9b}\u{202e}\r\n\tb";
        let json = serde_json::to_string_pretty(&[hostile]).unwrap();
        let escaped = shown(&json);
        assert!(json.contains('\u{202e}') && !escaped.contains('\u{202e}'));
        assert_eq!(serde_json::from_str::<Vec<String>>(&escaped).unwrap(), [hostile]);
    }

    #[test]
    fn control_characters_become_readable_escapes() {
        assert_eq!(one_line("a\0b\x1b[31m\n\r\t\u{9b}"), r"a\u0000b\u001b[31m\n\r\t\u009b");
    }
}
