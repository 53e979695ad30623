//! Conversations: rendered by the tokenizer's own template, with the loss on answers.

use std::fs;
use std::path::{Path, PathBuf};

use crate::support::{Ran, Sandbox};

const TEMPLATE: &str = "{% for message in messages %}<{{ message.role }}>{{ message.content }}</>{% endfor %}\
                        {% if messages[0].role != 'user' %}{{ raise_exception('A user begins!') }}{% endif %}\
                        {% if add_generation_prompt %}<assistant>{% endif %}";

/// A conversation of one question and one answer, as a line of JSON.
fn line(question: &str, answer: &str) -> String {
    format!(
        "{{\"messages\": [{{\"role\": \"user\", \"content\": \"{question}\"}}, \
         {{\"role\": \"assistant\", \"content\": \"{answer}\"}}]}}\n"
    )
}

/// Creates a sandbox with conversations tokenized as bytes: the end of a turn is text like any other.
fn sandbox() -> Sandbox {
    let sandbox = Sandbox::new();
    sandbox.write("chat.jinja", TEMPLATE);
    sandbox.write("data.jsonl", line("Hi", "Hello").repeat(16));
    sandbox.edit("run.toml", "data.txt", "data.jsonl");
    let keys = "seq_len = 64\npacking = \"documents\"\nchat_template = \"chat.jinja\"\nshuffle = false";
    sandbox.edit("run.toml", "seq_len = 8", keys);
    sandbox
}

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

#[test]
fn first_sample_is_shown_with_loss_tokens_marked() {
    let sandbox = sandbox();
    let ran = sandbox.succeed("train run.toml");
    let sample = "first sample: 30 tokens, of which 8 count (in \u{27e6}\u{27e7})\n  <user>Hi</><assistant>\u{27e6}Hello</>\u{27e7}\n";
    assert!(ran.stderr.starts_with(sample), "{}", ran.stderr);
    // With `loss_on=all` no sample is shown: every token counts except the first, which is never a target.
    let all = sandbox.succeed("train run.toml --overwrite --set data.loss_on=all");
    assert!(!all.stderr.contains("first sample"), "{}", all.stderr);
}

#[test]
fn first_sample_respects_quiet_and_json_log_format() {
    let sandbox = sandbox();
    let quiet = sandbox.succeed("train run.toml --quiet").stderr;
    assert!(!quiet.contains("first sample"), "{quiet}");
    let json = sandbox.succeed("train run.toml --overwrite --log-format json").stderr;
    let lines: Vec<serde_json::Value> =
        json.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|_| panic!("{line}"))).collect();
    let is_sample = |line: &&serde_json::Value| {
        line.to_string().contains("first sample: 30 tokens")
            && line.to_string().contains("\u{27e6}Hello</>\u{27e7}")
    };
    assert_eq!(lines.iter().filter(is_sample).count(), 1, "{json}");
}

#[test]
fn conversation_is_shown_even_after_plain_text_samples() {
    let sandbox = sandbox();
    sandbox.write("text.jsonl", "{\"text\": \"plain\"}\n".repeat(16));
    let lists = "--set data.train=[\"text.jsonl\",\"data.jsonl\"]";
    let ran = sandbox.succeed(&format!("train run.toml {lists} --set train.steps=1"));
    assert!(ran.stderr.contains("first sample: 30 tokens, of which 8 count"), "{}", ran.stderr);
    assert!(ran.stderr.contains("tokens/s with padding"), "{}", ran.stderr);
    let ended = sandbox.succeed(&format!("train run.toml {lists} --overwrite --set data.eos=0"));
    let expected = "warning: data.train: data.bos and data.eos are not added to 16 conversations";
    assert!(ended.stderr.contains(expected), "{}", ended.stderr);
}

#[test]
fn resume_with_changed_loss_on_is_rejected() {
    let sandbox = sandbox();
    sandbox.succeed("train run.toml --set checkpoint.every=2");
    let rejected = sandbox.fsdp("train run.toml --resume --set train.steps=5 --set data.loss_on=all");
    assert_eq!(rejected.code, Some(2), "{}", rejected.stderr);
    assert!(rejected.stderr.contains("the run cannot resume from"), "{}", rejected.stderr);
    sandbox.succeed("train run.toml --resume --set train.steps=5");
}

#[test]
fn invalid_conversation_is_rejected_with_line_number() {
    let sandbox = sandbox();
    let wrong = "{\"messages\": [{\"role\": \"system\", \"content\": \"x\"}]}\n";
    sandbox.write("data.jsonl", format!("{}{wrong}", line("Hi", "Hello")));
    insta::assert_snapshot!(sandbox.input_error("train run.toml"), @r"error: data.jsonl: line 2: the chat template rejects it: A user begins!");
    sandbox.write("data.jsonl", "{\"messages\": []}\n");
    insta::assert_snapshot!(sandbox.input_error("train run.toml"), @r#"error: data.jsonl: line 1: "messages" has no messages"#);
}

#[test]
fn data_without_loss_tokens_is_rejected() {
    let sandbox = sandbox();
    let seq_len = |seq_len: usize| format!("train run.toml --set data.seq_len={seq_len}");
    // The answer begins at token 22 of 30.
    insta::assert_snapshot!(sandbox.input_error(&seq_len(21)), @r#"
    error: none of 16 documents in data.jsonl has a token that counts (data.loss_on) within
    data.seq_len = 21: raise that to at least 22, or count all tokens with data.loss_on = "all"
    "#);
    let with_answers = sandbox.read("data.jsonl");
    sandbox.write("data.jsonl", "{\"messages\": [{\"role\": \"user\", \"content\": \"Hi\"}]}\n".repeat(16));
    let no_answer = sandbox.input_error("train run.toml");
    insta::assert_snapshot!(no_answer, @r#"
    error: none of 16 documents in data.jsonl has a token that counts (data.loss_on): they have no
    assistant message and no completion, or the chat template marks none as generated; provide data
    with answers, or count all tokens with data.loss_on = "all"
    "#);
    assert_eq!(sandbox.input_error("train run.toml --set data.packing=stream"), no_answer);
    let checked = sandbox.fsdp("check run.toml");
    assert!(checked.code == Some(2) && checked.stdout.contains("none of 16 documents"), "{}", checked.stdout);
    sandbox.write("data.jsonl", with_answers);
    sandbox.succeed(&seq_len(22));
}

#[test]
fn missing_or_invalid_chat_template_is_rejected() {
    let sandbox = sandbox();
    sandbox.write("chat.jinja", "{% for message in messages %}\n  {{ message. }}\n{% endfor %}");
    let broken = sandbox.input_error("train run.toml");
    assert!(broken.starts_with("error: chat.jinja: line 2, column "), "{broken}");
    sandbox.edit("run.toml", "chat_template = \"chat.jinja\"\n", "");
    // Skipping malformed records does not avoid the error.
    let missing = sandbox.input_error("train run.toml --set data.malformed=skip");
    assert!(
        missing.contains("has no chat template, which `messages` need; set data.chat_template"),
        "{missing}"
    );
}

#[test]
fn chat_example_trains_and_exports_chat_template() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let mut command = Sandbox::new().command();
    let out_dir = format!("run.out_dir={}", out.display());
    let arguments = ["train", "examples/chat.toml", "--set", "train.steps=2", "--set", &out_dir];
    let ran = Ran::of(command.current_dir(repository()).args(arguments).output().unwrap());
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    assert!(ran.stderr.contains("<|end|>\u{27e7}"), "{}", ran.stderr);
    assert!(
        out.join("model/chat_template.jinja").exists() && out.join("model/tokenizer_config.json").exists()
    );
}

#[test]
fn answers_without_end_token_are_warned_of() {
    let dir = tempfile::tempdir().unwrap();
    let template = dir.path().join("chat.jinja");
    std::fs::write(
        &template,
        TEMPLATE
            .replace("</>", "")
            .replace("raise_exception('A user begins!')", "''")
            .replace("<{{ message.role }}>", "<|{{ message.role }}|>")
            .replace("<assistant>", "<|assistant|>"),
    )
    .unwrap();
    let warning = "no answer ends with a token that stops generation";
    for command in ["check", "train"] {
        let settings = [
            format!("run.out_dir={}", dir.path().join("out").display()),
            format!("data.chat_template={}", template.display()),
            "train.steps=1".to_owned(),
        ];
        let arguments = settings.iter().flat_map(|setting| ["--set", setting]);
        let mut ran = Sandbox::new().command();
        let ran = ran.current_dir(repository()).args([command, "examples/chat.toml"]).args(arguments);
        let Ran { stdout, stderr, .. } = Ran::of(ran.output().unwrap());
        assert!([&stdout, &stderr].iter().any(|text| text.contains(warning)), "{command}: {stdout}{stderr}");
        let is_shown = stderr.contains("); no token that stops generation ends an answer");
        assert_eq!(is_shown, command == "train", "{stderr}");
    }
}

#[test]
fn tokenizer_library_panic_is_reported_as_error() {
    let sandbox = Sandbox::new();
    let tokenizer = r#"{"version": "1.0", "pre_tokenizer": {"type": "FixedLength", "length": 0},
        "model": {"type": "WordLevel", "vocab": {"<unk>": 0}, "unk_token": "<unk>"}}"#;
    sandbox.write("tokenizer.json", tokenizer);
    let ran = sandbox.fsdp("train run.toml --set data.tokenizer=tokenizer.json");
    assert_eq!(ran.code, Some(2), "{}", ran.stderr);
    assert!(ran.stderr.contains("chunk size must be non-zero"), "{}", ran.stderr);
    assert!(!ran.stderr.contains("panicked"), "{}", ran.stderr);
}

#[test]
fn template_that_uses_timestamp_of_table_is_refused_by_path() {
    let sandbox = sandbox();
    let tables = repository().join("crates/fsdp-data/src/source/fixtures");
    for (format, row) in [("parquet", "row group 0, row 0: "), ("arrow", "row 0: ")] {
        let file = format!("wild.{format}");
        fs::copy(tables.join(&file), sandbox.path(&file)).unwrap();
        let of = format!("run.toml --set data.train=[\"{file}\"] --set data.column=conversation");
        let usual = sandbox.fsdp(&format!("check {of}"));
        let said = usual.stdout + &usual.stderr;
        // The last row begins with a system prompt.
        assert!(said.contains("row 2: ") && said.contains("A user begins!"), "{said}");
        sandbox.write("times.jinja", format!("{{{{ messages[0].timestamp }}}}{TEMPLATE}"));
        for command in ["check", "train"] {
            let Ran { code, stdout, stderr } =
                sandbox.fsdp(&format!("{command} {of} --set data.chat_template=times.jinja"));
            let said = (stdout + &stderr).split_whitespace().collect::<Vec<_>>().join(" ");
            assert_eq!(code, Some(2), "{said}");
            let column = "column \"conversation[].timestamp\" is of type timestamp";
            assert!(said.contains(&file) && said.contains(row) && said.contains(column), "{said}");
        }
    }
}
