use serde_json::{Value, json};

use super::*;

fn marked(marks: &Value) -> Result<Option<bool>, String> {
    mark(marks.as_object().unwrap())
}

#[test]
fn zero_weight_or_false_flag_leaves_message_out() {
    for (marks, expected) in [
        (json!({}), None),
        (json!({"weight": 1, "train": true}), Some(true)),
        (json!({"weight": 1.0}), Some(true)),
        (json!({"weight": 0}), Some(false)),
        (json!({"weight": 0.0}), Some(false)),
        (json!({"train": false}), Some(false)),
        (json!({"training": false}), Some(false)),
        (json!({"weight": 1, "train": false}), Some(false)),
        (json!({"train_detail": []}), None),
    ] {
        assert_eq!(marked(&marks), Ok(expected), "{marks}");
    }
}

#[test]
fn marks_that_cannot_be_followed_are_refused() {
    for (marks, fragment) in [
        (json!({"weight": 0.5}), "has \"weight\": 0.5, but a message counts in full (1) or not at all (0)"),
        (json!({"weight": "0"}), "has \"weight\": \"0\""),
        (json!({"weight": false}), "has \"weight\": false"),
        (json!({"train": 0}), "has \"train\": 0, which is neither true nor false"),
        (json!({"train_detail": [{"begin_offset": 0}]}), "has \"train_detail\""),
    ] {
        let fault = marked(&marks).unwrap_err();
        assert!(fault.contains(fragment), "`{fragment}` is not in `{fault}`");
    }
}

#[test]
fn marks_of_others_than_the_assistant_are_never_ignored() {
    for loss_on in [LossOn::All, LossOn::Answers, LossOn::LastAnswer] {
        for mark in [None, Some(false), Some(true)] {
            assert_eq!(check(mark, "assistant", loss_on), Ok(()));
            // What the mark asks for is done anyway.
            let is_so = mark.is_none_or(|mark| mark == (loss_on == LossOn::All));
            let checked = check(mark, "user", loss_on);
            assert_eq!(checked.is_ok(), is_so, "{mark:?}, {loss_on:?}");
            if let Err(fault) = checked {
                assert!(fault.contains("(of role \"user\") is marked"), "{fault}");
                assert_eq!(fault.contains("data.loss_on = \"all\""), loss_on != LossOn::All, "{fault}");
            }
        }
    }
}
