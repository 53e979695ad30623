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
        let page = render(&report);
        for part in [
            ">0.0000</text>",
            ">no gradient expected</text>",
            ">-2.0000</text>",
            ">norm of the used one 5.0e-1</text>",
        ] {
            assert_eq!(page.matches(part).count(), 1, "{part}: {page}");
        }
        assert!(page.contains("Step 7 used the right gradient"));
    }
}
