//! The verdict as an HTML file: a bar per parameter, so that a pattern over layers is seen at once.

use fsdp_train::audit::{GradientRow, Report};

use crate::report::bars::{self, Bar};
use crate::report::page::Page;

/// Renders the page.
pub(super) fn render(report: &Report) -> String {
    let mut page = Page::default();
    page.text(&match report.is_sound() {
        true => format!("Step {} used the right gradient and made the right update.", report.step + 1),
        false => format!("Step {}: {} found.", report.step + 1, report.findings.len()),
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
    page.section("Used gradient divided by the expected one");
    page.html(&bars::svg(
        "factor of each parameter",
        &rows(&|row| {
            let factor = row.factor.unwrap_or(0.0);
            bar(factor.abs(), format!("{factor:.4}"))
        }),
    ));
    page.section("What the factor leaves unexplained, relative to the expected gradient");
    page.html(&bars::svg(
        "residual of each parameter",
        &rows(&|row| bar(row.residual, format!("{:.1e} (precision {:.0e})", row.residual, row.bound))),
    ));
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
