use std::fs;
use std::time::{Duration, Instant};

use fsdp_core::FailureKind;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::chat::conversation::Conversation;
use crate::testing::config;
use crate::tokenizer::Tokenizer;

/// The argument that turns the test below into a worker; libtest takes it as the name of a test to skip.
const WORKER: &str = "__worker__";

/// The beginning of the argument by which a test says that its memory is limited, followed by the limit.
const SHORT: &str = "__memory__";

/// Not a test if started with [`WORKER`]: then it is the process in which templates run.
#[test]
fn worker_serves_only_when_asked() {
    if std::env::args().any(|argument| argument == WORKER) {
        worker::serve().unwrap();
    }
}

/// Limits that hostile templates exceed soon. Time is measured in whole seconds.
const QUICK: Limits = Limits { memory_bytes: 128 << 20, time: Duration::from_millis(900) };

/// Returns a template, which runs in a process of its own if that has limits.
fn chats(template: &str, limits: Option<Limits>) -> Chats {
    static ARGUMENTS: OnceLock<Vec<OsString>> = OnceLock::new();
    let name = "chat::contained::tests::worker_serves_only_when_asked";
    let arguments = [name, "--exact", "--nocapture", "--skip", WORKER];
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("template.jinja");
    fs::write(&file, template).unwrap();
    let mut config = config();
    config.chat_template = Some(file.to_str().unwrap().to_owned());
    let mut chats = Chats::find(&config, &Tokenizer::load("bytes").unwrap()).unwrap();
    if let Some(limits) = limits {
        chats.limits = limits;
        chats.worker = Some(ARGUMENTS.get_or_init(|| arguments.map(OsString::from).to_vec()));
    }
    chats
}

fn apart(template: &str) -> Chats {
    chats(template, Some(QUICK))
}

/// A conversation of one question and one answer, as JSON.
fn conversation(question: &str) -> Vec<u8> {
    json_of(
        json!([{"role": "user", "content": question}, {"role": "assistant", "content": "Hello"}]),
        json!({}),
    )
}

fn json_of(messages: Value, context: Value) -> Vec<u8> {
    let (Value::Array(messages), Value::Object(context)) = (messages, context) else { panic!("not these") };
    Conversation::new(messages, 0, context).unwrap().to_json().unwrap()
}

fn script(chats: &Chats, conversation: &[u8]) -> Result<Script, EncodeFault> {
    chats.scripts(vec![conversation])?.next()
}

/// Checks that a template ends the run, and returns the error.
#[track_caller]
fn refusal(template: &str, limits: Limits) -> String {
    let fault = script(&chats(template, Some(limits)), &conversation("Hi")).unwrap_err();
    let is_fatal =
        matches!(fault, EncodeFault::Template(_) | EncodeFault::Data(DataError::ChatTemplate { .. }));
    let fault = fault.to_string();
    assert!(is_fatal && fault.len() < 1000, "{template:.80}: {fault}");
    fault
}

/// A value nested 100,000 deep, and what is done with it.
fn nested(then: &str) -> String {
    format!(
        "{{% set ns = namespace(v=[], w={{}}, x=[]) %}}{{% for i in range(100000) %}}{{% set ns.v = [ns.v] %}}\
         {{% set ns.x = [ns.x] %}}{{% set ns.w = dict(a=ns.w) %}}{{% endfor %}}{then}"
    )
}

#[test]
fn deep_templates_and_values_end_only_their_process() {
    let long = |part: &str, count: usize| format!("{{{{ 1{} }}}}", part.repeat(count));
    for template in [
        "{% set ns = namespace() %}{% set ns.a = ns %}{{ ns }}",
        "{% set ns = namespace() %}{% set ns.a = [ns] %}{{ ns|tojson }}",
        "{% set ns = namespace() %}{% set ns.a = {'a': ns} %}{{ ns.a|string }}",
        &long("+1", 50_000),
        &long("|string", 100_000),
        &long(".a", 100_000),
        &long(" if 1 else 1", 50_000),
        &format!("{{{{ {}1 }}}}", "-".repeat(100_000)),
        &nested("{{ ns.v }}"),
        &nested("{{ ns.v|tojson }}"),
        &nested("{{ ns.w|string }}"),
        &nested("{{ ns.v == ns.x }}"),
        &nested("{{ raise_exception('only dropped') }}"),
    ] {
        // To come that deep may take longer than these.
        let fault = refusal(template, Limits { time: Limits::USUAL.time, ..QUICK });
        let is_named = ["the chat template nests too deeply", "template.jinja: line 1, column"];
        assert!(is_named.iter().any(|part| fault.contains(part)), "{template:.80}: {fault}");
    }
}

/// Recursion is limited by the template engine: an error of the record, at any depth.
#[test]
fn recursive_macros_and_includes_are_errors() {
    for template in [
        "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
        "{% macro m() %}{% call m() %}{% endcall %}{% endmacro %}{{ m() }}",
        "{% include 'chat template' %}",
        "{% import 'chat template' as t %}{{ t.x }}",
        "{% extends 'chat template' %}",
        "{% include '/etc/passwd' %}",
        "{% for m in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    ] {
        let fault = script(&apart(template), &conversation("Hi")).unwrap_err().to_string();
        assert!(fault.contains("the chat template"), "{template}: {fault}");
    }
}

#[test]
fn memory_of_a_template_is_bounded() {
    let doubled = |expression: &str| {
        format!(
            "{{% set ns = namespace(s='0123456789', v=[1]) %}}{{% for i in range(40) %}}{expression}{{% endfor %}}\
             {{{{ ns.s|length }}}}"
        )
    };
    for template in [
        &doubled("{% set ns.s = ns.s ~ ns.s %}"),
        &doubled("{% set ns.s = ns.s + ns.s %}"),
        &doubled("{% set ns.s = ns.s|replace('0', '00000000000') %}"),
        &doubled("{% set ns.s = [ns.s, ns.s]|join('') %}"),
        &doubled("{% set ns.s = '%s%s'|format(ns.s, ns.s) %}"),
        &doubled("{% set ns.v = ns.v + ns.v %}{{ ns.v|tojson }}"),
        &doubled("{% set ns.v = [ns.v, ns.v] %}{% if i > 35 %}{{ ns.v|tojson }}{% endif %}"),
        &doubled("{% set ns.s = ns.s.replace('0', ns.s) %}"),
        "{{ '%10000000000d'|format(1) }}",
        "{{ 'a'|indent(10000000000, true) }}",
        "{{ 'a' * 10000000000 }}",
        "{{ [1]|batch(10000000000, 0)|list|length }}",
        "{{ [1]|slice(10000000000, 0)|list|length }}",
        "{% for i in range(9000) %}{% for j in range(90) %}{{ '0123456789abcdef' }}{% endfor %}{% endfor %}",
    ] {
        let fault = script(&apart(template), &conversation("Hi"));
        match fault {
            Err(EncodeFault::Template(fault)) => assert!(fault.contains("the chat template"), "{fault}"),
            // The engine itself may refuse the width.
            Err(EncodeFault::Record(fault)) => assert!(fault.len() < 1000, "{fault}"),
            other => panic!("{template:.80}: {other:?}"),
        }
    }
}

#[test]
fn time_of_a_conversation_is_bounded() {
    let list = "{% set l = range(100000)|list %}";
    for costly in ["{% set m = l|sort %}", "{% set m = l|unique|list %}", "{% if 'a' in l %}{% endif %}"] {
        let start = Instant::now();
        let fault = refusal(&format!("{list}{{% for i in l %}}{costly}{{% endfor %}}"), QUICK);
        assert!(fault.contains("the chat template takes more than 0.9 s"), "{costly}: {fault}");
        assert!(start.elapsed() < 50 * QUICK.time, "{costly}: {:?}", start.elapsed());
    }
}

/// Costly where only the beginning of a conversation is rendered, and where another text in place of an answer is.
#[test]
fn excess_ends_the_run_wherever_it_begins() {
    let whole =
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}?{% endif %}";
    let endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}";
    for condition in ["add_generation_prompt", "messages|length == 1", "messages[-1].content == '\u{fdd2}'"] {
        refusal(&format!("{whole}{{% if {condition} %}}{endless}{{% endif %}}"), QUICK);
    }
    let later =
        format!("{{% if messages[0].content == 'late' %}}{endless}{{% endif %}}{{{{ messages|length }}}}");
    let chats = apart(&later);
    let all = ["early", "late", "early"].map(conversation);
    let mut scripts = chats.scripts(all.iter().map(Vec::as_slice).collect()).unwrap();
    assert!(matches!(scripts.next(), Ok(_) | Err(EncodeFault::Record(_))));
    assert!(matches!(scripts.next(), Err(EncodeFault::Template(_))));
}

#[test]
fn slow_rejections_one_after_the_other_end_the_run() {
    let slow = "{% set l = range(100000)|list %}{% for i in range(40) %}{% set m = l|sort|reverse|sort %}{% endfor %}\
                {{ raise_exception('no') }}";
    let chats = apart(slow);
    let all = vec![conversation("Hi"); 10_000];
    let mut scripts = chats.scripts(all.iter().map(Vec::as_slice).collect()).unwrap();
    let mut rejected = 0;
    let fault = loop {
        match scripts.next().unwrap_err() {
            EncodeFault::Record(fault) => assert_eq!(fault, "the chat template rejects it: no"),
            fault => break fault,
        }
        rejected += 1;
    };
    assert!(matches!(fault, EncodeFault::Template(_)) && rejected < 1000, "{rejected}: {fault}");
    // Quick ones may go on.
    let chats = apart("{{ raise_exception('no') }}");
    let mut scripts = chats.scripts(all.iter().map(Vec::as_slice).collect()).unwrap();
    assert!((0..all.len()).all(|_| matches!(scripts.next(), Err(EncodeFault::Record(_)))));
}

#[test]
fn killed_process_is_a_temporary_failure() {
    let chats = apart("{{ messages|length }}");
    script(&chats, &conversation("Hi")).unwrap_err();
    chats.idle.lock().unwrap()[0].kill();
    let EncodeFault::Data(fault) = script(&chats, &conversation("Hi")).unwrap_err() else {
        panic!("not this")
    };
    assert!(fault.to_string().contains("(SIGKILL)"), "{fault}");
    assert_eq!(fault.kind(), FailureKind::Temporary);
    assert!(chats.idle.lock().unwrap().is_empty());
}

/// The limits of this process hold for what it starts, so a shell sets them.
#[test]
fn too_little_memory_is_not_the_fault_of_the_template() {
    if let Some(mib) = std::env::args().find_map(|argument| argument.strip_prefix(SHORT).map(str::to_owned)) {
        let greedy =
            "{% set ns = namespace(s='x') %}{% for i in range(40) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}";
        let fault = script(&chats(greedy, Some(Limits::USUAL)), &conversation("Hi")).unwrap_err();
        let EncodeFault::Data(fault) = fault else { panic!("{mib} MiB: {fault}") };
        let text = fault.to_string();
        assert!(text.contains("(ulimit -v)"), "{mib} MiB: {text}");
        assert_eq!(fault.kind(), FailureKind::Temporary, "{mib} MiB: {text}");
        // What needs little is done.
        let modest = chats("{{ messages[0].content }}", Some(Limits::USUAL));
        assert!(matches!(script(&modest, &conversation("Hi")), Ok(_) | Err(EncodeFault::Record(_))));
        return;
    }
    let name = "chat::contained::tests::too_little_memory_is_not_the_fault_of_the_template";
    for mib in [512, 700, 1000] {
        let run = format!("ulimit -v {}; exec \"$0\" {name} --exact --skip {SHORT}{mib}", mib << 10);
        let mut shell = std::process::Command::new("sh");
        let done = shell.args(["-c", &run]).arg(std::env::current_exe().unwrap()).output().unwrap();
        let said = String::from_utf8_lossy(&done.stdout);
        assert!(done.status.success() && said.contains("1 passed"), "{mib} MiB: {said}");
    }
}

#[test]
fn process_that_is_never_ready_is_a_temporary_failure() {
    let chats = Chats { worker: Some(Vec::leak(vec!["--list".into()])), ..apart("{{ 1 }}") };
    let EncodeFault::Data(fault) = script(&chats, &conversation("Hi")).unwrap_err() else {
        panic!("not this")
    };
    assert!(fault.to_string().contains("before it was ready; is there enough memory"), "{fault}");
    assert_eq!(fault.kind(), FailureKind::Temporary);
}

#[test]
fn invalid_template_is_refused_with_its_place() {
    for template in ["{{ 1", "{% for %}", "{% generation %}"] {
        let [here, there] = [None, Some(QUICK)]
            .map(|limits| script(&chats(template, limits), &conversation("Hi")).unwrap_err().to_string());
        let [here, there] =
            [&here, &there].map(|fault| fault.split_once("/template.jinja: line 1, ").unwrap().1);
        assert_eq!(here, there);
        assert!(here.starts_with("column "), "{here}");
    }
}

#[test]
fn message_of_template_and_conversation_are_bounded() {
    for raised in ["{{ raise_exception('x' * 1000000) }}", "{{ messages[0][messages[0].content] }}{{ 1|x }}"]
    {
        let fault = script(&apart(raised), &conversation(&"x".repeat(1 << 20))).unwrap_err().to_string();
        assert!(fault.len() < 1000, "{fault:.1000}");
    }
    let long = json!([{"role": "user", "content": "x".repeat(16 << 20)}]);
    let Value::Array(long) = long else { panic!("a list") };
    let fault = Conversation::new(long, 0, serde_json::Map::new()).unwrap().to_json().unwrap_err();
    assert!(fault.contains("the maximum for a conversation is 16777216"), "{fault}");
}

#[test]
fn long_conversations_keep_to_the_limits() {
    let template =
        fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/chats/templates/turns.jinja"));
    let messages: Vec<Value> = (0..2000)
        .map(|index| json!({"role": (["user", "assistant"][index % 2]), "content": "x".repeat(index % 50)}))
        .collect();
    let context = json!({"tools": [{"deep": (0..200).fold(json!(1), |value, _| json!([value]))}]});
    let json = json_of(Value::from(messages[..200].to_vec()), context);
    let usual = |template: &str| chats(template, Some(Limits::USUAL));
    assert_eq!(script(&usual(&template.unwrap()), &json).unwrap().learned.len(), 100);
    let long = "x".repeat(12 << 20);
    let json =
        json_of(json!([{"role": "user", "content": long}, {"role": "assistant", "content": "a"}]), json!({}));
    let template =
        "{% for m in messages %}<{{ m.content }}>{% endfor %}{% if add_generation_prompt %}<{% endif %}";
    assert_eq!(script(&usual(template), &json).unwrap().text.len(), (12 << 20) + 5);
}

/// A number, text or structure of JSON.
fn any_json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        any::<f64>()
            .prop_filter_map("JSON has no NaN", |x| serde_json::Number::from_f64(x).map(Value::Number)),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        "\\PC{0,8}".prop_map(Value::from),
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
    ];
    leaf.prop_recursive(3, 16, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::vec(("\\PC{0,4}", inner), 0..4)
                .prop_map(|items| Value::Object(items.into_iter().collect())),
        ]
    })
}

/// Parts of templates, harmless and hostile, that can be joined in any order.
const PARTS: [&str; 24] = [
    "{{ ns.s }}",
    "{% for m in messages %}{{ m.content }}{% endfor %}",
    "{% generation %}{{ messages[-1].content }}{% endgeneration %}",
    "{% set ns.s = ns.s ~ ns.s %}",
    "{% for i in range(30) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "{% set ns.v = [ns.v, ns.v] %}",
    "{% set ns.v = {'a': ns.v, 'b': ns.s} %}",
    "{% for i in range(30) %}{% set ns.v = [ns.v, ns.v] %}{% endfor %}",
    "{% for i in range(50000) %}{% set ns.v = [ns.v] %}{% endfor %}",
    "{% set ns.v = ns %}",
    "{{ ns.v|tojson(indent=60) }}",
    "{{ ns }}",
    "{% if ns.v == ns %}{% endif %}",
    "{{ ns.s|indent(99999999999) }}",
    "{{ ns.s * 99999999 }}",
    "{{ ns.s|center(99999999999) }}",
    "{{ ns.v|pprint }}",
    "{{ (ns.s|list)[::-1]|join(ns.s) }}",
    "{{ ns.v|list|sort|unique|list }}",
    "{{ ns.s.split('t')|batch(99999999, ns.s)|list }}",
    "{% macro m() %}{{ ns.s }}{{ m() }}{% endmacro %}{{ m() }}",
    "{% if add_generation_prompt %}{% set ns.v = range(99999)|list|string %}{% endif %}",
    "{{ raise_exception(ns.s) }}",
    "{{ range(1000000000)|list }}",
];

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn process_scripts_what_this_one_would(
        extra in any_json(),
        texts in prop::collection::vec("\\PC{1,12}", 1..5),
        has_blocks in any::<bool>(),
    ) {
        let said = if has_blocks { "{% generation %}{{ m.content }}{% endgeneration %}" } else { "{{ m.content }}" };
        let template = format!(
            "{{% for m in messages %}}[{{{{ m.role }}}}]{said}|{{% endfor %}}{{% if extra is defined and false %}}\
             {{% endif %}}{{% if add_generation_prompt %}}[assistant]{{% else %}}{{{{ extra }}}}{{{{ extra|tojson }}}}{{% endif %}}"
        );
        let roles = ["user", "assistant"];
        let messages: Vec<Value> = texts.iter().enumerate()
            .map(|(index, text)| json!({"role": roles[index % 2], "content": text, "extra": extra}))
            .collect();
        let json = json_of(Value::from(messages), json!({"extra": extra}));
        let [here, there] = [None, Some(QUICK)].map(|limits| {
            script(&chats(&template, limits), &json).map_err(|fault| fault.to_string())
        });
        prop_assert_eq!(here, there);
    }

    #[test]
    fn random_hostile_templates_end_only_their_process(parts in prop::collection::vec(0..PARTS.len(), 1..8)) {
        let parts: String = parts.into_iter().map(|part| PARTS[part]).collect();
        let start = Instant::now();
        let template = format!("{{% set ns = namespace(s='text', v=[]) %}}{parts}");
        let json = conversation("Hi");
        match script(&apart(&template), &json) {
            Ok(script) => prop_assert!(script.text.len() <= limits::text_bytes(json.len())),
            Err(EncodeFault::Data(DataError::ChatProcess { source })) => panic!("{template}: {source}"),
            Err(fault) => prop_assert!(fault.to_string().len() < 1000, "{}", fault),
        }
        prop_assert!(start.elapsed() < 50 * QUICK.time, "{:?}", start.elapsed());
    }
}
