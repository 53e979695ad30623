use serde_json::{Value, json};

use super::*;

fn learned(role: &str, marks: &Value) -> Result<bool, String> {
    is_learned(marks.as_object().unwrap(), role)
}

#[test]
fn zero_weight_or_false_flag_leaves_message_out() {
    for (marks, expected) in [
        (json!({}), true),
        (json!({"weight": 1, "train": true}), true),
        (json!({"weight": 1.0}), true),
        (json!({"weight": 0}), false),
        (json!({"weight": 0.0}), false),
        (json!({"train": false}), false),
        (json!({"training": false}), false),
        (json!({"weight": 1, "train": false}), false),
        (json!({"train_detail": []}), true),
    ] {
        assert_eq!(learned("assistant", &marks), Ok(expected), "{marks}");
    }
    assert_eq!(learned("user", &json!({"weight": 0, "train": false})), Ok(false));
}

#[test]
fn marks_that_cannot_be_followed_are_refused() {
    for (role, marks, fragment) in [
        (
            "assistant",
            json!({"weight": 0.5}),
            "has \"weight\": 0.5, but a message counts in full (1) or not at all (0)",
        ),
        ("assistant", json!({"weight": "0"}), "has \"weight\": \"0\""),
        ("assistant", json!({"weight": false}), "has \"weight\": false"),
        ("assistant", json!({"train": 0}), "has \"train\": 0, which is neither true nor false"),
        ("assistant", json!({"train_detail": [{"begin_offset": 0}]}), "has \"train_detail\""),
        ("user", json!({"train": true}), "(of role \"user\") is marked to count"),
        ("system", json!({"weight": 1}), "data.loss_on = \"all\""),
    ] {
        let fault = learned(role, &marks).unwrap_err();
        assert!(fault.contains(fragment), "`{fragment}` is not in `{fault}`");
    }
}
