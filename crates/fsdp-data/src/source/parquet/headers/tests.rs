use std::io::Write;

use parquet::basic::{Compression, ZstdLevel};
use parquet::data_type::{ByteArray, ByteArrayType};
use parquet::file::properties::{WriterProperties, WriterVersion};
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use parquet::schema::types::Type;
use proptest::prelude::*;
use tempfile::NamedTempFile;

use super::super::open;
use super::*;
use crate::error::DataError;
use crate::files::{DataFile, Kind};
use crate::progress::Meter;
use crate::record::Fields;
use crate::source::expansion::Bounds;

/// The message type with a column nested as deep as there are groups, beside a plain one.
fn schema(groups: &[bool]) -> String {
    let open: String = groups
        .iter()
        .map(|&is_list| if is_list { "repeated group g { " } else { "optional group g { " })
        .collect();
    let close = "} ".repeat(groups.len());
    format!("message m {{ required binary a (UTF8); {open}optional int32 x; {close}required int64 z; }}")
}

fn write(schema: &str, texts: &[String], properties: WriterProperties) -> NamedTempFile {
    let file = NamedTempFile::new().unwrap();
    let schema = parse_message_type(schema).unwrap();
    let mut writer =
        SerializedFileWriter::new(file.reopen().unwrap(), schema.into(), properties.into()).unwrap();
    if !texts.is_empty() {
        let mut group = writer.next_row_group().unwrap();
        let mut column = group.next_column().unwrap().unwrap();
        let values: Vec<ByteArray> = texts.iter().map(|text| ByteArray::from(text.as_str())).collect();
        column.typed::<ByteArrayType>().write_batch(&values, None, None).unwrap();
        column.close().unwrap();
        group.close().unwrap();
    }
    writer.close().unwrap();
    file
}

fn depth(group: &Type) -> usize {
    if group.is_primitive() {
        0
    } else {
        1 + group.get_fields().iter().map(|field| depth(field)).max().unwrap_or(0)
    }
}

proptest! {
    #[test]
    fn schema_depth_is_that_of_library(groups in proptest::collection::vec(any::<bool>(), 0..60)) {
        let file = write(&schema(&groups), &[], WriterProperties::default());
        let reader = SerializedFileReader::new(file.reopen().unwrap()).unwrap();
        let expected = depth(reader.metadata().file_metadata().schema());
        prop_assert_eq!(schema_depth(file.as_file()).unwrap(), Some(expected));
        prop_assert_eq!(expected, groups.len() + 1);
    }

    #[test]
    fn largest_page_is_that_of_library(
        lens in proptest::collection::vec(0..3000_usize, 1..60),
        (is_second, has_dictionary, is_packed) in any::<(bool, bool, bool)>(),
        page_bytes in 1..5000_usize,
    ) {
        let texts: Vec<String> = lens.iter().map(|&len| "ab".repeat(len)).collect();
        let properties = WriterProperties::builder()
            .set_writer_version(if is_second { WriterVersion::PARQUET_2_0 } else { WriterVersion::PARQUET_1_0 })
            .set_dictionary_enabled(has_dictionary)
            .set_compression(if is_packed { Compression::ZSTD(ZstdLevel::default()) } else { Compression::UNCOMPRESSED })
            .set_data_page_size_limit(page_bytes)
            .set_write_page_header_statistics(true)
            .set_statistics_truncate_length(None)
            .set_write_batch_size(4)
            .build();
        let file = write("message m { required binary a (UTF8); }", &texts, properties);
        let reader = SerializedFileReader::new(file.reopen().unwrap()).unwrap();
        let group = reader.get_row_group(0).unwrap();
        let pages = group.get_column_page_reader(0).unwrap();
        let expected = pages.map(|page| page.unwrap().buffer().len() as u64).max().unwrap();
        let range = group.metadata().column(0).byte_range();
        prop_assert_eq!(largest_page(file.as_file(), range).unwrap(), Some(expected));
    }

    #[test]
    fn damaged_headers_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        let mut file = NamedTempFile::new().unwrap();
        file.write_all(&bytes).unwrap();
        let _ = (depth_in(&bytes), schema_depth(file.as_file()).unwrap());
        let _ = largest_page(file.as_file(), (0, bytes.len() as u64)).unwrap();
    }
}

/// A file without rows, whose only column is nested `depth` deep.
fn nested(depth: u32) -> NamedTempFile {
    let mut footer = vec![0x15, 0x02, 0x19, 0xfc];
    let mut count = depth + 1;
    while count > 0x7f {
        footer.push(count as u8 | 0x80);
        count >>= 7;
    }
    footer.push(count as u8);
    for _ in 0..depth {
        // A name, and one child.
        footer.extend_from_slice(&[0x48, 1, b'a', 0x15, 2, 0]);
    }
    // The type, a name.
    footer.extend_from_slice(&[0x15, 2, 0x38, 1, b'a', 0]);
    footer.extend_from_slice(&[0x16, 0, 0x19, 0x0c, 0]);
    let len = (footer.len() as u32).to_le_bytes();
    let mut file = NamedTempFile::new().unwrap();
    file.write_all(&[b"PAR1", &footer[..], &len, b"PAR1"].concat()).unwrap();
    file
}

#[test]
fn deeply_nested_columns_are_refused_without_recursion() {
    let opened = |file: &NamedTempFile| {
        let file =
            DataFile { path: file.path().to_owned(), named: true, kind: Kind::Parquet, compression: None };
        open(0, &file, Bounds::of(&file, 100), &Fields::new(None), &Meter::default())
            .err()
            .unwrap()
            .to_string()
    };
    let error = opened(&nested(200_000));
    assert!(error.contains("its columns are nested 200000 deep; the maximum is 128"), "{error}");
    assert!(!opened(&nested(128)).contains("nested"));
}

#[test]
fn page_that_asks_for_too_much_memory_is_refused() {
    let texts = vec!["x".repeat(150 << 20)];
    let properties = WriterProperties::builder().set_compression(Compression::ZSTD(ZstdLevel::default()));
    let properties = properties.set_dictionary_enabled(false).build();
    let written = write("message m { required binary text (UTF8); }", &texts, properties);
    let file =
        DataFile { path: written.path().to_owned(), named: true, kind: Kind::Parquet, compression: None };
    let read = |times| {
        let bounds = Bounds::of(&file, times);
        let rows = open(0, &file, bounds, &Fields::new(None), &Meter::default());
        rows.and_then(|mut rows| rows.next().unwrap())
    };
    assert_eq!(read(100).unwrap().len_bytes(), 150 << 20);
    // The header of the page says 2^27 bytes more than the metadata, of which the page is all: a length, and the text.
    let zigzag = 2 * ((150_u64 << 20) + 4);
    let size: Vec<u8> =
        (0..5).map(|at| (zigzag >> (7 * at)) as u8 & 0x7f | if at < 4 { 0x80 } else { 0 }).collect();
    let mut bytes = std::fs::read(written.path()).unwrap();
    let at = bytes.windows(5).position(|window| window == size).unwrap();
    bytes[at + 4] += 1;
    std::fs::write(written.path(), bytes).unwrap();
    let (asked, found) = ((278_u64 << 20) + 4, read(100));
    assert!(
        matches!(found, Err(DataError::Expansion { made_bytes, .. }) if made_bytes == asked),
        "{found:?}"
    );
    assert!(matches!(read(1_000_000), Err(DataError::Malformed { .. })));
}
