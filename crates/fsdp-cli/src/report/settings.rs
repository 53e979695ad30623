//! Compares the resolved configurations of runs.

use std::collections::BTreeMap;

use fsdp_train::checkpoint::leaves;

use super::record::Record;
use crate::document::Document;
use crate::document::page::Page;

/// Shown if a run lacks a key, or has no `resolved.toml`.
const ABSENT: &str = "–";

/// A key and its value in each run.
type Row = (String, Vec<String>);

/// Writes the keys that differ between runs, and all keys.
pub(super) fn write(page: &mut Page, runs: &[Record]) {
    page.section("Configuration");
    let rows = rows(runs);
    if rows.is_empty() {
        return page.text("There is no resolved.toml beside these metrics.");
    }
    let header: Vec<&str> = std::iter::once("key").chain(runs.iter().map(|run| &*run.name)).collect();
    let cells = |(key, values): Row| std::iter::once(key).chain(values).collect::<Vec<_>>();
    let differs = |row: &Row| row.1.windows(2).any(|pair| pair[0] != pair[1]);
    if runs.len() > 1 {
        let different: Vec<Row> = rows.iter().filter(|row| differs(row)).cloned().collect();
        match different.len() {
            0 => page.text("All keys are equal."),
            _ => page.rows(&header, different.into_iter().map(|row| (false, cells(row)))),
        }
    }
    page.html("<details><summary>All keys</summary>");
    page.rows(&header, rows.into_iter().map(|row| (differs(&row), cells(row))));
    page.html("</details>");
}

fn rows(runs: &[Record]) -> Vec<Row> {
    let leaves: Vec<BTreeMap<String, String>> =
        runs.iter().map(|run| run.resolved.as_deref().map_or_else(BTreeMap::new, leaves)).collect();
    let mut keys: Vec<&String> = leaves.iter().flat_map(BTreeMap::keys).collect();
    keys.sort();
    keys.dedup();
    let value =
        |of: &BTreeMap<String, String>, key: &str| of.get(key).map_or(ABSENT.to_owned(), Clone::clone);
    keys.iter().map(|&key| (key.clone(), leaves.iter().map(|of| value(of, key)).collect())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(name: &str, resolved: Option<&str>) -> Record {
        Record { name: name.to_owned(), resolved: resolved.map(str::to_owned), ..Record::default() }
    }

    #[test]
    fn rows_align_keys_of_all_runs() {
        let runs =
            [run("a", Some("[x]\ny = 1\nz = { w = 'v' }")), run("b", Some("[x]\ny = 2")), run("c", None)];
        let expected = [("x.y", ["1", "2", ABSENT]), ("x.z.w", ["\"v\"", ABSENT, ABSENT])];
        assert_eq!(rows(&runs), expected.map(|(key, row)| (key.to_owned(), row.map(str::to_owned).into())));
    }

    #[test]
    fn differing_keys_come_first_and_are_marked() {
        let text = |seed: u8| format!("seed = {seed}\nsame = true");
        let mut page = Page::default();
        write(&mut page, &[run("a", Some(&text(1))), run("b", Some(&text(2)))]);
        let html = page.finish("t");
        let (in_front, all) = html.split_once("<details>").unwrap();
        assert!(
            in_front.contains("<td>seed</td><td>1</td><td>2</td>") && !in_front.contains("<td>same</td>")
        );
        assert!(all.contains("<tr class=\"marked\"><td>seed</td>") && all.contains("<tr><td>same</td>"));
    }
}
