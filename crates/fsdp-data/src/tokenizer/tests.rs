use serde_json::{Value, json};

use super::*;

const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/chats");

#[test]
fn tokens_match_transformers() {
    let cases = std::fs::read_to_string(format!("{FOLDER}/tokens.json")).unwrap();
    let cases: Vec<Value> = serde_json::from_str(&cases).unwrap();
    assert_eq!(cases.len(), 4);
    for case in cases {
        let name = case["tokenizer"].as_str().unwrap();
        let tokenizer = Tokenizer::load(&format!("{FOLDER}/tokenizers/{name}/tokenizer.json")).unwrap();
        assert_eq!(json!(tokenizer.vocab_size()), case["size"], "{name}");
        assert_eq!(tokenizer.truncates_left(), case["truncation_side"] == "left", "{name}");
        let Ends { before, after } = tokenizer.ends().unwrap();
        for text in case["texts"].as_array().unwrap() {
            let what = format!("{name}: {}", text["text"]);
            let ids = tokenizer.encode(text["text"].as_str().unwrap()).unwrap();
            assert_eq!(json!(ids), text["inside"], "{what}");
            assert_eq!(json!([&before[..], &ids, &after].concat()), text["whole"], "{what}");
            let encoded = tokenizer.encode_with_offsets(text["text"].as_str().unwrap()).unwrap();
            assert_eq!(encoded.ids, ids, "{what}");
        }
    }
}

#[test]
fn byte_tokenizer_has_no_bos_eos_or_special_tokens() {
    let tokenizer = Tokenizer::load("bytes").unwrap();
    assert_eq!(tokenizer.ends().unwrap(), Ends::default());
    let encoded = tokenizer.encode_with_offsets("é!").unwrap();
    assert_eq!(encoded, Encoded { ids: vec![0xc3, 0xa9, 0x21], offsets: vec![0..1, 1..2, 2..3] });
    assert_eq!(tokenizer.decode(&encoded.ids).unwrap(), "é!");
    assert!(!tokenizer.truncates_left() && !tokenizer.is_special(0));
}

/// The output of `tests/tokenizers/make.py`: what AutoTokenizer makes of tokenizers with files next to them.
#[test]
fn files_next_to_tokenizer_are_applied_as_by_transformers() {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/tokenizers/cases.json");
    let all: Value = serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap();
    let cases = all["cases"].as_array().unwrap();
    assert!(cases.len() > 30);
    for case in cases {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokenizer.json");
        std::fs::write(&path, all["tokenizers"][case["tokenizer"].as_str().unwrap()].to_string()).unwrap();
        for (name, content) in case["files"].as_object().unwrap() {
            std::fs::write(folder.path().join(name), content.to_string()).unwrap();
        }
        let what = format!("{} with {}", case["tokenizer"], case["files"]);
        let tokenizer =
            Tokenizer::load(path.to_str().unwrap()).unwrap_or_else(|fault| panic!("{what}: {fault}"));
        assert_eq!(json!(tokenizer.vocab_size()), case["size"], "{what}");
        let eos = tokenizer.special_tokens().get(EOS).cloned().unwrap_or_default();
        assert_eq!(eos, case["eos"], "{what}");
        let Ends { before, after } = tokenizer.ends().unwrap();
        for (index, text) in all["texts"].as_array().unwrap().iter().enumerate() {
            let ids = tokenizer.encode(text.as_str().unwrap()).unwrap();
            assert_eq!(json!(ids), case["inside"][index], "{what}: {text}");
            assert_eq!(json!([&before[..], &ids, &after].concat()), case["whole"][index], "{what}: {text}");
        }
    }
}

#[test]
fn digest_depends_on_files_next_to_tokenizer() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tokenizer.json");
    let file = json!({"version": "1.0", "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}});
    std::fs::write(&path, file.to_string()).unwrap();
    let mut seen = Vec::new();
    for (name, content) in [
        ("tokenizer_config.json", json!({})),
        ("added_tokens.json", json!({"<a>": 2})),
        (
            "tokenizer_config.json",
            json!({"added_tokens_decoder": {"2": {"content": "<a>", "special": true}}}),
        ),
        ("tokenizer_config.json", json!({"added_tokens_decoder": {"2": {"content": "<a>", "lstrip": true}}})),
        ("tokenizer_config.json", json!({"split_special_tokens": true})),
        ("tokenizer_config.json", json!({"tokenizer_class": "LlamaTokenizer"})),
        ("tokenizer_config.json", json!({"tokenizer_class": "LlamaTokenizer", "add_prefix_space": false})),
        ("config.json", json!({"model_type": "qwen2"})),
    ] {
        std::fs::write(folder.path().join(name), content.to_string()).unwrap();
        seen.push(Tokenizer::load(path.to_str().unwrap()).unwrap().digest());
        assert!(!seen[..seen.len() - 1].contains(seen.last().unwrap()), "{name}: {content}");
    }
}

#[test]
fn tokenizer_without_fixed_ids_is_refused_by_key() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tokenizer.json");
    let load = |model: Value, config: Value| {
        let file = json!({"version": "1.0", "model": model});
        std::fs::write(&path, file.to_string()).unwrap();
        std::fs::write(folder.path().join("tokenizer_config.json"), config.to_string()).unwrap();
        Tokenizer::load(path.to_str().unwrap()).map(drop).map_err(|fault| fault.to_string())
    };
    let bpe = |dropout: Value| json!({"type": "BPE", "vocab": {"a": 0}, "merges": [], "dropout": dropout});
    assert_eq!(load(bpe(json!(0.0)), json!({})), Ok(()));
    let llama = json!({"tokenizer_class": "LlamaTokenizer"});
    assert_eq!(load(bpe(json!(0.5)), llama.clone()), Ok(()));
    let words = json!({"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"});
    for (model, config, fragment) in [
        (bpe(json!(0.5)), json!({}), "\"dropout\": 0.5"),
        (bpe(Value::Null), json!({"fix_mistral_regex": true}), "\"fix_mistral_regex\": true"),
        (bpe(Value::Null), json!({"tokenizer_class": "T5TokenizerFast"}), "\"T5Tokenizer\""),
        (words, llama, "its model is WordLevel"),
    ] {
        let fault = load(model, config).unwrap_err();
        assert!(fault.contains(fragment), "{fault}");
    }
}
