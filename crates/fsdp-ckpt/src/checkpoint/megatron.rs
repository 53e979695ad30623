//! Megatron Core's names and shapes of a model, as those of Hugging Face.
//!
//! Megatron stacks layers and experts, keeps the queries, keys and values of each group of heads together, the rows of the
//! gate before those of the up projection in one matrix, and pads the vocabulary. Every tensor of Hugging Face's is rows of
//! one of Megatron's, so all of it is views of the same bytes, also for moments.

mod rows;
mod sizes;
mod states;

use std::collections::{BTreeMap, BTreeSet};

use super::{Checkpoint, Key, OptimizerName, Role, Tensor, join, parameter_span, with_parameter};
use crate::error::Error;
use sizes::LAYERS;
pub(crate) use sizes::ModelSizes;

/// What the names of extra states of modules have in them.
pub(crate) const EXTRA_STATE: &str = "._extra_state";

impl Checkpoint {
    /// Whether names are those of a decoder of Megatron Core.
    pub fn has_megatron_names(&self) -> bool {
        self.parameters().any(|name| name.starts_with(LAYERS) && name.contains("self_attention.linear_"))
    }

    /// Returns the same checkpoint with the names and shapes of Hugging Face, of weights and of what its optimizer keeps of
    /// them. If `has_states`, the weights are the 32-bit copies of the optimizer, where it keeps these, and each parameter has
    /// its step count.
    ///
    /// # Errors
    /// [`Error::BadRequest`] if a tensor is not known, has other sizes than the configuration, or if layers are missing.
    pub(crate) fn with_hugging_face_names(
        mut self,
        sizes: &ModelSizes,
        has_states: bool,
    ) -> Result<Checkpoint, Error> {
        if has_states {
            self.use_masters();
        }
        let refused = |reason: String| Error::bad_request(&self.path, reason);
        let mut layers = BTreeSet::new();
        let mut tensors = BTreeMap::new();
        let (mut names, mut counts) = (BTreeMap::new(), Vec::new());
        for (name, tensor) in std::mem::take(&mut self.tensors) {
            let Some((parameter, rename)) = parameter(&tensor) else {
                tensors.insert(name, tensor);
                continue;
            };
            if tensor.role == Role::Optimizer && tensor.shape.is_empty() {
                counts.push((parameter, rename, tensor));
                continue;
            }
            let cuts = sizes.cuts(&parameter, &tensor.shape).map_err(|why| {
                refused(format!(
                    "`{name}` of shape {:?} {why}; without --config, conversions keep Megatron's names and shapes",
                    tensor.shape
                ))
            })?;
            for cut in cuts {
                let layer = cut
                    .name
                    .strip_prefix("model.layers.")
                    .and_then(|rest| rest.split('.').next()?.parse().ok());
                layers.extend(layer.filter(|_: &u64| tensor.role == Role::Model));
                let part = rows::rows_of(&tensor, &cut.index, &cut.rows, rename(&cut.name));
                let part_name = join(&part.path);
                if tensors.insert(part_name.clone(), part).is_some() {
                    return Err(refused(format!("it holds `{part_name}` in two forms")));
                }
                names.entry(parameter.clone()).or_insert_with(BTreeSet::new).insert(cut.name);
            }
        }
        // What a parameter has only one of, such as a step count, all its parts have.
        for (parameter, rename, count) in counts {
            for name in names.get(&parameter).into_iter().flatten() {
                let path = rename(name);
                tensors.insert(join(&path), Tensor { path, ..count.clone() });
            }
        }
        if !layers.is_empty()
            && (layers.len() as u64, layers.last().copied()) != (sizes.layers, sizes.layers.checked_sub(1))
        {
            return Err(refused(format!(
                "it has {} layers, of which the last is number {}, and the configuration has {}",
                layers.len(),
                layers.last().expect("there are some"),
                sizes.layers
            )));
        }
        self.tensors = tensors;
        // What modules store beside parameters (scales of FP8) has no place in the other model.
        self.values.retain(|name, _| !name.contains(EXTRA_STATE));
        self.tensors.retain(|name, _| !name.contains(EXTRA_STATE));
        if has_states {
            self.count_steps();
        }
        Ok(self)
    }
}

/// The parameter's name of a tensor of the model or of its optimizer, and the path for another name of it.
fn parameter(tensor: &Tensor) -> Option<(String, impl Fn(&str) -> Vec<Key> + use<>)> {
    let path = tensor.path.clone();
    let (name, span) = match tensor.role {
        Role::Model => (join(&path), None),
        Role::Optimizer => match OptimizerName::of_path(&path)? {
            OptimizerName::State { parameter, .. } => (parameter, Some(parameter_span(&path)?)),
            _ => return None,
        },
        Role::Other => return None,
    };
    let renamed = move |name: &str| match &span {
        Some(span) => with_parameter(&path, span.clone(), name),
        None => vec![Key::Name(name.to_owned())],
    };
    Some((name, renamed))
}
