//! Stacks the weights of experts.

use std::collections::BTreeMap;

use super::{ExpertNames, STACKED_MLP, Weight, cut, parameter, renamed_module};
use crate::{
    checkpoint::{Checkpoint, Key, Role, Tensor, with_parameter},
    error::Error,
};

impl Checkpoint {
    pub(super) fn fused(mut self) -> Result<Checkpoint, Error> {
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
            let (from, to) = (ExpertNames::Mixtral.module(), STACKED_MLP);
            match found.and_then(|(span, text)| Some((span, renamed_module(&text, from, to)?.1))) {
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
            let beside = || Some(renamed_module(name, ExpertNames::Mixtral.module(), STACKED_MLP)?.1);
            Some(vec![Weight::parse(name).map(|weight| weight.stack_name()).or_else(beside)?])
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
