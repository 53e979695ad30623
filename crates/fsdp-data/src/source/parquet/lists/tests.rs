use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use parquet::data_type::{ByteArray, ByteArrayType, Int32Type};
use parquet::file::properties::{WriterProperties, WriterVersion};
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use proptest::prelude::*;

use super::*;

/// A row: a list of lists of texts, any of which may be null.
type NestedRow = Option<Vec<Option<Vec<Option<String>>>>>;

const NESTED: &str = "message m { optional group a (LIST) { repeated group list { optional group element (LIST) { \
                      repeated group list { optional binary element (UTF8); } } } } }";

/// The values of rows with their definition and repetition levels.
fn levels(rows: &[NestedRow]) -> (Vec<ByteArray>, Vec<i16>, Vec<i16>) {
    let (mut values, mut definitions, mut repetitions) = (Vec::new(), Vec::new(), Vec::new());
    for row in rows {
        let mut add = |definition, repetition| {
            definitions.push(definition);
            repetitions.push(repetition);
        };
        let lists = row.as_deref().unwrap_or_default();
        if lists.is_empty() {
            add(i16::from(row.is_some()), 0);
        }
        for (outer, list) in lists.iter().enumerate() {
            let first = i16::from(outer > 0);
            let texts = list.as_deref().unwrap_or_default();
            if texts.is_empty() {
                add(if list.is_some() { 3 } else { 2 }, first);
            }
            for (inner, text) in texts.iter().enumerate() {
                add(if text.is_some() { 5 } else { 4 }, if inner > 0 { 2 } else { first });
                values.extend(text.as_deref().map(ByteArray::from));
            }
        }
    }
    (values, definitions, repetitions)
}

fn write(path: &Path, rows: &[NestedRow], properties: WriterProperties) {
    let schema = parse_message_type(NESTED).unwrap();
    let file = File::create(path).unwrap();
    let mut writer = SerializedFileWriter::new(file, schema.into(), properties.into()).unwrap();
    let mut group = writer.next_row_group().unwrap();
    let mut column = group.next_column().unwrap().unwrap();
    let (values, definitions, repetitions) = levels(rows);
    column.typed::<ByteArrayType>().write_batch(&values, Some(&definitions), Some(&repetitions)).unwrap();
    column.close().unwrap();
    group.close().unwrap();
    writer.close().unwrap();
}

/// The first row with the largest measure, and the measure.
fn first_max(measures: impl Iterator<Item = u64>) -> (u64, u64) {
    let mut found = (0, 0);
    for (row, measure) in (0..).zip(measures) {
        found = if measure > found.1 { (row, measure) } else { found };
    }
    found
}

fn texts(row: &NestedRow) -> impl Iterator<Item = &String> {
    row.iter().flatten().flatten().flatten().flatten()
}

fn rows() -> impl Strategy<Value = Vec<NestedRow>> {
    let text = proptest::option::weighted(0.9, prop_oneof!["[a-c]{0,3}", "[a-z]{20,30}"]);
    let list = proptest::option::weighted(0.9, proptest::collection::vec(text, 0..5));
    let long = proptest::collection::vec(Just(Some(vec![Some("same".to_owned()); 7])), 10..40);
    let row = prop_oneof![9 => proptest::collection::vec(list, 0..5), 1 => long];
    proptest::collection::vec(proptest::option::weighted(0.9, row), 1..80)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn rows_are_measured_like_their_values(
        rows in rows(), is_second in any::<bool>(), has_dictionary in any::<bool>(), page_bytes in 1..500_usize
    ) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.parquet");
        let version = if is_second { WriterVersion::PARQUET_2_0 } else { WriterVersion::PARQUET_1_0 };
        let properties = WriterProperties::builder()
            .set_writer_version(version)
            .set_dictionary_enabled(has_dictionary)
            .set_data_page_size_limit(page_bytes)
            .set_write_batch_size(16)
            .build();
        write(&path, &rows, properties);
        let reader = SerializedFileReader::new(File::open(&path).unwrap()).unwrap();
        let group = reader.get_row_group(0).unwrap();
        let counts = |row: &NestedRow| levels(std::slice::from_ref(row)).1.len() as u64;
        prop_assert_eq!(values(&*group, 0).unwrap(), rows.iter().map(counts).sum::<u64>());
        prop_assert_eq!(longest_row(&*group, 0).unwrap(), first_max(rows.iter().map(counts)));
        let bytes = |row: &NestedRow| texts(row).map(|text| text.len() as u64).sum();
        prop_assert_eq!(largest_row(&*group, 0).unwrap(), first_max(rows.iter().map(bytes)));
        let all = rows.iter().flat_map(texts).map(|text| text.len() as u64);
        let has_texts = rows.iter().flat_map(texts).next().is_some();
        let longest = if has_dictionary && has_texts { all.max().unwrap() } else { 0 };
        prop_assert_eq!(longest_text(&*group, 0).unwrap(), longest);
    }
}

const MAX: RowMax = RowMax { values: 1 << 16, bytes: 1 << 26 };

fn checked(path: &Path) -> Result<usize, ParquetError> {
    let reader = SerializedFileReader::new(File::open(path).unwrap()).unwrap();
    let schema = SchemaDescriptor::new(Arc::new(reader.metadata().file_metadata().schema().clone()));
    check(&*reader.get_row_group(0).unwrap(), &schema, MAX)
}

/// Writes a column of lists of numbers with these lengths.
fn numbers(path: &Path, lens: &[usize]) {
    let schema = parse_message_type("message m { repeated int32 a; }").unwrap();
    let file = File::create(path).unwrap();
    let properties = WriterProperties::builder().build();
    let mut writer = SerializedFileWriter::new(file, schema.into(), properties.into()).unwrap();
    let mut group = writer.next_row_group().unwrap();
    let mut column = group.next_column().unwrap().unwrap();
    for &len in lens {
        let repetitions: Vec<i16> = (0..len).map(|at| i16::from(at > 0)).collect();
        column
            .typed::<Int32Type>()
            .write_batch(&vec![7; len], Some(&vec![1; len]), Some(&repetitions))
            .unwrap();
    }
    column.close().unwrap();
    group.close().unwrap();
    writer.close().unwrap();
}

#[test]
fn long_list_among_short_ones_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.parquet");
    let max = MAX.values as usize;
    let mut lens = vec![1; 1000];
    lens[700] = max + 1;
    numbers(&path, &lens);
    assert!(path.metadata().unwrap().len() < 1 << 16);
    let error = checked(&path).unwrap_err().to_string();
    assert!(error.contains("row 700 has lists of 65537 values; the maximum is 65536"), "{error}");
    // Rows as long as allowed are decoded one by one, shorter ones several at a time.
    numbers(&path, &[1, max, 1]);
    assert_eq!(checked(&path).unwrap(), 1);
    numbers(&path, &[max / 4; 5]);
    assert_eq!(checked(&path).unwrap(), 4);
    numbers(&path, &[5; 100]);
    assert_eq!(checked(&path).unwrap(), 64);
}

#[test]
fn list_of_copies_of_long_text_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.parquet");
    let properties = || {
        WriterProperties::builder()
            .set_dictionary_page_size_limit(1 << 24)
            .set_compression(parquet::basic::Compression::ZSTD(Default::default()))
            .build()
    };
    let row = |copies: usize| Some(vec![Some(vec![Some("long text ".repeat(100_000)); copies])]);
    let row_max = 67;
    // As a whole, the column has more than a row may have.
    write(&path, &[row(row_max), row(1), row(row_max)], properties());
    assert_eq!(checked(&path).unwrap(), 64);
    // One long text among many short ones.
    let mut mixed = row(1);
    mixed.as_mut().unwrap().push(Some(vec![Some("short".to_owned()); 100]));
    write(&path, &[mixed], properties());
    assert_eq!(checked(&path).unwrap(), 1);
    write(&path, &[row(1), row(row_max + 1)], properties());
    assert!(path.metadata().unwrap().len() < 1 << 16);
    let error = checked(&path).unwrap_err().to_string();
    assert!(error.contains("row 1 has lists of 68000000 bytes; the maximum is 67108864"), "{error}");
}
