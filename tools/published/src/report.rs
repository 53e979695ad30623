//! What is printed of a check, as text and JSON.

use std::collections::BTreeMap;

use fsdp_plan::Constants;
use serde_json::{Map, Value, json};

use crate::check::{Check, Checked, Errors, Found, check, project};
use crate::row::{Row, Runs};
use crate::table::table;

/// Number of runs shown, those with the largest errors.
const WORST: usize = 8;

/// Printed if there is nothing to compare.
const NO_ERRORS: &str = "no run has both a predicted step and a measured one\n";

/// The property by which runs are grouped.
type Key = fn(&Row) -> String;

/// Ways to group runs: heading and key.
const GROUPS: [(&str, Key); 3] = [
    ("source", project),
    ("device", |row| row.text("device_type").to_owned()),
    ("checkpointing", |row| row.text("act_ckpt").to_owned()),
];

/// Predicts runs and prints the errors.
pub(crate) fn print(runs: &Runs, is_json: bool) {
    let check = check(&runs.rows, &Constants::fitted());
    match is_json {
        true => println!("{:#}", json(&check, &runs.ignored)),
        false => print!("{}", text(&check)),
    }
}

fn json(check: &Check, ignored: &[String]) -> Value {
    let mut summary = Map::new();
    summary.insert("ignored_columns".into(), json!(ignored));
    summary.insert("rows".into(), check.rows.len().into());
    summary.insert("outside".into(), json!(check.outside()));
    summary.insert("all".into(), json!(check.errors(|_| true)));
    summary.insert("without_checkpointing".into(), json!(check.errors(is_kept)));
    summary.insert("mean_over_sources".into(), json!(check.mean_over_sources()));
    for (name, key) in GROUPS {
        summary.insert(format!("by_{name}"), json!(check.by(key)));
    }
    summary.insert("peak_memory".into(), json!(check.memory_errors()));
    let (known, right) = check.fitting();
    summary.insert("fits".into(), json!({ "known": known, "right": right }));
    json!({ "rows": check.rows.iter().map(row_json).collect::<Vec<_>>(), "summary": summary })
}

fn row_json(checked: &Checked) -> Value {
    let mut row = Map::new();
    row.insert("row".into(), checked.row.id());
    match &checked.found {
        Ok(Found { seconds, band, assumed, .. }) => {
            row.insert("step_time_ms".into(), json!(seconds * 1e3));
            if let Some(band) = band {
                row.insert("band_ms".into(), json!(band.map(|seconds| seconds * 1e3)));
            }
            if !assumed.is_empty() {
                row.insert("assumed".into(), json!(assumed));
            }
        }
        Err(reason) => {
            row.insert("outside".into(), json!(reason));
        }
    }
    if let Some(memory) = checked.memory {
        row.insert("peak_mem_gib".into(), json!(memory.predicted));
        row.insert("fits".into(), json!(memory.fits));
    }
    Value::Object(row)
}

/// Whether a run keeps all activations for backward.
fn is_kept(row: &Row) -> bool {
    row.word("act_ckpt") == "none"
}

fn text(check: &Check) -> String {
    let mut text = errors(check);
    for table in [worst(check), alone(check), memory(check), wide(check), assumed(check), outside(check)] {
        if !table.is_empty() {
            text += &format!("\n{table}");
        }
    }
    text
}

fn percent(value: f64) -> String {
    format!("{value:.1} %")
}

fn error_row(name: String, errors: Errors) -> [String; 7] {
    let Errors { runs, mean, median, p90, worst, bias } = errors;
    let [mean, median, p90, worst] = [mean, median, p90, worst].map(percent);
    [name, runs.to_string(), mean, median, p90, worst, format!("{bias:+.1} %")]
}

fn errors(check: &Check) -> String {
    let mut rows: Vec<[String; 7]> = Vec::new();
    let mut line = |name: &str, errors: Option<Errors>| {
        rows.extend(errors.map(|errors| error_row(name.to_owned(), errors)));
    };
    line("all", check.errors(|_| true));
    line("without checkpointing", check.errors(is_kept));
    for (name, key) in GROUPS {
        check.by(key).into_iter().for_each(|(value, errors)| line(&format!("{name} {value}"), Some(errors)));
    }
    line("peak memory", check.memory_errors());
    let header = ["errors of step times", "runs", "mean", "median", "p90", "worst", "bias"];
    let over_sources = check.mean_over_sources();
    let over_sources = over_sources.map(|mean| format!("mean over sources: {}\n", percent(mean)));
    let (known, right) = check.fitting();
    let fits = format!("fits or not: right for {right} of {known} runs for which it is known\n");
    let errors = if rows.is_empty() { NO_ERRORS.to_owned() } else { table(header, rows) };
    errors + &over_sources.unwrap_or_default() + if known > 0 { &fits } else { "" }
}

fn worst(check: &Check) -> String {
    let mut worst: Vec<(f64, &Checked)> =
        check.rows.iter().filter_map(|checked| Some((checked.error()?, checked))).collect();
    worst.sort_by(|one, other| other.0.abs().total_cmp(&one.0.abs()));
    let rows = worst.iter().take(WORST).map(|(error, checked)| {
        let row = &checked.row;
        let what = ["model", "devices", "device_type", "sharding", "act_ckpt"].map(|column| row.text(column));
        let [model, devices, device, sharding, checkpointing] = what.map(str::to_owned);
        let devices = format!("{devices} x {device}");
        [format!("{:+.1} %", error * 100.0), id(row), project(row), model, devices, sharding, checkpointing]
    });
    table(["worst", "row", "source", "model", "devices", "sharding", "checkpointing"], rows)
}

/// The identifier of a row.
fn id(row: &Row) -> String {
    match row.id() {
        Value::String(text) => text,
        other => other.to_string(),
    }
}

/// Predictions without a measurement.
fn alone(check: &Check) -> String {
    let mut rows: Vec<[String; 3]> = Vec::new();
    for Checked { row, found, .. } in &check.rows {
        if let Ok(Found { seconds, measured: None, .. }) = found {
            rows.push([id(row), row.text("model").to_owned(), format!("{seconds:.2} s")]);
        }
    }
    table(["no time was measured: row", "model", "predicted step"], rows)
}

fn memory(check: &Check) -> String {
    let rows: Vec<[String; 5]> = check
        .rows
        .iter()
        .filter_map(|checked| {
            let memory = checked.memory?;
            let (measured, error) = (memory.measured?, memory.error()?);
            let gib = |value: f64| format!("{value:.1} GiB");
            let error = format!("{:+.1} %", 100.0 * error);
            Some([
                id(&checked.row),
                checked.row.text("model").to_owned(),
                gib(memory.predicted),
                gib(measured),
                error,
            ])
        })
        .collect();
    table(["peak memory of row", "model", "predicted", "measured", "error"], rows)
}

/// Rows with an uncertainty band, because they have many ranks.
fn wide(check: &Check) -> String {
    let mut rows: Vec<[String; 4]> = Vec::new();
    for checked in &check.rows {
        if let Ok(Found { seconds, band: Some([low, high]), .. }) = &checked.found {
            let devices = checked.row.text("devices").to_owned();
            let band = format!("{low:.2} to {high:.2} s");
            rows.push([id(&checked.row), devices, format!("{seconds:.2} s"), band]);
        }
    }
    table(["more than 512 ranks: row", "devices", "step", "may be"], rows)
}

fn assumed(check: &Check) -> String {
    let mut rows: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for checked in &check.rows {
        for assumed in checked.found.iter().flat_map(|found| &found.assumed) {
            rows.entry(assumed).or_default().push(id(&checked.row));
        }
    }
    table(["assumed", "rows"], rows.into_iter().map(|(assumed, rows)| [assumed.to_owned(), rows.join(", ")]))
}

fn outside(check: &Check) -> String {
    let outside = check.outside();
    let rows = outside.iter().map(|(reason, runs)| [(*reason).to_owned(), runs.to_string()]);
    table(["outside of the model", "runs"], rows)
}
