//! Freezing parameters by name.

use fsdp_core::model::ModelSpec;

use crate::error::ModelError;

/// Marks the parameters whose name, or the name of a tied use, matches one of `patterns` as not trained. In
/// a pattern, `*` stands for any characters (dots too) and `?` for one.
///
/// # Errors
/// [`ModelError::Pattern`] when a pattern matches nothing, [`ModelError::NothingToTrain`] when nothing is left.
pub fn freeze(spec: &mut ModelSpec, patterns: &[String]) -> Result<(), ModelError> {
    for pattern in patterns {
        let mut matched = false;
        for param in &mut spec.params {
            if std::iter::once(&param.fqn).chain(&param.aliases).any(|name| matches(pattern, name)) {
                param.trainable = false;
                matched = true;
            }
        }
        if !matched {
            let example = spec.params.first().map_or_else(String::new, |param| param.fqn.clone());
            return Err(ModelError::Pattern { pattern: pattern.clone(), example });
        }
    }
    if spec.params.iter().all(|param| !param.trainable) {
        return Err(ModelError::NothingToTrain);
    }
    Ok(())
}

/// Whether a name matches a pattern: the usual greedy walk that falls back to the latest `*`.
fn matches(pattern: &str, name: &str) -> bool {
    let (pattern, name) = (pattern.as_bytes(), name.as_bytes());
    let (mut p, mut n) = (0, 0);
    let mut star: Option<(usize, usize)> = None;
    while n < name.len() {
        match pattern.get(p) {
            Some(b'*') => {
                star = Some((p, n));
                p += 1;
            }
            Some(&byte) if byte == b'?' || byte == name[n] => {
                p += 1;
                n += 1;
            }
            _ => match star {
                Some((at, from)) => {
                    star = Some((at, from + 1));
                    p = at + 1;
                    n = from + 1;
                }
                None => return false,
            },
        }
    }
    pattern[p..].iter().all(|&byte| byte == b'*')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stars_and_question_marks_match() {
        for (pattern, name, expected) in [
            ("*", "a.b", true),
            ("model.layers.0.*", "model.layers.0.mlp.weight", true),
            ("model.layers.0.*", "model.layers.10.mlp.weight", false),
            ("model.layers.?.*", "model.layers.7.mlp.weight", true),
            ("*.bias", "a.bias.weight", false),
            ("*.b*s", "a.bias.bs", true),
            ("", "", true),
            ("a", "", false),
            ("a**", "a", true),
        ] {
            assert_eq!(matches(pattern, name), expected, "{pattern} on {name}");
        }
    }
}
