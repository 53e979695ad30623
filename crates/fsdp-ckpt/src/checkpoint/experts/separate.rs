//! Takes stacks of experts apart.

use std::collections::{BTreeMap, BTreeSet};

use super::{DIMS, ExpertNames, cut, parameter, parse_stack, weights_of};
use crate::{
    checkpoint::{Checkpoint, Tensor, join, with_parameter},
    error::Error,
};

/// Maximum number of experts in a stack: a damaged shape must not make names without end.
const EXPERTS_MAX: u64 = 1 << 16;

impl Checkpoint {
    pub(super) fn separated(mut self, names: ExpertNames) -> Result<Checkpoint, Error> {
        let experts = self.stacked_experts(names);
        let parts = |name: &str| {
            let stack = parse_stack(name)?;
            Some((weights_of(stack, *experts.get(name)?, names).collect::<Vec<_>>(), DIMS[stack.1]))
        };
        let modules: BTreeSet<String> =
            experts.keys().filter_map(|stack| Some(parse_stack(stack)?.0.to_owned())).collect();
        // Other layers may have an MLP of the same name.
        let beside = |name: &str| {
            let (prefix, renamed) = names.published_beside(name)?;
            modules.contains(&prefix).then_some(renamed)
        };
        let mut tensors = BTreeMap::new();
        for (name, tensor) in std::mem::take(&mut self.tensors) {
            let found = parameter(&tensor.path, tensor.role);
            let parts = found.as_ref().and_then(|(span, name)| Some((span, parts(name)?)));
            if let Some((span, (parts, dims))) = parts {
                let slots = parts.iter().filter(|(_, expert, _)| *expert == 0).count();
                for (new, expert, slot) in parts {
                    let path = with_parameter(&tensor.path, span.clone(), &new);
                    let part = cut::part_of(&tensor, path, expert, (slot, slots), dims);
                    let part = part.ok_or_else(|| self.undivided(&tensor))?;
                    self.put(&mut tensors, part)?;
                }
                continue;
            }
            let renamed = found.and_then(|(span, name)| Some((span, beside(&name)?)));
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
            let parts = parts(name).map(|(parts, _)| parts.into_iter().map(|part| part.0).collect());
            parts.or_else(|| Some(vec![beside(name)?]))
        })?;
        Ok(self)
    }

    fn undivided(&self, state: &Tensor) -> Error {
        self.refused(format!(
            "`{}` has the shape {:?}: a state of stacked experts that is neither one value nor of their shape, as \
             Adafactor's are, has no counterpart in single experts",
            join(&state.path),
            state.shape
        ))
    }

    /// The number of experts in each stack, by its name.
    fn stacked_experts(&self, names: ExpertNames) -> BTreeMap<String, u64> {
        let stacks = self.tensors.values().filter_map(|tensor| {
            let (_, name) = parameter(&tensor.path, tensor.role)?;
            let (_, stack) = parse_stack(&name)?;
            let slots = names.words()[stack].len() as u64;
            let &[experts, rows, ..] = &tensor.shape[..] else { return None };
            let is_stack = tensor.shape.len() == DIMS[stack] && slots > 0 && rows.is_multiple_of(slots);
            (is_stack && experts <= EXPERTS_MAX).then_some((name, experts))
        });
        stacks.collect()
    }
}
