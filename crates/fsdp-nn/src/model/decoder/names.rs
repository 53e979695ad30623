//! What the modules of a decoder are called in transformers.

/// The modules of a decoder whose names differ between families. The others are called `model`, `embed_tokens`, `layers`,
/// `self_attn`, `o_proj`, `mlp`, `down_proj`, `norm` and `lm_head`, and `q_norm` and `k_norm`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Names {
    /// What the names of its classes begin with: `Llama` of `LlamaForCausalLM`, `LlamaDecoderLayer`.
    pub class: &'static str,
    /// The projections to queries, keys and values: three, or one to all of them.
    pub qkv: &'static [&'static str],
    /// Whether `o_proj` stands before them. Optimizer states of other trainers go by the number of a parameter.
    pub output_is_first: bool,
    /// The projections to gate and up: two, or one to both.
    pub gate_up: &'static [&'static str],
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
        qkv: &["q_proj", "k_proj", "v_proj"],
        output_is_first: false,
        gate_up: &["gate_proj", "up_proj"],
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
