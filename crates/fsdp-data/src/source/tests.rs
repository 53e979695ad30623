mod arrow;
#[cfg(feature = "tokenizers")]
mod nested;
#[cfg(feature = "tokenizers")]
mod odd;

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use ::parquet::basic::{BrotliLevel, Compression as Codec, GzipLevel, ZstdLevel};
use ::parquet::data_type::{ByteArray, ByteArrayType, Int64Type};
use ::parquet::file::properties::WriterProperties;
use ::parquet::file::reader::{FileReader, SerializedFileReader};
use ::parquet::file::writer::SerializedFileWriter;
use ::parquet::schema::parser::parse_message_type;
use flate2::write::GzEncoder;
use fsdp_config::{DataConfig, EndToken, Format, LossOn, Malformed, Packing, TokenRef};
use proptest::prelude::*;
use serde_json::json;

use crate::DataError;
use crate::dataset::Dataset;
use crate::loading::Loading;

fn config() -> DataConfig {
    DataConfig {
        train: Vec::new(),
        eval: Vec::new(),
        eval_every: 0,
        eval_batches: 0,
        format: Format::Auto,
        column: None,
        malformed: Malformed::Error,
        expansion_max: 1000,
        tokenizer: "bytes".to_owned(),
        cache: None,
        prompt: None,
        completion: None,
        chat_template: None,
        date: None,
        loss_on: LossOn::Answers,
        loss_on_reasoning: true,
        packing: Packing::Documents,
        bos: Some(EndToken::Token(TokenRef::Id(1))),
        eos: Some(EndToken::Token(TokenRef::Id(2))),
        pad: TokenRef::Id(0),
        seq_len: 12,
        shuffle: false,
        seed: 0,
        source: Vec::new(),
    }
}

fn load(paths: &[PathBuf], config: &DataConfig) -> Result<Dataset, DataError> {
    let paths: Vec<String> = paths.iter().map(|path| path.to_str().unwrap().to_owned()).collect();
    Dataset::load(&paths, config, &Loading::quietly(Path::new("out")))
}

#[track_caller]
fn assert_refused(path: &Path, config: &DataConfig, fragments: &[&str]) {
    let message = load(&[path.to_owned()], config).unwrap_err().to_string();
    for fragment in fragments {
        assert!(message.contains(fragment), "`{fragment}` is not in `{message}`");
    }
}

/// Returns all data that a trainer sees.
fn seen(data: &Dataset) -> Vec<(Vec<u32>, Vec<u32>)> {
    (0..data.len()).map(|index| data.sample(index)).collect()
}

/// Writes a file with a column `text`, in which `None` is null, and with row groups of these lengths.
fn parquet_of_text(path: &Path, groups: &[&[Option<&str>]], codec: Codec) {
    let schema = parse_message_type("message m { optional binary text (UTF8); required int64 id; }").unwrap();
    let properties = WriterProperties::builder().set_compression(codec).build();
    let mut writer =
        SerializedFileWriter::new(File::create(path).unwrap(), schema.into(), properties.into()).unwrap();
    for rows in groups {
        let mut group = writer.next_row_group().unwrap();
        let values: Vec<ByteArray> = rows.iter().flatten().map(|&text| text.into()).collect();
        let levels: Vec<i16> = rows.iter().map(|text| i16::from(text.is_some())).collect();
        let mut column = group.next_column().unwrap().unwrap();
        column.typed::<ByteArrayType>().write_batch(&values, Some(&levels), None).unwrap();
        column.close().unwrap();
        let ids: Vec<i64> = (0..rows.len() as i64).collect();
        let mut column = group.next_column().unwrap().unwrap();
        column.typed::<Int64Type>().write_batch(&ids, None, None).unwrap();
        column.close().unwrap();
        group.close().unwrap();
    }
    writer.close().unwrap();
}

fn lines_of(documents: &[String]) -> Vec<u8> {
    documents.iter().flat_map(|text| format!("{}\n", json!({"id": 1, "text": text})).into_bytes()).collect()
}

fn write_part(path: &Path, documents: &[String], form: usize, rows_per_group: usize) -> PathBuf {
    let named = |extension: &str| path.with_extension(extension);
    let lines = lines_of(documents);
    let (path, bytes) = match form {
        0 => (named("jsonl"), lines),
        1 => {
            let mut encoder = GzEncoder::new(Vec::new(), flate2::Compression::fast());
            encoder.write_all(&lines).unwrap();
            (named("jsonl.gz"), encoder.finish().unwrap())
        }
        2 => (named("jsonl.zst"), zstd::encode_all(&*lines, 1).unwrap()),
        3 => {
            // Concatenated members and frames form a single content.
            let half = lines.len() / 2;
            let frames = [&lines[..half], &lines[half..]].map(|part| zstd::encode_all(part, 1).unwrap());
            (named("jsonl.zst"), frames.concat())
        }
        form => {
            let codecs = [
                Codec::UNCOMPRESSED,
                Codec::SNAPPY,
                Codec::GZIP(GzipLevel::default()),
                Codec::ZSTD(ZstdLevel::default()),
                Codec::BROTLI(BrotliLevel::default()),
                Codec::LZ4,
                Codec::LZ4_RAW,
            ];
            let rows: Vec<Option<&str>> = documents.iter().map(|text| Some(&**text)).collect();
            let groups: Vec<&[Option<&str>]> = rows.chunks(rows_per_group).collect();
            let path = named("parquet");
            parquet_of_text(&path, &groups, codecs[form - 4]);
            return path;
        }
    };
    fs::write(&path, bytes).unwrap();
    path
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn samples_do_not_depend_on_file_layout_or_format(
        documents in prop::collection::vec("[a-c\\PC]{0,20}", 1..40),
        cuts in prop::collection::vec((0usize..40, 0usize..11, 1usize..9), 1..6),
        is_stream: bool,
    ) {
        let dir = tempfile::tempdir().unwrap();
        let mut config = config();
        if is_stream {
            config.packing = Packing::Stream;
        }
        let plain = dir.path().join("plain.jsonl");
        fs::write(&plain, lines_of(&documents)).unwrap();
        let expected = load(&[plain], &config).unwrap();

        let mut ends: Vec<usize> = cuts.iter().map(|(at, ..)| (*at).min(documents.len())).collect();
        ends.sort_unstable();
        ends.push(documents.len());
        let mut start = 0;
        let mut parts = Vec::new();
        for (index, &end) in ends.iter().enumerate() {
            let (_, form, rows_per_group) = cuts[index % cuts.len()];
            let path = dir.path().join(format!("part-{index}"));
            parts.push(write_part(&path, &documents[start..end], form, rows_per_group));
            start = end;
        }
        let data = load(&parts, &config).unwrap();
        prop_assert_eq!(data.digest(), expected.digest());
        prop_assert_eq!(seen(&data), seen(&expected));
    }
}

#[test]
fn compressed_text_matches_plain_text() {
    let dir = tempfile::tempdir().unwrap();
    let [plain, packed] = ["a.txt", "a.txt.gz"].map(|name| dir.path().join(name));
    fs::write(&plain, "some text").unwrap();
    let mut encoder = GzEncoder::new(File::create(&packed).unwrap(), flate2::Compression::fast());
    encoder.write_all(b"some text").unwrap();
    encoder.finish().unwrap();
    let [plain, packed] = [plain, packed].map(|path| load(&[path], &config()).unwrap());
    assert_eq!(seen(&packed), seen(&plain));
}

#[test]
fn token_ids_match_across_parquet_jsonl_and_token_file() {
    let dir = tempfile::tempdir().unwrap();
    let documents: [&[i64]; 4] = [&[5, 6, 7], &[], &[65_535], &[8; 30]];
    let path = dir.path().join("ids.parquet");
    let schema = parse_message_type(
        "message m { optional group input_ids (LIST) { repeated group list { optional int64 element; } } }",
    );
    let properties = WriterProperties::builder().build();
    let file = File::create(&path).unwrap();
    let mut writer = SerializedFileWriter::new(file, schema.unwrap().into(), properties.into()).unwrap();
    let mut group = writer.next_row_group().unwrap();
    let mut column = group.next_column().unwrap().unwrap();
    let (mut values, mut definitions, mut repetitions) = (Vec::new(), Vec::new(), Vec::new());
    for ids in documents {
        values.extend_from_slice(ids);
        definitions.extend(if ids.is_empty() { vec![1] } else { vec![3; ids.len()] });
        repetitions.extend((0..ids.len().max(1)).map(|index| i16::from(index > 0)));
    }
    column.typed::<Int64Type>().write_batch(&values, Some(&definitions), Some(&repetitions)).unwrap();
    column.close().unwrap();
    group.close().unwrap();
    writer.close().unwrap();
    let lines = dir.path().join("ids.jsonl");
    let text: String = documents.iter().map(|ids| format!("{}\n", json!({"input_ids": ids}))).collect();
    fs::write(&lines, text).unwrap();
    let bytes = dir.path().join("ids.bin");
    let ids: Vec<u8> = documents.concat().iter().flat_map(|&id| (id as u16).to_le_bytes()).collect();
    fs::write(&bytes, ids).unwrap();

    let of_tokens = DataConfig { format: Format::TokensU16, ..config() };
    let expected = load(&[bytes], &of_tokens).unwrap();
    let [rows, lines] = [path, lines].map(|path| load(&[path], &config()).unwrap());
    assert_eq!([rows.digest(), lines.digest()], [expected.digest(); 2]);
    assert_eq!(seen(&rows), seen(&lines));
    assert_eq!((rows.len(), rows.sample(0).0[..4].to_vec()), (3, vec![1, 5, 6, 7]));
}

#[test]
fn invalid_record_error_names_location() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.parquet");
    let rows: Vec<Option<&str>> = (0..9).map(|row| (row != 7).then_some("text")).collect();
    parquet_of_text(&path, &[&rows[..5], &rows[5..]], Codec::SNAPPY);
    assert_refused(&path, &config(), &["a.parquet: row group 1, row 2: \"text\" is null"]);
    let of = |column: &str| DataConfig { column: Some(column.to_owned()), ..config() };
    assert_refused(&path, &of("id"), &["row group 0, row 0: \"id\" is a number"]);
    assert_refused(&path, &of("body"), &["there is no \"body\"", "there are: text, id"]);

    let lines = dir.path().join("a.jsonl");
    fs::write(&lines, "{\"text\": \"a\"}\n\n{\"text\": 5}\nnonsense\n").unwrap();
    assert_refused(&lines, &config(), &["a.jsonl: line 3: \"text\" is a number"]);
    fs::write(&lines, b"{\"text\": \"a\"}\n{\"text\": \"\xff\"}\n").unwrap();
    assert_refused(&lines, &config(), &["a.jsonl: line 2: ", "every line must be an object"]);
}

#[test]
fn malformed_skip_drops_and_counts_bad_records() {
    let dir = tempfile::tempdir().unwrap();
    let [lines, rows] = ["a.jsonl", "b.parquet"].map(|name| dir.path().join(name));
    fs::write(&lines, "{\"text\": \"abc\"}\nnonsense\n{\"text\": null}\n{\"text\": \"\"}\n").unwrap();
    parquet_of_text(&rows, &[&[None, Some("def")]], Codec::UNCOMPRESSED);
    let config = DataConfig {
        malformed: Malformed::Skip,
        packing: Packing::Stream,
        bos: None,
        eos: None,
        seq_len: 5,
        ..config()
    };
    let data = load(&[lines, rows], &config).unwrap();
    assert_eq!(data.sample(0).0, "abcde".bytes().map(u32::from).collect::<Vec<_>>());
    let warnings: Vec<String> = data.warnings().iter().map(ToString::to_string).collect();
    let [empty, left_out] = &*warnings else { panic!("{warnings:?}") };
    assert!(empty.starts_with("1 documents are empty") && empty.ends_with("a.jsonl"), "{empty}");
    assert!(left_out.starts_with("3 lines or rows are left out"), "{left_out}");
}

#[test]
fn truncated_file_is_rejected_and_damage_never_panics() {
    let dir = tempfile::tempdir().unwrap();
    let documents: Vec<String> = (0..200).map(|index| format!("document {index}")).collect();
    for form in [1, 2, 5] {
        let path = write_part(&dir.path().join(format!("part-{form}")), &documents, form, 50);
        let whole = fs::read(&path).unwrap();
        for cut in [whole.len() - 1, whole.len() / 2, 20] {
            fs::write(&path, &whole[..cut]).unwrap();
            assert_refused(&path, &config(), &["truncated"]);
        }
        // A changed byte causes an error or different data, but never ends the process.
        for at in (0..whole.len()).step_by(7) {
            let mut changed = whole.clone();
            changed[at] ^= 0x55;
            fs::write(&path, &changed).unwrap();
            drop(load(std::slice::from_ref(&path), &config()));
        }
    }
    let path = dir.path().join("plain.jsonl.gz");
    fs::write(&path, lines_of(&documents)).unwrap();
    assert_refused(&path, &config(), &["cannot be decompressed as gzip"]);
}

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("src/source/fixtures").join(name)
}

/// Reads the output of `fixtures/write.py`: written by `pyarrow` and `datasets`, with all codecs, page versions and
/// types, and with folders of `save_to_disk`.
#[test]
fn pyarrow_and_datasets_files_yield_written_documents() {
    let dir = tempfile::tempdir().unwrap();
    let plain = dir.path().join("plain.jsonl");
    let first = ["the first", "", "ünïcödé ✓", "the first", "line\nbreak\0"].map(str::to_owned);
    let mut texts = first.to_vec();
    texts.push("x".repeat(300));
    texts.extend((0..20).map(|row| format!("row {row}")));
    fs::write(&plain, lines_of(&texts)).unwrap();
    let expected = load(std::slice::from_ref(&plain), &config()).unwrap();
    let of_parquet = ["snappy", "zstd-v2", "gzip-plain", "binary", "datasets", "lz4", "brotli"]
        .map(|name| format!("{name}.parquet"));
    let of_arrow = ["saved", "text.arrow", "large.arrow", "view.arrow", "bytes.arrow", "dictionary.arrow"]
        .map(str::to_owned);
    for name in of_parquet.iter().chain(&of_arrow) {
        let data = load(&[fixture(name)], &config()).unwrap();
        assert_eq!((data.digest(), seen(&data)), (expected.digest(), seen(&expected)), "{name}");
    }

    let mut ids: Vec<Vec<u32>> = vec![vec![1, 2, 3], vec![], vec![65_535; 40], vec![0]];
    ids.extend((0..20).map(|id| vec![id, id + 1]));
    let lines: String = ids.iter().map(|ids| format!("{}\n", json!({"input_ids": ids}))).collect();
    fs::write(&plain, lines).unwrap();
    let expected = load(&[plain], &config()).unwrap();
    for name in [
        "ids-int32.parquet",
        "ids-int64.parquet",
        "ids-uint16.parquet",
        "saved-ids",
        "ids-uint16.arrow",
        "ids-large.arrow",
    ] {
        let data = load(&[fixture(name)], &config()).unwrap();
        assert_eq!((data.digest(), seen(&data)), (expected.digest(), seen(&expected)), "{name}");
    }
}

#[test]
fn every_flipped_bit_in_page_with_checksum_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.parquet");
    for name in ["checksums.parquet", "checksums-dictionary.parquet"] {
        let whole = fs::read(fixture(name)).unwrap();
        fs::write(&path, &whole).unwrap();
        load(std::slice::from_ref(&path), &config()).unwrap();
        let reader = SerializedFileReader::new(File::open(&path).unwrap()).unwrap();
        let mut pages = reader.get_row_group(0).unwrap().get_column_page_reader(1).unwrap();
        let mut count = 0;
        while let Some(page) = pages.get_next_page().unwrap() {
            let bytes = page.buffer();
            let start = whole.windows(bytes.len()).position(|window| window == &bytes[..]).unwrap();
            for (at, bit) in (start..start + bytes.len()).flat_map(|at| [0, 3, 7].map(|bit| (at, bit))) {
                let mut changed = whole.clone();
                changed[at] ^= 1 << bit;
                fs::write(&path, changed).unwrap();
                assert_refused(&path, &config(), &["a.parquet: row group 0, row 0, column \"text\"", "CRC"]);
            }
            count += 1;
        }
        assert!(count > 0, "{name}");
    }
}

#[test]
fn row_with_endless_list_is_refused_before_it_is_read() {
    let fragments = ["row group 0, row 0", "lists of 20000000 values; the maximum is 16777216"];
    assert_refused(&fixture("endless.parquet"), &config(), &fragments);
}

#[test]
fn byte_order_mark_is_skipped_only_at_file_start() {
    let dir = tempfile::tempdir().unwrap();
    let line = "{\"text\": \"ab\"}\n";
    let of = |name: &str, text: String| {
        let path = dir.path().join(name);
        fs::write(&path, text).unwrap();
        (load(std::slice::from_ref(&path), &config()), path)
    };
    let (plain, _) = of("a.jsonl", line.repeat(2));
    let (marked, _) = of("b.jsonl", format!("\u{feff}{}", line.repeat(2)));
    assert_eq!(seen(&marked.unwrap()), seen(&plain.unwrap()));
    let (_, path) = of("c.jsonl", format!("{line}\u{feff}{line}"));
    assert_refused(&path, &config(), &["c.jsonl: line 2"]);
}
