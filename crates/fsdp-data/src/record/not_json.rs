//! Numbers that JSON does not have, but that Python's `json` writes: NaN and the infinities.

/// How Python writes them.
const NAMES: [&[u8]; 3] = [b"NaN", b"Infinity", b"-Infinity"];

/// What may stand before a value. (Before the first, there is nothing.)
const BEFORE: &[u8] = b" \t\r\n:,[";

/// Replaces these numbers with a digit and spaces, so that all columns stay the same; `None` if there are none.
pub(super) fn replaced(json: &[u8], digit: u8) -> Option<Vec<u8>> {
    let mut out = json.to_vec();
    let (mut at, mut is_in_string, mut is_found) = (0, false, false);
    while at < out.len() {
        let is_value = !is_in_string && at.checked_sub(1).is_none_or(|before| BEFORE.contains(&out[before]));
        let name = NAMES.iter().find(|name| is_value && out[at..].starts_with(name));
        if let Some(name) = name {
            out[at..at + name.len()].fill(b' ');
            out[at] = digit;
            is_found = true;
        }
        match out[at] {
            b'"' => is_in_string = !is_in_string,
            // Whatever is escaped does not end the string.
            b'\\' if is_in_string => at += 1,
            _ => {}
        }
        at += 1;
    }
    is_found.then_some(out)
}
