//! Names of a model to which PEFT has added LoRA adapters, without what PEFT inserts.
//!
//! PEFT wraps the model (`base_model.model.`) and the modules that it changes: a linear map becomes `q_proj.base_layer`,
//! `q_proj.lora_A.<adapter>`, `q_proj.lora_B.<adapter>` and, with DoRA, `q_proj.lora_magnitude_vector.<adapter>`; a module that is trained in full is there twice, as
//! `lm_head.original_module` and as `lm_head.modules_to_save.<adapter>`. What PEFT itself saves, without the base, has
//! neither the names of adapters nor those two, but the rest.

use std::collections::{BTreeMap, BTreeSet};

use super::{Checkpoint, Key, OptimizerName, Role, Value, join, parameter_span, with_parameter};
use crate::error::Error;

/// The copy of a module that is trained in full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Copies {
    /// The trained one.
    Trained,
    /// That of the base.
    Base,
}

/// A name without what PEFT inserts.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Parsed {
    name: String,
    /// Whether it is one of the matrices of an adapter.
    is_adapter: bool,
    /// Whether it is of a module that PEFT has wrapped.
    is_base_layer: bool,
    /// Which copy it is, of a module that is there twice.
    copy: Option<Copies>,
    /// The name of the adapter, if it has one.
    adapter: Option<String>,
}

/// The matrices of a LoRA adapter.
const MATRICES: [&str; 2] = ["lora_A", "lora_B"];

/// The lengths of rows of DoRA. In memory it is a module with a `weight`, which PEFT leaves out of the name that it saves.
pub(crate) const MAGNITUDE: &str = "lora_magnitude_vector";

fn parse(name: &str) -> Parsed {
    let inside = name.split_once("base_model.model.").filter(|(before, _)| {
        // Before it, only wrappers of the whole model are left, and keys of the checkpoint.
        before.is_empty() || before.ends_with('.')
    });
    let mut steps: Vec<&str> = inside.map_or(name, |(_, inside)| inside).split('.').collect();
    let mut parsed =
        Parsed { name: String::new(), is_adapter: false, is_base_layer: false, copy: None, adapter: None };
    let mut kept: Vec<&str> = Vec::with_capacity(steps.len());
    let last = steps.pop().unwrap_or_default();
    let mut steps = steps.into_iter();
    while let Some(step) = steps.next() {
        match step {
            "base_layer" => parsed.is_base_layer = true,
            "original_module" => parsed.copy = Some(Copies::Base),
            "modules_to_save" => {
                parsed.copy = Some(Copies::Trained);
                parsed.adapter = steps.next().map(str::to_owned);
            }
            step if step == MAGNITUDE || MATRICES.contains(&step) => {
                parsed.is_adapter = true;
                parsed.adapter = steps.next().map(str::to_owned);
                kept.push(step);
            }
            step => kept.push(step),
        }
    }
    parsed.is_adapter |= last == MAGNITUDE;
    if kept.last() != Some(&MAGNITUDE) {
        kept.push(last);
    }
    parsed.name = kept.join(".");
    parsed
}

/// The name of the parameter of a tensor or value, and its place in the path.
fn parameter(path: &[Key], role: Role) -> Option<((usize, std::ops::Range<usize>), String)> {
    let (step, range) = match (role, path.last()) {
        (Role::Model, Some(Key::Name(name))) => (path.len() - 1, 0..name.len()),
        (Role::Optimizer, _) => parameter_span(path)?,
        _ => return None,
    };
    let name = path[step].text()[range.clone()].to_owned();
    Some(((step, range), name))
}

impl Checkpoint {
    fn peft_names(&self) -> impl Iterator<Item = Parsed> {
        let tensors = self.tensors.values().filter_map(|tensor| parameter(&tensor.path, tensor.role));
        tensors.map(|(_, name)| parse(&name))
    }

    /// Whether it holds matrices of LoRA adapters.
    pub(crate) fn has_adapters(&self) -> bool {
        self.peft_names().any(|parsed| parsed.is_adapter)
    }

    /// The name of a matrix that adapts stacked experts (PEFT's `target_parameters`), if it holds one.
    pub(crate) fn adapter_of_stack(&self) -> Option<String> {
        self.peft_names().map(|parsed| parsed.name).find(|name| name.contains(".experts.lora_"))
    }

    /// Whether it holds the base to which adapters were added.
    pub(crate) fn has_base_of_adapters(&self) -> bool {
        self.peft_names().any(|parsed| parsed.is_base_layer)
    }

    /// Returns the same checkpoint under the names that its model would have without PEFT, but for those of
    /// adapters. Of modules that are there twice, the other copy is left out.
    ///
    /// # Errors
    /// [`Error::BadRequest`] for several adapters, parts that LoRA and DoRA do not have, and names that become the same.
    pub(crate) fn without_peft(mut self, copies: Copies) -> Result<Checkpoint, Error> {
        self.check_lora()?;
        let mut tensors = BTreeMap::new();
        for (name, mut tensor) in std::mem::take(&mut self.tensors) {
            let Some((span, parsed)) =
                parameter(&tensor.path, tensor.role).map(|(span, name)| (span, parse(&name)))
            else {
                tensors.insert(name, tensor);
                continue;
            };
            if parsed.copy.is_some_and(|copy| copy != copies) {
                continue;
            }
            tensor.path = with_parameter(&tensor.path, span, &parsed.name);
            let new = join(&tensor.path);
            if tensors.insert(new.clone(), tensor).is_some() {
                let reason = format!("without the names of PEFT's modules, two tensors would be `{new}`");
                return Err(Error::bad_request(&self.path, reason));
            }
        }
        self.tensors = tensors;
        for (name, mut object) in std::mem::take(&mut self.values) {
            if object.role == Role::Optimizer {
                let is_members = matches!(
                    OptimizerName::of_path(&object.path),
                    Some(OptimizerName::GroupSetting { key, .. }) if key == "params"
                );
                if is_members {
                    rename_members(&mut object.value);
                }
                if let Some((span, inner)) = parameter(&object.path, object.role) {
                    object.path = with_parameter(&object.path, span, &parse(&inner).name);
                    self.values.insert(join(&object.path), object);
                    continue;
                }
            }
            self.values.insert(name, object);
        }
        Ok(self)
    }

    /// Names, without PEFT's, of parameters that the run trained in full: the copies that PEFT made of them or, in what
    /// PEFT saves without the base, everything that is not an adapter.
    pub(crate) fn trained_beside_adapters(&self) -> BTreeSet<String> {
        let has_base = self.has_base_of_adapters();
        let models = self.tensors.values().filter(|tensor| tensor.role == Role::Model);
        let parsed = models.filter_map(|tensor| Some(parse(&parameter(&tensor.path, tensor.role)?.1)));
        let is_trained = |one: &Parsed| {
            !one.is_adapter && (one.copy == Some(Copies::Trained) || !has_base && one.copy.is_none())
        };
        parsed.filter(is_trained).map(|one| one.name).collect()
    }

    fn check_lora(&self) -> Result<(), Error> {
        let adapters: BTreeSet<String> = self.peft_names().filter_map(|one| one.adapter).collect();
        if adapters.len() > 1 {
            let names: Vec<String> = adapters.into_iter().collect();
            let reason = format!("it holds several adapters ({}); save one of them", names.join(", "));
            return Err(Error::bad_request(&self.path, reason));
        }
        let is_other = |parsed: &Parsed| {
            let lora = parsed.name.split('.').find(|step| step.starts_with("lora_"));
            lora.is_some_and(|step| match step {
                MAGNITUDE => !parsed.name.ends_with(MAGNITUDE),
                step => !MATRICES.contains(&step) || !parsed.name.ends_with(".weight"),
            })
        };
        if let Some(other) = self.peft_names().find(is_other) {
            let reason = format!(
                "it holds `{}`, which LoRA and DoRA of linear maps do not have (adapters of embeddings and biases of adapters are \
                 not supported)",
                other.name
            );
            return Err(Error::bad_request(&self.path, reason));
        }
        Ok(())
    }
}

fn rename_members(value: &mut Value) {
    let (Value::List(items) | Value::Tuple(items)) = value else { return };
    for item in items {
        if let Value::Str(name) = item {
            *name = parse(name).name;
        }
    }
}

#[cfg(test)]
mod tests;
