//! The verdict.

use fsdp_train::audit::{GradientRow, Report, UpdateRow};
use serde_json::Value;

use crate::document::bars::{self, Bar};
use crate::document::page::Page;
use crate::document::{self, Document, Mark, json};

impl document::Report for Report {
    fn json(&self) -> Value {
        json(self)
    }

    fn write(&self, to: &mut dyn Document) {
        write_verdict(self, to);
        to.gap();
        let what = if self.steps > 1 { "changes" } else { "gradients" };
        to.table(
            [what, "expected norm", "used norm", "factor", "cosine", "left", "bound"],
            self.groups.iter().map(gradient),
        );
        to.table_of_any(
            ["updates", "lr", "found", "weight decay", "found", "left", "bound"],
            self.updates.iter().map(update),
        );
        to.figure(&|page| draw(self, page));
    }
}

/// Draws a bar per parameter, so that a pattern over layers is seen at once.
fn draw(report: &Report, page: &mut Page) {
    let bar = |value: f64, text: String| -> Vec<Bar> { vec![(0, value, text)] };
    let rows = |of: &dyn Fn(&GradientRow) -> Vec<Bar>| -> Vec<(String, Vec<Bar>)> {
        report.params.iter().map(|row| (row.name.clone(), of(row))).collect()
    };
    let (used, expected) = match report.steps {
        1 => ("Used gradient", "gradient"),
        _ => ("Change of weights and moments", "change"),
    };
    page.section(&format!("{used} divided by the expected one"));
    page.html(&bars::svg(
        "factor of each parameter",
        &rows(&|row| match row.factor {
            Some(factor) => bar(factor.abs(), format!("{factor:.4}")),
            None => bar(0.0, format!("no {expected} expected")),
        }),
    ));
    page.section(&format!("What the factor leaves unexplained, relative to the expected {expected}"));
    page.html(&bars::svg(
        "residual of each parameter",
        &rows(&|row| match row.factor {
            Some(_) => bar(row.residual, format!("{:.1e} (precision {:.0e})", row.residual, row.bound)),
            // There is nothing to relate it to.
            None => bar(0.0, format!("norm of the used one {:.1e}", row.used)),
        }),
    ));
}

/// Writes what was found, or how far the step is sound.
fn write_verdict(report: &Report, to: &mut dyn Document) {
    let (steps, bound) = (steps(report), percent(report.bound));
    let sound = match report.steps {
        1 => format!(
            ": {steps} used the right gradient and made the right update, as far as its precision shows ({bound} of the gradient)"
        ),
        _ => format!(
            ": the whole update of {steps} is right, as far as precision shows ({bound} of a change); gradients of single steps \
             cannot be judged"
        ),
    };
    if report.is_sound() {
        to.marked(Mark::Good, "sound", &sound);
    }
    let hidden: Vec<_> = report.hidden().collect();
    if let (true, [first, ..]) = (report.is_sound(), &hidden[..]) {
        let (count, all) = (hidden.len(), report.params.len());
        let what = if report.steps > 1 { "weights and moments" } else { "gradients" };
        to.line(&format!(
            "precision shows nothing of {count} of {all} {what}, such as {}: less is expected there than the bound",
            first.name
        ));
    }
    for finding in &report.findings {
        let share = match finding.explains {
            0.0 => String::new(),
            share => format!(" (explains {} of the difference)", percent(share)),
        };
        let cause = json(&finding.cause).as_str().unwrap_or_default().replace('_', " ");
        to.marked(Mark::Bad, &cause, &format!(": {steps}: {}{share}", finding.text));
    }
}

/// The judged steps, counted from 1.
fn steps(report: &Report) -> String {
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

fn update(row: &UpdateRow) -> [String; 7] {
    [
        row.name.clone(),
        format!("{:.4e}", row.lr),
        format!("{:.4e}", row.lr_found),
        format!("{:.4}", row.weight_decay),
        format!("{:.4}", row.weight_decay_found),
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

#[cfg(test)]
mod tests {
    use super::*;

    fn row(name: &str, factor: Option<f64>) -> GradientRow {
        let expected = if factor.is_some() { 2.0 } else { 0.0 };
        let (used, residual) = (0.5, 0.25);
        GradientRow { name: name.to_owned(), expected, used, factor, cosine: factor, residual, bound: 1e-5 }
    }

    #[test]
    fn parameter_without_expected_gradient_has_no_factor() {
        let report = Report {
            verdict: "sound",
            step: 6,
            steps: 1,
            findings: Vec::new(),
            bound: 1e-5,
            groups: Vec::new(),
            params: vec![row("a", Some(0.0)), row("b", None), row("c", Some(-2.0))],
            updates: Vec::new(),
        };
        let mut page = Page::default();
        document::Report::write(&report, &mut page);
        let page = page.finish("t");
        for part in [
            ">0.0000</text>",
            ">no gradient expected</text>",
            ">-2.0000</text>",
            ">norm of the used one 5.0e-1</text>",
        ] {
            assert_eq!(page.matches(part).count(), 1, "{part}: {page}");
        }
        assert!(page.contains("sound: step 7 used the right gradient"));
    }
}
