//! Builds the tokenizers of the classes that do not use a `tokenizer.json` as it is.

use serde_json::{Map, Value, json};

use super::class::Class;
use super::fault::{Source, TokenizerFault};

/// The patterns by which Qwen's tokenizers split a text.
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN35: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// SentencePiece's mark for a space.
const SPACE: &str = "\u{2581}";

impl Class {
    /// Returns the `tokenizer.json` of the class with the vocabulary, the merges and the post-processor of a file. It has no
    /// added tokens.
    ///
    /// # Errors
    /// If the text is not JSON, or its model is not BPE.
    pub(super) fn rebuild(self, text: &str, unknown: Option<&str>) -> Result<String, Source> {
        let mut file: Map<String, Value> = serde_json::from_str(text)?;
        let mut model = file.remove("model").unwrap_or_default();
        let kind = model["type"].as_str().unwrap_or("BPE");
        if kind != "BPE" {
            return Err(TokenizerFault::NotBpe { class: self.name(), kind: kind.to_owned() }.into());
        }
        let is_pieces = matches!(self, Class::Llama { .. } | Class::Gemma);
        let unknown = unknown.filter(|_| self == Class::Gemma);
        let post_processor =
            if matches!(self, Class::GptNeoX { .. }) { None } else { file.remove("post_processor") };
        let rebuilt = json!({
            "version": "1.0",
            "truncation": file.remove("truncation"),
            "padding": null,
            "added_tokens": [],
            "normalizer": self.normalizer(),
            "pre_tokenizer": self.pre_tokenizer(),
            "post_processor": post_processor,
            "decoder": self.decoder(),
            "model": {
                "type": "BPE",
                "dropout": null,
                "unk_token": unknown,
                "continuing_subword_prefix": null,
                "end_of_word_suffix": null,
                "fuse_unk": is_pieces,
                "byte_fallback": is_pieces,
                "ignore_merges": false,
                "vocab": model["vocab"].take(),
                "merges": model["merges"].take(),
            },
        });
        Ok(rebuilt.to_string())
    }

    fn name(self) -> &'static str {
        match self {
            Class::Llama { .. } => "Llama",
            Class::Gemma => "Gemma",
            Class::Gpt2 { .. } => "GPT2",
            Class::GptNeoX { .. } => "GPTNeoX",
            Class::Qwen2 { .. } => "Qwen2",
            Class::Qwen35 { .. } => "Qwen3_5",
        }
    }

    fn normalizer(self) -> Value {
        match self {
            Class::Llama { .. } | Class::Gpt2 { .. } => Value::Null,
            Class::Gemma => json!({"type": "Replace", "pattern": {"String": " "}, "content": SPACE}),
            Class::GptNeoX { .. } | Class::Qwen2 { .. } | Class::Qwen35 { .. } => json!({"type": "NFC"}),
        }
    }

    fn pre_tokenizer(self) -> Value {
        let bytes = |prefix: bool, use_regex: bool| {
            json!({
                "type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": true, "use_regex": use_regex
            })
        };
        let split = |pattern: Value, behavior: &str| json!({"type": "Split", "pattern": pattern, "behavior": behavior, "invert": false});
        let qwen = |pattern: &str, prefix| {
            let steps = [split(json!({"Regex": pattern}), "Isolated"), bytes(prefix, false)];
            json!({"type": "Sequence", "pretokenizers": steps})
        };
        match self {
            Class::Llama { prefix, legacy } => {
                let scheme = match (prefix, legacy) {
                    (false, _) => "never",
                    (true, false) => "first",
                    (true, true) => "always",
                };
                json!({"type": "Metaspace", "replacement": SPACE, "prepend_scheme": scheme, "split": false})
            }
            Class::Gemma => split(json!({"String": " "}), "MergedWithPrevious"),
            Class::Gpt2 { prefix } | Class::GptNeoX { prefix } => bytes(prefix, true),
            Class::Qwen2 { prefix } => qwen(QWEN2, prefix),
            Class::Qwen35 { prefix } => qwen(QWEN35, prefix),
        }
    }

    fn decoder(self) -> Value {
        let (Class::Llama { .. } | Class::Gemma) = self else {
            return json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true});
        };
        let mut steps = vec![
            json!({"type": "Replace", "pattern": {"String": SPACE}, "content": " "}),
            json!({"type": "ByteFallback"}),
            json!({"type": "Fuse"}),
        ];
        if matches!(self, Class::Llama { prefix: true, .. }) {
            steps.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
        }
        json!({"type": "Sequence", "decoders": steps})
    }
}
