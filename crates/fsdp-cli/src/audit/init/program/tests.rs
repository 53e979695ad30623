use fsdp_config::Resolved;
use fsdp_train::lr::LrSchedule;
use serde_json::{Value as Json, json};

use super::*;

/// Rates of all schedules as transformers has them (`schedules.py` beside the file).
const GOLDEN: &str = include_str!("../../../../../../tests/golden/audit/schedules.json");

/// The rates of a run file with this schedule.
fn rates(schedule: &Schedule) -> Vec<f64> {
    let Schedule::Shape { text, steps, .. } = schedule else { panic!("{schedule:?}") };
    let file = format!(
        "[model]\npath = \"m\"\n[train]\nsteps = {steps}\nlr_schedule = {text}\noptimizer = {{ name = \"adamw\", lr = 0.01 }}\n"
    );
    let train = Resolved::parse_for_audit(&file, "test").unwrap().config.train;
    let schedule = LrSchedule::new(&train.lr_schedule, 0.01, train.steps);
    (0..*steps).map(|step| schedule.lr(step)).collect()
}

#[test]
fn schedules_of_the_trainer_have_its_rates() {
    let cases: Vec<Json> = serde_json::from_str(GOLDEN).unwrap();
    assert!(cases.len() > 40, "{}", cases.len());
    for case in cases {
        let said = json!({
            "lr_scheduler_type": case["kind"], "warmup_steps": case["warmup_steps"], "lr_scheduler_kwargs": case["kwargs"]
        });
        let state = Settings::of_json("trainer_state.json", &json!({ "max_steps": 20 }));
        let found = trainer_schedule(&Settings::of_json("training_args.bin", &said), Some(&state));
        if case["has_form"] == false {
            assert_eq!(found, None, "{said}");
            continue;
        }
        let expected: Vec<f64> = serde_json::from_value(case["rates"].clone()).unwrap();
        for (step, (ours, theirs)) in rates(&found.unwrap()).into_iter().zip(expected).enumerate() {
            assert!((ours - theirs).abs() <= 1e-15, "{said}, step {step}: {ours} instead of {theirs}");
        }
    }
}

#[test]
fn older_arguments_have_a_ratio_of_warm_up() {
    let state = Settings::of_json("trainer_state.json", &json!({ "max_steps": 20 }));
    let of =
        |said: Json| trainer_schedule(&Settings::of_json("training_args.bin", &said), Some(&state)).unwrap();
    let ratio = of(json!({ "lr_scheduler_type": "linear", "warmup_steps": 0, "warmup_ratio": 0.12 }));
    assert_eq!(ratio, of(json!({ "lr_scheduler_type": "linear", "warmup_steps": 3 })));
    let both = of(json!({ "lr_scheduler_type": "linear", "warmup_steps": 5, "warmup_ratio": 0.12 }));
    assert_eq!(both, of(json!({ "lr_scheduler_type": "linear", "warmup_steps": 5 })));
}

#[test]
fn scheduler_that_has_not_moved_on_leaves_the_rate_open() {
    let program = |moved| Program {
        name: "",
        schedule: Schedule::Moved { moved, from: "the scheduler".to_owned() },
        train: Vec::new(),
        dtype: Line::note(String::new()),
    };
    let is_open = |moved, steps| matches!(program(moved).schedule_lines(steps)[1], Line::Key { is_open, .. } if is_open);
    assert!(!is_open(Some(6.0), Some(6)) && !is_open(Some(12.0), Some(6)) && !is_open(None, Some(6)));
    assert!(is_open(Some(5.0), Some(6)) && is_open(Some(1.0), Some(600)));
}
