//! The command `check`.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Output};

use serde_json::Value;
use tempfile::TempDir;

const TPU_V4: &str = include_str!("../data/xla-fsdp-tpu-v4.csv");

/// A folder with a file of runs.
struct Runs(TempDir);

impl Runs {
    fn new(text: &str) -> Self {
        let runs = Self(tempfile::tempdir().unwrap());
        runs.write(text);
        runs
    }

    fn file(&self) -> PathBuf {
        self.0.path().join("runs.csv")
    }

    fn write(&self, text: &str) {
        fs::write(self.file(), text).unwrap();
    }

    fn check(&self, code: i32, options: &[&str]) -> Output {
        let command = Command::new(env!("CARGO_BIN_EXE_fsdp-published"))
            .args(["check", "runs.csv"])
            .args(options)
            .current_dir(&self.0)
            .output();
        let output = command.unwrap();
        assert_eq!(output.status.code(), Some(code), "{output:?}");
        output
    }

    fn text(&self) -> String {
        String::from_utf8(self.check(0, &[]).stdout).unwrap()
    }

    fn json(&self) -> Value {
        serde_json::from_slice(&self.check(0, &["--json"]).stdout).unwrap()
    }

    fn error(&self) -> String {
        String::from_utf8(self.check(2, &[]).stderr).unwrap()
    }
}

#[test]
fn check_predicts_each_row() {
    let file = Runs::new(TPU_V4);
    insta::assert_snapshot!("check", file.text());
    let found = file.json();
    let rows = found["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 6);
    assert!(rows.iter().all(|row| row["step_time_ms"].as_f64().unwrap() > 1e3));
    assert!(found["summary"]["all"]["mean"].as_f64().unwrap() < 10.0);
    assert!(rows.iter().filter(|row| row["assumed"].to_string().contains("not published")).count() == 5);
    file.write(&TPU_V4.replacen(",18,", ",eighteen,", 1));
    let wrong = file.error();
    assert!(wrong.contains("runs.csv: line 2, column `layers`: \"eighteen\""), "{wrong}");
}

#[test]
fn check_reports_invalid_and_ignored_input() {
    let file = Runs::new(TPU_V4);
    let (header, runs) = TPU_V4.split_once('\n').unwrap();
    let with = |header: &str, runs: &str| file.write(&format!("{header}\n{runs}"));
    let wrong = || file.error();

    with(header, "");
    assert!(wrong().contains("runs.csv: there are no runs below the header"));
    with(&header.replace("step_time_ms", "step_time"), runs);
    assert!(wrong().contains("runs.csv: unknown column `step_time`; did you mean `step_time_ms`?"));
    with(&header.replace("mfu", "seq"), runs);
    assert!(wrong().contains("runs.csv: column `seq` occurs twice, as number 10 and 22"));
    for impossible in ["nan", "0", "-4191.0"] {
        with(header, &runs.replacen("4191.0", impossible, 1));
        let expected =
            format!("runs.csv: line 2, column `step_time_ms`: \"{impossible}\" is not a number above 0");
        assert!(wrong().contains(&expected), "{}", wrong());
    }
    with(header, &runs.replacen(",seed", "", 1));
    assert!(
        wrong().contains("runs.csv: line 2 has 24 values for 25 columns: none for `group`"),
        "{}",
        wrong()
    );

    // An unknown column is reported and ignored, and a run without measurements is not compared.
    with(&header.replace("group", "notes"), &runs.replacen("4191.0", "", 1).replacen(",0.357,", ",,", 1));
    let ran = file.check(0, &["--json"]);
    let warning = String::from_utf8(ran.stderr).unwrap();
    assert!(warning.contains("runs.csv: column `notes` is unknown, and ignored"), "{warning}");
    let found: Value = serde_json::from_slice(&ran.stdout).unwrap();
    assert_eq!(found["summary"]["ignored_columns"], serde_json::json!(["notes"]));
    assert_eq!((&found["summary"]["rows"], &found["summary"]["all"]["runs"]), (&6.into(), &5.into()));
    let stdout = file.text();
    assert!(stdout.contains("no time was measured: row") && stdout.contains("GPT-2-2B"), "{stdout}");
    with(header, &runs.lines().next().unwrap().replacen("4191.0", "", 1).replacen(",0.357,", ",,", 1));
    let stdout = file.text();
    assert!(stdout.starts_with("no run has both a predicted step and a measured one\n"), "{stdout}");
}

#[test]
fn check_marks_runs_that_ran_out_of_memory() {
    // 40 times the samples: a model of 2 billion parameters then does not fit on 4 chips of 32 GiB.
    let file = Runs::new(&TPU_V4.replacen(",1024,32,", ",1024,1280,", 1).replacen("4191.0", "OOM", 1));
    let found = file.json();
    assert_eq!((&found["rows"][0]["fits"], &found["rows"][1]["fits"]), (&false.into(), &true.into()));
    assert_eq!(found["summary"]["fits"], serde_json::json!({ "known": 6, "right": 6 }));
    file.write(&TPU_V4.replacen("4191.0", "OOM", 1));
    assert_eq!(file.json()["summary"]["fits"]["right"], 5);
}

#[test]
fn check_compares_published_peak_memory() {
    let file = Runs::new(include_str!("../data/published.csv"));
    let found = file.json();
    let summary = &found["summary"];
    assert_eq!((&summary["all"]["runs"], &summary["peak_memory"]["runs"]), (&144.into(), &9.into()));
    assert!(summary["peak_memory"]["mean"].as_f64().unwrap() < 10.0);
    let [known, right] = ["known", "right"].map(|key| summary["fits"][key].as_f64().unwrap());
    assert!(known > 140.0 && right >= 0.95 * known, "{right} of {known}");
    let large = found["rows"].as_array().unwrap().iter().filter(|row| !row["band_ms"].is_null());
    assert!(large.count() > 0);
    assert!(file.text().contains("mean over sources"));
}
