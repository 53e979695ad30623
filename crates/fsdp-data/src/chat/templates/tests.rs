use std::fs;

use serde_json::json;

use super::*;
use crate::testing::config;

fn names(templates: &Templates) -> Vec<(&str, &str)> {
    templates.sources.iter().map(|(name, source)| (name.as_str(), source.as_str())).collect()
}

#[test]
fn template_files_override_config_and_key_overrides_both() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let mut config = config();
    let listed = json!([{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]);
    let find = |config: &DataConfig, value: &Value| Templates::find(config, Some(dir.path()), value).unwrap();

    assert_eq!(names(&find(&config, &json!("x"))), [("default", "x")]);
    assert_eq!(names(&find(&config, &listed)), [("default", "a"), ("tool_use", "b")]);
    fs::write(path("chat_template.jinja"), "c").unwrap();
    assert_eq!(names(&find(&config, &listed)), [("default", "c")]);
    fs::create_dir(path("additional_chat_templates")).unwrap();
    fs::write(path("additional_chat_templates/tool_use.jinja"), "d").unwrap();
    let templates = find(&config, &listed);
    assert_eq!(names(&templates), [("default", "c"), ("tool_use", "d")]);
    let compiled = templates.compile().unwrap();
    let text = |has_tools| compiled.select(has_tools).render(&json!({})).unwrap().text;
    assert_eq!((text(false), text(true)), ("c".to_owned(), "d".to_owned()));
    config.chat_template = Some(path("mine.jinja"));
    assert!(matches!(
        Templates::find(&config, Some(dir.path()), &listed),
        Err(DataError::Read { key: "data.chat_template", .. })
    ));
    fs::write(path("mine.jinja"), "e").unwrap();
    assert_eq!(names(&find(&config, &listed)), [("default", "e")]);
}

#[test]
fn missing_or_invalid_template_error_names_source() {
    let config = config();
    let found =
        |folder: Option<&str>, value: Value| Templates::find(&config, folder.map(Path::new), &value).unwrap();
    let fault = |templates: Templates| templates.fault(templates.compile().unwrap_err()).to_string();
    let none = fault(found(Some("folder"), Value::Null));
    assert!(none.starts_with("folder/tokenizer_config.json: it has no chat template"), "{none}");
    assert!(none.contains("data.chat_template"), "{none}");
    let bytes = fault(found(None, Value::Null));
    assert!(bytes.starts_with("tokenizer \"bytes\": it has no chat template"), "{bytes}");
    let broken = fault(found(Some("folder"), json!("{% if %}")));
    assert!(broken.starts_with("folder/tokenizer_config.json: line 1, column "), "{broken}");
}
