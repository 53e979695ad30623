//! Weights of experts in two forms: one tensor for each weight of each expert, or all experts of a layer stacked.
//!
//! transformers 5 publishes the weights of Mixtral and Qwen3-MoE one by one (`experts.0.gate_proj.weight`, ..), and
//! stacks them in memory: `experts.gate_up_proj` of shape `[experts, 2 * inner, hidden]`, for each expert the rows of
//! the gate and then those of the up projection, and `experts.down_proj` of shape `[experts, hidden, inner]`. Whatever
//! saves a model from memory, such as FSDP2, has the stacks, and so have the states of its optimizer. A weight of one
//! expert is a range of a flattened stack, so both forms are views of the same bytes.

mod cut;

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use super::{Checkpoint, Key, Object, Role, Tensor, Value, join, parameter_span, with_parameter};
use crate::error::Error;

/// The form of the weights of experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Experts {
    /// Stacked, as transformers 5 holds them in memory.
    Fused,
    /// One by one, under the names that a family of models publishes.
    Separate(ExpertNames),
}

/// The names of experts that are stored one by one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpertNames {
    /// `block_sparse_moe.experts.0.w1.weight`, `w3` and `w2`; the router is `block_sparse_moe.gate`.
    Mixtral,
    /// `mlp.experts.0.gate_proj.weight`, `up_proj` and `down_proj`; the router is `mlp.gate`.
    Qwen,
}

impl ExpertNames {
    /// The families of models whose experts have these forms.
    pub(crate) const MODEL_TYPES: [(&'static str, ExpertNames); 2] =
        [("mixtral", ExpertNames::Mixtral), ("qwen3_moe", ExpertNames::Qwen)];

    /// The names that models of this `model_type` publish; `None` if their experts are not known to have these forms.
    pub fn of_model_type(model_type: &str) -> Option<ExpertNames> {
        Self::MODEL_TYPES.into_iter().find(|(known, _)| *known == model_type).map(|(_, names)| names)
    }

    /// The names to which the parameters of a model belong; `None` if it has no experts of these forms.
    pub(crate) fn of_parameters<'a>(mut names: impl Iterator<Item = &'a str>) -> Option<ExpertNames> {
        names.find_map(|name| Weight::parse(name).map(|weight| weight.names))
    }

    /// The module of router and experts, and the names of gate, up and down projection.
    const fn words(self) -> (&'static str, [&'static str; 3]) {
        match self {
            ExpertNames::Mixtral => ("block_sparse_moe", ["w1", "w3", "w2"]),
            ExpertNames::Qwen => (STACKED_MLP, ["gate_proj", "up_proj", "down_proj"]),
        }
    }
}

/// The module of router and experts in memory, whatever it is called in published weights.
const STACKED_MLP: &str = "mlp";

/// The names of the stacks, with the number of weights of each expert.
const STACKS: [(&str, usize); 2] = [("gate_up_proj", 2), ("down_proj", 1)];

/// The name of one weight of one expert, parsed.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Weight<'a> {
    names: ExpertNames,
    /// Everything before the module of router and experts, with its dot.
    prefix: &'a str,
    expert: u64,
    /// Index in [`STACKS`].
    stack: usize,
    /// Position among the expert's weights in the stack.
    slot: usize,
}

impl Weight<'_> {
    fn parse(name: &str) -> Option<Weight<'_>> {
        let (module, rest) = name.rsplit_once(".experts.")?;
        let (expert, rest) = rest.split_once('.')?;
        let (expert, word) = (expert.parse().ok()?, rest.strip_suffix(".weight")?);
        [ExpertNames::Mixtral, ExpertNames::Qwen].into_iter().find_map(|names| {
            let (mlp, words) = names.words();
            let prefix =
                module.strip_suffix(mlp).filter(|prefix| prefix.is_empty() || prefix.ends_with('.'))?;
            let index = words.iter().position(|known| *known == word)?;
            Some(Weight { names, prefix, expert, stack: index / 2, slot: index % 2 })
        })
    }

    fn stack_name(&self) -> String {
        format!("{}{STACKED_MLP}.experts.{}", self.prefix, STACKS[self.stack].0)
    }
}

/// The prefix and the index in [`STACKS`] of a stack's name.
fn parse_stack(name: &str) -> Option<(&str, usize)> {
    let (module, stack) = name.rsplit_once(".experts.")?;
    let prefix =
        module.strip_suffix(STACKED_MLP).filter(|prefix| prefix.is_empty() || prefix.ends_with('.'))?;
    Some((prefix, STACKS.iter().position(|(known, _)| *known == stack)?))
}

/// The names of the weights in a stack of experts, with expert and slot.
fn weights_of(
    (prefix, stack): (&str, usize),
    experts: u64,
    names: ExpertNames,
) -> impl Iterator<Item = (String, u64, usize)> {
    let ((mlp, words), slots) = (names.words(), STACKS[stack].1);
    (0..experts).flat_map(move |expert| {
        let name =
            move |slot: usize| format!("{prefix}{mlp}.experts.{expert}.{}.weight", words[2 * stack + slot]);
        (0..slots).map(move |slot| (name(slot), expert, slot))
    })
}

/// Replaces the end of a router's name.
fn renamed_router(name: &str, from: &str, to: &str) -> Option<String> {
    let prefix = name.strip_suffix(&format!("{from}.gate.weight"))?;
    (prefix.is_empty() || prefix.ends_with('.')).then(|| format!("{prefix}{to}.gate.weight"))
}

/// The place of a parameter's name in the path of a tensor or value, and the name.
fn parameter(path: &[Key], role: Role) -> Option<((usize, std::ops::Range<usize>), String)> {
    let (step, range) = match (role, path.last()) {
        (Role::Model, Some(Key::Name(name))) => (path.len() - 1, 0..name.len()),
        _ => parameter_span(path)?,
    };
    let Key::Name(text) = &path[step] else { return None };
    let name = text[range.clone()].to_owned();
    Some(((step, range), name))
}

impl Checkpoint {
    /// Whether a tensor of the model or of its optimizer is a stack of experts.
    pub(crate) fn has_fused_experts(&self) -> bool {
        self.tensors.values().any(|tensor| {
            tensor.shape.len() == 3
                && parameter(&tensor.path, tensor.role).is_some_and(|(_, name)| parse_stack(&name).is_some())
        })
    }

    /// Returns the same checkpoint with the weights of experts in this form, together with the states and the settings
    /// of their optimizer. What has the form already remains.
    ///
    /// # Errors
    /// [`Error::BadRequest`] if weights of a stack are missing or differ in shape or dtype, or if two tensors would
    /// have one name.
    pub fn with_experts(self, form: Experts) -> Result<Checkpoint, Error> {
        match form {
            Experts::Separate(names) => self.separated(names),
            Experts::Fused => self.fused(),
        }
    }

    fn separated(mut self, names: ExpertNames) -> Result<Checkpoint, Error> {
        let experts = self.stacked_experts();
        let parts = |name: &str| {
            let stack = parse_stack(name)?;
            Some(weights_of(stack, *experts.get(name)?, names).collect::<Vec<_>>())
        };
        let router =
            |name: &str| renamed_router(name, STACKED_MLP, names.words().0).filter(|_| !experts.is_empty());
        let mut tensors = BTreeMap::new();
        for (name, tensor) in std::mem::take(&mut self.tensors) {
            let found = parameter(&tensor.path, tensor.role);
            let parts = found.as_ref().and_then(|(span, name)| Some((span, parts(name)?)));
            if let Some((span, parts)) = parts {
                let slots = parts.iter().filter(|(_, expert, _)| *expert == 0).count();
                for (new, expert, slot) in parts {
                    let path = with_parameter(&tensor.path, span.clone(), &new);
                    let part = cut::part_of(&tensor, path, expert, (slot, slots));
                    self.put(&mut tensors, part)?;
                }
                continue;
            }
            let renamed = found.and_then(|(span, name)| Some((span, router(&name)?)));
            match renamed {
                Some((span, new)) => {
                    let path = with_parameter(&tensor.path, span, &new);
                    self.put(&mut tensors, Tensor { path, ..tensor })?;
                }
                None => drop(tensors.insert(name, tensor)),
            }
        }
        self.tensors = tensors;
        self.rename_values(|name| {
            let parts = parts(name).map(|parts| parts.into_iter().map(|part| part.0).collect());
            parts.or_else(|| Some(vec![router(name)?]))
        });
        Ok(self)
    }

    /// The number of experts in each stack, by its name.
    fn stacked_experts(&self) -> BTreeMap<String, u64> {
        let stacks = self.tensors.values().filter_map(|tensor| {
            let [experts, rows, _] = tensor.shape[..] else { return None };
            let (_, name) = parameter(&tensor.path, tensor.role)?;
            let (_, stack) = parse_stack(&name)?;
            rows.is_multiple_of(STACKS[stack].1 as u64).then_some((name, experts))
        });
        stacks.collect()
    }

    fn fused(mut self) -> Result<Checkpoint, Error> {
        let mut tensors = BTreeMap::new();
        let mut stacks: BTreeMap<Vec<Key>, cut::Weights> = BTreeMap::new();
        for (name, tensor) in std::mem::take(&mut self.tensors) {
            let found = parameter(&tensor.path, tensor.role);
            if let Some((span, text)) = &found
                && let Some(weight) = Weight::parse(text)
            {
                let path = with_parameter(&tensor.path, span.clone(), &weight.stack_name());
                stacks
                    .entry(path)
                    .or_default()
                    .insert((weight.expert, weight.slot), (STACKS[weight.stack].1, tensor));
                continue;
            }
            let (from, to) = (ExpertNames::Mixtral.words().0, STACKED_MLP);
            match found.and_then(|(span, text)| Some((span, renamed_router(&text, from, to)?))) {
                Some((span, new)) => {
                    let path = with_parameter(&tensor.path, span, &new);
                    self.put(&mut tensors, Tensor { path, ..tensor })?;
                }
                None => drop(tensors.insert(name, tensor)),
            }
        }
        for (path, weights) in stacks {
            let stack = cut::stack_of(path, weights).map_err(|why| Error::bad_request(&self.path, why))?;
            self.put(&mut tensors, stack)?;
        }
        self.tensors = tensors;
        self.rename_values(|name| {
            let router = || renamed_router(name, ExpertNames::Mixtral.words().0, STACKED_MLP);
            Some(vec![Weight::parse(name).map(|weight| weight.stack_name()).or_else(router)?])
        });
        Ok(self)
    }

    /// Adds a tensor under the name of its path.
    fn put(&self, tensors: &mut BTreeMap<String, Tensor>, tensor: Tensor) -> Result<(), Error> {
        let name = join(&tensor.path);
        match tensors.insert(name.clone(), tensor) {
            None => Ok(()),
            Some(_) => {
                let reason =
                    format!("it holds the experts of `{name}` in both forms, stacked and one by one");
                Err(Error::bad_request(&self.path, reason))
            }
        }
    }

    /// Renames parameters in the settings and states of the optimizer that are no tensors. A parameter may become
    /// several, and several may become one.
    fn rename_values(&mut self, renamed: impl Fn(&str) -> Option<Vec<String>>) {
        let mut values = BTreeMap::new();
        for (name, mut object) in std::mem::take(&mut self.values) {
            if object.role == Role::Optimizer {
                rename_members(&mut object.value, &renamed);
            }
            let found = parameter(&object.path, object.role).filter(|_| object.role == Role::Optimizer);
            match found.and_then(|(span, name)| Some((span, renamed(&name)?))) {
                Some((span, names)) => values.extend(names.iter().map(|new| {
                    let path = with_parameter(&object.path, span.clone(), new);
                    (join(&path), Object { path, ..object.clone() })
                })),
                None => drop(values.insert(name, object)),
            }
        }
        self.values = values;
    }
}

/// Renames parameters in the list of a group, at any depth.
fn rename_members(value: &mut Value, renamed: &impl Fn(&str) -> Option<Vec<String>>) {
    match value {
        Value::List(items) | Value::Tuple(items) => {
            let mut all: Vec<Value> = Vec::with_capacity(items.len());
            for mut item in std::mem::take(items) {
                let new = if let Value::Str(name) = &item { renamed(name) } else { None };
                match new {
                    Some(names) => {
                        for name in names.into_iter().map(Value::Str) {
                            // Several members that become one are kept once.
                            if !all.contains(&name) {
                                all.push(name);
                            }
                        }
                    }
                    None => {
                        rename_members(&mut item, renamed);
                        all.push(item);
                    }
                }
            }
            *items = all;
        }
        Value::Dict(items) => items.iter_mut().for_each(|(_, item)| rename_members(item, renamed)),
        _ => {}
    }
}
