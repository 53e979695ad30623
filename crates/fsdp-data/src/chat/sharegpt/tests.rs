use serde_json::json;

use super::*;

fn rewritten(messages: &Value, system: &Value) -> Result<Value, String> {
    let messages = messages.as_array().unwrap().clone();
    assert!(is_sharegpt(&messages));
    rewrite(messages, system).map(Value::from)
}

#[test]
fn speakers_become_roles_and_other_keys_stay() {
    let expected = |role: &str| json!([{"role": role, "content": "x", "weight": 0}]);
    for (role, names) in [
        ("system", &["system"][..]),
        ("user", &["human", "user"]),
        ("assistant", &["gpt", "assistant", "bot", "chatgpt", "model"]),
        ("tool", &["tool", "observation"]),
    ] {
        for name in names {
            let messages = json!([{"from": name, "value": "x", "weight": 0}]);
            assert_eq!(rewritten(&messages, &Value::Null), Ok(expected(role)), "{name}");
        }
    }
    for messages in
        [json!([{"role": "user", "content": "x"}]), json!([{"from": "a", "role": "user"}]), json!([])]
    {
        assert!(!is_sharegpt(messages.as_array().unwrap()), "{messages}");
    }
}

#[test]
fn function_call_becomes_tool_call() {
    let call = json!({"name": "f", "arguments": {"x": 1}});
    for value in [call.clone(), json!(call.to_string()), json!([call]), json!(format!("[{call}]"))] {
        let got = rewritten(&json!([{"from": "function_call", "value": value}]), &Value::Null);
        let calls = json!([{"type": "function", "function": call}]);
        assert_eq!(got, Ok(json!([{"role": "assistant", "content": "", "tool_calls": calls}])), "{value}");
    }
    for value in [json!("f(1)"), json!("{}"), json!([]), json!({"name": "f"}), json!(null)] {
        let fault = rewritten(&json!([{"from": "function_call", "value": value}]), &Value::Null).unwrap_err();
        assert!(
            fault.starts_with("message 1 is from \"function_call\", but its \"value\" is not JSON"),
            "{fault}"
        );
    }
}

#[test]
fn system_of_record_comes_first_unless_messages_have_one() {
    let human = json!([{"from": "human", "value": "x"}]);
    let user = json!({"role": "user", "content": "x"});
    let prompt = |text: &str| json!({"role": "system", "content": text});
    assert_eq!(rewritten(&human, &json!("Be kind.")), Ok(json!([prompt("Be kind."), user])));
    for none in [json!(""), Value::Null] {
        assert_eq!(rewritten(&human, &none), Ok(json!([user])));
    }
    let own = json!([{"from": "system", "value": "Be brief."}, human[0]]);
    assert_eq!(rewritten(&own, &json!("Be kind.")), Ok(json!([prompt("Be brief."), user])));
    assert!(rewritten(&human, &json!(5)).is_err());
}

#[test]
fn unknown_speaker_error_lists_known_ones() {
    let fault = |second: Value| {
        rewritten(&json!([{"from": "human", "value": "x"}, second]), &Value::Null).unwrap_err()
    };
    let unknown = fault(json!({"from": "narrator", "value": "x"}));
    assert!(unknown.starts_with(
        "message 2 is from \"narrator\", which is none of the known roles: \"system\", \"human\""
    ));
    assert!(unknown.contains("\"gpt\"") && unknown.contains("\"observation\""), "{unknown}");
    assert_eq!(fault(json!({"value": "x"})), "message 2 has no \"from\", such as \"human\" or \"gpt\"");
    assert_eq!(fault(json!("x")), "message 2 is not an object with \"from\" and \"value\"");
}
