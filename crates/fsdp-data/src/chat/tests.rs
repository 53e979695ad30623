use serde_json::{Map, Value, json};

use super::*;
use crate::chat::fault::EncodeFault;
use crate::testing::config;

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

/// Returns the tokens of a conversation, and whether none of its answers ends with a token that stops generation.
fn encode(
    chats: &Chats,
    conversation: &Conversation,
    tokenizer: &Tokenizer,
) -> Result<(Marked, bool), EncodeFault> {
    let json = conversation.to_json()?;
    let script = chats.scripts(vec![&json])?.next()?;
    Ok(chats.tokens(&script, tokenizer)?)
}

/// Returns the parts of the text that count in the loss.
fn answers((chats, tokenizer): &(Chats, Tokenizer), messages: &Value) -> Result<Vec<String>, String> {
    let marked = encode(chats, &conversation(messages), tokenizer);
    let (Marked { ids, counts }, _) = marked.map_err(|fault| fault.to_string())?;
    let runs = (0..ids.len()).collect::<Vec<_>>();
    let runs = runs.chunk_by(|&one, &next| counts[one] == counts[next]).filter(|run| counts[run[0]]);
    Ok(runs.map(|run| tokenizer.decode(&ids[run[0]..=run[run.len() - 1]]).unwrap()).collect())
}

/// Returns a tokenizer of the fixtures with a template that is given as text.
fn with_template(source: &str) -> (Chats, Tokenizer) {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("template.jinja");
    std::fs::write(&file, source).unwrap();
    let mut config = config();
    config.tokenizer = format!("{FOLDER}/tokenizers/plain/tokenizer.json");
    config.chat_template = Some(file.to_str().unwrap().to_owned());
    let tokenizer = Tokenizer::load(&config.tokenizer).unwrap();
    (Chats::find(&config, &tokenizer).unwrap(), tokenizer)
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
            let (marked, _) = encode(&chats, &conversation(&chat["messages"]), &tokenizer).unwrap();
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
        let (Marked { ids, counts }, _) = encode(&chats, &conversation, &tokenizer).unwrap();
        let counted: Vec<u32> =
            ids.into_iter().zip(counts).filter_map(|(id, counts)| counts.then_some(id)).collect();
        assert_eq!(tokenizer.decode(&counted).unwrap(), "A test.<|close|>", "{template}");
    }
}

#[test]
fn undeterminable_answer_error_names_remedy() {
    let twice = "{% for message in messages %}{{ message.content }}{{ message.content }}{% endfor %}\
                 {% if add_generation_prompt %}{{ raise_exception('No prompts!') }}{% endif %}";
    let fault = answers(&with_template(twice), &turns()).unwrap_err();
    let expected = "cannot tell which tokens of message 3 are the answer: with only the messages before it, the chat \
                    template rejects it: No prompts!";
    assert!(fault.starts_with(expected), "{fault}");
    assert!(fault.contains("data.chat_template") && fault.contains("data.loss_on = \"all\""), "{fault}");
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
    chats.setup.loss_on = LossOn::All;
    let (marked, _) = encode(&chats, &conversation(&turns()), &tokenizer).unwrap();
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
    let fault = encode(&chats, &conversation(&turns()), &tokenizer).unwrap_err();
    assert!(matches!(fault, EncodeFault::Data(DataError::ChatTemplate { .. })), "{fault}");
}

/// Each template has `{% generation %}` blocks, by which transformers has marked the answers. They are found without the
/// blocks, too: by the text before and after them.
#[test]
fn answers_are_found_where_blocks_mark_them() {
    let cases = std::fs::read_to_string(format!("{FOLDER}/marked.json")).unwrap();
    let cases: Vec<Value> = serde_json::from_str(&cases).unwrap();
    assert!(cases.len() > 30);
    for case in cases {
        let name = case["template"].as_str().unwrap();
        let marked = std::fs::read_to_string(format!("{FOLDER}/marked/{name}.jinja")).unwrap();
        let plain = marked.replace("{% generation %}", "").replace("{% endgeneration %}", "");
        assert_ne!(marked, plain);
        for (source, what) in [(marked, "with blocks"), (plain, "without blocks")] {
            let (chats, tokenizer) = with_template(&source);
            let got = encode(&chats, &conversation(&case["messages"]), &tokenizer);
            let (Marked { ids, counts }, _) = got.unwrap_or_else(|fault| panic!("{name} {what}: {fault}"));
            let counts: Vec<u8> = counts.into_iter().map(u8::from).collect();
            assert_eq!(json!(ids), case["ids"], "{name} {what}: {}", case["messages"]);
            assert_eq!(json!(counts), case["mask"], "{name} {what}: {}", case["messages"]);
        }
    }
}

const SHORT: &str = "{% for message in messages %}{{ '<|open|>' + message.role + '\n' }}\
                     {% if message.role == 'assistant' %}SAID{% else %}{{ message.content }}AFTER{% endif %}{% endfor %}\
                     {% if add_generation_prompt %}{{ '<|open|>assistant\n' }}{% endif %}";

#[test]
fn token_that_stops_generation_counts_or_is_missed() {
    let block = "{% generation %}{{ message.content }}{% endgeneration %}";
    let two = ["It is 4.", "A test."];
    for (said, after, end, is_open) in [
        ("{{ message.content }}<|close|>", "<|close|>", ["<|close|>", "<|close|>"], false),
        (&format!("{block}<|close|>"), "<|close|>", ["<|close|>", "<|close|>"], false),
        (&format!("{block}{{{{ '\\n</s>' }}}}"), "</s>", ["\n</s>", "\n</s>"], false),
        // Only the beginning of the next message ends an answer, at which this tokenizer does not stop.
        ("{{ message.content }}", "", ["<|open|>", ""], true),
        (block, "", ["<|open|>", ""], true),
        ("{{ message.content }}\n", "\n", ["\n<|open|>", "\n"], true),
    ] {
        let mut loaded = with_template(&SHORT.replace("SAID", said).replace("AFTER", after));
        let both = json!(turns().as_array().unwrap()[..5]);
        let expected = [0, 1].map(|index| format!("{}{}", two[index], end[index])).to_vec();
        assert_eq!(answers(&loaded, &both), Ok(expected), "{said}");
        let open = |(chats, tokenizer): &(Chats, Tokenizer), messages: &Value| {
            encode(chats, &conversation(messages), tokenizer).unwrap().1
        };
        assert_eq!(open(&loaded, &both), is_open, "{said}");
        assert_eq!(open(&loaded, &turns()), is_open, "{said}: a question at the end");
        loaded.0.stops = loaded.1.encode("<|open|>").unwrap();
        assert!(!open(&loaded, &both), "{said}");
        let one = json!(turns().as_array().unwrap()[..3]);
        assert_eq!(open(&loaded, &one), is_open, "{said}: nothing follows the only answer");
    }
}

#[test]
fn messages_marked_not_to_count_are_seen_but_not_learned() {
    let mut marked = turns();
    for mark in
        [json!({"weight": 0}), json!({"weight": 0.0}), json!({"train": false}), json!({"training": false})]
    {
        marked[2] = json!({"role": "assistant", "content": "It is 4."});
        marked[2].as_object_mut().unwrap().extend(mark.as_object().unwrap().clone());
        marked[4]["weight"] = json!(1);
        for template in ["turns", "generation", "reasoning"] {
            let (mut chats, tokenizer) = chats("plain", Some(template));
            let (plain, _) = encode(&chats, &conversation(&turns()), &tokenizer).unwrap();
            let (got, _) = encode(&chats, &conversation(&marked), &tokenizer).unwrap();
            assert_eq!(got.ids, plain.ids, "{template} {mark}");
            let counted = |Marked { ids, counts }: Marked| {
                let counted = ids.into_iter().zip(counts).filter_map(|(id, counts)| counts.then_some(id));
                tokenizer.decode(&counted.collect::<Vec<u32>>()).unwrap()
            };
            assert_eq!(counted(got), "A test.<|close|>", "{template} {mark}");
            chats.setup.loss_on = LossOn::All;
            let (all, _) = encode(&chats, &conversation(&marked), &tokenizer).unwrap();
            let ignored = Marked { counts: all.counts.iter().map(|counts| !counts).collect(), ..all };
            assert_eq!(counted(ignored), "It is 4.<|close|>", "{template} {mark}");
        }
    }
}

#[test]
fn last_answer_alone_counts() {
    for template in ["turns", "generation", "reasoning"] {
        let (mut chats, tokenizer) = chats("plain", Some(template));
        let digest = chats.digest();
        chats.setup.loss_on = LossOn::LastAnswer;
        assert_ne!(chats.digest(), digest);
        let found = answers(&(chats, tokenizer), &turns());
        assert_eq!(found, Ok(vec!["A test.<|close|>".to_owned()]), "{template}");
    }
}

#[test]
fn reasoning_counts_unless_it_is_left_out() {
    let messages = json!([
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "<think>\nA.\n</think>\n\nHello!"},
        {"role": "user", "content": "Who are you?"},
        {"role": "assistant", "content": "<think>\nB.\n</think>\n\nA test."},
    ]);
    let opened = std::fs::read_to_string(format!("{FOLDER}/marked/thinking.jinja")).unwrap();
    let plain = opened.replace("{% generation %}", "").replace("{% endgeneration %}", "");
    let turns = std::fs::read_to_string(format!("{FOLDER}/templates/turns.jinja")).unwrap();
    let first = "<think>\nA.\n</think>\n\n";
    for (template, first, second) in [
        (&opened, "", "B.\n</think>\n\n"),
        (&plain, "", "B.\n</think>\n\n"),
        (&turns, first, "<think>\nB.\n</think>\n\n"),
    ] {
        let mut loaded = with_template(template);
        let digest = loaded.0.digest();
        let expected = vec![format!("{first}Hello!<|close|>"), format!("{second}A test.<|close|>")];
        assert_eq!(answers(&loaded, &messages), Ok(expected));
        loaded.0.setup.counts_reasoning = false;
        assert_ne!(loaded.0.digest(), digest);
        let without = ["Hello!<|close|>", "A test.<|close|>"].map(str::to_owned).to_vec();
        assert_eq!(answers(&loaded, &messages), Ok(without));
        loaded.0.setup.loss_on = LossOn::All;
        let (Marked { ids, counts }, _) = encode(&loaded.0, &conversation(&messages), &loaded.1).unwrap();
        let left_out = ids.into_iter().zip(counts).filter_map(|(id, counts)| (!counts).then_some(id));
        let left_out = loaded.1.decode(&left_out.collect::<Vec<u32>>()).unwrap();
        assert_eq!(left_out, format!("{first}{second}"));
    }
}

/// Templates that write reasoning unless the answer has some, as for Nemotron 3, and prompts that begin it.
#[test]
fn header_before_an_answer_with_its_own_reasoning_does_not_count() {
    let template = "{% for message in messages %}{{ '<|open|>' + message.role + '\\n' }}\
                    {% if message.role == 'assistant' and '<think>' not in message.content %}<think></think>{% endif %}\
                    {{ message.content + '<|close|>\\n' }}{% endfor %}\
                    {% if add_generation_prompt %}{{ '<|open|>assistant\\n<think>\\n' }}{% endif %}";
    let loaded = with_template(template);
    for (content, counted) in [
        ("<think>B.</think>A test.", "B.</think>A test.<|close|>"),
        ("So: <think>B.</think>A test.", "So: <think>B.</think>A test.<|close|>"),
    ] {
        let mut messages = turns();
        messages[4]["content"] = json!(content);
        let found = answers(&loaded, &messages).unwrap();
        assert_eq!(found[1], counted);
    }
}

/// Answers end with special tokens, white space, the token that ends them, or are empty, and no token but `</s>` is known to
/// stop generation. What the template writes after any answer ends each, inside of blocks or after them.
#[test]
fn end_of_template_counts_whatever_ends_the_message() {
    let said = |inside: &str, after: &str| {
        format!(
            "{{% for message in messages %}}{{{{ '<|open|>' + message.role + '\n' }}}}{{% if message.role == 'assistant' %}}\
             {inside}{{% else %}}{{{{ message.content }}}}<|close|>{{% endif %}}{{{{ '\n' }}}}{{% endfor %}}\
             {{% if add_generation_prompt %}}{{{{ '<|open|>assistant\n' }}}}{{% else %}}{after}{{% endif %}}"
        )
    };
    let [content, open, close] = ["{{ message.content }}", "{% generation %}", "{% endgeneration %}"];
    let mut messages = json!(turns().as_array().unwrap()[..5]);
    for answer in
        ["It is<s>", "", " ", "4 \n", "<|open|>", "<|close|>", "It<s> is<|close|>", "A test.</s>", "</s>"]
    {
        for after in ["", "</s>", "<s>"] {
            for inside in [
                format!("{content}<|close|>"),
                format!("{open}{content}<|close|>{close}"),
                format!("{open}{content}{close}<|close|>"),
            ] {
                let is_outside = inside.ends_with("<|close|>") && inside.starts_with(open);
                if is_outside && answer.ends_with("</s>") {
                    // The block has an end already.
                    continue;
                }
                let loaded = with_template(&said(&inside, after));
                messages[2]["content"] = json!(answer);
                let first = answers(&loaded, &messages).unwrap().swap_remove(0);
                assert_eq!(first, format!("{answer}<|close|>"), "{inside} {after}");
            }
        }
    }
}

/// Where nothing else ends an answer, the token that begins the next message does, as in GLM 4.
#[test]
fn next_message_ends_an_answer_whatever_ends_that() {
    let template = "{% for message in messages %}{{ '<|open|>' + message.role + '\n' + message.content }}\
                    {% for call in message.tool_calls or [] %}{{ call + '<s>' }}{% endfor %}{% endfor %}\
                    {% if add_generation_prompt %}{{ '<|open|>assistant\n' }}{% endif %}";
    let mut loaded = with_template(template);
    let mut messages = turns();
    for (answer, calls, counted) in [
        ("It is<s>", json!(null), "It is<s><|open|>"),
        ("", json!(["now", "then"]), "now<s>then<s><|open|>"),
        ("<|close|>", json!(null), "<|close|><|open|>"),
        ("It is 4.</s>", json!(null), "It is 4.</s>"),
    ] {
        messages[2] = json!({"role": "assistant", "content": answer, "tool_calls": calls});
        assert_eq!(answers(&loaded, &messages).unwrap()[0], counted);
    }
    // The last one is followed by another token that stops generation.
    loaded.0.stops = loaded.1.encode("</s><|open|>").unwrap();
    assert_eq!(answers(&loaded, &messages).unwrap()[0], "It is 4.</s><|open|>");
}

#[test]
fn marks_on_questions_are_refused_where_they_cannot_be_followed() {
    let (mut chats, tokenizer) = chats("plain", Some("turns"));
    let mut marked = turns();
    marked[1]["train"] = json!(false);
    assert!(encode(&chats, &conversation(&marked), &tokenizer).is_ok());
    chats.setup.loss_on = LossOn::All;
    let fault = encode(&chats, &conversation(&marked), &tokenizer).unwrap_err();
    assert!(
        format!("{fault:?}").contains("message 2 (of role \\\"user\\\") is marked not to count"),
        "{fault:?}"
    );
    marked[1]["train"] = json!(true);
    assert!(encode(&chats, &conversation(&marked), &tokenizer).is_ok());
}
