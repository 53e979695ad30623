//! The verdict for people.

use std::fmt::Write;
use std::path::Path;

use fsdp_train::audit::{GradientRow, Report};

use crate::output::{Paint, table};

/// Renders the verdict, the findings, and the tables that show them.
pub(super) fn render(report: &Report, page: Option<&Path>) -> String {
    let mut text = verdict(report);
    text.push('\n');
    text += &table(
        [
            if report.steps > 1 { "changes" } else { "gradients" },
            "expected norm",
            "used norm",
            "factor",
            "cosine",
            "left",
            "bound",
        ],
        report.groups.iter().map(gradient),
    );
    if !report.updates.is_empty() {
        text.push('\n');
        text += &table(
            ["updates", "lr", "found", "weight decay", "found", "left", "bound"],
            report.updates.iter().map(|row| {
                [
                    row.name.clone(),
                    format!("{:.4e}", row.lr),
                    format!("{:.4e}", row.lr_found),
                    format!("{:.4}", row.weight_decay),
                    format!("{:.4}", row.weight_decay_found),
                    format!("{:.1e}", row.residual),
                    format!("{:.1e}", row.bound),
                ]
            }),
        );
    }
    if let Some(page) = page {
        let _ = writeln!(text, "\n{}", page.display());
    }
    text
}

/// What was found, or how far the step is sound.
fn verdict(report: &Report) -> String {
    let mut text = String::new();
    let steps = steps(report);
    let style = Paint::of(&std::io::stdout());
    if report.is_sound() && report.steps > 1 {
        let _ = writeln!(
            text,
            "{}: the whole update of {} is right, as far as precision shows ({} of a change); gradients of single steps cannot be \
             judged",
            style.good("sound"),
            steps,
            percent(report.bound)
        );
    } else if report.is_sound() {
        let _ = writeln!(
            text,
            "{}: {steps} used the right gradient and made the right update, as far as its precision shows ({} of the \
             gradient)",
            style.good("sound"),
            percent(report.bound)
        );
    }
    let hidden: Vec<_> = report.hidden().collect();
    if report.is_sound()
        && let [first, ..] = hidden[..]
    {
        let _ = writeln!(
            text,
            "precision shows nothing of {} of {} {}, such as {}: less is expected there than the bound",
            hidden.len(),
            report.params.len(),
            if report.steps > 1 { "weights and moments" } else { "gradients" },
            first.name
        );
    }
    for finding in &report.findings {
        let cause = serde_json::to_value(finding.cause).expect("a cause is a name");
        let cause = cause.as_str().unwrap_or_default().replace('_', " ");
        let _ = writeln!(
            text,
            "{}: {steps}: {}{}",
            style.bad(&cause),
            finding.text,
            match finding.explains {
                0.0 => String::new(),
                share => format!(" (explains {} of the difference)", percent(share)),
            }
        );
    }
    text
}

/// The judged steps, counted from 1.
pub(super) fn steps(report: &Report) -> String {
    let first = report.step + 1;
    match report.steps {
        1 => format!("step {first}"),
        steps => format!("steps {first} to {}", report.step + steps as u64),
    }
}

fn gradient(row: &GradientRow) -> [String; 7] {
    let shown = |value: Option<f64>| value.map_or("-".to_owned(), |value| format!("{value:.6}"));
    [
        row.name.clone(),
        format!("{:.4e}", row.expected),
        format!("{:.4e}", row.used),
        shown(row.factor),
        shown(row.cosine),
        format!("{:.1e}", row.residual),
        format!("{:.1e}", row.bound),
    ]
}

fn percent(share: f64) -> String {
    match 100.0 * share {
        percent if percent >= 99.0 => format!("{percent:.4} %"),
        percent if percent >= 0.01 => format!("{percent:.2} %"),
        percent => format!("{percent:.1e} %"),
    }
}
