use std::fs::{self, File};
use std::path::Path;
use std::sync::Arc;

use ::parquet::basic::{Compression as Codec, ZstdLevel};
use ::parquet::data_type::{ByteArray, ByteArrayType};
use ::parquet::file::properties::{EnabledStatistics, WriterProperties};
use ::parquet::file::writer::{SerializedFileWriter, SerializedRowGroupWriter};
use ::parquet::schema::parser::parse_message_type;
use arrow_array::types::Int32Type;
use arrow_array::{DictionaryArray, Int32Array, RecordBatch, StringArray};
use arrow_ipc::writer::StreamWriter;

use super::*;
use crate::files::{Compression, Kind};
use crate::progress::Meter;
use crate::record::Fields;
use crate::source;

/// Reads a file; returns what it expands to.
fn expanded(path: &Path, kind: Kind, compression: Option<Compression>, times: u64) -> Result<u64, DataError> {
    let file = DataFile { path: path.to_owned(), named: true, kind, compression };
    let bounds = Bounds::of(&file, times);
    let mut expansion = Expansion::within(bounds);
    for batch in source::open(0, &file, bounds, &Fields::new(None), &Meter::default())? {
        expansion.add(&batch?, &file)?;
    }
    Ok(expansion.made_bytes)
}

/// Writes rows that all have the same text, or are null, as one entry of a dictionary. As with older writers, the file does
/// not say how large the texts are.
fn repeated(path: &Path, text: Option<&str>, rows: usize) {
    let schema = parse_message_type("message m { optional binary text (UTF8); }").unwrap();
    let properties = WriterProperties::builder()
        .set_statistics_enabled(EnabledStatistics::None)
        .set_compression(Codec::ZSTD(ZstdLevel::default()))
        .set_dictionary_page_size_limit(1 << 24)
        .build();
    let file = File::create(path).unwrap();
    let mut writer = SerializedFileWriter::new(file, schema.into(), properties.into()).unwrap();
    let mut group = writer.next_row_group().unwrap();
    write_column(&mut group, text, rows);
    group.close().unwrap();
    writer.close().unwrap();
}

fn write_column(group: &mut SerializedRowGroupWriter<'_, File>, text: Option<&str>, rows: usize) {
    let mut column = group.next_column().unwrap().unwrap();
    let values: Vec<ByteArray> = text.map(|text| vec![ByteArray::from(text); rows]).unwrap_or_default();
    let levels = vec![i16::from(text.is_some()); rows];
    column.typed::<ByteArrayType>().write_batch(&values, Some(&levels), None).unwrap();
    column.close().unwrap();
}

#[track_caller]
fn refused(outcome: Result<u64, DataError>, position: &str, made_max: u64) {
    let Err(DataError::Expansion { file, position: at, file_bytes, made_bytes, limit_bytes, times }) =
        outcome
    else {
        panic!("{outcome:?}");
    };
    assert!(at.starts_with(position) && limit_bytes == FREE_BYTES && times == 1000, "{at}");
    // It is found before much more is read.
    assert!(file_bytes < FREE_BYTES / 1000 && made_bytes < made_max, "{made_bytes}");
    let error = DataError::Expansion { file, position: at, file_bytes, made_bytes, limit_bytes, times };
    assert!(error.to_string().contains("raise data.expansion_max"), "{error}");
}

#[test]
fn small_parquet_file_without_end_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.parquet");
    repeated(&path, Some(&"word ".repeat(1 << 16)), 2000);
    refused(expanded(&path, Kind::Parquet, None, 1000), "row group 0, row 8", FREE_BYTES + (1 << 23));
    assert!(expanded(&path, Kind::Parquet, None, 10_000_000).unwrap() > 2 * FREE_BYTES);
}

#[test]
fn rows_without_text_count_as_well() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.parquet");
    let rows = FREE_BYTES as usize / 128 + (1 << 14);
    repeated(&path, None, rows);
    refused(expanded(&path, Kind::Parquet, None, 1000), "row group 0, row 0", 2 * FREE_BYTES);
}

/// Metadata may be wrong, so what is read counts, too.
#[test]
fn later_row_group_is_refused_before_the_first_is_read() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.parquet");
    let declared = |texts: [(usize, usize); 2]| {
        let schema = parse_message_type("message m { optional binary text (UTF8); }").unwrap();
        let properties = WriterProperties::builder()
            .set_compression(Codec::ZSTD(ZstdLevel::default()))
            .set_dictionary_page_size_limit(1 << 24)
            .build();
        let file = File::create(&path).unwrap();
        let mut writer = SerializedFileWriter::new(file, schema.into(), properties.into()).unwrap();
        for (len, rows) in texts {
            let mut group = writer.next_row_group().unwrap();
            write_column(&mut group, Some(&"word ".repeat(len / 5)), rows);
            group.close().unwrap();
        }
        writer.close().unwrap();
    };
    declared([(5, 10), (1 << 20, 400)]);
    refused(expanded(&path, Kind::Parquet, None, 1000), "row group 1, row 0", 2 * FREE_BYTES);
    declared([(5, 10), (1 << 20, 200)]);
    assert!(expanded(&path, Kind::Parquet, None, 1000).unwrap() > 200 << 19);
}

#[test]
fn arrow_dictionary_is_refused_at_its_first_row() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.arrow");
    let long = "word ".repeat(1 << 14);
    let values = Arc::new(StringArray::from(vec![long.as_str()]));
    let column = DictionaryArray::<Int32Type>::new(Int32Array::from(vec![0; 10_000]), values);
    let batch = RecordBatch::try_from_iter([("text", Arc::new(column) as _)]).unwrap();
    let mut writer = StreamWriter::try_new(File::create(&path).unwrap(), &batch.schema()).unwrap();
    writer.write(&batch).unwrap();
    writer.finish().unwrap();
    let Err(DataError::Expansion { position, made_bytes, .. }) = expanded(&path, Kind::Arrow, None, 1000)
    else {
        panic!("it is refused");
    };
    assert_eq!((&*position, made_bytes), ("row 0", 10_000 * long.len() as u64 + 2 * 128));
    assert!(expanded(&path, Kind::Arrow, None, 10_000).unwrap() > 2 * FREE_BYTES);
}

#[test]
fn small_compressed_lines_without_end_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.jsonl.zst");
    let mut encoder = zstd::Encoder::new(File::create(&path).unwrap(), 1).unwrap();
    let line = format!("{{\"text\": \"{}\"}}\n", "x".repeat(1 << 20));
    (0..300).for_each(|_| std::io::Write::write_all(&mut encoder, line.as_bytes()).unwrap());
    encoder.finish().unwrap();
    refused(expanded(&path, Kind::Jsonl, Some(Compression::Zstd), 1000), "line 2", FREE_BYTES + (1 << 23));
}

#[test]
fn declared_size_of_compressed_lines_is_checked_first() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.jsonl.zst");
    let text = "{\"text\": \"x\"}\n".repeat(1 << 15);
    let mut bytes = zstd::bulk::compress(text.as_bytes(), 1).unwrap();
    fs::write(&path, &bytes).unwrap();
    let read = || expanded(&path, Kind::Jsonl, Some(Compression::Zstd), 1000);
    assert_eq!(read().unwrap(), text.len() as u64);
    // The header says 2^29 bytes more.
    let size = (text.len() as u32).to_le_bytes();
    let at = bytes.windows(4).position(|window| window == size).unwrap();
    bytes[at + 3] |= 0x20;
    fs::write(&path, &bytes).unwrap();
    let Err(DataError::Expansion { position, made_bytes, .. }) = read() else { panic!("it is refused") };
    assert_eq!((&*position, made_bytes), ("the whole file", text.len() as u64 + (1 << 29)));
}

#[test]
fn file_as_large_as_its_text_is_never_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.jsonl");
    fs::write(&path, "{\"text\": \"a\"}\n".repeat(10_000)).unwrap();
    assert_eq!(expanded(&path, Kind::Jsonl, None, 0).unwrap(), 14 * 10_000);
    for times in [0, 1] {
        assert_eq!(Bounds { file_bytes: 1 << 40, times }.limit_bytes(), 1 << 40);
    }
}
