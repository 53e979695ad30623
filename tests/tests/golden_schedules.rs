//! Learning rates, compared with PyTorch's schedulers and transformers' `get_scheduler` (tests/golden).

use fsdp_config::{DecayCurve, LrScheduleConfig, LrShape, MinLr, Warmup};
use fsdp_train::lr::LrSchedule;
use serde_json::Value;

use crate::golden_training::golden;
use crate::support;

/// Compares the entries of a file and returns their number of learning rates.
fn compare(file: &str, config: impl Fn(&Value) -> LrScheduleConfig) -> usize {
    let entries: Vec<Value> = serde_json::from_str(&std::fs::read_to_string(golden(file)).unwrap()).unwrap();
    let compare = |entry: &Value| {
        let (lr, steps) = (number(entry, "lr"), count(entry, "steps"));
        let ours = LrSchedule::new(&config(entry), lr, steps);
        let theirs = entry["lr_per_step"].as_array().unwrap();
        for (step, expected) in theirs.iter().enumerate() {
            let difference = (ours.lr(step as u64) - expected.as_f64().unwrap()).abs();
            assert!(difference <= 1e-12 * lr, "{ours:?}, step {step} of {steps}: off by {difference:e}");
        }
        theirs.len()
    };
    entries.iter().map(compare).sum()
}

fn number(entry: &Value, key: &str) -> f64 {
    entry[key].as_f64().unwrap_or_else(|| panic!("{key} of {entry}"))
}

fn count(entry: &Value, key: &str) -> u64 {
    entry[key].as_u64().unwrap_or_else(|| panic!("{key} of {entry}"))
}

#[test]
fn learning_rates_match_pytorch() {
    let compared = compare("lr_schedules.json", |entry| {
        let min = || MinLr::Absolute(number(entry, "min_lr"));
        let (shape, start_factor) = match entry["name"].as_str().unwrap() {
            "constant" => (LrShape::Constant, number(entry, "start_factor")),
            "linear" => (LrShape::Linear { min: min() }, number(entry, "start_factor")),
            "warmup-cosine" => (LrShape::WarmupCosine { min: min() }, number(entry, "start_factor")),
            "transformers-linear" => (LrShape::Linear { min: MinLr::Absolute(0.0) }, 0.0),
            other => panic!("no schedule is called {other}"),
        };
        LrScheduleConfig { shape, warmup: Warmup { steps: count(entry, "warmup_steps"), start_factor } }
    });
    assert_eq!(compared, 1024);
}

#[test]
fn learning_rates_match_transformers() {
    let compared = compare("lr_schedules_transformers.json", |entry| {
        let schedule = &entry["schedule"];
        let ratio = schedule["min_lr_ratio"].as_f64().unwrap_or(0.0);
        let min = MinLr::Ratio(ratio);
        let shape = match schedule["name"].as_str().unwrap() {
            "constant" => LrShape::Constant,
            "linear" => LrShape::Linear { min },
            "warmup-cosine" => LrShape::WarmupCosine { min },
            "cosine-with-restarts" => LrShape::CosineWithRestarts { cycles: count(schedule, "cycles"), min },
            "inverse-sqrt" => LrShape::InverseSqrt { timescale: count(schedule, "timescale"), min },
            "warmup-stable-decay" => LrShape::WarmupStableDecay {
                decay_share: number(schedule, "decay_steps") / number(entry, "steps"),
                decay: match schedule["decay"].as_str().unwrap() {
                    "linear" => DecayCurve::Linear,
                    "cosine" => DecayCurve::Cosine,
                    "1-sqrt" => DecayCurve::OneMinusSqrt,
                    other => panic!("no curve is called {other}"),
                },
                min,
            },
            other => panic!("no schedule is called {other}"),
        };
        // transformers warms up from 0, or from the minimum if a stable phase follows.
        let start_factor = if matches!(shape, LrShape::WarmupStableDecay { .. }) { ratio } else { 0.0 };
        LrScheduleConfig { shape, warmup: Warmup { steps: count(entry, "warmup_steps"), start_factor } }
    });
    assert_eq!(compared, 4106);
}

/// The schedules of a run file that docs/training.md gives for those of transformers.
#[test]
fn run_file_with_zero_start_matches_transformers() {
    let text = std::fs::read_to_string(golden("lr_schedules_transformers.json")).unwrap();
    let entries: Vec<Value> = serde_json::from_str(&text).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let mut compared = 0;
    for entry in entries {
        let (schedule, steps) = (entry["schedule"].as_object().unwrap(), count(&entry, "steps"));
        let is_stable = schedule["name"] == "warmup-stable-decay";
        let start = if is_stable { schedule["min_lr_ratio"].clone() } else { Value::from(0) };
        let keys = schedule.iter().map(|(key, value)| match key.as_str() {
            "decay_steps" => format!("decay_share = {}", value.as_f64().unwrap() / steps as f64),
            _ => format!("{key} = {value}"),
        });
        if schedule.get("decay_steps") == Some(&Value::from(0)) {
            continue; // The run file has no decay of no steps.
        }
        let keys = keys.collect::<Vec<_>>().join(", ");
        let warmup = format!("warmup_steps = {}, start_factor = {start}", entry["warmup_steps"]);
        let overrides = [format!("train.lr_schedule={{ {keys}, {warmup} }}"), format!("train.steps={steps}")];
        let config = support::config(dir.path(), 61, &overrides.each_ref().map(String::as_str));
        let lr = number(&entry, "lr");
        let ours = LrSchedule::new(&config.train.lr_schedule, lr, steps);
        for (step, expected) in entry["lr_per_step"].as_array().unwrap().iter().enumerate() {
            let expected = expected.as_f64().unwrap();
            assert!((ours.lr(step as u64) - expected).abs() <= 1e-12 * lr, "{ours:?}, step {step}");
        }
        compared += 1;
    }
    assert!(compared > 70, "{compared}");
}
