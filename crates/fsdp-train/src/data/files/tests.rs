use tempfile::TempDir;

use super::*;
use crate::config::{Format, Resolved};
use crate::data::tokens::Width;

/// A folder with empty files.
fn folder(files: &[&str]) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for name in files {
        let path = folder.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, "").unwrap();
    }
    folder
}

/// What paths in a folder lead to: names, kinds and compressions.
fn found(
    folder: &TempDir,
    paths: &[&str],
    format: Format,
) -> Result<Vec<(String, Kind, Option<Compression>)>, String> {
    let mut config = Resolved::parse(
        "model.path = 'm'\ndata = { train = ['x'], seq_len = 1 }\ntrain.steps = 1\ntrain.micro_batch_size = 1\n\
         train.global_batch_size = 1\nrun.out_dir = 'out'\n",
        "test",
        &[],
    )
    .unwrap()
    .config
    .data;
    config.format = format;
    let absolute = |path: &&str| folder.path().join(path).to_str().unwrap().to_owned();
    let paths: Vec<String> = paths.iter().map(absolute).collect();
    let found = find(&paths, &config, Path::new("out")).map_err(|error| error.to_string())?;
    let relative = |path: &Path| path.strip_prefix(folder.path()).unwrap().to_str().unwrap().to_owned();
    Ok(found.into_iter().map(|file| (relative(&file.path), file.kind, file.compression)).collect())
}

fn names(found: Result<Vec<(String, Kind, Option<Compression>)>, String>) -> Vec<String> {
    found.unwrap().into_iter().map(|(name, ..)| name).collect()
}

#[test]
fn names_say_what_files_hold_unless_the_format_does() {
    let files = ["a.jsonl.gz", "b.ndjson", "c.PARQUET", "d.txt.zst", "e.rs"];
    let folder = folder(&files);
    let by_name = found(&folder, &files, Format::Auto).unwrap();
    let expected = [
        (Kind::Jsonl, Some(Compression::Gzip)),
        (Kind::Jsonl, None),
        (Kind::Parquet, None),
        (Kind::Text, Some(Compression::Zstd)),
        (Kind::Text, None),
    ];
    assert!(by_name.iter().map(|(_, kind, compression)| (*kind, *compression)).eq(expected));
    let as_lines = found(&folder, &["e.rs", "d.txt.zst"], Format::Jsonl).unwrap();
    assert!(as_lines.iter().all(|(_, kind, _)| *kind == Kind::Jsonl));
    let as_ids = found(&folder, &["e.rs"], Format::TokensU16).unwrap();
    assert_eq!(as_ids[0].1, Kind::Tokens(Width::U16));
}

#[test]
fn names_that_do_not_say_it_are_refused() {
    for (name, fragment) in [
        ("a.bin", "set data.format to \"tokens-u16\" or \"tokens-u32\""),
        ("a.json", "set data.format to \"jsonl\" or \"text\""),
        ("data-00000-of-00001.arrow", "to_parquet"),
        ("a.parquet.gz", "decompress it"),
    ] {
        let fault = found(&folder(&[name]), &[name], Format::Auto).unwrap_err();
        assert!(fault.contains(name) && fault.contains(fragment), "{fault}");
    }
    let fault = found(&folder(&["a.bin.gz"]), &["a.bin.gz"], Format::TokensU32).unwrap_err();
    assert!(fault.contains("decompress it"), "{fault}");
}

#[test]
fn a_data_set_of_hugging_face_is_its_parquet_files() {
    let folder = folder(&[
        "README.md",
        ".gitattributes",
        "LICENSE",
        "dataset_infos.json",
        "data/train-00001-of-00002.parquet",
        "data/train-00000-of-00002.parquet",
    ]);
    let expected = ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"];
    assert_eq!(names(found(&folder, &[""], Format::Auto)), expected);
}

#[test]
fn a_folder_of_sources_is_text_and_what_is_mixed_is_refused() {
    let sources = folder(&["README.md", "src/a.rs", "src/b.py", "x.gz", "y.txt.gz"]);
    let expected = [
        ("README.md", None),
        ("src/a.rs", None),
        ("src/b.py", None),
        ("x.gz", None),
        ("y.txt.gz", Some(Compression::Gzip)),
    ];
    let text = found(&sources, &[""], Format::Auto).unwrap();
    assert!(text.iter().map(|(name, _, compression)| (&**name, *compression)).eq(expected));
    for others in [&["a.jsonl", "b.parquet"][..], &["a.jsonl", "b.rs"]] {
        let mixed = folder(others);
        let fault = found(&mixed, &[""], Format::Auto).unwrap_err();
        assert!(fault.contains("set data.format to what is data"), "{fault}");
        assert_eq!(names(found(&mixed, &[""], Format::Jsonl)), ["a.jsonl"]);
    }
    let saved = folder(&["train/data-00000-of-00001.arrow", "train/state.json", "dataset_dict.json"]);
    let fault = found(&saved, &[""], Format::Auto).unwrap_err();
    assert!(fault.contains("save_to_disk") && fault.contains("to_parquet"), "{fault}");
}

#[test]
fn a_folder_of_several_splits_is_refused() {
    let folder = folder(&["ds/data/train-0.parquet", "ds/data/validation-0.parquet", "one/latest-0.parquet"]);
    let fault = found(&folder, &["ds"], Format::Auto).unwrap_err();
    assert!(
        fault.contains("it holds the splits train, validation") && fault.contains("ds/**/train-*"),
        "{fault}"
    );
    assert_eq!(names(found(&folder, &["ds/**/train-*"], Format::Auto)), ["ds/data/train-0.parquet"]);
    assert_eq!(names(found(&folder, &["one"], Format::Auto)), ["one/latest-0.parquet"]);
}

#[test]
fn patterns_are_those_of_a_shell_and_a_file_of_that_name_comes_first() {
    let folder =
        folder(&["b-2.txt", "b-1.txt", ".b-0.txt", "c.txt", "deep/b-3.txt", "deep/d[1].txt", "deep/d1.txt"]);
    assert_eq!(names(found(&folder, &["b-*.txt"], Format::Auto)), ["b-1.txt", "b-2.txt"]);
    assert_eq!(names(found(&folder, &["**/b-?.txt"], Format::Auto)), ["b-1.txt", "b-2.txt", "deep/b-3.txt"]);
    assert_eq!(names(found(&folder, &["deep/d[1].txt"], Format::Auto)), ["deep/d[1].txt"]);
    assert_eq!(names(found(&folder, &["d*/d[0-9].txt"], Format::Auto)), ["deep/d1.txt"]);
    let fault = found(&folder, &["x-*.txt"], Format::Auto).unwrap_err();
    assert!(fault.contains("no files that match in") && fault.contains("x-*.txt"), "{fault}");
}
