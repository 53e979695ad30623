//! `fsdp plan check`: predictions beside measured runs.

use fsdp_plan::Constants;
use fsdp_plan::published::{Check, Checked, Errors, Row, check, project, read};
use serde_json::{Map, Value, json};

use crate::args::PlanCheckArgs;
use crate::error::CliError;
use crate::output::{self, table};

/// The runs with the largest errors that are shown.
const WORST: usize = 8;

/// What a run is grouped by.
type Key = fn(&Row) -> String;

/// Ways to group runs: what a heading calls them, and how they are told apart.
const GROUPS: [(&str, Key); 3] = [
    ("source", project),
    ("device", |row| row.text("device_type").to_owned()),
    ("checkpointing", |row| row.text("act_ckpt").to_owned()),
];

/// Predicts the runs of a file.
///
/// # Errors
/// [`CliError`]: the file can not be read.
pub(super) fn run(args: &PlanCheckArgs) -> Result<(), CliError> {
    let rows = read(&super::read(&args.file)?, &args.file.display().to_string())?;
    let check = check(&rows, &Constants::fitted());
    output::print(&if args.json { format!("{:#}\n", json(&check)) } else { text(&check) })
}

fn json(check: &Check) -> Value {
    let row = |checked: &Checked| match &checked.found {
        Ok((seconds, _)) => json!({ "row": checked.row.id(), "step_time_ms": seconds * 1e3 }),
        Err(reason) => json!({ "row": checked.row.id(), "outside": reason }),
    };
    let mut summary = Map::new();
    summary.insert("rows".into(), check.rows.len().into());
    summary.insert("outside".into(), json!(check.outside()));
    summary.insert("all".into(), json!(check.errors(|_| true)));
    for (name, key) in GROUPS {
        summary.insert(format!("by_{name}"), json!(check.by(key)));
    }
    json!({ "rows": check.rows.iter().map(row).collect::<Vec<_>>(), "summary": summary })
}

fn text(check: &Check) -> String {
    let mut rows: Vec<[String; 7]> = Vec::new();
    let mut line = |name: String, errors: Option<Errors>| {
        let Some(Errors { runs, mean, median, p90, worst, bias }) = errors else { return };
        let percent = |value: f64| format!("{value:.1} %");
        let bias = format!("{bias:+.1} %");
        rows.push([
            name,
            runs.to_string(),
            percent(mean),
            percent(median),
            percent(p90),
            percent(worst),
            bias,
        ]);
    };
    line("all".to_owned(), check.errors(|_| true));
    for (name, key) in GROUPS {
        check.by(key).into_iter().for_each(|(value, errors)| line(format!("{name} {value}"), Some(errors)));
    }
    let header = ["errors of step times", "runs", "mean", "median", "p90", "worst", "bias"];
    let mut text = table(header, rows);
    let mut worst: Vec<(f64, &Checked)> =
        check.rows.iter().filter_map(|checked| Some((checked.error()?, checked))).collect();
    worst.sort_by(|one, other| other.0.abs().total_cmp(&one.0.abs()));
    let worst = worst.iter().take(WORST).map(|(error, checked)| {
        let row = &checked.row;
        let what =
            ["row", "model", "devices", "device_type", "sharding", "act_ckpt"].map(|column| row.text(column));
        let [id, model, devices, device, sharding, checkpointing] = what.map(str::to_owned);
        [
            format!("{:+.1} %", error * 100.0),
            id,
            project(row),
            model,
            format!("{devices} x {device}"),
            sharding,
            checkpointing,
        ]
    });
    text += &format!(
        "\n{}",
        table(["worst", "row", "source", "model", "devices", "sharding", "checkpointing"], worst)
    );
    let outside = check.outside();
    if !outside.is_empty() {
        let outside = outside.iter().map(|(reason, runs)| [(*reason).to_owned(), runs.to_string()]);
        text += &format!("\n{}", table(["outside of the model", "runs"], outside));
    }
    text
}
