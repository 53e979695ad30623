//! Which tensors of Hugging Face are in which rows of one of Megatron's.

use std::ops::Range;

use super::super::ExpertNames;

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

/// What the names of tensors of layers begin with.
pub(super) const LAYERS: &str = "decoder.layers.";

/// A tensor of Hugging Face: its name, and the rows of which it consists, of the matrix at an index of a stack.
pub(super) struct Cut {
    pub(super) name: String,
    pub(super) index: Vec<u64>,
    pub(super) rows: Vec<Range<u64>>,
}

impl ModelSizes {
    /// The tensors of Hugging Face in one of Megatron's, or why there are none.
    pub(super) fn cuts(&self, parameter: &str, shape: &[u64]) -> Result<Vec<Cut>, String> {
        let whole =
            |name: &str, rows| vec![Cut { name: name.to_owned(), index: Vec::new(), rows: one(0..rows) }];
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
                cut("mlp.gate_proj.weight".to_owned(), one(0..half)),
                cut("mlp.up_proj.weight".to_owned(), one(half..rows)),
            ]);
        }
        if let Some((_, name)) = SAME.iter().find(|(known, _)| *known == rest) {
            return Ok(vec![cut((*name).to_owned(), one(0..rows))]);
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
            let rows = one(0..shape[0]);
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

/// One range of rows.
fn one(rows: Range<u64>) -> Vec<Range<u64>> {
    std::iter::once(rows).collect()
}
