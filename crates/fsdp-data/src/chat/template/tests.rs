use serde_json::{Map, Value, json};

use super::*;

const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/chats");

fn rendered(source: &str, context: &Value) -> Result<String, RenderFault> {
    let template = ChatTemplate::parse(source, None).unwrap();
    template.render(context).map(|rendered| rendered.text)
}

#[test]
fn rendering_matches_transformers() {
    let cases = std::fs::read_to_string(format!("{FOLDER}/renderings.json")).unwrap();
    let cases: Vec<Value> = serde_json::from_str(&cases).unwrap();
    assert!(cases.len() > 100);
    for case in cases {
        let name = case["template"].as_str().unwrap();
        let what = format!("{name}, {}, {}", case["conversation"], case["options"]);
        let source = std::fs::read_to_string(format!("{FOLDER}/templates/{name}.jinja")).unwrap();
        let template = ChatTemplate::parse(&source, Some("2024-07-26")).unwrap();
        assert_eq!(template.has_generation(), name == "generation");
        let special = json!({
            "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>",
            "tools": null, "documents": null, "add_generation_prompt": false,
        });
        let mut context: Map<String, Value> = special.as_object().unwrap().clone();
        context.extend(case["options"].as_object().unwrap().clone());
        context.insert("messages".to_owned(), case["messages"].clone());
        let outcome = template.render(&context);
        if let Some(text) = case["text"].as_str() {
            let Rendered { text: got, generated } = outcome.unwrap_or_else(|fault| panic!("{what}: {fault}"));
            assert_eq!(got, text, "{what}");
            let spans: Vec<[usize; 2]> = generated.iter().map(|span| [span.start, span.end]).collect();
            assert_eq!(json!(spans), case["generated"], "{what}");
        } else if let Some(raised) = case["raised"].as_str() {
            assert_eq!(outcome, Err(RenderFault::Rejected(raised.to_owned())), "{what}");
        } else {
            // Python's error message differs from ours.
            assert!(matches!(outcome, Err(RenderFault::Failed { .. })), "{what}: {outcome:?}");
        }
    }
}

#[test]
fn template_syntax_error_names_line_and_column() {
    let fault = ChatTemplate::parse("{{ messages }}\n  {% for m in %}", None).unwrap_err();
    assert!(fault.starts_with("line 2, column 15: syntax error"), "{fault}");
    let fault = ChatTemplate::parse("é{% nonsense %}", None).unwrap_err();
    assert!(fault.starts_with("line 1, column 5: syntax error: unknown statement nonsense"), "{fault}");
    let fault = ChatTemplate::parse("{% generation %}{% if a %}{% endgeneration %}", None).unwrap_err();
    assert!(fault.starts_with("line 1, column "), "{fault}");
}

#[test]
fn endless_template_is_error() {
    let endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}";
    assert_eq!(rendered(endless, &json!({})), Err(RenderFault::Endless));
    let recursive = "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}";
    assert!(matches!(rendered(recursive, &json!({})), Err(RenderFault::Failed { .. })));
}

#[test]
fn strftime_now_requires_configured_date() {
    let asks = "{{ strftime_now('%Y') }}";
    assert_eq!(rendered(asks, &json!({})), Err(RenderFault::Date));
    let dated = ChatTemplate::parse(asks, Some("1999-12-31")).unwrap();
    assert_eq!(dated.render(&json!({})).unwrap().text, "1999");
    let looks = "{{ 'date' if strftime_now is defined else 'none' }}";
    assert_eq!(rendered(looks, &json!({})).unwrap(), "none");
}

#[test]
fn messages_with_marker_noncharacters_are_rejected() {
    for text in ["\u{fdd0}", "\u{fdd1}", "\u{fdd0}\u{fdd1}", "\u{fdd1}\u{fdd0}"] {
        for source in ["{{ text }}", "{% generation %}{{ text }}{% endgeneration %}"] {
            let outcome = rendered(source, &json!({"text": text}));
            assert!(matches!(outcome, Err(RenderFault::Noncharacter(0xfdd0..=0xfdd1))), "{text:?} {source}");
        }
    }
}

#[test]
fn render_error_names_line() {
    let fault = rendered("\n\n{{ messages[0].content + 1 }}", &json!({"messages": [{"content": "a"}]}));
    assert!(matches!(&fault, Err(RenderFault::Failed { line: 3, .. })), "{fault:?}");
}
