//! Stacks the weights of experts.

use std::collections::BTreeMap;

use super::{ExpertNames, SPARSE_MLP, STACKED_MLP, Weight, cut, parameter, parse_stack, renamed_module};
use crate::{
    checkpoint::{Checkpoint, Key, Role, Tensor, with_parameter},
    error::Error,
};

/// Whether a tensor belongs to the experts of a Granite, in any form.
fn is_of_granite(tensor: &Tensor) -> bool {
    let Some((_, name)) = parameter(&tensor.path, tensor.role) else { return false };
    let weight = Weight::parse(&name).map(|weight| weight.names);
    weight == Some(ExpertNames::Granite) || parse_stack(&name).is_some() && name.contains(SPARSE_MLP)
}

impl Checkpoint {
    pub(super) fn fused(mut self) -> Result<Checkpoint, Error> {
        let is_granite = self.tensors.values().any(is_of_granite);
        // The module of Granite has the same name in both forms.
        let beside = |name: &str| match is_granite {
            true => None,
            false => Some(renamed_module(name, SPARSE_MLP, STACKED_MLP)?.1),
        };
        let mut tensors = BTreeMap::new();
        let mut stacks: BTreeMap<Vec<Key>, (String, cut::Weights)> = BTreeMap::new();
        for (name, tensor) in std::mem::take(&mut self.tensors) {
            let found = parameter(&tensor.path, tensor.role);
            if let Some((span, text)) = &found
                && let Some(weight) = Weight::parse(text)
            {
                let path = with_parameter(&tensor.path, span.clone(), &weight.stack_name());
                let (_, weights) =
                    stacks.entry(path).or_insert_with(|| (weight.stack_name(), BTreeMap::new()));
                weights.insert((weight.expert, weight.slot), (weight.slots(), tensor));
                continue;
            }
            match found.and_then(|(span, text)| Some((span, beside(&text)?))) {
                Some((span, new)) => {
                    let path = with_parameter(&tensor.path, span, &new);
                    self.put(&mut tensors, Tensor { path, ..tensor })?;
                }
                None => drop(tensors.insert(name, tensor)),
            }
        }
        // Weights, moments and counts of a stack are of the same experts.
        let mut experts: BTreeMap<String, u64> = BTreeMap::new();
        for (name, weights) in stacks.values() {
            let count = weights.last_key_value().map_or(0, |((expert, _), _)| expert.saturating_add(1));
            let most = experts.entry(name.clone()).or_default();
            *most = count.max(*most);
        }
        for (path, (name, weights)) in stacks {
            let stack = cut::stack_of(path, weights, experts[&name]).map_err(|why| self.refused(why))?;
            self.put(&mut tensors, stack)?;
        }
        self.tensors = tensors;
        self.rename_values(|name| {
            let stack = Weight::parse(name).map(|weight| weight.stack_name());
            Some(vec![stack.or_else(|| beside(name))?])
        })?;
        Ok(self)
    }

    /// The states that have one value for each expert, such as step counts, of which a stack has only one: the name of
    /// the stack, and all tensors that would become one.
    pub(crate) fn single_values_of_experts(&self) -> Vec<(String, Vec<&str>)> {
        let mut all: BTreeMap<Vec<Key>, (String, Vec<&str>)> = BTreeMap::new();
        for (name, tensor) in &self.tensors {
            let found = parameter(&tensor.path, tensor.role);
            if let Some((span, text)) = found
                .filter(|_| tensor.role == Role::Optimizer && tensor.shape.len() < 2 && tensor.len() == 1)
                && let Some(weight) = Weight::parse(&text)
            {
                let stack = weight.stack_name();
                let path = with_parameter(&tensor.path, span, &stack);
                all.entry(path).or_insert_with(|| (stack, Vec::new())).1.push(name);
            }
        }
        all.into_values().collect()
    }
}
