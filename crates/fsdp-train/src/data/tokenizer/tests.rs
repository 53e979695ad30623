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
