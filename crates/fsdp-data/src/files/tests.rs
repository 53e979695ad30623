use fsdp_config::{Format, Resolved};
use tempfile::TempDir;

use super::*;
use crate::tokens::Width;

/// Creates a folder with empty files.
fn folder(files: &[&str]) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for name in files {
        let path = folder.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, "").unwrap();
    }
    folder
}

/// Returns the files found for paths in a folder: names, kinds and compressions.
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
fn file_kind_follows_name_unless_format_is_set() {
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
fn ambiguous_or_unsupported_file_names_are_rejected() {
    for (name, fragment) in [
        ("a.bin", "set data.format to \"tokens-u16\" or \"tokens-u32\""),
        ("a.json", "set data.format to \"jsonl\" or \"text\""),
        ("a.parquet.gz", "decompress it"),
        ("a.arrow.zst", "decompress it"),
    ] {
        let fault = found(&folder(&[name]), &[name], Format::Auto).unwrap_err();
        assert!(fault.contains(name) && fault.contains(fragment), "{fault}");
    }
    let fault = found(&folder(&["a.bin.gz"]), &["a.bin.gz"], Format::TokensU32).unwrap_err();
    assert!(fault.contains("decompress it"), "{fault}");
}

#[test]
fn hugging_face_dataset_folder_yields_parquet_files() {
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
fn source_folder_is_text_and_mixed_folder_is_rejected() {
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
        assert!(fault.contains("set data.format to that of the data, such as data.format = \""), "{fault}");
        assert_eq!(fault.contains("b.rs)"), others[1] == "b.rs", "{fault}");
        assert_eq!(names(found(&mixed, &[""], Format::Jsonl)), ["a.jsonl"]);
    }
    let cached = folder(&["a.arrow", "a_builder.lock", ".hidden", "dataset_info.json"]);
    assert_eq!(names(found(&cached, &[""], Format::Auto)), ["a.arrow"]);
    let many = folder(&["a.arrow", "1.png", "2.png", "3.png", "4.png"]);
    let fault = found(&many, &[""], Format::Auto).unwrap_err();
    assert!(fault.contains("4 others (") && fault.contains("3.png)"), "{fault}");
    assert!(fault.contains("data.format = \"arrow\""), "{fault}");
    assert_eq!(names(found(&many, &[""], Format::Arrow)), ["a.arrow"]);
}

/// Creates a folder as `save_to_disk` writes it, with two splits.
fn saved() -> tempfile::TempDir {
    let saved = folder(&[
        "dataset_dict.json",
        "sft/dataset_info.json",
        "sft/data-00000-of-00002.arrow",
        "sft/data-00001-of-00002.arrow",
        "sft/cache-1234.arrow",
        "sft/other.arrow",
        "sft/state.json",
        "pref/data-00000-of-00001.arrow",
        "pref/state.json",
    ]);
    let write = |name: &str, text: &str| std::fs::write(saved.path().join(name), text).unwrap();
    write("dataset_dict.json", r#"{"splits": ["sft", "pref"]}"#);
    let files = r#"[{"filename": "data-00000-of-00002.arrow"}, {"filename": "data-00001-of-00002.arrow"}]"#;
    write("sft/state.json", &format!(r#"{{"_data_files": {files}, "_split": null}}"#));
    write("pref/state.json", r#"{"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}"#);
    saved
}

#[test]
fn saved_dataset_yields_files_named_by_its_state() {
    let saved = saved();
    let expected = ["sft/data-00000-of-00002.arrow", "sft/data-00001-of-00002.arrow"];
    for format in [Format::Auto, Format::Arrow] {
        assert_eq!(names(found(&saved, &["sft"], format)), expected);
    }
    let all = found(&saved, &["sft"], Format::Auto).unwrap();
    assert!(all.iter().all(|(_, kind, _)| *kind == Kind::Arrow));
    let fault = found(&saved, &[""], Format::Auto).unwrap_err();
    assert!(fault.contains("it holds the splits sft, pref; name the folder of one"), "{fault}");
}

#[test]
fn unusable_dataset_state_is_rejected() {
    let saved = saved();
    let of = |state: &str| {
        std::fs::write(saved.path().join("sft/state.json"), state).unwrap();
        found(&saved, &["sft"], Format::Auto).unwrap_err()
    };
    let absent = of(r#"{"_data_files": [{"filename": "gone.arrow"}]}"#);
    assert!(
        absent.contains("state.json: it names") && absent.contains("gone.arrow, which does not exist"),
        "{absent}"
    );
    let chosen = of(r#"{"_data_files": [], "_indices_data_files": [{"filename": "indices.arrow"}]}"#);
    assert!(chosen.contains("flatten_indices()"), "{chosen}");
    let other = of("[]");
    assert!(other.contains("`save_to_disk` of datasets does not write such a file"), "{other}");
}

#[test]
fn folder_with_several_splits_is_rejected() {
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
fn glob_patterns_match_like_shell_and_literal_name_wins() {
    let folder =
        folder(&["b-2.txt", "b-1.txt", ".b-0.txt", "c.txt", "deep/b-3.txt", "deep/d[1].txt", "deep/d1.txt"]);
    assert_eq!(names(found(&folder, &["b-*.txt"], Format::Auto)), ["b-1.txt", "b-2.txt"]);
    assert_eq!(names(found(&folder, &["**/b-?.txt"], Format::Auto)), ["b-1.txt", "b-2.txt", "deep/b-3.txt"]);
    assert_eq!(names(found(&folder, &["deep/d[1].txt"], Format::Auto)), ["deep/d[1].txt"]);
    assert_eq!(names(found(&folder, &["d*/d[0-9].txt"], Format::Auto)), ["deep/d1.txt"]);
    let fault = found(&folder, &["x-*.txt"], Format::Auto).unwrap_err();
    assert!(fault.contains("no files that match in") && fault.contains("x-*.txt"), "{fault}");
}
