//! The shape of a model: the sizes in its row, and properties that follow from its name or its number of parameters.

use std::sync::Arc;

use fsdp_nn::model::{DecoderConfig, LayerConfig, Names, NormKind, RopeConfig, RopeScaling};
use fsdp_nn::op::Function;

use crate::row::Row;
use crate::words::{Words, matches, number_in};

/// Models whose MLPs have no gate, by name in lower case.
const UNGATED: &str = r"^(.*/)?(mpt|gpt|mingpt|modded|nanochat|maxtext-22b|maxtext-52b|opt|pythia|falcon|bloom|starcoder|santacoder|cerebras|phi-?[12]|bert|codegen|stablelm-base|dolly|redpajama)";
/// Models whose MLPs have a gate.
const GATED: &str = r"llama|mistral|mixtral|qwen|gemma|maxtext|internlm|smollm|olmo|granite|deepseek|baichuan|\byi\b|yi-|phi-?[34]|vicuna|nanotron|palm|zephyr";
/// Models whose head is tied to the embedding.
const TIED: &str = r"^(.*/)?(mpt|gpt-?[23]|gpt-\d|gptneo\b|gpt-neo-|gpt$|opt|bloom|falcon|gemma|nanotron-(1|3)|starcoder|santacoder|cerebras)";
/// Models whose head is not tied.
const UNTIED: &str = r"^(.*/)?(tiny|code)?-?(llama-?2|llama2|llama-?3(\.[013])?-|llama-|mistral|mixtral|vicuna|pythia|gpt-?neox|gpt-?j|internlm|maxtext|yi|phi-3|deepseek|baichuan)";

/// Models whose heads may be larger or smaller than the width divided by their number.
const CUSTOM_HEAD_DIM: &str = r"qwen-?3|gemma|nemo|glm";

/// Head sizes of models that do not divide their width evenly among heads.
const HEAD_DIMS: [usize; 6] = [64, 80, 96, 128, 192, 256];

/// Relative difference to the row's number of parameters up to which a shape is accepted: norms, biases, positions.
const SAME_SIZE: f64 = 0.02;

/// Upper bounds that no model exceeds, this and the next ones, small enough that all their products fit 64 bits.
const LAYERS_MAX: usize = 4096;
const HEADS_MAX: usize = 4096;
const WIDTH_MAX: usize = 1 << 17;
const INNER_MAX: usize = 1 << 19;
const VOCAB_MAX: usize = 1 << 20;
const SEQ_MAX: usize = 1 << 20;

/// The shape of a model and of its samples.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Sizes {
    pub(crate) layers: usize,
    pub(crate) hidden: usize,
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) ffn: usize,
    pub(crate) vocab: usize,
    pub(crate) seq: usize,
    pub(crate) is_gated: bool,
    pub(crate) is_tied: bool,
}

impl Sizes {
    /// Reads the sizes of a row; `None` if a size is missing.
    pub(crate) fn of(row: &Row, words: &Words) -> Option<Self> {
        let size = |column: &str| row.number(column).map(|number| number as usize);
        let (heads, hidden) = (size("heads")?, size("hidden")?);
        let model = words.model.as_str();
        let named = Self {
            layers: size("layers")?,
            hidden,
            heads,
            kv_heads: size("kv_heads").unwrap_or(heads),
            head_dim: named_head_dim(model).unwrap_or(hidden / heads),
            ffn: size("ffn")?,
            vocab: size("vocab")?,
            seq: size("seq")?,
            is_gated: !matches(UNGATED, model),
            is_tied: matches(TIED, model),
        };
        Some(row.number("params").map_or(named, |parameters| named.fit_to_parameters(parameters, model)))
    }

    /// The shape with the nearest number of parameters, among those that the name allows; `self` if it is near enough.
    fn fit_to_parameters(self, parameters: f64, model: &str) -> Self {
        let log_error = |sizes: &Self| (sizes.parameters() / parameters).ln().abs();
        if log_error(&self) < SAME_SIZE {
            return self;
        }
        let [gates, ties] = [[UNGATED, GATED], [TIED, UNTIED]]
            .map(|names| if names.iter().any(|names| matches(names, model)) { 1 } else { 2 });
        let is_custom_head_dim = !self.hidden.is_multiple_of(self.heads) || matches(CUSTOM_HEAD_DIM, model);
        let dims: &[usize] =
            if is_custom_head_dim && named_head_dim(model).is_none() { &HEAD_DIMS } else { &[] };
        let mut all = Vec::new();
        for head_dim in [self.head_dim].iter().chain(dims) {
            for gate in 0..gates {
                for tie in 0..ties {
                    let (is_gated, is_tied) = (self.is_gated ^ (gate == 1), self.is_tied ^ (tie == 1));
                    all.push(Self { head_dim: *head_dim, is_gated, is_tied, ..self });
                }
            }
        }
        // Among equally near shapes, `min_by` returns the first, which changes least.
        all.into_iter().min_by(|one, other| log_error(one).total_cmp(&log_error(other))).unwrap_or(self)
    }

    /// Describes the properties that were derived from the number of parameters, or assumed.
    pub(crate) fn assumed(&self, row: &Row, words: &Words) -> Vec<String> {
        let keys =
            row.number("kv_heads").is_none().then(|| "kv_heads is not given: as many as heads".to_owned());
        keys.into_iter().chain(self.assumed_of_name(row, words.model.as_str())).collect()
    }

    /// The same for properties that the name leaves open.
    fn assumed_of_name(&self, row: &Row, model: &str) -> Option<String> {
        let is_known = |names: [&str; 2]| names.iter().any(|names| matches(names, model));
        if is_known([UNGATED, GATED]) && is_known([TIED, UNTIED]) && self.hidden.is_multiple_of(self.heads) {
            return None;
        }
        let basis = if row.number("params").is_some() { "from its parameters" } else { "assumed" };
        let [gate, head] = [
            if self.is_gated { "gated" } else { "without a gate" },
            if self.is_tied { "tied to the embedding" } else { "untied" },
        ];
        Some(format!(
            "model \"{}\": MLP {gate}, head {head}, heads of {} elements ({basis})",
            row.text("model"),
            self.head_dim
        ))
    }

    /// Describes what is wrong with the sizes; `None` if a model can have them.
    pub(crate) fn contradiction(&self) -> Option<String> {
        let &Self { layers, hidden, heads, kv_heads, head_dim, ffn, vocab, seq, .. } = self;
        let sizes = [
            ("layers", layers, LAYERS_MAX),
            ("hidden", hidden, WIDTH_MAX),
            ("heads", heads, HEADS_MAX),
            ("ffn", ffn, INNER_MAX),
            ("vocab", vocab, VOCAB_MAX),
            ("seq", seq, SEQ_MAX),
        ];
        if let Some((name, size, _)) = sizes.iter().find(|(_, size, max)| size > max) {
            return Some(format!("{name} = {size}, more than any model has"));
        }
        if !heads.is_multiple_of(kv_heads) {
            return Some(format!("{heads} heads do not share {kv_heads} key/value heads evenly"));
        }
        let is_odd = head_dim == 0 || self.is_gated && !head_dim.is_multiple_of(2);
        is_odd.then(|| format!("heads of {head_dim} elements, which cannot rotate"))
    }

    /// The configuration of a model of these sizes: if gated, with RMS norms and rotary positions; otherwise with layer
    /// norms.
    pub(crate) fn config(&self) -> DecoderConfig {
        let names =
            if self.is_gated { Names::LLAMA } else { Names { gate_up: &["up_proj"], ..Names::LLAMA } };
        let rope = self
            .is_gated
            .then(|| Arc::new(RopeConfig { theta: 10_000.0, partial: 1.0, scaling: RopeScaling::Default }));
        let layer = LayerConfig { rope, window: None, mixture: None, delta: None };
        DecoderConfig {
            names,
            vocab_size: self.vocab,
            padding_row: None,
            embedding_scale: 1.0,
            embedding_scale_rounds: false,
            embedding_dropout: 0.0,
            hidden_size: self.hidden,
            intermediate_size: self.ffn,
            num_attention_heads: self.heads,
            num_key_value_heads: self.kv_heads,
            head_dim: self.head_dim,
            latent: None,
            layers: vec![layer; self.layers],
            is_parallel: false,
            qk_norm: None,
            qkv_by_head: false,
            rotates_neighbors: false,
            attention_scale: None,
            attention_softcap: None,
            residual_scale: 1.0,
            logit_scale: 1.0,
            logit_softcap: None,
            is_gated: self.is_gated,
            activation: if self.is_gated { Function::Silu } else { Function::GeluTanh },
            norm: if self.is_gated { NormKind::Rms } else { NormKind::Layer },
            norm_eps: 1e-5,
            tie_word_embeddings: self.is_tied,
            qkv_bias: false,
            sinks: false,
            attention_gate: false,
            output_bias: false,
            mlp_bias: false,
            attention_dropout: 0.0,
            residual_dropout: 0.0,
            router_loss: 0.0,
            keep_f32: &[],
            initializer_range: 0.02,
            max_position_embeddings: self.seq,
        }
    }

    /// Number of parameters in the products of a layer.
    pub(crate) fn layer_parameters(&self) -> f64 {
        let (hidden, head_dim) = (self.hidden as f64, self.head_dim as f64);
        let attention = hidden * head_dim * (2 * self.heads + 2 * self.kv_heads) as f64;
        let mlp = if self.is_gated { 3.0 } else { 2.0 } * hidden * self.ffn as f64;
        attention + mlp
    }

    /// Number of parameters in products, embeddings and the head.
    pub(crate) fn parameters(&self) -> f64 {
        let tables = if self.is_tied { 1.0 } else { 2.0 };
        self.layers as f64 * self.layer_parameters() + tables * (self.vocab * self.hidden) as f64
    }
}

/// Head size, if the name states it.
fn named_head_dim(model: &str) -> Option<usize> {
    let stated = number_in(r"head_?dim[=_ ]?(\d+)", model).filter(|&size| size > 0 && size <= WIDTH_MAX);
    stated.or_else(|| matches(r"maxtext-(22|52)b", model).then_some(256))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::row::read;

    fn of(model: &str, params: &str, sizes: &str) -> Sizes {
        let text = format!(
            "model,params,layers,hidden,heads,kv_heads,ffn,vocab,seq,micro_batch,devices,device_type,sharding,act_ckpt\n\
             {model},{params},{sizes},1024,1,8,H100-80GB,fsdp2,none\n"
        );
        let row = &read(&text, "runs.csv").unwrap().rows[0];
        Sizes::of(row, &Words::of(row)).unwrap()
    }

    #[test]
    fn model_kind_is_recognized_by_name_in_any_case() {
        // Gated, tied: by their published configurations.
        let models = [
            ("gpt2-xl", "48,1600,25,25,6400,50257", false, true),
            ("GPT-2-1.5B", "48,1600,25,25,6400,50304", false, true),
            ("facebook/opt-1.3b", "24,2048,32,32,8192,50272", false, true),
            ("Pythia-6.9B", "32,4096,32,32,16384,50432", false, false),
            ("EleutherAI/gpt-neox-20b", "44,6144,64,64,24576,50432", false, false),
            ("bloom-7b1", "30,4096,32,32,16384,250880", false, true),
            ("falcon-7b", "32,4544,71,1,18176,65024", false, true),
            ("mpt-7b", "32,4096,32,32,16384,50432", false, true),
            ("meta-llama/Llama-2-7b", "32,4096,32,32,11008,32000", true, false),
            ("Mistral-7B", "32,4096,32,8,14336,32000", true, false),
            ("Qwen2.5-7B", "28,3584,28,4,18944,152064", true, false),
        ];
        for (model, sizes, is_gated, is_tied) in models {
            let found = of(model, "", sizes);
            assert_eq!((found.is_gated, found.is_tied), (is_gated, is_tied), "{model}");
        }
    }

    #[test]
    fn unknown_properties_are_inferred_from_parameter_count() {
        let shape = "24,2048,16,16,8192,50304";
        for (is_gated, is_tied) in [(false, false), (false, true), (true, false), (true, true)] {
            let sizes = Sizes { is_gated, is_tied, ..of("own", "", shape) };
            assert_eq!(of("own", &format!("{:.0}", sizes.parameters()), shape), sizes);
        }
        // Heads that are larger than their part of the width: Qwen3-0.6B has 596 million parameters and heads of 128.
        let qwen = of("Qwen3-0.6B", "596049920", "28,1024,16,8,3072,151936");
        assert_eq!((qwen.head_dim, qwen.is_gated, qwen.is_tied), (128, true, true));
        // Properties that are known from the name stay, whatever the number of parameters.
        let llama = of("Llama-2-7B", "3e9", "32,4096,32,32,11008,32000");
        assert_eq!((llama.head_dim, llama.is_gated, llama.is_tied), (128, true, false));
        assert_eq!(of("MaxText-16B(head_dim128)", "", "32,4096,64,64,11008,32000").head_dim, 128);
    }
}
