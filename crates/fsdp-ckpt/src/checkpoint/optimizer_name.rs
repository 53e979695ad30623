//! Parses the names of optimizer tensors and values, however deep the dicts were that they came from:
//! `optim.state.<parameter>.<state>`, `optim.param_groups.<group>.<setting>` and
//! `optim.param_groups.<parameter>.<setting>`, with any of the usual prefixes or none.

use std::ops::Range;

use super::{Key, join, role::OPTIMIZER_STEPS};

/// The parsed name of an optimizer tensor or value.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum OptimizerName {
    /// A state of a parameter.
    State {
        /// The parameter: its name, or its number in the order of the groups.
        parameter: String,
        /// Name of the state (`exp_avg`, `step`).
        state: String,
    },
    /// A setting of a group of parameters.
    GroupSetting {
        /// Number of the group.
        group: u64,
        /// Name of the setting (`lr`, `params`).
        key: String,
    },
    /// A setting of a single parameter, as in flattened state dicts of optimizers.
    ParameterSetting {
        /// Name of the parameter.
        parameter: String,
        /// Name of the setting.
        key: String,
    },
}

impl OptimizerName {
    /// Parses a path. `None` if it is none of these.
    pub fn of_path(path: &[Key]) -> Option<OptimizerName> {
        let name = join(path);
        let mut rest = &name[..];
        // Trainers that wrap an optimizer save its state below a key of their own.
        while let Some((_, below)) = rest.split_once('.').filter(|(first, _)| OPTIMIZER_STEPS.contains(first))
        {
            rest = below;
        }
        // Trainers that keep a list of optimizers usually have one.
        let rest = rest.strip_prefix("0.").unwrap_or(rest);
        if let Some(rest) = rest.strip_prefix("state.") {
            let (parameter, state) = rest.rsplit_once('.')?;
            return Some(OptimizerName::State { parameter: parameter.to_owned(), state: state.to_owned() });
        }
        let rest = rest.strip_prefix("param_groups.")?;
        let (group, key) = rest.split_once('.')?;
        if let Ok(group) = group.parse() {
            return Some(OptimizerName::GroupSetting { group, key: key.to_owned() });
        }
        let (parameter, key) = rest.rsplit_once('.')?;
        Some(OptimizerName::ParameterSetting { parameter: parameter.to_owned(), key: key.to_owned() })
    }
}

/// Locates the parameter name in the path of an optimizer state or setting: the step, and the byte range in its text.
/// `None` if the parameter has a number instead of a name.
pub(crate) fn parameter_span(path: &[Key]) -> Option<(usize, Range<usize>)> {
    span(path, |parameter, _| !is_number(parameter))
}

/// Locates the number of a parameter in the path of an optimizer state, like [`parameter_span`].
pub(crate) fn number_span(path: &[Key]) -> Option<(usize, Range<usize>)> {
    span(path, |parameter, is_state| is_state && is_number(parameter))
}

fn is_number(text: &str) -> bool {
    text.bytes().all(|byte| byte.is_ascii_digit())
}

/// Locates a parameter for which `is_meant` holds, given whether it has a state or a setting here.
fn span(path: &[Key], is_meant: impl Fn(&str, bool) -> bool) -> Option<(usize, Range<usize>)> {
    let texts: Vec<String> = path.iter().map(Key::text).collect();
    // The number of an optimizer, alone or after its name, is that of one of several.
    let is_outer = |text: &String| {
        let number = text.strip_prefix("optimizer_").unwrap_or(text);
        OPTIMIZER_STEPS.contains(&text.as_str()) || is_number(number)
    };
    if let [outer @ .., state, parameter, _] = &texts[..]
        && state == "state"
        && outer.iter().all(is_outer)
    {
        return is_meant(parameter, true).then_some((outer.len() + 1, 0..parameter.len()));
    }
    let [outer @ .., only] = &texts[..] else { return None };
    if !outer.iter().all(is_outer) {
        return None;
    }
    let flat = only.split_once('.').filter(|(first, _)| outer.is_empty() && OPTIMIZER_STEPS.contains(first));
    let rest = flat.map_or(&only[..], |(_, rest)| rest);
    let state = rest.strip_prefix("state.");
    let inner = state.or_else(|| rest.strip_prefix("param_groups."))?;
    let (parameter, _) =
        inner.rsplit_once('.').filter(|(parameter, _)| is_meant(parameter, state.is_some()))?;
    let start = only.len() - inner.len();
    Some((outer.len(), start..start + parameter.len()))
}

/// Returns the path with the parameter name at this location replaced.
pub(crate) fn with_parameter(path: &[Key], (step, range): (usize, Range<usize>), name: &str) -> Vec<Key> {
    let mut path = path.to_vec();
    if let Key::Name(text) = &mut path[step] {
        text.replace_range(range, name);
    }
    path
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(steps: &[&str]) -> Option<OptimizerName> {
        let path: Vec<Key> = steps.iter().map(|step| Key::Name((*step).to_owned())).collect();
        OptimizerName::of_path(&path)
    }

    #[test]
    fn state_name_parses_identically_in_every_nesting() {
        let state =
            Some(OptimizerName::State { parameter: "layers.0.w".to_owned(), state: "exp_avg".to_owned() });
        let forms: [&[&str]; 7] = [
            &["optimizer", "optimizer_state_dict", "state", "layers.0.w", "exp_avg"],
            &["optimizer_states", "0", "state", "layers.0.w", "exp_avg"],
            &["optim", "state", "layers.0.w", "exp_avg"],
            &["optimizer", "state.layers.0.w.exp_avg"],
            &["optim.state.layers.0.w.exp_avg"],
            &["state", "layers.0.w", "exp_avg"],
            &["optimizer_state_dict", "state", "layers", "0", "w", "exp_avg"],
        ];
        forms.iter().for_each(|form| assert_eq!(named(form), state, "{form:?}"));
    }

    #[test]
    fn parameter_is_renamed_in_every_nesting() {
        let renamed = |steps: &[&str]| {
            let path: Vec<Key> = steps.iter().map(|step| Key::Name((*step).to_owned())).collect();
            parameter_span(&path).map(|span| join(&with_parameter(&path, span, "x.y")))
        };
        let state = Some("optim.state.x.y.exp_avg".to_owned());
        assert_eq!(renamed(&["optim", "state", "layers.0.w", "exp_avg"]), state);
        assert_eq!(renamed(&["optim", "state.layers.0.w.exp_avg"]), state);
        assert_eq!(renamed(&["optim.state.layers.0.w.exp_avg"]), state);
        assert_eq!(renamed(&["state", "layers.0.w", "exp_avg"]), Some("state.x.y.exp_avg".to_owned()));
        let listed = [Key::Name("optimizer_states".into()), Key::Index(0), Key::Name("state".into())];
        let listed = [&listed[..], &["w", "exp_avg"].map(|step| Key::Name(step.to_owned()))].concat();
        let span = parameter_span(&listed).unwrap();
        assert_eq!(join(&with_parameter(&listed, span, "x.y")), "optimizer_states.0.state.x.y.exp_avg");
        let second = Some("optimizer_1.optimizer.state.x.y.exp_avg".to_owned());
        assert_eq!(renamed(&["optimizer_1", "optimizer", "state", "w", "exp_avg"]), second);
        let setting = Some("optim.param_groups.x.y.lr".to_owned());
        assert_eq!(renamed(&["optim", "param_groups.layers.0.w.lr"]), setting);
        for other in
            [&["optim", "state", "0", "exp_avg"][..], &["optim", "param_groups.0.lr"], &["layers.0.w"]]
        {
            assert_eq!(renamed(other), None, "{other:?}");
        }
    }

    #[test]
    fn numbers_of_parameters_are_found_in_states_alone() {
        let renamed = |steps: &[&str]| {
            let path: Vec<Key> = steps.iter().map(|step| Key::Name((*step).to_owned())).collect();
            number_span(&path).map(|span| join(&with_parameter(&path, span, "x.y")))
        };
        let state = Some("optim.state.x.y.exp_avg".to_owned());
        assert_eq!(renamed(&["optim", "state", "12", "exp_avg"]), state);
        assert_eq!(renamed(&["optim.state.12.exp_avg"]), state);
        for other in [&["optim", "state", "w", "exp_avg"][..], &["optim", "param_groups.0.lr"], &["0"]] {
            assert_eq!(renamed(other), None, "{other:?}");
        }
    }

    #[test]
    fn settings_belong_to_groups_or_parameters() {
        let (group, key) = (1, "lr".to_owned());
        let of_group = Some(OptimizerName::GroupSetting { group, key: key.clone() });
        assert_eq!(named(&["optim", "param_groups", "1", "lr"]), of_group);
        let parameter = "layers.0.w".to_owned();
        let of_parameter = Some(OptimizerName::ParameterSetting { parameter, key });
        assert_eq!(named(&["optimizer", "param_groups.layers.0.w.lr"]), of_parameter);
        assert_eq!(named(&["optim", "defaults", "lr"]), None);
    }
}
