//! Megatron Core's names and shapes of a model, as those of Hugging Face.
//!
//! Megatron stacks layers and experts, keeps the queries, keys and values of each group of heads together, the rows of the
//! gate before those of the up projection in one matrix, and pads the vocabulary. Every tensor of Hugging Face's is rows of
//! one of Megatron's, so all of it is views of the same bytes, also for moments.

mod rows;

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Range,
};

use super::{
    Checkpoint, ExpertNames, Key, Object, OptimizerName, Role, Tensor, join, parameter_span, with_parameter,
};
use crate::error::Error;

/// The sizes in a `config.json` that shapes depend on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ModelSizes {
    pub(crate) vocabulary: u64,
    pub(crate) layers: u64,
    pub(crate) heads: u64,
    pub(crate) key_heads: u64,
    pub(crate) head: u64,
    /// The number of experts and their names, in a mixture.
    pub(crate) experts: Option<(u64, ExpertNames)>,
}

/// Tensors of layers, and their names in Hugging Face's models, below the layer.
const SAME: [(&str, &str); 8] = [
    ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
    ("input_layernorm.weight", "input_layernorm.weight"),
    ("self_attention.linear_proj.weight", "self_attn.o_proj.weight"),
    ("self_attention.q_layernorm.weight", "self_attn.q_norm.weight"),
    ("self_attention.k_layernorm.weight", "self_attn.k_norm.weight"),
    ("mlp.linear_fc1.layer_norm_weight", "post_attention_layernorm.weight"),
    ("pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
    ("mlp.linear_fc2.weight", "mlp.down_proj.weight"),
];

const LAYERS: &str = "decoder.layers.";

/// A tensor of Hugging Face: its name, and the rows of which it consists, of the matrix at an index of a stack.
struct Cut {
    name: String,
    index: Vec<u64>,
    rows: Vec<Range<u64>>,
}

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
        for (name, tensor) in std::mem::take(&mut self.tensors) {
            let Some((parameter, rename)) = parameter(&tensor) else {
                tensors.insert(name, tensor);
                continue;
            };
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
        self.values.retain(|name, _| !name.contains("._extra_state"));
        if has_states {
            self.count_steps();
        }
        Ok(self)
    }

    /// Replaces 16-bit weights by the copies that the optimizer updates.
    fn use_masters(&mut self) {
        let master = |tensor: &Tensor| match OptimizerName::of_path(&tensor.path) {
            Some(OptimizerName::State { parameter, state }) if MASTERS.contains(&&*state) => Some(parameter),
            _ => None,
        };
        let of_optimizer = self.tensors.iter().filter(|(_, tensor)| tensor.role == Role::Optimizer);
        let masters: Vec<_> =
            of_optimizer.filter_map(|(name, tensor)| Some((name.clone(), master(tensor)?))).collect();
        for (name, parameter) in masters {
            let Some(weight) = self.tensors.get_mut(&parameter) else { continue };
            let path = weight.path.clone();
            if let Some(master) = self.tensors.remove(&name) {
                self.tensors.insert(parameter, Tensor { path, role: Role::Model, ..master });
            }
        }
    }

    /// Gives each parameter with states the step count that Megatron stores once, or once for each group.
    fn count_steps(&mut self) {
        let common = self.tensors.remove("optimizer.state.common_step");
        let is_of_group = |name: &&String| name.contains("param_groups.") && name.ends_with(".step");
        let mut of_groups =
            self.values.iter().filter(|(name, _)| is_of_group(name)).map(|(_, object)| &object.value);
        let first = of_groups.next().cloned().filter(|first| of_groups.all(|other| other == first));
        let of_parameters = self.tensors.values().filter(|tensor| tensor.role == Role::Optimizer);
        let paths: BTreeSet<Vec<Key>> = of_parameters
            .filter(|tensor| OptimizerName::of_path(&tensor.path).is_some())
            .map(|tensor| [&tensor.path[..tensor.path.len() - 1], &[Key::Name("step".to_owned())]].concat())
            .collect();
        for path in paths {
            let (name, role) = (join(&path), Role::Optimizer);
            if let Some(count) = &common {
                self.tensors.insert(name, Tensor { path, ..count.clone() });
            } else if let Some(value) = &first {
                self.values.insert(name, Object { path, role, value: value.clone() });
            }
        }
    }
}

/// The names of 32-bit copies among the states of an optimizer.
const MASTERS: [&str; 2] = ["fp32_param", "param"];

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

impl ModelSizes {
    /// The tensors of Hugging Face in one of Megatron's, or why there are none.
    fn cuts(&self, parameter: &str, shape: &[u64]) -> Result<Vec<Cut>, String> {
        let whole =
            |name: &str, rows| vec![Cut { name: name.to_owned(), index: Vec::new(), rows: vec![0..rows] }];
        let words = match parameter {
            "embedding.word_embeddings.weight" => Some("model.embed_tokens.weight"),
            "output_layer.weight" => Some("lm_head.weight"),
            _ => None,
        };
        if let Some(name) = words {
            return match shape {
                [rows, _] if *rows >= self.vocabulary => Ok(whole(name, self.vocabulary)),
                _ => Err(format!("has fewer rows than the vocabulary of {} tokens", self.vocabulary)),
            };
        }
        if parameter == "decoder.final_layernorm.weight" {
            let [rows] = shape else { return Err("is not a vector".to_owned()) };
            return Ok(whole("model.norm.weight", *rows));
        }
        let rest = parameter
            .strip_prefix(LAYERS)
            .ok_or("is none of the tensors that are known in Megatron's decoders")?;
        let numbered =
            rest.split_once('.').and_then(|(number, rest)| Some((number.parse::<u64>().ok()?, rest)));
        match numbered {
            Some((layer, rest)) => self.cuts_of_layer(rest, layer, &[], shape),
            None => {
                let (layers, inner) = shape.split_first().ok_or("is not a stack of layers")?;
                if *layers != self.layers {
                    return Err(format!("has {layers} layers, and the configuration has {}", self.layers));
                }
                let cuts = (0..*layers).map(|layer| self.cuts_of_layer(rest, layer, &[layer], inner));
                Ok(cuts.collect::<Result<Vec<_>, _>>()?.into_iter().flatten().collect())
            }
        }
    }

    /// The tensors in one of a layer, which has this shape at this index.
    fn cuts_of_layer(
        &self,
        rest: &str,
        layer: u64,
        index: &[u64],
        shape: &[u64],
    ) -> Result<Vec<Cut>, String> {
        let rows = *shape.first().ok_or("is a single value")?;
        let prefix = format!("model.layers.{layer}.");
        let cut = |name: String, rows| Cut { name: format!("{prefix}{name}"), index: index.to_vec(), rows };
        if let Some(kind) =
            rest.strip_prefix("self_attention.linear_qkv.").filter(|kind| ["weight", "bias"].contains(kind))
        {
            let parts = self.query_key_value(rows)?.into_iter().zip(["q", "k", "v"]);
            return Ok(parts
                .map(|(rows, which)| cut(format!("self_attn.{which}_proj.{kind}"), rows))
                .collect());
        }
        if rest == "mlp.linear_fc1.weight" {
            let half = half(rows)?;
            return Ok(vec![
                cut("mlp.gate_proj.weight".to_owned(), vec![0..half]),
                cut("mlp.up_proj.weight".to_owned(), vec![half..rows]),
            ]);
        }
        if let Some((_, name)) = SAME.iter().find(|(known, _)| *known == rest) {
            return Ok(vec![cut((*name).to_owned(), vec![0..rows])]);
        }
        self.cuts_of_mixture(rest, &prefix, index, shape)
    }

    /// The tensors in one of a mixture: the router, all experts, or one of them.
    fn cuts_of_mixture(
        &self,
        rest: &str,
        prefix: &str,
        index: &[u64],
        shape: &[u64],
    ) -> Result<Vec<Cut>, String> {
        let unknown = "is none of the tensors that are known in Megatron's layers of this family";
        let (experts, names) = self.experts.filter(|_| rest.starts_with("mlp.")).ok_or(unknown)?;
        let (module, [gate, up, down]) = names.of_linear_maps().ok_or(unknown)?;
        if rest == "mlp.router.weight" {
            let rows = vec![0..shape[0]];
            return Ok(vec![Cut {
                name: format!("{prefix}{module}.gate.weight"),
                index: index.to_vec(),
                rows,
            }]);
        }
        let parts = |map: &str, rows: u64| match map {
            "linear_fc1.weight" => Ok(vec![(gate, 0..half(rows)?), (up, half(rows)?..rows)]),
            "linear_fc2.weight" => Ok(vec![(down, 0..rows)]),
            _ => Err(unknown.to_owned()),
        };
        let of_expert = |expert: u64, index: Vec<u64>, parts: Vec<(&str, Range<u64>)>| {
            let name = format!("{prefix}{module}.experts.{expert}.");
            let cut = move |(word, rows)| Cut {
                name: format!("{name}{word}"),
                index: index.clone(),
                rows: vec![rows],
            };
            parts.into_iter().map(cut).collect::<Vec<_>>()
        };
        let single = rest.strip_prefix("mlp.experts.local_experts.").and_then(|rest| rest.split_once('.'));
        if let Some((expert, map)) = single {
            let expert = expert.parse().ok().filter(|expert| *expert < experts);
            let expert =
                expert.ok_or_else(|| format!("is not one of the {experts} experts of the configuration"))?;
            return Ok(of_expert(expert, index.to_vec(), parts(map, shape[0])?));
        }
        let map = rest.strip_prefix("mlp.experts.experts.").ok_or(unknown)?;
        let &[found, rows, _] = shape else { return Err("is not a stack of experts".to_owned()) };
        if found != experts {
            return Err(format!("has {found} experts, and the configuration has {experts}"));
        }
        let parts = parts(map, rows)?;
        Ok((0..experts)
            .flat_map(|expert| of_expert(expert, [index, &[expert]].concat(), parts.clone()))
            .collect())
    }

    /// The rows of queries, keys and values: each group of heads has its queries, then one key and one value.
    fn query_key_value(&self, rows: u64) -> Result<[Vec<Range<u64>>; 3], String> {
        let (groups, head) = (self.key_heads, self.head);
        let queries = (self.heads.checked_div(groups)).filter(|many| many * groups == self.heads);
        let queries = queries
            .and_then(|many| many.checked_mul(head))
            .ok_or("has groups of unequal numbers of heads")?;
        let group = queries.checked_add(head.saturating_mul(2)).ok_or("has heads that are too large")?;
        if group.checked_mul(groups) != Some(rows) {
            return Err(format!(
                "has {rows} rows, and the configuration has {} query heads and twice {groups} others of {head}",
                self.heads
            ));
        }
        let parts = [0..queries, queries..queries + head, queries + head..group];
        Ok(parts.map(|part| {
            (0..groups).map(|number| number * group + part.start..number * group + part.end).collect()
        }))
    }
}

fn half(rows: u64) -> Result<u64, String> {
    rows.is_multiple_of(2)
        .then_some(rows / 2)
        .ok_or_else(|| "has an odd number of rows for gate and up".to_owned())
}
