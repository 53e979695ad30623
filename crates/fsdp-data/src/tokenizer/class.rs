//! The class that transformers' `AutoTokenizer` loads a `tokenizer.json` with.
//!
//! Most classes use the file as it is. Those of some models take only the vocabulary, the merges and the post-processor from
//! it, and build the rest themselves, so the same file has other tokens under another class.

use serde_json::{Map, Value};

use super::fault::TokenizerFault;

/// A class that builds its tokenizer itself, with the settings that it reads from `tokenizer_config.json`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Class {
    /// SentencePiece with byte fallback, without any splitting.
    Llama {
        /// `add_prefix_space`: whether a space is put before a text.
        prefix: bool,
        /// `legacy`: whether a space is also put after each special token.
        legacy: bool,
    },
    /// SentencePiece with byte fallback, split after each space.
    Gemma,
    /// Byte-level, with GPT-2's pattern.
    Gpt2 {
        /// `add_prefix_space`.
        prefix: bool,
    },
    /// GPT-2's with Unicode normalization.
    GptNeoX {
        /// `add_prefix_space`.
        prefix: bool,
    },
    /// Byte-level, with Qwen 2's pattern.
    Qwen2 {
        /// `add_prefix_space`.
        prefix: bool,
    },
    /// Byte-level, with Qwen 3.5's pattern.
    Qwen35 {
        /// `add_prefix_space`.
        prefix: bool,
    },
}

const LLAMA: &str = "LlamaTokenizer";
const GEMMA: &str = "GemmaTokenizer";
const GPT2: &str = "GPT2Tokenizer";
const CODEGEN: &str = "CodeGenTokenizer";
const GPT_NEOX: &str = "GPTNeoXTokenizer";
const QWEN2: &str = "Qwen2Tokenizer";
const QWEN35: &str = "Qwen3_5Tokenizer";

/// The names of the class that uses the file as it is.
const GENERIC: [&str; 4] =
    ["TokenizersBackend", "PreTrainedTokenizer", "PreTrainedTokenizerFast", "PythonBackend"];

/// Other classes of transformers that build their tokenizers themselves, without `Tokenizer` at the end of the name.
#[rustfmt::skip]
const UNSUPPORTED: [&str; 57] = [
    "Albert", "Bart", "Barthez", "Bert", "BigBird", "Blenderbot", "CLIP", "Camembert", "CodeLlama", "Cohere", "ConvBert",
    "DPRContextEncoder", "DPRQuestionEncoder", "DPRReader", "Deberta", "DebertaV2", "DistilBert", "Electra", "Esmc",
    "FNet", "Funnel", "Herbert", "LED", "Lasr", "LayoutLM", "LayoutLMv2", "LayoutLMv3", "LayoutXLM", "Longformer", "Luke",
    "LxMert", "MBart", "MBart50", "MLuke", "MPNet", "MarkupLM", "MobileBert", "Mvp", "Nllb", "Nougat", "OpenAIGPT",
    "Pegasus", "Reformer", "RemBert", "RoFormer", "Roberta", "SeamlessM4T", "Siglip2", "Splinter", "SqueezeBert", "T5",
    "Tipsv2", "Udop", "Whisper", "XGLM", "XLMRoberta", "XLNet",
];

/// Model types whose class uses the file as it is, whatever class `tokenizer_config.json` names.
#[rustfmt::skip]
const GENERIC_MODELS: [&str; 48] = [
    "arctic", "chameleon", "chatlm", "cohere_asr", "deepseek_ocr", "deepseek_ocr2", "deepseek_v2", "deepseek_v3",
    "deepseek_v32", "deepseek_v4", "deepseek_vl", "deepseek_vl_hybrid", "deepseek_vl_v2", "ernie4_5", "ernie4_5_moe",
    "fuyu", "granite", "h2ovl_chat", "hyperclovax", "hyperclovax_vlm", "internlm2", "jamba", "janus", "llava",
    "llava_next", "minicpm3", "minicpmv", "minimax_m2", "mistral", "mistral3", "mixtral", "modernbert", "molmo", "molmo2",
    "nemotron", "nvfp4", "olmo2", "olmo3", "opencua", "openvla", "paddleocr_vl", "phi3", "phi3_v", "phimoe", "smolvlm",
    "stablelm", "step3p5", "vipllava",
];

/// The model type whose own class is used whatever class `tokenizer_config.json` names.
const OVERRULED: &str = "qwen2";

/// Returns the class that transformers registers for a model type.
fn registered(model_type: &str) -> Option<&'static str> {
    match model_type {
        "gemma" | "gemma2" | "gemma3" | "gemma3_text" => Some(GEMMA),
        "gpt2" | "starcoder2" | "phi" | "opt" => Some(GPT2),
        "gpt_neox" | "mpt" | "olmo" | "olmoe" => Some(GPT_NEOX),
        OVERRULED | "qwen2_moe" | "qwen3" | "qwen3_moe" | "qwen3_next" => Some(QWEN2),
        "qwen3_5" | "qwen3_5_moe" | "qwen3_5_text" => Some(QWEN35),
        other if GENERIC_MODELS.contains(&other) => Some(GENERIC[0]),
        _ => None,
    }
}

impl Class {
    /// Returns the class for the fields of `tokenizer_config.json` and of the model's `config.json`; `None` for the one that
    /// uses the file as it is.
    ///
    /// # Errors
    /// [`TokenizerFault::Class`] for a class that builds its tokenizer in a way that is not known here.
    pub(super) fn find(
        config: &Map<String, Value>,
        model: &Map<String, Value>,
    ) -> Result<Option<Class>, TokenizerFault> {
        let name = name(config, model);
        let flag = |key: &str| config.get(key).and_then(Value::as_bool);
        let prefix = flag("add_prefix_space");
        let spaced = prefix.unwrap_or(false);
        Ok(Some(match &*name {
            LLAMA => Class::Llama { prefix: prefix.unwrap_or(true), legacy: flag("legacy").unwrap_or(false) },
            GEMMA => Class::Gemma,
            GPT2 | CODEGEN => Class::Gpt2 { prefix: spaced },
            GPT_NEOX => Class::GptNeoX { prefix: spaced },
            QWEN2 => Class::Qwen2 { prefix: spaced },
            QWEN35 => Class::Qwen35 { prefix: spaced },
            other if other.strip_suffix("Tokenizer").is_some_and(|other| UNSUPPORTED.contains(&other)) => {
                return Err(TokenizerFault::Class { name });
            }
            _ => return Ok(None),
        }))
    }

    /// Returns the special tokens that the class has unless the configuration says otherwise, by role.
    pub(super) fn roles(self) -> &'static [(&'static str, &'static str)] {
        const END: &str = "<|endoftext|>";
        match self {
            Class::Llama { .. } => &[("bos_token", "<s>"), ("eos_token", "</s>"), ("unk_token", "<unk>")],
            Class::Gemma => &[
                ("bos_token", "<bos>"),
                ("eos_token", "<eos>"),
                ("unk_token", "<unk>"),
                ("pad_token", "<pad>"),
                ("mask_token", "<mask>"),
            ],
            Class::Gpt2 { .. } => &[("bos_token", END), ("eos_token", END), ("unk_token", END)],
            Class::GptNeoX { .. } => {
                &[("bos_token", END), ("eos_token", END), ("unk_token", END), ("pad_token", "<|padding|>")]
            }
            Class::Qwen2 { .. } | Class::Qwen35 { .. } => {
                &[("eos_token", END), ("unk_token", END), ("pad_token", END)]
            }
        }
    }
}

/// Returns the name of the class, without `Fast` at its end, as `AutoTokenizer` finds it.
fn name(config: &Map<String, Value>, model: &Map<String, Value>) -> String {
    let text = |fields: &Map<String, Value>, key: &str| {
        fields.get(key).and_then(Value::as_str).map(|text| text.trim_end_matches("Fast").to_owned())
    };
    let model_type = text(model, "model_type").unwrap_or_default();
    let own = registered(&model_type);
    let named = text(config, "tokenizer_class").or_else(|| text(model, "tokenizer_class"));
    let has_code = config.contains_key("auto_map");
    match (named, own) {
        (Some(named), Some(own)) if !has_code && named != own => {
            if GENERIC.contains(&own) || model_type == OVERRULED { own.to_owned() } else { named }
        }
        (Some(named), _) => named,
        (None, own) => own.unwrap_or(GENERIC[0]).to_owned(),
    }
}

#[cfg(test)]
mod tests;
