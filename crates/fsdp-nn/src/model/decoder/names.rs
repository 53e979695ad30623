//! Module names of decoders, as in transformers.

/// The modules of a decoder whose names differ between families. The other names are fixed: `layers`, `experts`, `sinks`,
/// and those of latent attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Names {
    /// Prefix of its class names: `Llama` in `LlamaForCausalLM`, `LlamaDecoderLayer`.
    pub class: &'static str,
    /// Suffix of the class name of layers.
    pub layer_class: &'static str,
    /// Everything except the head.
    pub model: &'static str,
    /// The token embedding.
    pub embedding: &'static str,
    /// The norm after the layers.
    pub last_norm: &'static str,
    /// The output head.
    pub head: &'static str,
    /// The attention of a layer.
    pub attention: &'static str,
    /// The projections to queries, keys and values: three, or one to all three.
    pub qkv: &'static [&'static str],
    /// The norms of queries and keys, if there are any.
    pub qk_norms: [&'static str; 2],
    /// The attention output projection.
    pub output: &'static str,
    /// Whether the output projection comes before those of `qkv` in parameter order. Optimizer states of other
    /// trainers identify parameters by their number in that order.
    pub output_is_first: bool,
    /// The MLP of a layer.
    pub mlp: &'static str,
    /// The input projections of the MLP: to gate and up, or one to both, or the only one if there is no gate.
    pub gate_up: &'static [&'static str],
    /// The output projection of the MLP. Experts use the same names.
    pub down: &'static str,
    /// The router of a mixture.
    pub router: &'static str,
    /// The parameter that corrects the scores of experts, within the module of a mixture, and the number of its dimensions,
    /// of which only the last is not one.
    pub score_bias: (&'static str, usize),
    /// The MLP of a mixture that all tokens go through; the map to its weight ends in `_gate`.
    pub shared_expert: &'static str,
    /// Where the norms of a layer are in parameter order.
    pub norms: NormsPlace,
    /// Whether the norm of the input of the MLP comes before that of the output of attention in parameter order (GLM 4).
    pub inputs_have_norms_first: bool,
    /// The norm of the input of attention, if there is one.
    pub before_attention: Option<&'static str>,
    /// The norm of the output of attention, if there is one.
    pub after_attention: Option<&'static str>,
    /// The norm of the input of the MLP, if there is one.
    pub before_mlp: Option<&'static str>,
    /// The norm of the output of the MLP, if there is one.
    pub after_mlp: Option<&'static str>,
}

/// Where the norms of a layer are in parameter order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormsPlace {
    /// Before attention (GPT-NeoX).
    BeforeAttention,
    /// Between attention and MLP (Granite with mixtures).
    BeforeMlp,
    /// After the MLP.
    AfterMlp,
}

impl Names {
    /// The names of Llama, which most families share under their own class prefix.
    pub const LLAMA: Names = Names {
        class: "Llama",
        layer_class: "DecoderLayer",
        model: "model",
        embedding: "embed_tokens",
        last_norm: "norm",
        head: "lm_head",
        attention: "self_attn",
        qkv: &["q_proj", "k_proj", "v_proj"],
        qk_norms: ["q_norm", "k_norm"],
        output: "o_proj",
        output_is_first: false,
        mlp: "mlp",
        gate_up: &["gate_proj", "up_proj"],
        down: "down_proj",
        router: "gate",
        score_bias: ("gate.e_score_correction_bias", 1),
        shared_expert: "shared_experts",
        norms: NormsPlace::AfterMlp,
        inputs_have_norms_first: false,
        before_attention: Some("input_layernorm"),
        after_attention: None,
        before_mlp: Some("post_attention_layernorm"),
        after_mlp: None,
    };

    /// Returns the name of a class with this suffix.
    pub(super) fn class(&self, end: &str) -> String {
        format!("{}{end}", self.class)
    }
}
