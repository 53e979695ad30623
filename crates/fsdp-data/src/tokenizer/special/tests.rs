use serde_json::json;

use super::*;

fn of(fields: Value) -> TokenizerConfig {
    let Value::Object(fields) = fields else { panic!("an object") };
    TokenizerConfig::of(fields, &Map::new(), &Map::new()).unwrap()
}

#[test]
fn special_tokens_are_read_from_strings_and_objects() {
    let config = of(json!({
        "eos_token": {"__type": "AddedToken", "content": "</s>", "rstrip": true},
        "bos_token": "<s>",
        "pad_token": null,
        "unk_token": "",
        "add_bos_token": true,
        "image_token": "<image>",
        "additional_special_tokens": ["<a>", {"content": "<b>", "single_word": true}],
        "model_max_length": 5,
    }));
    let roles = json!({"bos_token": "<s>", "eos_token": "</s>", "image_token": "<image>"});
    assert_eq!(Value::Object(config.roles), roles);
    let plain = AddedToken::special;
    let named = [
        plain("<s>"),
        AddedToken { strips: [false, true], normalized: true, ..plain("</s>") },
        plain("<image>"),
    ];
    assert_eq!(config.rules.named, named);
    let single = AddedToken { single_word: true, normalized: true, special: false, ..plain("<b>") };
    assert_eq!(config.rules.extra, [plain("<a>"), single]);
}

#[test]
fn extra_special_tokens_may_be_object() {
    let config = of(json!({"extra_special_tokens": {"audio_token": "<audio>"}, "truncation_side": "left"}));
    assert_eq!(Value::Object(config.roles), json!({"audio_token": "<audio>"}));
    assert_eq!(config.truncation_side.as_deref(), Some("left"));
}

/// As transformers does: `AutoTokenizer` refuses such an object for the usual roles, and ignores it for others.
#[test]
fn objects_with_other_roles_are_tokens_only_if_typed() {
    let config = of(json!({
        "plain_token": {"content": "<a>", "lstrip": true},
        "text_token": "<b>",
        "typed_token": {"__type": "AddedToken", "content": "<c>"},
        "strange_token": {"__type": "Other", "content": "<d>"},
        "list_token": ["<e>"],
        "model_specific_special_tokens": {"saved_token": "<f>"},
    }));
    let roles = json!({"typed_token": "<c>", "text_token": "<b>"});
    assert_eq!(serde_json::to_string(&config.roles).unwrap(), roles.to_string());
    let saved = of(json!({"model_specific_special_tokens": {"saved_token": "<f>"}}));
    assert_eq!(Value::Object(saved.roles), json!({"saved_token": "<f>"}));
    let mut fields = Map::new();
    let map = json!({"plain_token": {"content": "<a>"}});
    merge(&mut fields, map.as_object().unwrap().clone());
    assert_eq!(Value::Object(of(fields.into()).roles), json!({"plain_token": "<a>"}));
}

#[test]
fn config_files_are_optional_but_must_be_valid() {
    let dir = tempfile::tempdir().unwrap();
    let tokenizer = dir.path().join("tokenizer.json");
    assert_eq!(TokenizerConfig::read_next_to(&tokenizer).unwrap(), TokenizerConfig::default());
    std::fs::write(dir.path().join(MAP), r#"{"bos_token": "<s>"}"#).unwrap();
    assert_eq!(TokenizerConfig::read_next_to(&tokenizer).unwrap().rules.named.len(), 1);
    // Newer tokenizers have everything in one file.
    std::fs::write(dir.path().join(CONFIG), r#"{"added_tokens_decoder": {}}"#).unwrap();
    assert_eq!(TokenizerConfig::read_next_to(&tokenizer).unwrap().rules.named, []);
    std::fs::write(dir.path().join(CONFIG), "[]").unwrap();
    let fault = TokenizerConfig::read_next_to(&tokenizer).unwrap_err().to_string();
    assert!(fault.contains("tokenizer_config.json next to it: invalid type"), "{fault}");
}
