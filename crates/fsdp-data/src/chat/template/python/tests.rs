use serde_json::json;

use super::*;

#[test]
fn numbers_are_formatted_like_python() {
    // The expected values were printed by Python 3.11.
    for (number, expected) in [
        (0.1, "0.1"),
        (1.0, "1.0"),
        (-0.0, "-0.0"),
        (1e-4, "0.0001"),
        (1e-5, "1e-05"),
        (1.5e-7, "1.5e-07"),
        (1e15, "1000000000000000.0"),
        (1e16, "1e+16"),
        (1.7976931348623157e308, "1.7976931348623157e+308"),
        (f64::NAN, "nan"),
        (f64::INFINITY, "inf"),
        (f64::NEG_INFINITY, "-inf"),
    ] {
        assert_eq!(text(&Value::from(number)), expected);
    }
    assert_eq!(text(&Value::from(10_u64.pow(18))), "1000000000000000000");
}

#[test]
fn tojson_rejects_undefined_value_and_unknown_option() {
    let options = Kwargs::from_iter(std::iter::empty::<(&str, Value)>());
    assert!(tojson(&Value::UNDEFINED, None, options).is_err());
    let options = Kwargs::from_iter([("indents", Value::from(4))]);
    assert!(tojson(&Value::from_serialize(json!([])), None, options).is_err());
}
