use serde_json::{Map, json};

use super::*;

/// The tokens of a JSON object whose field `x` is the document, by the tokenizer of bytes.
fn encode(value: Value) -> Result<Vec<u32>, String> {
    let tokenizer = Tokenizer::load("bytes").unwrap();
    let encoder = Encoder { tokenizer: &tokenizer, fields: Fields::new(Some("x")) };
    encoder.encode(Record::Object(Map::from_iter([("x".to_owned(), value)])))
}

#[test]
fn a_string_is_tokenized_and_a_list_of_ids_is_taken() {
    assert_eq!(encode(json!("ab")), Ok(vec![97, 98]));
    assert_eq!(encode(json!([0, 7, 4_294_967_294_u32])), Ok(vec![0, 7, 4_294_967_294]));
    assert_eq!(encode(json!([])), Ok(vec![]));
}

#[test]
fn everything_else_is_named() {
    for (value, fragment) in [
        (json!(null), "\"x\" is null"),
        (json!(true), "is a boolean"),
        (json!(3), "is a number"),
        (json!({"a": 1}), "is an object"),
        (json!([1, -1]), "holds -1"),
        (json!([1.5]), "holds 1.5"),
        (json!([4_294_967_295_u32]), "holds 4294967295"),
        (json!([1, "a"]), "holds a string"),
        (json!([null]), "holds null"),
    ] {
        let fault = encode(value).unwrap_err();
        assert!(
            fault.contains(fragment) && fault.contains("must be a string or a list of token ids"),
            "{fault}"
        );
    }
}
