use serde_json::json;

use super::*;

fn fault(messages: Value) -> String {
    let Value::Array(messages) = messages else { panic!("a list") };
    Conversation::new(messages, 0, Map::new()).unwrap_err()
}

#[test]
fn invalid_conversation_error_names_message() {
    assert_eq!(fault(json!([])), "has no messages");
    let user = json!({"role": "user", "content": "a"});
    assert_eq!(fault(json!([user, "b"])), "message 2 is not an object with role and content");
    for message in
        [json!({"content": "b"}), json!({"role": "", "content": "b"}), json!({"role": 1, "content": "b"})]
    {
        assert_eq!(fault(json!([message])), "message 1 has no role, such as \"user\" or \"assistant\"");
    }
    for message in [json!({"role": "user"}), json!({"role": "user", "content": null})] {
        assert_eq!(fault(json!([message])), "message 1 (of role \"user\") has no content");
    }
    let number = json!([{"role": "user", "content": 5}]);
    assert_eq!(
        fault(number),
        "message 1 (of role \"user\") has content that is neither text nor a list of parts"
    );
}

#[test]
fn null_fields_are_dropped_except_content_of_tool_call() {
    let message = json!({"role": "assistant", "content": null, "tool_calls": [{"id": null}], "name": null});
    let conversation = Conversation::new(vec![message], 0, Map::new()).unwrap();
    let expected = json!({"role": "assistant", "content": null, "tool_calls": [{"id": null}]});
    assert_eq!(conversation.messages, [expected]);
}

#[test]
fn answers_are_assistant_messages_after_prompt() {
    let roles = ["system", "user", "assistant", "tool", "assistant", "user", "assistant"];
    let messages: Vec<Value> = roles.iter().map(|role| json!({"role": role, "content": ""})).collect();
    let answers = |prompt| {
        let conversation = Conversation::new(messages.clone(), prompt, Map::new()).unwrap();
        conversation.answers(LossOn::Answers).into_iter().map(|(index, _)| index).collect::<Vec<_>>()
    };
    assert_eq!((answers(0), answers(3), answers(7)), (vec![2, 4, 6], vec![4, 6], vec![]));
}

#[test]
fn last_answer_is_all_that_answers_last_question() {
    let counted = |roles: &[&str]| {
        let messages = roles.iter().map(|role| json!({"role": role, "content": ""})).collect();
        let conversation = Conversation::new(messages, 0, Map::new()).unwrap();
        let answers = conversation.answers(LossOn::LastAnswer).into_iter();
        answers.filter_map(|(index, counts)| counts.then_some(index)).collect::<Vec<_>>()
    };
    assert_eq!(counted(&["user", "assistant", "user", "assistant"]), [3]);
    assert_eq!(counted(&["user", "assistant", "user", "assistant", "tool", "assistant", "user"]), [3, 5]);
    assert_eq!(counted(&["system", "assistant", "assistant"]), [1, 2]);
    assert_eq!(counted(&["user"]), [0; 0]);
}

#[test]
fn tools_may_be_json_text_and_kwargs_reach_template() {
    let of = |record: Value| {
        let Value::Object(mut record) = record else { panic!("an object") };
        context(&mut record).map(Value::Object)
    };
    let tools = json!([{"type": "function"}]);
    for written in [tools.clone(), json!("[{\"type\": \"function\"}]")] {
        let record = json!({"tools": written, "chat_template_kwargs": {"enable_thinking": false}});
        assert_eq!(of(record), Ok(json!({"tools": tools, "enable_thinking": false})));
    }
    assert_eq!(of(json!({"tools": null, "chat_template_kwargs": null})), Ok(json!({})));
    assert_eq!(of(json!({"tools": ""})), Ok(json!({})));
    for record in [json!({"tools": "["}), json!({"tools": 5}), json!({"chat_template_kwargs": []})] {
        assert!(of(record.clone()).is_err(), "{record}");
    }
}
