//! `scripts/compare_with_trainer.py`, with logs that transformers' Trainer wrote, and with logs made here.

use std::process::Command;

use serde_json::{Value, json};

use crate::support::{Ran, Sandbox};

const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../scripts/compare_with_trainer.py");

/// The run of the fixtures of the Trainer, in the folder of a sandbox.
const RUN: &str = r#"train fsdp2/run.toml --set model.path=fsdp2 --set data.train=["fsdp2/tokens.bin"] --set train.steps=10"#;

/// Whether this machine has Python.
fn has_python() -> bool {
    let found = Command::new("python3").arg("--version").output().is_ok_and(|ran| ran.status.success());
    if !found {
        println!("skipped: there is no python3 on PATH");
    }
    found
}

fn compare(sandbox: &Sandbox, args: &str) -> Ran {
    let args = args.split_whitespace();
    Ran::of(Command::new("python3").arg(SCRIPT).args(args).current_dir(sandbox.path("")).output().unwrap())
}

#[test]
fn runs_match_logs_of_the_trainer() {
    if !has_python() {
        return;
    }
    let sandbox = Sandbox::with_fixtures(&["fsdp2", "trainer"]);
    sandbox.succeed(&format!("{RUN} --set run.out_dir=constant"));
    let warm_up = r#"--set train.lr_schedule={name="warmup-cosine",warmup_steps=4,start_factor=0}"#;
    sandbox.succeed(&format!("{RUN} --set run.out_dir=warm {warm_up}"));
    for (run, trainer) in [
        ("constant", "trainer/single/checkpoint-10"),
        ("constant", "trainer/single"),
        ("constant", "trainer/fsdp2/checkpoint-10/trainer_state.json"),
        ("warm", "trainer/warm_up"),
        ("warm/metrics.jsonl", "trainer/resumed --resumed-after 5 --loss 1e-6 --norm 1e-6"),
    ] {
        let ran = compare(&sandbox, &format!("{run} {trainer}"));
        // The number of samples of a step stands in the resolved run file.
        assert_eq!(ran.code, Some(0), "{run} {trainer}: {}{}", ran.stdout, ran.stderr);
    }
    let ran = compare(&sandbox, "warm trainer/warm_up");
    assert!(ran.stdout.contains("tokens         same, 3 values"), "{}", ran.stdout);
    // Without --resumed-after, the losses before the resumption seem to be missing.
    let ran = compare(&sandbox, "warm trainer/resumed");
    assert_eq!(ran.code, Some(1), "{}", ran.stdout);
    assert!(ran.stdout.contains("first difference: loss of step 6"), "{}", ran.stdout);
    assert!(ran.stdout.contains("--resumed-after 5"), "{}", ran.stdout);
    let ran = compare(&sandbox, "constant trainer/warm_up");
    assert!(
        ran.stdout.contains("first difference: learning rate of step 3, 0.01 here and 0.005"),
        "{}",
        ran.stdout
    );
}

/// What a Trainer would log of a run.
#[derive(Clone, Copy, Debug)]
struct Log {
    every: usize,
    /// Steps by which the logged rates are ahead.
    ahead: usize,
    is_rounded: bool,
    /// The name of the count of tokens, and how many more than `targets` it has in each step.
    tokens: (&'static str, u64),
}

const LOGS: [Log; 4] = [
    Log { every: 1, ahead: 0, is_rounded: false, tokens: ("num_input_tokens_seen", 0) },
    Log { every: 1, ahead: 1, is_rounded: true, tokens: ("num_input_tokens_seen", 4) },
    Log { every: 3, ahead: 0, is_rounded: true, tokens: ("num_tokens", 4) },
    Log { every: 4, ahead: 1, is_rounded: false, tokens: ("num_tokens", 0) },
];

const STEPS: usize = 13;

/// The steps of a run, with values that do not repeat.
fn steps() -> Vec<Value> {
    let step = |step: usize| {
        let x = step as f64;
        json!({
            "step": step, "loss": 4.0 - 0.17 * x + 0.05 * (x * x).sin(), "grad_norm": 1.0 + 0.3 * x.cos(),
            "lr": 1e-3 * (1.0 + (x / 4.0).cos()), "tokens": 64, "targets": 40 + step * step % 7,
        })
    };
    (1..=STEPS).map(step).collect()
}

fn log_of(steps: &[Value], log: Log) -> Value {
    let (mut history, mut seen) = (Vec::new(), 0);
    for (index, step) in steps.iter().enumerate() {
        let number = index + 1;
        seen += step["targets"].as_u64().unwrap() + log.tokens.1;
        let Some(rate) = steps.get(index + log.ahead).filter(|_| number % log.every == 0) else { continue };
        let window = &steps[number - log.every..number];
        let mean = window.iter().map(|one| one["loss"].as_f64().unwrap()).sum::<f64>() / log.every as f64;
        let mean = if log.is_rounded { (mean * 1e4).round() / 1e4 } else { mean };
        history.push(json!({
            "step": number, "loss": mean, "grad_norm": step["grad_norm"], "learning_rate": rate["lr"],
            log.tokens.0: seen, "epoch": 0.1,
        }));
    }
    history.push(json!({"step": STEPS, "train_loss": 3.0, "train_runtime": 1.0}));
    json!({ "log_history": history })
}

/// Writes both files and compares them.
fn compared(sandbox: &Sandbox, steps: &[Value], state: &Value) -> Ran {
    std::fs::create_dir_all(sandbox.path("out")).unwrap();
    let lines: String = steps.iter().map(|step| format!("{step}\n")).collect();
    sandbox.write("out/metrics.jsonl", format!("{}\n{lines}", json!({"start": {"ranks": 1}})));
    sandbox.write("out/resolved.toml", "[train]\nglobal_batch_size = 4\n");
    sandbox.write("state.json", state.to_string());
    compare(sandbox, "out state.json")
}

#[test]
fn first_difference_from_a_log_is_named() {
    if !has_python() {
        return;
    }
    let sandbox = Sandbox::new();
    for log in LOGS {
        let state = log_of(&steps(), log);
        let same = compared(&sandbox, &steps(), &state);
        assert_eq!(same.code, Some(0), "{log:?}: {}{}", same.stdout, same.stderr);
        for (key, name, factor) in [
            ("targets", "tokens", None),
            ("lr", "learning rate", Some(1.001)),
            ("loss", "loss", Some(1.01)),
            ("grad_norm", "gradient norm", Some(1.001)),
        ] {
            let at = 6;
            let mut changed = steps();
            changed[at - 1][key] = match factor {
                Some(factor) => json!(changed[at - 1][key].as_f64().unwrap() * factor),
                None => json!(changed[at - 1][key].as_u64().unwrap() + 1),
            };
            let window_end = at.div_ceil(log.every) * log.every;
            let seen_at = match key {
                // Of rates and norms, only those of logged steps can be seen.
                "lr" if !(at - log.ahead).is_multiple_of(log.every) => None,
                "lr" => Some(at - log.ahead),
                "grad_norm" if !at.is_multiple_of(log.every) => None,
                "grad_norm" => Some(at),
                _ => Some(window_end),
            };
            let ran = compared(&sandbox, &changed, &state);
            assert_eq!(ran.code, Some(i32::from(seen_at.is_some())), "{log:?} {key}: {}", ran.stdout);
            let first = seen_at.map(|step| format!("first difference: {name} of step {step},"));
            assert!(first.is_none_or(|first| ran.stdout.contains(&first)), "{log:?} {key}: {}", ran.stdout);
        }
    }
}

#[test]
fn logs_with_gaps_are_compared_where_both_have_steps() {
    if !has_python() {
        return;
    }
    let sandbox = Sandbox::new();
    let mut state = log_of(&steps(), LOGS[2]);
    // A run that continued a checkpoint has only later steps; a Trainer may log neither rates, norms nor tokens.
    for entry in state["log_history"].as_array_mut().unwrap() {
        let entry = entry.as_object_mut().unwrap();
        entry.retain(|key, _| key == "loss" || key == "step");
    }
    let later = &steps()[4..];
    let ran = compared(&sandbox, later, &state);
    assert_eq!(ran.code, Some(0), "{}{}", ran.stdout, ran.stderr);
    for line in [
        "tokens         not compared",
        "learning rate  not compared",
        // The windows that end with steps 9 and 12; that of step 6 begins before the run.
        "loss           same, 2 values",
        "gradient norm  not compared",
    ] {
        assert!(ran.stdout.contains(line), "{line}: {}", ran.stdout);
    }
    // A loss that is not finite is `null` here and NaN there.
    let mut steps = steps();
    steps[2]["loss"] = Value::Null;
    let text = log_of(&self::steps(), LOGS[0]).to_string();
    let third = self::steps()[2]["loss"].to_string();
    let both = compared(&sandbox, &steps, &Value::Null);
    assert_eq!(both.code, Some(2), "{}", both.stderr);
    sandbox.write("state.json", text.replace(&third, "NaN"));
    assert_eq!(compare(&sandbox, "out state.json").code, Some(0));
    sandbox.write("state.json", text);
    let one = compare(&sandbox, "out state.json");
    assert!(one.stdout.contains("first difference: loss of step 3, nan here"), "{}", one.stdout);
}

/// Where samples are padded, the Trainer may count other tokens than a run in every step, and yet train the same.
#[test]
fn counts_of_other_tokens_are_no_difference() {
    if !has_python() {
        return;
    }
    let sandbox = Sandbox::new();
    let recounted = |every: u64| {
        let mut state = log_of(&steps(), LOGS[0]);
        let mut more = 0;
        for (index, entry) in state["log_history"].as_array_mut().unwrap().iter_mut().enumerate() {
            more += if (index as u64).is_multiple_of(every) { 1000 + index as u64 } else { 0 };
            if let Some(seen) = entry.get_mut("num_input_tokens_seen") {
                *seen = json!(seen.as_u64().unwrap() + more);
            }
        }
        state
    };
    let all = compared(&sandbox, &steps(), &recounted(1));
    assert_eq!(all.code, Some(0), "{}", all.stdout);
    assert!(
        all.stdout.contains("tokens         not compared: the Trainer counts other tokens"),
        "{}",
        all.stdout
    );
    // Some counts agree, so the others are of other data, or of padding.
    let some = compared(&sandbox, &steps(), &recounted(5));
    assert_eq!(some.code, Some(1), "{}", some.stdout);
    assert!(some.stdout.contains("first difference: tokens of step 1"), "{}", some.stdout);
    assert!(some.stdout.contains("--no-tokens"), "{}", some.stdout);
    assert_eq!(compare(&sandbox, "out state.json --no-tokens").code, Some(0));
    // With other losses, the counts are the first to differ.
    let mut state = recounted(1);
    state["log_history"][0]["loss"] = json!(9.0);
    let other = compared(&sandbox, &steps(), &state);
    assert!(other.stdout.contains("first difference: tokens of step 1"), "{}", other.stdout);
}

#[test]
fn files_that_cannot_be_compared_are_named() {
    if !has_python() {
        return;
    }
    let sandbox = Sandbox::new();
    let state = log_of(&steps(), LOGS[0]);
    assert_eq!(compared(&sandbox, &steps(), &state).code, Some(0));
    sandbox.write("empty.json", "{}");
    sandbox.write("twice.jsonl", "{\"step\": 1, \"loss\": 2.0}\n".repeat(2));
    sandbox.write("later.jsonl", "{\"step\": 100, \"loss\": 2.0}\n");
    for (args, why) in [
        ("out empty.json", "empty.json: has no `log_history`"),
        ("out out", "out: has no trainer_state.json"),
        ("out nowhere.json", "nowhere.json: "),
        ("nowhere state.json", "nowhere: "),
        ("run.toml state.json", "run.toml: "),
        ("state.json state.json", "state.json: has no steps"),
        ("twice.jsonl state.json", "twice.jsonl: step 1 is there twice"),
        ("later.jsonl state.json", "the run has steps 100 to 100, the Trainer logged 1 to 13"),
    ] {
        let ran = compare(&sandbox, args);
        assert_eq!(ran.code, Some(2), "{args}: {}{}", ran.stdout, ran.stderr);
        assert!(ran.stderr.starts_with("error: ") && ran.stderr.contains(why), "{args}: {}", ran.stderr);
    }
}
