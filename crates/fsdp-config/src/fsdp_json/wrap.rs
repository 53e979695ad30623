//! Which modules become units.

use serde_json::Value;

use super::{File, WRAP};
use crate::error::ConfigError;

const POLICY: &str = "auto_wrap_policy";
const CLASSES: &str = "transformer_layer_cls_to_wrap";
/// Its name in accelerate's Python class.
const PLUGIN_CLASSES: &str = "transformer_cls_names_to_wrap";
const SIZE: &str = "min_num_params";

/// The values of `auto_wrap_policy`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Policy {
    Classes,
    Size,
    None,
}

const POLICIES: [(Policy, &str); 3] = [
    (Policy::Classes, "TRANSFORMER_BASED_WRAP"),
    (Policy::Size, "SIZE_BASED_WRAP"),
    (Policy::None, "NO_WRAP"),
];

impl File<'_> {
    /// Reads the policy. Without one, the classes or the size that are there choose.
    pub(super) fn wrap(&mut self) -> Result<(), ConfigError> {
        let policy = self.take(POLICY, &POLICIES.map(|(_, name)| name).join(", "), policy)?;
        let classes = self.classes()?;
        let size = self.take(SIZE, "an integer of at least 0", non_negative_integer)?.unwrap_or(0);
        let (has_classes, has_size) = (!classes.is_empty(), size > 0);
        let [by_class, by_size] = WRAP;
        match policy {
            None if has_classes && has_size => {
                return Err(ConfigError::Conflict {
                    origin: self.origin.to_owned(),
                    first: CLASSES.to_owned(),
                    second: SIZE.to_owned(),
                    remedy: "choose units by class or by size, and remove the other",
                });
            }
            None | Some(Policy::Classes) if has_classes => self.set(by_class, classes),
            None | Some(Policy::Size) if has_size => self.set(by_size, size),
            Some(Policy::Classes) => {
                self.warn_needs(
                    POLICY,
                    "`transformer_layer_cls_to_wrap`: the whole model is one unit, where Hugging Face wraps its layers",
                )
            }
            Some(Policy::Size) => self.warn_needs(POLICY, "`min_num_params`: the whole model is one unit"),
            None | Some(Policy::None) => {}
        }
        if has_classes && !matches!(policy, None | Some(Policy::Classes)) {
            self.warn_needs(CLASSES, "`auto_wrap_policy`: TRANSFORMER_BASED_WRAP");
        }
        if has_size && !matches!(policy, None | Some(Policy::Size)) {
            self.warn_needs(SIZE, "`auto_wrap_policy`: SIZE_BASED_WRAP");
        }
        Ok(())
    }

    /// Reads the classes, under either of their names.
    fn classes(&mut self) -> Result<Vec<String>, ConfigError> {
        let allowed = "class names, as a list or separated by commas";
        let [first, second] =
            [self.take(CLASSES, allowed, classes)?, self.take(PLUGIN_CLASSES, allowed, classes)?];
        if first.is_some() && second.is_some() {
            return Err(ConfigError::Conflict {
                origin: self.origin.to_owned(),
                first: CLASSES.to_owned(),
                second: PLUGIN_CLASSES.to_owned(),
                remedy: "they mean the same; remove one of the two",
            });
        }
        Ok(first.or(second).unwrap_or_default())
    }
}

fn policy(value: &Value) -> Option<Policy> {
    let name = value.as_str()?.trim().to_ascii_uppercase();
    POLICIES.into_iter().find(|(_, known)| *known == name).map(|(policy, _)| policy)
}

/// Reads class names. accelerate splits a text at its commas, and passes a list through the same text.
fn classes(value: &Value) -> Option<Vec<String>> {
    let split = |value: &Value| -> Option<Vec<String>> {
        let class = |class: &str| Some(class.trim().to_owned()).filter(|class| !class.is_empty());
        value.as_str()?.split(',').map(class).collect()
    };
    match value {
        Value::Array(list) => Some(list.iter().map(split).collect::<Option<Vec<_>>>()?.concat()),
        text => split(text),
    }
}

/// Reads a size; Python writes both `100000000` and `1e8`.
#[expect(clippy::cast_possible_truncation, reason = "whole and in range, checked here")]
fn non_negative_integer(value: &Value) -> Option<i64> {
    let is_whole = |x: &f64| x.fract() == 0.0 && (0.0..9e15).contains(x);
    let integer = value.as_i64().filter(|&x| x >= 0);
    integer.or_else(|| value.as_f64().filter(is_whole).map(|x| x as i64))
}
