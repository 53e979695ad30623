//! Messages with values that JSON does not have, as in WildChat's files.

use std::fs;
use std::path::Path;

use fsdp_config::{DataConfig, LossOn};

use super::{assert_refused, config, fixture, load, seen};

const TABLES: [&str; 2] = ["wild.parquet", "wild.arrow"];

/// Settings with a template that begins with some text.
fn config_with(dir: &Path, text: &str) -> DataConfig {
    let template = dir.join("a.jinja");
    let turns = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}";
    fs::write(&template, format!("{text}{turns}")).unwrap();
    DataConfig {
        column: Some("conversation".to_owned()),
        chat_template: Some(template.to_str().unwrap().to_owned()),
        loss_on: LossOn::Answers,
        seq_len: 4096,
        ..config()
    }
}

#[test]
fn messages_with_timestamps_are_read_as_without_them() {
    let dir = tempfile::tempdir().unwrap();
    for text in [
        "",
        "{% for m in messages %}{{ (m.header or {}).language }}{{ m.toxic }}{% endfor %}",
        "{% for m in messages %}{% for s in m.seen or [] %}{{ s.by }}{% endfor %}{% endfor %}",
    ] {
        let config = config_with(dir.path(), text);
        let expected = load(&[fixture("wild.jsonl")], &config).unwrap();
        for name in TABLES {
            let data = load(&[fixture(name)], &config).unwrap();
            assert_eq!(seen(&data), seen(&expected), "{text} of {name}");
        }
    }
}

#[test]
fn use_of_value_without_json_form_is_refused_by_path() {
    let dir = tempfile::tempdir().unwrap();
    let cases = [
        ("{{ messages[0].timestamp }}", "timestamp\" is of type timestamp"),
        ("{{ messages[0]['timestamp'] ~ '' }}", "timestamp\" is of type timestamp"),
        ("{{ messages[0].timestamp.year }}", "timestamp\" is of type timestamp"),
        ("{{ messages[0].timestamp.strftime('%Y') }}", "timestamp\" is of type timestamp"),
        ("{{ (messages[0].timestamp | string | upper)[:3] }}", "timestamp\" is of type timestamp"),
        ("{% if messages[0].timestamp %}x{% endif %}", "timestamp\" is of type timestamp"),
        ("{{ messages | sort(attribute='timestamp') | length }}", "timestamp\" is of type timestamp"),
        ("{{ messages[0] | tojson(ensure_ascii=true) }}", "timestamp\" is of type timestamp"),
        ("{{ messages[0].header.received }}", "header.received\" is of type time"),
        ("{{ messages[0].header.address }}", "header.address\" is not UTF-8 text (byte 0)"),
        ("{{ messages[1].seen[0].at }}", "seen[].at[]\" is of type timestamp"),
        ("{{ messages[1].seen }}", "seen[].at[]\" is of type timestamp"),
        ("{{ messages[1].seen[0].cost }}", "seen[].cost\" is of type decimal"),
        ("{{ messages[0].numbers }}", "numbers\" has keys that are not text"),
    ];
    for (text, what) in cases {
        let config = config_with(dir.path(), text);
        for name in TABLES {
            let column = format!(
                "the chat template uses a value that has no JSON form: column \"conversation[].{what}"
            );
            assert_refused(&fixture(name), &config, &[name, "row 0: ", &column]);
        }
    }
}
