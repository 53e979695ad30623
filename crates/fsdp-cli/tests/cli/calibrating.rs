//! `fsdp calibrate`: measuring this machine, and plans based on the measurements.

use std::fs;
use std::sync::OnceLock;

use crate::support::Sandbox;

/// The smallest calibration: one model, at most two ranks.
const SMALL: &str = "calibrate --out mine.toml --models 1 --steps 1 --ranks 2";

/// Calibrates in the sandbox, or gives it what another test has measured, and returns what was printed.
fn calibrate(sandbox: &Sandbox) -> &'static str {
    static MEASURED: OnceLock<[String; 2]> = OnceLock::new();
    let [stdout, file] = MEASURED.get_or_init(|| {
        let stdout = sandbox.succeed(SMALL).stdout;
        [stdout, sandbox.read("mine.toml")]
    });
    sandbox.write("mine.toml", file);
    stdout
}

/// Plans the run file of the sandbox on the calibrated cluster.
fn planned(sandbox: &Sandbox, args: &str) -> serde_json::Value {
    let plan = format!("plan run.toml --cluster mine.toml --json {args}");
    serde_json::from_str(&sandbox.succeed(&plan).stdout).unwrap()
}

fn input_error(sandbox: &Sandbox, args: &str) -> String {
    let ran = sandbox.fsdp(args);
    assert_eq!(ran.code, Some(2), "{}", ran.stderr);
    ran.stderr
}

fn points(sandbox: &Sandbox) -> toml::Table {
    let text = fs::read_to_string(sandbox.path("mine.toml")).unwrap();
    text.parse::<toml::Table>().unwrap()["measured"].as_table().unwrap().clone()
}

fn ranks(points: &toml::Table, table: &str, what: &str) -> Vec<i64> {
    let points = points[table][what].as_array().unwrap();
    let mut ranks: Vec<i64> = points.iter().map(|point| point["ranks"].as_integer().unwrap()).collect();
    ranks.dedup();
    ranks
}

#[test]
fn calibrate_measures_machine_and_plan_uses_it() {
    let sandbox = Sandbox::new();
    let stdout = calibrate(&sandbox);
    assert!(stdout.contains("points of") && stdout.contains("in mine.toml"), "{stdout}");
    let measured = points(&sandbox);
    for (table, what) in [
        ("calls", "linear f32"),
        ("calls", "rms_norm_backward bf16"),
        ("calls", "attention f32"),
        ("operations", "update"),
        ("collectives", "all-gather threads"),
        ("steps", "threads"),
    ] {
        assert_eq!(ranks(&measured, table, what)[0], 1, "{table} {what}");
    }
    for (table, what) in [("collectives", "reduce-scatter tcp"), ("steps", "tcp")] {
        assert_eq!(ranks(&measured, table, what), [2], "{table} {what}");
    }
    let plan = planned(&sandbox, "");
    let seconds = plan["step"]["seconds"].as_f64().unwrap();
    assert!(seconds > 0.0 && seconds < 100.0, "{seconds}");
    let assumed = plan["assumed"].to_string();
    assert!(
        assumed.contains("that were measured on") && !assumed.contains("has not been timed"),
        "{assumed}"
    );
    // The plan prices collectives for the transport of the run file.
    let over_tcp = planned(&sandbox, "--set run.transport=tcp")["step"]["queue_seconds"].clone();
    assert_ne!(over_tcp, plan["step"]["queue_seconds"]);

    // A second calibration replaces the points of the first.
    sandbox.succeed(SMALL);
    assert_eq!(ranks(&points(&sandbox), "collectives", "reduce-scatter tcp"), [2]);

    // Points of another machine are not mixed in.
    let file = sandbox.path("mine.toml");
    let text = fs::read_to_string(&file).unwrap();
    let machine = measured["machine"].as_str().unwrap();
    fs::write(&file, text.replacen(&format!("machine = \"{machine}\""), "machine = \"an abacus\"", 1))
        .unwrap();
    let error = input_error(&sandbox, "launch --nproc 2 -- calibrate --out mine.toml");
    assert!(error.contains("mine.toml is from another machine: \"an abacus\""), "{error}");
}

#[test]
fn calibrate_rejects_bad_output_and_keeps_existing_file() {
    let sandbox = Sandbox::new();
    fs::write(sandbox.path("mine.toml"), "important").unwrap();
    let error = input_error(&sandbox, SMALL);
    assert!(error.contains("mine.toml exists already and is not a calibration"), "{error}");
    assert_eq!(fs::read_to_string(sandbox.path("mine.toml")).unwrap(), "important");
    let error = input_error(&sandbox, "launch --nproc 2 -- calibrate --out none.toml");
    assert!(error.contains("cannot read none.toml"), "{error}");
    let error = input_error(&sandbox, "calibrate --out new.toml --like h100-sxm");
    assert!(error.contains("h100-sxm has other devices than \"cpu\""), "{error}");
    assert!(!sandbox.path("new.toml").exists());
    // Refused before anything is measured: all models would take minutes of CPU time, and the limit is 20 seconds.
    let ran = sandbox.shell("ulimit -t 20; exec \"$FSDP\" calibrate --out none/new.toml");
    assert_eq!(ran.code, Some(2), "{}", ran.stderr);
    assert!(ran.stderr.contains("cannot write none"), "{}", ran.stderr);
}

#[test]
fn invalid_measured_points_are_rejected() {
    let sandbox = Sandbox::new();
    let cluster = sandbox.succeed("plan run.toml --on cpu-2core --print-cluster").stdout;
    let measured = |seconds: &str| {
        format!(
            "{cluster}\n[measured]\nmachine = \"m\"\ndevice = \"cpu\"\nversion = \"1\"\ndate = \"d\"\nthreads = 2\nissue = 0.0\n\
             between_calls = 0.0\n[measured.calls]\n\"linear f32\" = [{{ ranks = 1, size = [1.0, 1.0, 1.0], work = 2.0, \
             seconds = {seconds} }}]\n[measured.operations]\n[measured.collectives]\n[measured.steps]\n"
        )
    };
    fs::write(sandbox.path("mine.toml"), measured("1e-6")).unwrap();
    let plan = planned(&sandbox, "");
    // Operations that were not measured are priced by size, and the plan says so.
    let assumed = plan["assumed"].to_string();
    assert!(assumed.contains("computing by size: not measured: by its size"), "{assumed}");
    assert!(assumed.contains("linear, ") && assumed.contains("measured at other sizes only"), "{assumed}");
    fs::write(sandbox.path("mine.toml"), measured("-1e-6")).unwrap();
    let error = input_error(&sandbox, "plan run.toml --cluster mine.toml");
    assert!(error.contains("`measured.calls.\"linear f32\"[0].seconds` is -0.000001"), "{error}");
}

/// Writes the smallest model that is calibrated, and a run that trains it.
fn calibrated_model(sandbox: &Sandbox) {
    sandbox.write(
        "model/config.json",
        r#"{
          "model_type": "llama", "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2,
          "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 96, "rms_norm_eps": 1e-5,
          "tie_word_embeddings": false
        }"#,
    );
    sandbox.edit("run.toml", "seq_len = 8", "seq_len = 96");
}

/// Returns how far the band of the step time reaches below and above it, as fractions of the step time.
fn band(plan: &serde_json::Value) -> [f64; 2] {
    let step = &plan["step"];
    [0, 1].map(|end| {
        (step["band_seconds"][end].as_f64().unwrap() / step["seconds"].as_f64().unwrap() - 1.0).abs()
    })
}

#[test]
fn fewer_measurements_never_narrow_step_time_band() {
    let sandbox = Sandbox::new();
    calibrated_model(&sandbox);
    calibrate(&sandbox);
    let is = |[less, more]: [f64; 2], expected: [f64; 2]| {
        (less - expected[0]).abs() < 1e-6 && (more - expected[1]).abs() < 1e-6
    };
    assert!(is(band(&planned(&sandbox, "")), [0.12, 0.12]), "{:?}", band(&planned(&sandbox, "")));
    let whole: toml::Table = sandbox.read("mine.toml").parse().unwrap();
    let without = |change: &dyn Fn(&mut toml::Table)| {
        let mut less = whole.clone();
        change(less["measured"].as_table_mut().unwrap());
        sandbox.write("mine.toml", toml::to_string(&less).unwrap());
        band(&planned(&sandbox, ""))
    };
    // Points measured with another number of ranks replace missing ones.
    let of_one = |measured: &mut toml::Table| {
        let steps = measured["steps"].as_table_mut().unwrap()["threads"].as_array_mut().unwrap();
        steps.retain(|point| point["ranks"].as_integer() == Some(1));
    };
    assert!(is(without(&of_one), [0.25, 0.25]));
    // Without points, prices are those of a machine that was not measured.
    for table in ["steps", "operations", "collectives"] {
        let found = without(&|measured| measured[table].as_table_mut().unwrap().clear());
        assert!(is(found, [0.25, 1.0]), "{table}: {found:?}");
    }
    // The band does not depend on how long the measured operations take.
    for slower in [1.0, 1000.0] {
        let found = without(&|measured| {
            let calls = measured["calls"].as_table_mut().unwrap();
            calls.retain(|what, _| what.starts_with("linear "));
            for point in calls.iter_mut().flat_map(|(_, points)| points.as_array_mut().unwrap()) {
                let seconds = point["seconds"].as_float().unwrap() * slower;
                point.as_table_mut().unwrap().insert("seconds".to_owned(), seconds.into());
            }
        });
        assert!(is(found, [0.25, 1.0]), "{slower}: {found:?}");
    }
}
