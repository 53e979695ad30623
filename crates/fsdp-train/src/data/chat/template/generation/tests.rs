use super::*;

#[test]
fn tags_become_those_of_a_filter_in_the_same_line() {
    let (rewritten, has_tags) = rewrite("a\n{%- generation %}b{% endgeneration -%}\nc");
    let expected = "a\n{%- filter _generation_ %}{% with %}b{% endwith %}{% endfilter -%}\nc";
    assert_eq!((rewritten.as_str(), has_tags), (expected, true));
}

#[test]
fn what_is_no_tag_stays() {
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
fn marks_say_what_is_between_them_also_one_in_the_other() {
    let [open, close] = MARKS;
    let Rendered { text, generated } =
        unmark(&format!("é{open}ab{close}c{open}{close}{open}d{open}e{close}f{close}"));
    assert_eq!((text.as_str(), generated), ("éabcdef", vec![2..4, 5..5, 5..8]));
}
