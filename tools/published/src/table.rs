//! Tables of text.

use comfy_table::{CellAlignment, Table, TableComponent, presets};

/// Formats a table: words are left-aligned, numbers right-aligned. Empty without rows.
pub(crate) fn table<const COLUMNS: usize>(
    header: [&str; COLUMNS],
    rows: impl IntoIterator<Item = [String; COLUMNS]>,
) -> String {
    let rows: Vec<[String; COLUMNS]> = rows.into_iter().collect();
    if rows.is_empty() {
        return String::new();
    }
    let begins_with_digit =
        |cell: &str| cell.trim_start_matches(['+', '-']).starts_with(|first: char| first.is_ascii_digit());
    let has_numbers = |column: usize| rows.iter().any(|row| begins_with_digit(&row[column]));
    let mut table = Table::new();
    table.load_preset(presets::NOTHING).set_header(header).add_rows(rows.clone());
    table
        .set_style(TableComponent::HeaderLines, '─')
        .set_style(TableComponent::MiddleHeaderIntersections, '─');
    for (_, column) in table.column_iter_mut().enumerate().skip(1).filter(|&(column, _)| has_numbers(column))
    {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table.lines().map(|line| format!("{}\n", line.trim_end())).collect()
}
