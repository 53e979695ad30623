//! Renames tensors and values, and keeps as much of their nesting as the new name allows.

use regex::Regex;

use crate::checkpoint::{Key, Value, join, parameter_span, with_parameter};

/// A renaming by a regular expression, in the syntax of the `regex` crate.
#[derive(Clone, Debug)]
pub struct Rename {
    pattern: Regex,
    replacement: String,
}

impl Rename {
    /// Parses `REGEX=REPLACEMENT`, split at the first `=`; the replacement refers to groups as `$1` or `${name}`.
    ///
    /// # Errors
    /// A message with the problem and the expected form.
    pub fn parse(text: &str) -> Result<Rename, String> {
        let bad = |what: &str| format!("`{text}` is not a renaming: {what}; write REGEX=REPLACEMENT");
        let (pattern, replacement) = text.split_once('=').ok_or_else(|| bad("it has no `=`"))?;
        let pattern = Regex::new(pattern).map_err(|error| bad(&error.to_string()))?;
        Ok(Rename { pattern, replacement: replacement.to_owned() })
    }

    /// The regular expression.
    pub(super) fn pattern(&self) -> &str {
        self.pattern.as_str()
    }
}

/// The renamings of a conversion, and which of them have matched.
pub(super) struct Renaming<'a> {
    prefix: Option<&'a str>,
    renames: &'a [Rename],
    pub(super) used_prefix: bool,
    pub(super) used: Vec<bool>,
}

impl<'a> Renaming<'a> {
    pub(super) fn new(prefix: Option<&'a str>, renames: &'a [Rename]) -> Renaming<'a> {
        Renaming { prefix, renames, used_prefix: false, used: vec![false; renames.len()] }
    }

    /// Returns the new path of a tensor or value. A parameter name within optimizer state is renamed like the
    /// parameter; a step that does not match the parameter name is applied to the whole name.
    pub(super) fn path(&mut self, path: &[Key]) -> Vec<Key> {
        let mut path = path.to_vec();
        for step in 0..=self.renames.len() {
            path = match self.inner(step, &path) {
                Some(renamed) => renamed,
                None => self.apply(step, &path).unwrap_or(path),
            };
        }
        path
    }

    /// Returns the path with its parameter renamed, if it contains one and the step changes it.
    fn inner(&mut self, step: usize, path: &[Key]) -> Option<Vec<Key>> {
        let (at, range) = parameter_span(path)?;
        let name = Key::Name(path[at].text()[range.clone()].to_owned());
        let renamed = self.apply(step, &[name])?;
        Some(with_parameter(path, (at, range), &join(&renamed)))
    }

    /// Returns the value with parameter names renamed: the parameter lists of an optimizer's groups.
    pub(super) fn value(&mut self, path: &[Key], value: &Value) -> Value {
        match value {
            Value::List(items) if is_list_of_parameters(path) => {
                Value::List(items.iter().map(|item| self.name(item)).collect())
            }
            other => other.clone(),
        }
    }

    fn name(&mut self, value: &Value) -> Value {
        match value {
            Value::Str(name) => Value::Str(join(&self.path(&[Key::Name(name.clone())]))),
            other => other.clone(),
        }
    }

    /// Applies one step to a path: step 0 removes the prefix, the others are renamings. `None` if the step does not
    /// match.
    fn apply(&mut self, step: usize, path: &[Key]) -> Option<Vec<Key>> {
        let Some(index) = step.checked_sub(1) else {
            let rest = without_prefix(path, self.prefix?)?;
            self.used_prefix = true;
            return Some(rest);
        };
        let (rename, name) = (&self.renames[index], join(path));
        if !rename.pattern.is_match(&name) {
            return None;
        }
        self.used[index] = true;
        let new = rename.pattern.replace_all(&name, rename.replacement.as_str());
        Some(nested_like(path, &new))
    }
}

/// Whether a path leads to the parameter list of a group.
fn is_list_of_parameters(path: &[Key]) -> bool {
    path.len() >= 2
        && path.last() == Some(&Key::Name("params".to_owned()))
        && path.iter().any(|step| *step == Key::Name("param_groups".to_owned()))
}

/// Removes a prefix of the path's name, and a dot after it.
fn without_prefix(path: &[Key], prefix: &str) -> Option<Vec<Key>> {
    let name = join(path);
    let rest = name.strip_prefix(prefix)?;
    let rest = rest.strip_prefix('.').unwrap_or(rest);
    // Whole steps at the end are kept.
    let mut kept = path.len();
    let mut head = rest;
    while kept > 0 {
        let step = path[kept - 1].text();
        match head.strip_suffix(&step) {
            Some("") => return Some(path[kept - 1..].to_vec()),
            Some(before) if before.ends_with('.') => head = &before[..before.len() - 1],
            _ => break,
        }
        kept -= 1;
    }
    let mut steps = vec![Key::Name(head.to_owned())];
    steps.extend_from_slice(&path[kept..]);
    Some(steps)
}

/// Returns a path for a new name that keeps the leading steps with which the name still starts.
fn nested_like(path: &[Key], name: &str) -> Vec<Key> {
    let mut steps = Vec::new();
    let mut rest = name;
    for step in &path[..path.len() - 1] {
        match rest.strip_prefix(&step.text()).and_then(|rest| rest.strip_prefix('.')) {
            Some(after) if !after.is_empty() => {
                rest = after;
                steps.push(step.clone());
            }
            _ => break,
        }
    }
    if steps.len() + 1 == path.len() && rest == path[path.len() - 1].text() {
        return path.to_vec();
    }
    steps.push(Key::Name(rest.to_owned()));
    steps
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(steps: &[&str]) -> Vec<Key> {
        steps.iter().map(|step| Key::Name((*step).to_owned())).collect()
    }

    #[test]
    fn prefix_strips_entire_and_partial_steps() {
        let path = names(&["model", "layers.0.w"]);
        assert_eq!(without_prefix(&path, "model."), Some(names(&["layers.0.w"])));
        assert_eq!(without_prefix(&path, "model"), Some(names(&["layers.0.w"])));
        assert_eq!(without_prefix(&path, "model.layers."), Some(names(&["0.w"])));
        assert_eq!(without_prefix(&path, "layers"), None);
        let path = names(&["state", "model", "w"]);
        assert_eq!(without_prefix(&path, "state."), Some(names(&["model", "w"])));
        assert_eq!(without_prefix(&path, "sta"), Some(names(&["te", "model", "w"])));
    }

    #[test]
    fn renaming_parameter_keeps_optimizer_nesting() {
        let rename = [Rename::parse(r"layers\.(\d+)=blocks.$1").unwrap()];
        let mut renaming = Renaming::new(None, &rename);
        assert_eq!(renaming.path(&names(&["model", "layers.0.w"])), names(&["model", "blocks.0.w"]));
        assert_eq!(renaming.path(&names(&["model", "layers", "0"])), names(&["model", "blocks.0"]));
        let state = names(&["optim", "state", "layers.0.w", "exp_avg"]);
        assert_eq!(renaming.path(&state), names(&["optim", "state", "blocks.0.w", "exp_avg"]));
        let list = Value::List(vec![Value::Str("layers.1.w".into())]);
        let groups = [
            Key::Name("optim".into()),
            Key::Name("param_groups".into()),
            Key::Index(0),
            Key::Name("params".into()),
        ];
        assert_eq!(renaming.value(&groups, &list), Value::List(vec![Value::Str("blocks.1.w".into())]));
        assert_eq!(renaming.used, [true]);
        assert_eq!(renaming.path(&groups), groups);
    }

    #[test]
    fn rename_can_match_full_state_name() {
        let renames = ["^optim=optimizer", "^layers=blocks"].map(|text| Rename::parse(text).unwrap());
        let mut renaming = Renaming::new(None, &renames);
        let state = names(&["optim", "state", "layers.0.w", "exp_avg"]);
        assert_eq!(join(&renaming.path(&state)), "optimizer.state.blocks.0.w.exp_avg");
        let flat = names(&["optim", "state.layers.0.w.exp_avg"]);
        assert_eq!(join(&renaming.path(&flat)), "optimizer.state.blocks.0.w.exp_avg");
        assert_eq!(renaming.path(&names(&["layers.0.w"])), names(&["blocks.0.w"]));
        let lr = names(&["optim", "param_groups", "0", "lr"]);
        assert_eq!(join(&renaming.path(&lr)), "optimizer.param_groups.0.lr");
        assert_eq!(renaming.used, [true, true]);
    }

    #[test]
    fn rejects_invalid_renames() {
        for text in ["abc", "(=x"] {
            assert!(Rename::parse(text).is_err(), "{text}");
        }
    }
}
