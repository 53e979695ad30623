use proptest::prelude::*;
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

#[test]
fn numbers_that_json_lacks_are_read_where_unused() {
    let fields = Fields::new(None);
    let text = |json: &str| {
        fields.parse(json.as_bytes()).map(|record| match record {
            Record::Object(object) => object["text"].clone(),
            other => panic!("{other:?}"),
        })
    };
    let values = [
        "NaN",
        "Infinity",
        "-Infinity",
        "[1, NaN,-Infinity]",
        "{\"a\": [{\"b\":NaN}]}",
        "\"NaN, \\\" NaN\", \"c\": NaN",
    ];
    for value in values {
        for json in [
            format!("{{\"text\": \"a NaN, Infinity\", \"score\": {value}}}"),
            format!("{{\"score\":{value} ,\"text\":\"a NaN, Infinity\"}}"),
            format!(
                "{{\"text\": \"a NaN, Infinity\", \"prompt\": 1, \"input_ids\": [NaN], \"tools\": [NaN], \"s\": {value}}}"
            ),
        ] {
            assert_eq!(text(&json), Ok("a NaN, Infinity".into()), "{json}");
        }
    }
    for (json, fragment) in [
        (r#"{"text": NaN}"#, "\"text\" contains NaN"),
        (r#"{"score": 1, "text": [1, -Infinity]}"#, "\"text\" contains NaN or Infinity"),
        (r#"{"messages": [{"role": "user", "content": NaN}]}"#, "\"messages\" contains NaN"),
        (r#"{"messages": [], "tools": [NaN]}"#, "\"tools\" contains NaN"),
        (r#"{"prompt": "a", "completion": NaN}"#, "\"completion\" contains NaN"),
    ] {
        let fault = text(json).unwrap_err();
        assert!(fault.contains(fragment) && fault.contains("data.malformed"), "{json}: {fault}");
    }
    for json in ["nan", "inf", "-NaN", "1NaN", "NaN1", "+Infinity", "NaNNaN", "Infinit", "NaN NaN"] {
        let json = format!("{{\"text\": \"a\", \"score\": {json}}}");
        assert!(text(&json).is_err(), "{json}");
    }
}

proptest! {
    #[test]
    fn replaced_numbers_leave_strings_and_columns(strings in prop::collection::vec("[NaInfty\"\\\\, :\\[-]{0,12}", 1..5)) {
        let plain = serde_json::to_string(&strings).unwrap();
        prop_assert_eq!(not_json::replaced(plain.as_bytes(), b'0'), None);
        let extended = format!("{}, NaN, -Infinity]", &plain[..plain.len() - 1]);
        let replaced = not_json::replaced(extended.as_bytes(), b'7').unwrap();
        prop_assert_eq!(replaced.len(), extended.len());
        let values: Vec<Value> = serde_json::from_slice(&replaced).unwrap();
        let expected: Vec<Value> = strings.iter().map(|text| Value::from(&**text)).chain([7.into(), 7.into()]).collect();
        prop_assert_eq!(values, expected);
    }
}
