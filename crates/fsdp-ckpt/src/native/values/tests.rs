//! Round trips of values of all kinds through JSON.

use proptest::prelude::*;

use super::*;

fn values() -> impl Strategy<Value = Value> {
    const KNOWN: [(&str, &str); 3] =
        [("torch", "Size"), ("torch", "float32"), ("collections", "OrderedDict")];
    let global = prop::sample::select(&KNOWN[..])
        .prop_map(|(module, name)| Global { module: module.into(), name: name.into() });
    let leaf = prop_oneof![
        Just(Value::None),
        any::<bool>().prop_map(Value::Bool),
        any::<i64>().prop_map(Value::Int),
        proptest::collection::vec(any::<u8>(), 0..12).prop_map(Value::Long),
        any::<f64>().prop_map(Value::Float),
        any::<String>().prop_map(Value::Str),
        proptest::collection::vec(any::<u8>(), 0..12).prop_map(Value::Bytes),
        global.clone().prop_map(Value::Global),
        ("[a-z.]{0,8}", "[A-Z]{1,8}").prop_map(|(module, name)| Value::Opaque(Global { module, name })),
    ];
    leaf.prop_recursive(4, 40, 5, move |inner| {
        let list = || proptest::collection::vec(inner.clone(), 0..5);
        let pairs = proptest::collection::vec((inner.clone(), inner.clone()), 0..4);
        prop_oneof![
            list().prop_map(Value::List),
            list().prop_map(Value::Tuple),
            list().prop_map(Value::Set),
            pairs.prop_map(Value::Dict),
            (global.clone(), list(), proptest::option::of(inner.clone().prop_map(Box::new)))
                .prop_map(|(class, args, state)| Value::Object { class, args, state }),
        ]
    })
}

proptest! {
    #[test]
    fn every_value_round_trips_through_json(value in values()) {
        let text = to_json(&value).unwrap().to_string();
        let back = from_json(serde_json::from_str(&text).unwrap()).unwrap();
        // Compare the text, which contains the bits of floats, because a NaN is not equal to itself.
        prop_assert_eq!(to_json(&back).unwrap().to_string(), text);
        prop_assert_eq!(std::mem::discriminant(&back), std::mem::discriminant(&value));
    }
}

#[test]
fn nan_keeps_its_bits() {
    let bits = 0x7ff8_0000_dead_beef;
    let back = from_json(to_json(&Value::Float(f64::from_bits(bits))).unwrap()).unwrap();
    assert!(matches!(back, Value::Float(value) if value.to_bits() == bits));
}

#[test]
fn rejects_values_nested_beyond_json_depth_limit() {
    let nested =
        |depth: usize| (0..depth).fold(Value::None, |value, _| Value::Dict(vec![(Value::None, value)]));
    let deepest = to_json(&nested(DEPTH_MAX - 1)).unwrap().to_string();
    assert!(
        serde_json::from_str::<Json>(&format!("{{\"values\":{{\"x\":{{\"value\":{deepest}}}}}}}")).is_ok()
    );
    assert_eq!(to_json(&nested(DEPTH_MAX)), None);
}

#[test]
fn rejects_json_of_invalid_values() {
    for text in [
        "1.5",
        "18446744073709551615",
        "{}",
        r#"{"int":1}"#,
        r#"{"long":"0"}"#,
        r#"{"bytes":"AB"}"#,
        r#"{"float":"00"}"#,
        r#"{"dict":[[1]]}"#,
        r#"{"tuple":[],"set":[]}"#,
        r#"{"global":["a"]}"#,
        r#"{"object":[["a","b"]]}"#,
        r#"{"object":[["a","b"],[],null,null]}"#,
    ] {
        assert_eq!(from_json(serde_json::from_str(text).unwrap()), None, "{text}");
    }
}

#[test]
fn run_state_round_trips_as_value() {
    let text = r#"{"step":50,"seed":18446744073709551615,"lr":0.30000000000000004,"a":[null,true,{"b":-1}]}"#;
    let Json::Object(state) = serde_json::from_str(text).unwrap() else { panic!("it is an object") };
    let value = run_state_to_value(&state);
    assert_eq!(value_to_run_state(&value).unwrap(), state);
    assert_eq!(Json::Object(value_to_run_state(&value).unwrap()).to_string(), text);
    for other in [Value::Int(1), Value::Dict(vec![(Value::Int(1), Value::None)]), Value::Float(f64::NAN)] {
        assert_eq!(value_to_run_state(&other), None);
    }
}

#[test]
fn unknown_globals_in_manifest_become_opaque() {
    let system = Global { module: "os".into(), name: "system".into() };
    for text in [r#"{"global":["os","system"]}"#, r#"{"object":[["os","system"],["true"]]}"#] {
        assert_eq!(from_json(serde_json::from_str(text).unwrap()), Some(Value::Opaque(system.clone())));
    }
}
