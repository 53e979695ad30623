use std::path::Path;

use super::*;
use crate::tests::FULL;

mod page;

/// Returns where and why a value does not fit a schema; panics on a keyword that this function does not know.
fn fault(schema: &Value, value: &Value, place: &str) -> Option<String> {
    let keywords = schema.as_object().unwrap().iter();
    let mut faults = keywords.filter_map(|(keyword, expected)| {
        let wrong = |holds: bool| (!holds).then(|| format!("{place}: {value} is not {keyword} {expected}"));
        let fitting = || expected.as_array().unwrap().iter().filter(|one| fault(one, value, place).is_none());
        match keyword.as_str() {
            "$schema" | "title" | "description" | "default" => None,
            "type" => match expected {
                Value::Array(types) => wrong(types.iter().any(|one| is_of(one, value))),
                one => wrong(is_of(one, value)),
            },
            "enum" => wrong(expected.as_array().unwrap().contains(value)),
            "const" => wrong(expected == value),
            "minimum" => wrong(value.as_i64() >= expected.as_i64()),
            "anyOf" => wrong(fitting().count() > 0),
            "oneOf" => wrong(fitting().count() == 1),
            "required" => wrong(
                expected.as_array().unwrap().iter().all(|key| value.get(key.as_str().unwrap()).is_some()),
            ),
            "items" => value.as_array()?.iter().find_map(|item| fault(expected, item, place)),
            "minItems" => wrong(value.as_array()?.len() as u64 >= expected.as_u64().unwrap()),
            "maxItems" => wrong(value.as_array()?.len() as u64 <= expected.as_u64().unwrap()),
            "uniqueItems" => None,
            "properties" => value.as_object()?.iter().find_map(|(key, value)| {
                expected.get(key).and_then(|schema| fault(schema, value, &format!("{place}.{key}")))
            }),
            "additionalProperties" => {
                wrong(value.as_object()?.keys().all(|key| schema["properties"].get(key).is_some()))
            }
            other => panic!("{other} is not a keyword that this test knows"),
        }
    });
    faults.next()
}

fn is_of(name: &Value, value: &Value) -> bool {
    match name.as_str().unwrap() {
        "object" => value.is_object(),
        "array" => value.is_array(),
        "string" => value.is_string(),
        "boolean" => value.is_boolean(),
        "integer" => value.is_i64(),
        "number" => value.is_number(),
        other => panic!("{other} is not a type that this test knows"),
    }
}

fn of_text(text: &str) -> Option<String> {
    let table: toml::Table = toml::from_str(text).unwrap();
    fault(&schema(), &serde_json::to_value(table).unwrap(), "file")
}

#[test]
fn schema_accepts_every_key_and_example() {
    assert_eq!(of_text(FULL), None);
    let examples = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples");
    let files = std::fs::read_dir(examples).unwrap().map(|entry| entry.unwrap().path());
    let files: Vec<_> = files.filter(|path| path.extension().is_some_and(|end| end == "toml")).collect();
    assert!(files.len() > 5);
    for file in files {
        assert_eq!(of_text(&std::fs::read_to_string(&file).unwrap()), None, "{}", file.display());
    }
    assert_eq!(of_text("extends = \"base.toml\"\n[run]\nranks = 2"), None, "a base says the rest");
}

#[test]
fn schema_accepts_alternative_key_forms() {
    for text in [
        "[fsdp]\nmin_num_params = 1000\nconfig = \"fsdp_config.json\"\nreshard_after_forward = 2",
        "[fsdp]\nreshard_after_forward = false",
        "[data]\nbos = 1\neos = \"none\"\npad = \"<pad>\"\nprompt = \"question\"",
        "[[data.eval]]\nname = \"a\"\npaths = [\"b\"]\nmax_samples = 3",
        "[[data.source]]\npath = \"a\"\nweight = 2\n[[data.source]]\npath = [\"a\", \"b\"]",
        "[train.optimizer]\nlr = 1",
        "[train.optimizer]\nname = \"sgd\"\nmomentum = 0.9\n[[train.optimizer.group]]\npatterns = [\"a\"]\nlr = 1",
        "[train.optimizer]\nname = \"adafactor\"\nlr = \"none\"",
        "[train]\nlr_schedule = { name = \"warmup-stable-decay\", decay = \"linear\", min_lr_ratio = 0.1 }",
        "[adapter]\ntarget_modules = [\"q_proj\"]\npath = \"none\"",
    ] {
        assert_eq!(of_text(text), None, "{text}");
    }
}

#[test]
fn schema_rejects_unknown_keys_and_invalid_values() {
    for text in [
        "[modle]\npath = \"a\"",
        "steps = 3",
        "[train]\nstep = 3",
        "[train]\nsteps = \"3\"",
        "[train]\nsteps = 0",
        "[train]\ngrad_clip = \"off\"",
        "[train]\noptimizer = { name = \"adam\" }",
        "[train]\noptimizer = { name = \"adamw\", momentum = 0.9 }",
        "[train]\noptimizer = { momentum = 0.9 }",
        "[train]\noptimizer = { betas = [0.9] }",
        "[train]\nlr_schedule = { name = \"linear\", cycles = 2 }",
        "[data]\ntrain = \"a\"",
        "[data]\neval = [{ name = \"a\", path = [\"b\"] }]",
        "[fsdp]\nparam_dtype = \"f8\"",
        "[fsdp]\nreshard_after_forward = \"yes\"",
        "[fsdp]\nmesh = { replicas = 2 }",
        "[adapter]\ntarget_modules = \"all\"",
        "[run]\nmetrics = \"csv\"",
    ] {
        assert!(of_text(text).is_some(), "{text}");
    }
}

#[test]
fn every_key_has_description() {
    fn each(schema: &Value, place: &str) {
        for (key, schema) in schema["properties"].as_object().unwrap() {
            let place = format!("{place}.{key}");
            let is_read_beside = ["file.fsdp.config", "file.fsdp.min_num_params"].contains(&place.as_str());
            let description = schema["description"].as_str().unwrap_or_default();
            assert!(
                is_read_beside || description.len() > 5 && !description.contains("]("),
                "{place}: {description}"
            );
            if schema.get("properties").is_some() {
                each(schema, &place);
            }
        }
    }
    each(&schema(), "file");
}
