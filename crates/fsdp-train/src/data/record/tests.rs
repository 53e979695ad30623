use serde_json::json;

use super::*;

fn parse(column: Option<&str>, text: &str) -> Result<Record, String> {
    Fields::new(column).parse(text.as_bytes())
}

#[test]
fn object_keeps_only_requested_fields() {
    let line = r#"{"id": 7, "text": "a", "input_ids": [1], "meta": {"text": ["b"]}}"#;
    let kept = |column, expected: Value| {
        assert_eq!(Value::Object(object(parse(column, line).unwrap())), expected);
    };
    kept(None, json!({"text": "a", "input_ids": [1]}));
    kept(Some("id"), json!({"id": 7}));
    kept(Some("meta"), json!({"meta": {"text": ["b"]}}));
}

fn object(record: Record) -> Map<String, Value> {
    match record {
        Record::Object(object) => object,
        other => panic!("{other:?}"),
    }
}

#[test]
fn text_wins_over_ids_and_named_column_over_both() {
    let names = ["id", "input_ids", "text"];
    assert_eq!(Fields::new(None).choose(&names), Ok(Chosen::One("text")));
    assert_eq!(Fields::new(None).choose(&names[..2]), Ok(Chosen::One("input_ids")));
    assert_eq!(Fields::new(Some("id")).choose(&names), Ok(Chosen::One("id")));
}

#[test]
fn conversations_win_over_text_but_not_over_messages() {
    let names = ["text", "prompt", "completion", "conversations", "messages"];
    assert_eq!(Fields::new(None).choose(&names), Ok(Chosen::One("messages")));
    assert_eq!(Fields::new(None).choose(&names[..4]), Ok(Chosen::One("conversations")));
    let line = r#"{"id": 1, "conversations": [], "system": "a", "text": "b"}"#;
    let kept = json!({"conversations": [], "system": "a", "text": "b"});
    assert_eq!(Value::Object(object(parse(None, line).unwrap())), kept);
}

#[test]
fn invalid_record_error_names_expected_and_found_fields() {
    for (column, line, fragments) in [
        (None, r#"{"content": "a", "id": 1}"#, ["no \"text\"", "content, id"]),
        (Some("body"), r#"{"text": "a"}"#, ["there is no \"body\" (data.column)", "there are: text"]),
        (None, "{}", ["no \"text\"", "none"]),
        (None, "[1]", ["expected an object", "every line must be an object"]),
        (None, "{\"text\": \"a\"", ["EOF", "under \"text\""]),
        (Some("body"), "{\"body\": 1} {}", ["trailing characters", "under \"body\""]),
        (None, r#"{"text": "a", "text": "b"}"#, ["duplicate field `text`", "under \"text\""]),
        (None, "{\"text\": \"\u{1}\"}", ["control character", "under \"text\""]),
    ] {
        let fault = parse(column, line).unwrap_err();
        for fragment in fragments {
            assert!(fault.contains(fragment), "`{fragment}` is not in `{fault}`");
        }
    }
}
