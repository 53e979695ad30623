use serde_json::json;

use super::*;

fn find(config: Value, model: Value) -> Result<Option<Class>, String> {
    let fields = |value: Value| value.as_object().unwrap().clone();
    Class::find(&fields(config), &fields(model)).map_err(|fault| fault.to_string())
}

#[test]
fn class_follows_config_and_model_type() {
    let gpt2 = Some(Class::Gpt2 { prefix: false });
    let qwen2 = Some(Class::Qwen2 { prefix: false });
    let llama = Some(Class::Llama { prefix: true, legacy: false });
    let cases = [
        (json!({}), json!({}), None),
        (json!({}), json!({"model_type": "llama"}), None),
        (json!({}), json!({"model_type": "qwen3"}), qwen2),
        (json!({"tokenizer_class": "LlamaTokenizerFast"}), json!({}), llama),
        (json!({"tokenizer_class": "LlamaTokenizer"}), json!({"model_type": "llama"}), llama),
        (json!({"tokenizer_class": "LlamaTokenizer"}), json!({"model_type": "mistral"}), None),
        (json!({"tokenizer_class": "LlamaTokenizer"}), json!({"model_type": "qwen2"}), qwen2),
        (json!({"tokenizer_class": "LlamaTokenizer"}), json!({"model_type": "qwen3"}), llama),
        (json!({"tokenizer_class": "PreTrainedTokenizerFast"}), json!({"model_type": "qwen3"}), None),
        (json!({"tokenizer_class": "PreTrainedTokenizerFast"}), json!({"model_type": "qwen2"}), qwen2),
        (json!({"tokenizer_class": "GPT2Tokenizer"}), json!({"model_type": "starcoder2"}), gpt2),
        (json!({}), json!({"model_type": "gpt_neox", "tokenizer_class": "GPT2Tokenizer"}), gpt2),
        (json!({"tokenizer_class": "OwnTokenizer"}), json!({"model_type": "llama"}), None),
    ];
    for (config, model, expected) in cases {
        assert_eq!(find(config.clone(), model.clone()).unwrap(), expected, "{config} {model}");
    }
}

#[test]
fn class_that_is_not_known_is_refused_with_way_out() {
    let fault = find(json!({"tokenizer_class": "BertTokenizerFast"}), json!({})).unwrap_err();
    assert!(fault.contains("\"BertTokenizer\"") && fault.contains("\"PreTrainedTokenizerFast\""), "{fault}");
}
