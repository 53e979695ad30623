//! What the modules of a decoder are called in transformers.

/// The modules of a decoder whose names differ between families. The others are called `layers`, `q_norm` and `k_norm`,
/// `gate` and `experts`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Names {
    /// What the names of its classes begin with: `Llama` of `LlamaForCausalLM`, `LlamaDecoderLayer`.
    pub class: &'static str,
    /// How the name of the class of layers goes on.
    pub layer_class: &'static str,
    /// All but the head.
    pub model: &'static str,
    /// The table of tokens.
    pub embedding: &'static str,
    /// The norm behind the layers.
    pub last_norm: &'static str,
    /// The output head.
    pub head: &'static str,
    /// The attention of a layer.
    pub attention: &'static str,
    /// The projections to queries, keys and values: three, or one to all of them.
    pub qkv: &'static [&'static str],
    /// The projection from the values that attention mixed.
    pub output: &'static str,
    /// Whether that stands before them. Optimizer states of other trainers go by the number of a parameter.
    pub output_is_first: bool,
    /// The MLP of a layer.
    pub mlp: &'static str,
    /// The projections into it: to gate and up, or one to both, or the only one where there is no gate.
    pub gate_up: &'static [&'static str],
    /// The projection out of it. Experts have the same names.
    pub down: &'static str,
    /// Whether the norms of a layer stand before attention and MLP.
    pub norms_are_first: bool,
    /// The norm of what attention reads, if there is one.
    pub before_attention: Option<&'static str>,
    /// The norm of what attention adds, if there is one.
    pub after_attention: Option<&'static str>,
    /// The norm of what the MLP reads, if there is one.
    pub before_mlp: Option<&'static str>,
    /// The norm of what the MLP adds, if there is one.
    pub after_mlp: Option<&'static str>,
}

impl Names {
    /// The names of a Llama; most families have them under classes of their own.
    pub const LLAMA: Names = Names {
        class: "Llama",
        layer_class: "DecoderLayer",
        model: "model",
        embedding: "embed_tokens",
        last_norm: "norm",
        head: "lm_head",
        attention: "self_attn",
        qkv: &["q_proj", "k_proj", "v_proj"],
        output: "o_proj",
        output_is_first: false,
        mlp: "mlp",
        gate_up: &["gate_proj", "up_proj"],
        down: "down_proj",
        norms_are_first: false,
        before_attention: Some("input_layernorm"),
        after_attention: None,
        before_mlp: Some("post_attention_layernorm"),
        after_mlp: None,
    };

    /// The name of one of its classes.
    pub(super) fn class(&self, end: &str) -> String {
        format!("{}{end}", self.class)
    }
}
