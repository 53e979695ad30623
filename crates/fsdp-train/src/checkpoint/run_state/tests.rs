use super::*;

const CONFIG: &str = r#"
[model]
path = "a"
seed = 1
[train]
steps = 10
optimizer = { name = "adamw", lr = 0.1 }
[fsdp]
accumulation = "reduce"
accumulation_order = "tree"
[run]
ranks = 2
"#;

fn state(config: &str) -> RunState {
    RunState {
        step: 5,
        tokens: 500,
        lr: 0.1,
        data: DataPosition {
            epoch: 0,
            step_in_epoch: 5,
            seed: None,
            samples: 9,
            digest: "crc64:1".into(),
            sources: Vec::new(),
        },
        seed: 1,
        model: Some(r#"{"hidden_size": 8, "rope_theta": 1e4}"#.into()),
        config: config.into(),
        config_digest: String::new(),
        base: None,
        base_from: None,
        changes: Vec::new(),
        watched: Vec::new(),
        loss_scale: None,
        late: LateParams::new(),
        version: "0.0.1".into(),
        param_groups: serde_json::Value::Null,
    }
}

/// The changes from `CONFIG` to the same text with one replacement.
fn changes(from: &str, to: &str) -> Result<Vec<Change>, Vec<Difference>> {
    assert!(CONFIG.contains(from), "the test replaces something");
    state(CONFIG).changes_to(&state(&CONFIG.replace(from, to)))
}

fn refusal(result: Result<Vec<Change>, Vec<Difference>>) -> Vec<String> {
    result.unwrap_err().into_iter().map(|difference| difference.what).collect()
}

#[test]
fn changes_to_free_keys_are_not_recorded() {
    for (from, to) in [
        ("ranks = 2", "ranks = 4\nthreads = 1"),
        (r#"path = "a""#, r#"path = "b""#),
        (r#"accumulation = "reduce""#, r#"accumulation = "unsharded""#),
    ] {
        assert_eq!(changes(from, to).unwrap(), [], "{to}");
    }
}

#[test]
fn changes_to_recorded_keys_keep_both_values() {
    let change = |key: &str, from: &str, to: &str| Change {
        step: 5,
        key: key.into(),
        from: from.into(),
        to: to.into(),
    };
    assert_eq!(changes("steps = 10", "steps = 20").unwrap(), [change("train.steps", "10", "20")]);
    assert_eq!(changes("lr = 0.1", "lr = 0.25").unwrap(), [change("train.optimizer.lr", "0.1", "0.25")]);
    let clipped = changes("steps = 10", "steps = 10\ngrad_clip = 1.0").unwrap();
    assert_eq!(clipped, [change("train.grad_clip", "", "1.0")]);
}

#[test]
fn all_other_differences_are_rejected_and_named() {
    assert_eq!(refusal(changes("seed = 1", "seed = 2")), ["model.seed"]);
    assert_eq!(refusal(changes("adamw", "sgd")), ["train.optimizer.name"]);
    // A key that merely starts with the name of a free key is not free.
    assert_eq!(refusal(changes(r#""tree""#, r#""running""#)), ["fsdp.accumulation_order"]);
    let mut other = state(&CONFIG.replace("seed = 1", "seed = 2"));
    other.data.digest = "crc64:2".into();
    other.model = Some(r#"{"hidden_size": 16, "rope_theta": 1e4}"#.into());
    let refused = refusal(state(CONFIG).changes_to(&other));
    assert_eq!(refused, ["model.seed", "content of data.train", "config.json hidden_size"]);
}

#[test]
fn rejected_resume_error_shows_both_values_and_remedy() {
    let mut other = state(CONFIG);
    other.model = Some(r#"{"hidden_size": 16}"#.into());
    let differences = state(CONFIG).changes_to(&other).unwrap_err();
    let error = other_run(Path::new("runs/step-00000005"), &differences);
    assert_eq!(
        error.to_string(),
        "the run cannot resume from runs/step-00000005: config.json hidden_size was 8, now 16; config.json \
         rope_theta was 10000.0, now nothing. Undo these changes, or start a new run (model.init = \
         \"pretrained\" starts from exported weights)"
    );
}

#[test]
fn schedule_free_keeps_its_options() {
    let text = "model = { path = 'm' }
data = { train = ['a'], seq_len = 8 }
run = { out_dir = 'out' }
\
                train = { steps = 10, micro_batch_size = 1, global_batch_size = 4, \
                optimizer = { name = 'schedule_free_adamw', lr = 0.5, warmup_steps = 3 } }";
    let now = Resolved::parse(text, "run.toml", &[]).unwrap().config.to_toml();
    for (key, from, to) in [("lr", "0.5", "0.25"), ("warmup_steps", "3", "4")] {
        let other = now.replace(&format!("{key} = {from}"), &format!("{key} = {to}"));
        assert_eq!(refusal(state(&now).changes_to(&state(&other))), [format!("train.optimizer.{key}")]);
    }
    let longer = now.replace("steps = 10", "steps = 20");
    assert_eq!(state(&now).changes_to(&state(&longer)).unwrap().len(), 1);
}

#[test]
fn key_missing_from_saved_run_takes_default() {
    let text = "model = { path = 'm' }\ndata = { train = ['a'], seq_len = 8 }\nrun = { out_dir = 'out' }\n\
                train = { steps = 10, micro_batch_size = 1, global_batch_size = 4 }";
    let now = Resolved::parse(text, "run.toml", &[]).unwrap().config.to_toml();
    let before = now.replace("ema_decay = \"none\"\n", "");
    assert_ne!(before, now);
    assert_eq!(state(&before).changes_to(&state(&now)).unwrap(), []);
    let averaged = now.replace("ema_decay = \"none\"", "ema_decay = 0.9");
    assert_eq!(refusal(state(&before).changes_to(&state(&averaged))), ["train.ema_decay"]);
}
