//! The verdict as an HTML file: a bar per parameter, so that a pattern over layers is seen at once.

use fsdp_train::audit::{GradientRow, Report};

use super::text;
use crate::report::bars::{self, Bar};
use crate::report::page::Page;

/// Renders the page.
pub(super) fn render(report: &Report) -> String {
    let mut page = Page::default();
    page.text(&match report.is_sound() {
        true if report.steps > 1 => {
            format!("S{} made the right update as a whole.", &text::steps(report)[1..])
        }
        true => format!("Step {} used the right gradient and made the right update.", report.step + 1),
        false => format!("S{}: {} found.", &text::steps(report)[1..], report.findings.len()),
    });
    page.table(
        &["cause", "what", "factor", "explains"],
        report.findings.iter().map(|finding| {
            let cause = serde_json::to_value(finding.cause).expect("a cause is a name");
            let factor = finding.factor.map_or(String::new(), |factor| format!("{factor:.4}"));
            let cells = [
                cause.as_str().unwrap_or_default(),
                &finding.text,
                &factor,
                &format!("{:.4}", finding.explains),
            ];
            (true, cells.map(str::to_owned).to_vec())
        }),
    );
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
        &rows(&|row| {
            let factor = row.factor.unwrap_or(0.0);
            bar(factor.abs(), format!("{factor:.4}"))
        }),
    ));
    page.section(&format!("What the factor leaves unexplained, relative to the expected {expected}"));
    page.html(&bars::svg(
        "residual of each parameter",
        &rows(&|row| bar(row.residual, format!("{:.1e} (precision {:.0e})", row.residual, row.bound))),
    ));
    if report.updates.is_empty() {
        return page.finish("Audit of a training step");
    }
    page.section("Updates");
    page.table(
        &["group", "lr", "lr found", "weight decay", "weight decay found", "left", "bound"],
        report.updates.iter().map(|row| {
            let numbers =
                [row.lr, row.lr_found, row.weight_decay, row.weight_decay_found, row.residual, row.bound];
            let cells =
                std::iter::once(row.name.clone()).chain(numbers.map(|number| format!("{number:.4e}")));
            (row.residual > row.bound, cells.collect())
        }),
    );
    page.finish("Audit of a training step")
}
