use serde_json::json;

use super::*;
use crate::testing::chats;

fn encode_record(encoder: &Encoder<'_>, record: Value) -> Result<EncodedDocument, EncodeFault> {
    let Value::Object(record) = record else { panic!("an object") };
    match encoder.read(Record::Object(record))? {
        Read::Document(document) => Ok(document),
        Read::Conversation(json) => encoder.conversation(&encoder.chats.scripts(vec![&json])?.next()?),
    }
}

/// Returns the tokens of a JSON object whose field `x` is the document, with the byte tokenizer.
fn encode(value: Value) -> Result<Vec<u32>, String> {
    let tokenizer = Tokenizer::load("bytes").unwrap();
    let encoder = Encoder { tokenizer: &tokenizer, fields: Fields::new(Some("x")), chats: chats() };
    let document = encode_record(&encoder, json!({"x": value}));
    document.map(|document| document.ids).map_err(|fault| fault.to_string())
}

#[test]
fn string_is_tokenized_and_id_list_is_used_as_is() {
    assert_eq!(encode(json!("ab")), Ok(vec![97, 98]));
    assert_eq!(encode(json!([0, 7, 2_147_483_647])), Ok(vec![0, 7, 2_147_483_647]));
    assert_eq!(encode(json!([])), Ok(vec![]));
}

#[test]
fn rejects_values_other_than_string_or_id_list() {
    for (value, fragment) in [
        (json!(null), "\"x\" is null"),
        (json!(true), "is a boolean"),
        (json!(3), "is a number"),
        (json!({"a": 1}), "is an object"),
        (json!([1, -1]), "contains -1"),
        (json!([1.5]), "contains 1.5"),
        (json!([2_147_483_648_u32]), "contains 2147483648"),
        (json!([1, "a"]), "contains a string"),
        (json!([null]), "contains null"),
    ] {
        let fault = encode(value).unwrap_err();
        assert!(
            fault.contains(fragment) && fault.contains("must be a string or a list of token ids"),
            "{fault}"
        );
    }
}

#[test]
fn prompts_and_messages_are_distinguished_from_texts() {
    let tokenizer = Tokenizer::load("bytes").unwrap();
    let encoder = Encoder { tokenizer: &tokenizer, fields: Fields::new(None), chats: chats() };
    let encode = |record: Value| encode_record(&encoder, record);
    let document = encode(json!({"text": "x", "prompt": "a", "completion": "b"})).unwrap();
    assert_eq!(document, EncodedDocument { ids: vec![97 | IGNORED_BIT, 98], form: Form::Completion });
    let document = encode(json!({"text": "x", "prompt": "a"})).unwrap();
    assert_eq!(document, EncodedDocument { ids: vec![120], form: Form::Text });
    let fault = |record: Value| encode(record).unwrap_err().to_string();
    assert_eq!(fault(json!({"messages": []})), "\"messages\" has no messages");
    assert!(fault(json!({"messages": [1]})).starts_with("\"messages\" message 1 is not an object"));
    assert_eq!(fault(json!({"messages": "x"})), "\"messages\" is a string, but must be a list of messages");
    let mixed = fault(json!({"prompt": "a", "completion": [{"role": "assistant", "content": "b"}]}));
    assert_eq!(
        mixed,
        "\"prompt\" is a string and \"completion\" is a list; both must be strings, or both lists of messages"
    );
    // A missing template is not a fault of the record.
    let turn = json!({"messages": [{"role": "user", "content": "a"}]});
    assert!(matches!(encode(turn), Err(EncodeFault::Data(_))));
}

#[test]
#[cfg(feature = "tokenizers")]
fn sharegpt_records_are_read_as_messages() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/chats");
    let mut config = crate::testing::config();
    config.tokenizer = format!("{folder}/tokenizers/plain/tokenizer.json");
    let tokenizer = Tokenizer::load(&config.tokenizer).unwrap();
    let encode = |column: Option<&str>, record: Value| {
        let chats = Chats::find(&config, &tokenizer).unwrap();
        let encoder = Encoder { tokenizer: &tokenizer, fields: Fields::new(column), chats };
        encode_record(&encoder, record).map_err(|fault| fault.to_string())
    };
    let user = json!({"role": "user", "content": "Hi"});
    let answer = json!({"role": "assistant", "content": "A test.", "weight": 1});
    let system = json!({"role": "system", "content": "Be brief."});
    let expected = encode(None, json!({"messages": [system, user, answer]})).unwrap();
    let turns = json!([{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "A test."}]);
    for (column, record) in [
        (None, json!({"conversations": turns, "system": "Be brief."})),
        (None, json!({"messages": turns, "system": "Be brief."})),
        (None, json!({"conversations": [system, user, answer]})),
        (Some("conversations"), json!({"conversations": turns, "system": "Be brief."})),
        (Some("x"), json!({"x": turns, "system": "Be brief."})),
    ] {
        assert_eq!(encode(column, record.clone()), Ok(expected.clone()), "{record}");
    }
    let unknown = encode(None, json!({"conversations": [{"from": "narrator", "value": "x"}]})).unwrap_err();
    assert!(unknown.starts_with("\"conversations\" message 1 is from \"narrator\""), "{unknown}");
}
