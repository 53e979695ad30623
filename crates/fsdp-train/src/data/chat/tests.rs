use serde_json::{Map, json};

use super::*;
use crate::data::testing::config;

const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/chats");

fn conversation(messages: &Value) -> Conversation {
    Conversation::new(messages.as_array().unwrap().clone(), 0, Map::new()).unwrap()
}

/// Loads a tokenizer of the fixtures, with its own chat template or another one.
fn chats(tokenizer: &str, template: Option<&str>) -> (Chats, Tokenizer) {
    let mut config = config();
    config.tokenizer = format!("{FOLDER}/tokenizers/{tokenizer}/tokenizer.json");
    config.chat_template = template.map(|name| format!("{FOLDER}/templates/{name}.jinja"));
    config.date = Some("2024-07-26".to_owned());
    let tokenizer = Tokenizer::load(&config.tokenizer).unwrap();
    (Chats::find(&config, &tokenizer).unwrap(), tokenizer)
}

/// Returns the parts of the text that count in the loss.
fn answers((chats, tokenizer): &(Chats, Tokenizer), messages: &Value) -> Result<Vec<String>, String> {
    let marked = chats.encode(&conversation(messages), tokenizer);
    let Marked { ids, counts } = marked.map_err(|fault| fault.to_string())?;
    let runs = (0..ids.len()).collect::<Vec<_>>();
    let runs = runs.chunk_by(|&one, &next| counts[one] == counts[next]).filter(|run| counts[run[0]]);
    Ok(runs.map(|run| tokenizer.decode(&ids[run[0]..=run[run.len() - 1]]).unwrap()).collect())
}

fn turns() -> Value {
    json!([
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is 2 + 2?"},
        {"role": "assistant", "content": "It is 4."},
        {"role": "user", "content": "Who are you?"},
        {"role": "assistant", "content": "A test."},
        {"role": "user", "content": "Hi"},
    ])
}

#[test]
fn tokens_and_answer_mask_match_transformers() {
    let cases = std::fs::read_to_string(format!("{FOLDER}/tokens.json")).unwrap();
    let cases: Vec<Value> = serde_json::from_str(&cases).unwrap();
    let mut compared = 0;
    for case in cases {
        let name = case["tokenizer"].as_str().unwrap();
        for chat in case["chats"].as_array().unwrap() {
            let (chats, tokenizer) = chats(name, None);
            let marked = chats.encode(&conversation(&chat["messages"]), &tokenizer).unwrap();
            assert_eq!(json!(marked.ids), chat["ids"], "{name}: {}", chat["messages"]);
            if let Some(mask) = chat["mask"].as_array() {
                let counts: Vec<Value> =
                    marked.counts.iter().map(|&counts| json!(u8::from(counts))).collect();
                assert_eq!(&counts, mask, "{name}: {}", chat["messages"]);
            }
            compared += 1;
        }
    }
    assert_eq!(compared, 8);
}

#[test]
fn answers_count_including_their_end_token() {
    let expected = Ok(vec!["It is 4.<|close|>".to_owned(), "A test.<|close|>".to_owned()]);
    for template in ["turns", "generation", "reasoning"] {
        assert_eq!(answers(&chats("plain", Some(template)), &turns()), expected, "{template}");
    }
    // The ends of these turns are not special tokens of this tokenizer.
    let expected = Ok(vec!["It is 4.</turn>\n".to_owned(), "A test.</turn>\n".to_owned()]);
    assert_eq!(answers(&chats("plain", Some("parts")), &turns()), expected);
    let brackets = answers(&chats("plain", Some("brackets")), &turns());
    assert_eq!(brackets, Ok(vec![" It is 4. </s>".to_owned(), " A test. </s>".to_owned()]));
}

#[test]
fn dropped_reasoning_does_not_mask_earlier_answers() {
    let reasoning = chats("plain", Some("reasoning"));
    let answers_of = |messages: Value| answers(&reasoning, &messages);
    let [first, second] = ["<think>\nA.\n</think>\n\nHello!", "<think>\nB.\n</think>\n\nA test."];
    let messages = json!([
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "Who are you?"},
        {"role": "assistant", "content": second},
    ]);
    assert_eq!(answers_of(messages), Ok(vec!["Hello!<|close|>".to_owned(), format!("{second}<|close|>")]));
}

#[test]
fn tool_calls_count_but_tool_results_do_not() {
    let call = json!([{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]);
    let messages = json!([
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": null, "tool_calls": call},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "It is 4."},
    ]);
    let expected = vec![
        "<call>{\"name\": \"f\", \"arguments\": {\"x\": 1}}</call><|close|>".to_owned(),
        "It is 4.<|close|>".to_owned(),
    ];
    let (chats, tokenizer) = chats("plain", Some("turns"));
    assert_eq!(answers(&(chats, tokenizer), &messages), Ok(expected));
}

#[test]
fn answers_within_prompt_are_masked() {
    for template in ["turns", "generation"] {
        let (chats, tokenizer) = chats("plain", Some(template));
        let conversation = Conversation::new(turns().as_array().unwrap().clone(), 4, Map::new()).unwrap();
        let Marked { ids, counts } = chats.encode(&conversation, &tokenizer).unwrap();
        let counted: Vec<u32> =
            ids.into_iter().zip(counts).filter_map(|(id, counts)| counts.then_some(id)).collect();
        assert_eq!(tokenizer.decode(&counted).unwrap(), "A test.<|close|>", "{template}");
    }
}

#[test]
fn undeterminable_answer_error_names_remedy() {
    let turns_of = |messages| answers(&chats("plain", Some("turns")), &messages).unwrap_err();
    let first = turns_of(json!([{"role": "assistant", "content": "A test."}]));
    assert!(
        first.starts_with("cannot tell which tokens of message 1 are the answer: no message precedes it"),
        "{first}"
    );
    assert!(first.contains("data.chat_template") && first.contains("data.loss_on = \"all\""), "{first}");
    let refused = answers(
        &chats("plain", Some("brackets")),
        &json!([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]),
    );
    let expected =
        "the chat template rejects it: Roles must alternate: user, assistant, user, assistant, and so on!";
    assert_eq!(refused.unwrap_err(), expected);
}

#[test]
fn loss_on_all_counts_every_token() {
    let (mut chats, tokenizer) = chats("plain", None);
    let digest = chats.digest();
    chats.loss_on = LossOn::All;
    let marked = chats.encode(&conversation(&turns()), &tokenizer).unwrap();
    assert!(marked.counts.iter().all(|&counts| counts));
    assert_ne!(chats.digest(), digest);
}

#[test]
fn completion_counts_from_first_overlapping_token() {
    let tokenizer = Tokenizer::load("bytes").unwrap();
    let marked = |loss_on| completion("ab", "cd", loss_on, &tokenizer).unwrap();
    assert_eq!(
        marked(LossOn::Answers),
        Marked { ids: vec![97, 98, 99, 100], counts: vec![false, false, true, true] }
    );
    assert_eq!(marked(LossOn::All).counts, [true; 4]);
    let (_, words) = chats("plain", None);
    // "que" and "stions" are parts of other tokens than "ques" and "tions".
    let whole = words.encode("questions").unwrap();
    let marked = completion("ques", "tions", LossOn::Answers, &words).unwrap();
    assert_eq!(marked.ids, whole);
    assert!(marked.counts.iter().any(|&counts| counts));
}

#[test]
fn missing_template_is_data_error_not_record_error() {
    let config = config();
    let tokenizer = Tokenizer::load("bytes").unwrap();
    let chats = Chats::find(&config, &tokenizer).unwrap();
    let fault = chats.encode(&conversation(&turns()), &tokenizer).unwrap_err();
    assert!(matches!(fault, EncodeFault::Data(DataError::ChatTemplate { .. })), "{fault}");
}
