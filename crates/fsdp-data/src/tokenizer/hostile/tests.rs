use fsdp_config::TokenRef;
use serde_json::json;

use super::*;
use crate::Tokenizer;

fn tokenizer(changes: Value) -> Value {
    let mut file = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null, "decoder": null,
        "model": {"type": "WordLevel", "vocab": {"<unk>": 0, "a": 1}, "unk_token": "<unk>"},
    });
    for (key, value) in changes.as_object().unwrap() {
        file[key] = value.clone();
    }
    file
}

/// Encodes a text with a changed tokenizer; returns its ids, or the error.
fn encoded(changes: Value) -> Result<Vec<u32>, String> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tokenizer.json");
    std::fs::write(&path, tokenizer(changes).to_string()).unwrap();
    let tokenizer = Tokenizer::load(path.to_str().unwrap()).map_err(|error| error.to_string())?;
    assert_eq!(tokenizer.resolve(&TokenRef::Token("<unk>".into()), "data.pad").unwrap_or(0), 0);
    tokenizer.encode("a b a").map_err(|error| error.to_string())
}

#[track_caller]
fn refused(changes: Value, fragment: &str) {
    let error = encoded(changes).unwrap_err();
    assert!(error.contains(fragment), "{error}");
}

fn charsmap(base64: &str) -> Value {
    json!({"normalizer": {"type": "Precompiled", "precompiled_charsmap": base64}})
}

#[test]
fn table_longer_than_file_is_rejected() {
    // 2^32 - 1 bytes, for which the library would reserve 8 GiB.
    refused(charsmap("/////2FiY2Q="), "a table of 4294967295 bytes, but has 8 in total");
    let nested = json!({"normalizer": {"type": "Sequence", "normalizers": [
        {"type": "Sequence", "normalizers": [charsmap("/////2FiY2Q=")["normalizer"]]}]}});
    refused(nested, "a table of 4294967295 bytes");
}

#[test]
fn first_word_decodes_first_four_bytes_of_base64() {
    assert_eq!(first_word("/////w=="), Some(u32::MAX));
    assert_eq!(first_word("AQAAAA=="), Some(1));
    assert_eq!(first_word("AAAAgGFi"), Some(0x8000_0000));
    assert_eq!(first_word("AQAA"), None);
    assert_eq!(first_word("AQ*AAA"), None);
}

#[test]
fn text_inflating_normalizers_are_rejected() {
    let tenfold = json!({"type": "Replace", "pattern": {"Regex": "."}, "content": "aaaaaaaaaa"});
    let chain = |steps: usize| json!({"normalizer": {"type": "Sequence", "normalizers": vec![tenfold.clone(); steps]}});
    refused(chain(4), "10000 times as long or more; the maximum is 1024");
    refused(chain(40), "times as long or more");
    assert_eq!(encoded(chain(1)).unwrap().len(), 1);
}

#[test]
fn wordpiece_that_looks_up_endless_words_is_rejected() {
    let words = |chars: u64| {
        let vocab = json!({"<unk>": 0, "a": 1, "##a": 2});
        json!({"model": {"type": "WordPiece", "vocab": vocab, "unk_token": "<unk>",
            "continuing_subword_prefix": "##", "max_input_chars_per_word": chars}})
    };
    assert_eq!(encoded(words(100)).unwrap(), [1, 0, 1]);
    refused(words(1_000_000_000), "up to 1000000000 characters");
}

#[test]
fn panic_in_tokenizers_library_becomes_error() {
    let empty = charsmap("AAAAAGFiY2Q=");
    refused(empty, "it is inconsistent: index out of bounds");
    refused(json!({"pre_tokenizer": {"type": "FixedLength", "length": 0}}), "chunk size must be non-zero");
    let prefix = json!({"model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]],
        "continuing_subword_prefix": "######"}});
    refused(prefix, "it is inconsistent");
}

#[test]
fn deep_nesting_is_rejected() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tokenizer.json");
    let deep = format!("{}\"x\"{}", "[".repeat(100_000), "]".repeat(100_000));
    let texts = ["normalizer", "pre_tokenizer", "decoder", "model", "unknown"].map(|key| {
        let empty = tokenizer(json!({})).to_string();
        format!("{},\"{key}\":{deep}}}", &empty[..empty.len() - 1])
    });
    for text in texts.into_iter().chain([deep.clone()]) {
        std::fs::write(&path, text).unwrap();
        assert!(Tokenizer::load(path.to_str().unwrap()).is_err());
    }
}

#[test]
fn harmless_tokenizers_load() {
    assert_eq!(encoded(json!({})).unwrap(), [1, 0, 1]);
    let metaspace = json!({"normalizer": {"type": "Sequence", "normalizers": [
        {"type": "Prepend", "prepend": "▁"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]}});
    assert!(encoded(metaspace).is_ok());
}
