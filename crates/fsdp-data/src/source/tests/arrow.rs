use std::fs;
use std::path::PathBuf;

use fsdp_config::{DataConfig, Malformed};

use super::super::{RecordFault, open};
use super::{assert_refused, config, fixture, load};
use crate::files::{DataFile, Kind};
use crate::progress::Meter;
use crate::record::{Fields, Record, RecordPosition};
use crate::source::expansion::Bounds;

/// Returns the records of a file with their positions.
fn records(path: PathBuf, kind: Kind, fields: &Fields) -> Vec<(RecordPosition, Result<Record, RecordFault>)> {
    let file = DataFile { path, named: true, kind, compression: None };
    let mut found = Vec::new();
    let bounds = Bounds::of(&file, 1000);
    for batch in open(0, &file, bounds, fields, &Meter::default()).unwrap() {
        batch.unwrap().for_each(fields, |record| found.push(record));
    }
    found
}

#[test]
fn arrow_conversations_match_parquet() {
    let fields = Fields::new(None);
    let of = |name: &str, kind| records(fixture(name), kind, &fields);
    let (arrow, parquet) = (of("chats.arrow", Kind::Arrow), of("chats.parquet", Kind::Parquet));
    let only = |found: &[(RecordPosition, Result<Record, RecordFault>)]| -> Vec<Record> {
        found.iter().map(|(_, record)| record.clone().unwrap()).collect()
    };
    assert_eq!(only(&arrow), only(&parquet));
    assert_eq!(only(&of("chats-dictionary.arrow", Kind::Arrow)), only(&parquet), "words by their numbers");
    let Record::Object(second) = &only(&arrow)[1] else { panic!("{arrow:?}") };
    assert_eq!(second["messages"][1]["tool_calls"][0]["weight"], 0.5);
    assert_eq!(second["tools"], r#"[{"name": "f"}]"#);
    let places: Vec<RecordPosition> = arrow.into_iter().map(|(place, _)| place).collect();
    assert_eq!(
        places,
        [0, 1, 2, 3].map(|row| RecordPosition::Row { group: None, row }),
        "across record batches"
    );
}

/// The output of `fixtures/write.py`: columns of all types, and the JSON of those that have one.
#[test]
fn values_of_all_types_are_the_same_or_odd_in_both_formats() {
    let kinds: serde_json::Value = serde_json::from_slice(&fs::read(fixture("kinds.json")).unwrap()).unwrap();
    for (kind, expected) in kinds.as_object().unwrap() {
        let [arrow, parquet] =
            [("kinds.arrow", Kind::Arrow), ("kinds.parquet", Kind::Parquet)].map(|(name, format)| {
                let found = records(fixture(name), format, &Fields::new(Some(kind)));
                let found = found.into_iter().map(|(_, record)| match record.unwrap() {
                    Record::Object(mut fields) => fields.remove(kind).unwrap(),
                    other => panic!("{kind}: {other:?}"),
                });
                found.collect::<serde_json::Value>()
            });
        assert_eq!(arrow, parquet, "{kind}");
        if expected.is_null() {
            let note = serde_json::to_string(&arrow).unwrap();
            let what = if kind == "numbered_map" { "has keys that are not text" } else { "is of type " };
            assert!(note.contains(&format!("column \\\"{kind}[].value")) && note.contains(what), "{note}");
        } else {
            assert_eq!(&arrow, expected, "{kind}");
        }
    }
    let stamps = records(fixture("int96.parquet"), Kind::Parquet, &Fields::new(Some("timestamp_us")));
    assert!(format!("{stamps:?}").contains("timestamp_us[].value\\\" is of type timestamp"), "{stamps:?}");
}

#[test]
fn invalid_row_error_names_row_and_column() {
    let of = |column: &str| DataConfig { column: Some(column.to_owned()), ..config() };
    assert_refused(&fixture("text.arrow"), &of("id"), &["text.arrow: row 0: \"id\" is a number"]);
    assert_refused(&fixture("text.arrow"), &of("body"), &["there is no \"body\"", "there are: id, text"]);
    assert_refused(&fixture("chats.arrow"), &of("tools"), &["chats.arrow: row 0: \"tools\" is null"]);
    let skipped =
        load(&[fixture("chats.arrow")], &DataConfig { malformed: Malformed::Skip, ..of("tools") }).unwrap();
    let warnings: Vec<String> = skipped.warnings().iter().map(ToString::to_string).collect();
    assert!(warnings[0].starts_with("2 lines or rows are left out"), "{warnings:?}");
    assert_refused(
        &fixture("feather.arrow"),
        &config(),
        &["feather.arrow: ", "footer (Feather)", "write_table"],
    );
}

#[test]
fn truncated_stream_is_rejected_and_damage_never_panics() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("cut.arrow");
    for name in ["text.arrow", "chats.arrow", "ids-uint16.arrow", "dictionary.arrow"] {
        let whole = fs::read(fixture(name)).unwrap();
        for cut in (0..whole.len()).step_by(3) {
            fs::write(&path, &whole[..cut]).unwrap();
            assert_refused(&path, &config(), &["truncated"]);
        }
        // Only the end is intact, as in a file whose middle was lost.
        for cut in (8..whole.len() - 8).step_by(8) {
            fs::write(&path, [&whole[..cut], &whole[whole.len() - 8..]].concat()).unwrap();
            drop(load(std::slice::from_ref(&path), &config()));
        }
        for at in (0..whole.len()).step_by(2) {
            let mut changed = whole.clone();
            changed[at] ^= [0x01, 0x55, 0x80][at % 3];
            fs::write(&path, &changed).unwrap();
            drop(load(std::slice::from_ref(&path), &config()));
        }
    }
}
