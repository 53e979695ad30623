use super::*;

#[test]
fn generation_tags_become_filter_tags_on_same_line() {
    let (rewritten, has_tags) = rewrite("a\n{%- generation %}b{% endgeneration -%}\nc");
    let expected = "a\n{%- filter _generation_ %}{% with %}b{% endwith %}{% endfilter -%}\nc";
    assert_eq!((rewritten.as_str(), has_tags), (expected, true));
}

#[test]
fn non_tags_are_unchanged() {
    for text in [
        "{# {% generation %} #}",
        "{{ '{% generation %}' }}",
        "{{ \"\\\"{% generation %}\" }}",
        "{% set a = '%}{% generation %}' %}",
        "{% raw %}{% generation %}{% endgeneration %}{% endraw %}",
        "{%- raw -%}{{ {% generation %}{% endraw %}",
        "{% set generation = 1 %}{{ generation }}",
        "{% if add_generation_prompt %}{% endif %}",
        "{ generation } {",
        "{{ 'open",
        "{% generation",
        "{",
        "",
    ] {
        assert_eq!(rewrite(text).0, text);
    }
    assert!(rewrite("{% raw %}{% generation %}{% endraw %}{%generation%}{%endgeneration%}").1);
}

#[test]
fn unmark_returns_marked_spans_including_nested() {
    let [open, close] = MARKS;
    let Rendered { text, generated } =
        unmark(&format!("é{open}ab{close}c{open}{close}{open}d{open}e{close}f{close}"));
    assert_eq!((text.as_str(), generated), ("éabcdef", vec![2..4, 5..5, 5..8]));
}
