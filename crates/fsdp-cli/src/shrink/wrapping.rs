//! Finds a `min_num_params` that wraps the same modules of a smaller model.
//!
//! Modules are the same if their names are, except for layer indices. If any minimum wraps exactly the expected
//! modules, the size of the smallest expected unit does: every expected unit reaches it, and a larger minimum would lose
//! that unit.

use std::collections::BTreeSet;

use fsdp_core::model::ModelSpec;
use fsdp_core::wrap::{self, WrapPolicy};

use crate::error::CliError;

/// The minimum for the smaller model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Scaled {
    pub(super) min_num_params: usize,
    /// A description of the change, for the user.
    pub(super) note: String,
}

/// Scales a minimum from one size of a model to another.
///
/// # Errors
/// [`CliError::Train`] if the policy does not fit the model, small or large.
pub(super) fn scale(min: usize, before: &ModelSpec, after: &ModelSpec) -> Result<Scaled, CliError> {
    let expected = wrapped(before, min)?;
    let min_num_params = smallest_unit(after, &expected);
    let found = wrapped(after, min_num_params)?;
    let outcome = if found == expected {
        "which wraps the same modules".to_owned()
    } else {
        format!(
            "which wraps {}, where {min} wraps {}; wrap by class to keep them",
            list(&found),
            list(&expected)
        )
    };
    Ok(Scaled { min_num_params, note: format!("min_num_params {min} to {min_num_params}, {outcome}") })
}

/// The patterns of the modules that a minimum wraps, without the root.
fn wrapped(spec: &ModelSpec, min: usize) -> Result<BTreeSet<String>, CliError> {
    let units = wrap::units(spec, &WrapPolicy::MinParams(min))?;
    Ok(units.iter().filter(|unit| !unit.is_root).map(|unit| pattern(&unit.name)).collect())
}

/// The elements of the smallest unit if exactly the expected modules are wrapped.
fn smallest_unit(spec: &ModelSpec, expected: &BTreeSet<String>) -> usize {
    let is_unit = |module: usize| expected.contains(&pattern(&spec.modules[module].fqn));
    let mut elements = vec![0; spec.modules.len()];
    for (index, module) in spec.modules.iter().enumerate() {
        let mut owner = index;
        while let (false, Some(parent)) = (is_unit(owner), spec.modules[owner].parent) {
            owner = parent;
        }
        elements[owner] += module.params.iter().map(|&id| spec.param(id).len()).sum::<usize>();
    }
    // If only the root is a unit, a minimum that nothing reaches.
    (1..elements.len()).filter(|&index| is_unit(index)).map(|index| elements[index]).min().unwrap_or(1 << 40)
}

/// A module's name without layer indices.
fn pattern(fqn: &str) -> String {
    let is_index = |part: &str| part.bytes().all(|byte| byte.is_ascii_digit());
    fqn.split('.').map(|part| if is_index(part) { "*" } else { part }).collect::<Vec<_>>().join(".")
}

fn list(patterns: &BTreeSet<String>) -> String {
    if patterns.is_empty() {
        return "nothing".to_owned();
    }
    patterns.iter().map(String::as_str).collect::<Vec<_>>().join(" ")
}
