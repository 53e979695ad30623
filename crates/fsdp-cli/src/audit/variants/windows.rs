//! Sliding windows of attention.

use fsdp_train::audit::{Between, Setting};
use serde_json::{Value, json};

use super::stated::{Keys, Stated};
use crate::run_setup::Model;

/// Rows up to this length are tried with every window.
const SHORT: usize = 32;

pub(super) fn settings(stated: &Stated, longest: usize) -> Vec<Setting<Model>> {
    let Some(window) = stated.keys.get("sliding_window") else { return Vec::new() };
    let is_used = stated.keys.get("use_sliding_window") != Some(&Value::Bool(false));
    let window = window.as_u64().map(|window| window as usize).filter(|_| is_used);
    let mut found = Vec::new();
    if window.is_some_and(|window| window < longest) {
        let mut keys = without_layers(stated.with("sliding_window", Value::Null));
        keys.insert("use_sliding_window".to_owned(), json!(false));
        let text = "attention has no sliding window, though config.json has one".to_owned();
        found.extend(stated.one(text, keys));
    }
    let says =
        window.map_or("config.json has none".to_owned(), |window| format!("config.json says {window}"));
    let sizes = others(window, longest).into_iter().map(|window| window as f64);
    found.push(stated.sized(None, sizes, Between::Nothing, move |stated, other| {
        let mut keys = stated.with("sliding_window", json!(other as u64));
        if window.is_none() {
            keys = without_layers(keys);
            keys.entry("use_sliding_window").and_modify(|used| *used = json!(true));
        }
        (format!("attention has a sliding window of {other} tokens, {says}"), keys)
    }));
    found
}

/// Without the kinds of layers, which may say that none has a window.
fn without_layers(mut keys: Keys) -> Keys {
    keys.remove("layer_types");
    keys
}

/// Windows that differ from the stated one in rows of some length: one token more or less, halves, doubles, powers of two.
fn others(window: Option<usize>, longest: usize) -> Vec<usize> {
    let near = window.into_iter().flat_map(|window| [window - 1, window + 1, window / 2, window * 2]);
    let powers = (1..usize::BITS - 1).map(|power| 1 << power).take_while(|window| *window < longest);
    let short = (1..longest).take_while(|_| longest <= SHORT);
    let mut found: Vec<usize> = Vec::new();
    for other in near.chain(powers).chain(short) {
        if other > 0 && other < longest && Some(other) != window && !found.contains(&other) {
            found.push(other);
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_are_those_that_change_rows_of_a_length() {
        for longest in 0..100 {
            for window in (1..100).map(Some).chain([None]) {
                let found = others(window, longest);
                let is_new = |(index, other): (usize, &usize)| {
                    (1..longest).contains(other) && Some(*other) != window && !found[..index].contains(other)
                };
                assert!(found.iter().enumerate().all(is_new), "{window:?}, {longest}: {found:?}");
                let is_all = longest > SHORT
                    || (1..longest).all(|other| Some(other) == window || found.contains(&other));
                assert!(is_all, "{window:?}, {longest}: {found:?}");
            }
        }
    }
}
