//! Which files are read, and in which format.

use super::*;

#[test]
fn folders_skip_hidden_target_and_binary_files() {
    let files = Files::new(&[
        ("a.txt", b"keep"),
        (".hidden", b"no"),
        (".git/config", b"no"),
        ("target/x.txt", b"no"),
        ("deep/target/x.txt", b"no"),
        ("image.png", b"\x89PNG\xff"),
        ("deep/b.rs", b"also"),
    ]);
    assert_eq!(files.load(&config(Packing::Stream, 1)).unwrap().corpus.len(), "keepalso".len());
}

#[test]
fn named_file_may_be_hidden_but_must_be_text() {
    let files = Files::new(&[(".hidden", b"yes"), ("bad.txt", b"ab\xffcd")]);
    let load = |name: &str| {
        Dataset::load(&[files.name(name)], &config(Packing::Stream, 1), &Loading::quietly(Path::new("out")))
    };
    assert_eq!(load(".hidden").unwrap().corpus.len(), 3);
    assert_message(load("bad.txt"), &["bad.txt: it is not UTF-8 text (byte 2)"]);
    assert_message(load("absent.txt"), &["cannot read", "absent.txt", "[data]"]);
}

#[test]
fn rejects_folder_without_files_of_format() {
    let files = Files::new(&[("a.txt", b"\xff")]);
    let mut config = config(Packing::Stream, 1);
    assert_message(files.load(&config), &["no UTF-8 text files in"]);
    config.format = Format::Jsonl;
    assert_message(files.load(&config), &["no *.jsonl files in"]);
    config.format = Format::TokensU16;
    assert_message(files.load(&config), &["no *.bin files in"]);
}

#[test]
fn jsonl_has_one_document_per_line() {
    let lines = "{\"text\": \"ab\", \"id\": 3}\n\n{\"text\": \"c\\u00e9\"}\n";
    let files = Files::new(&[("a.jsonl", lines.as_bytes()), ("notes.md", b"no")]);
    let mut config = config(Packing::Stream, 2);
    config.format = Format::Jsonl;
    assert_eq!(files.load(&config).unwrap().corpus.len(), 5);
    config.packing = Packing::Documents;
    assert_eq!(files.load(&config).unwrap().len(), 2);
    for (line, fault) in [
        ("{\"txt\": \"a\"}", "no \"text\""),
        ("{\"text\": 1}", "\"text\" is a number, but must be a string"),
        ("text", "a string or token ids under \"text\""),
    ] {
        let files = Files::new(&[("a.jsonl", format!("{{\"text\": \"a\"}}\n{line}\n").as_bytes())]);
        assert_message(files.load(&config), &["a.jsonl: line 2: ", fault]);
    }
}

#[test]
fn token_files_are_little_endian_and_reject_partial_ids() {
    let files = Files::new(&[("a.bin", &[1, 0, 0, 1, 2, 0, 0, 0])]);
    let mut config = config(Packing::Stream, 1);
    config.format = Format::TokensU16;
    let data = files.load(&config).unwrap();
    assert_eq!(data.sample(0), (vec![1], vec![256]));
    config.format = Format::TokensU32;
    let data = files.load(&config).unwrap();
    assert_eq!(data.sample(0), (vec![0x0100_0001], vec![2]));
    let torn = Files::new(&[("a.bin", &[1, 0, 0])]);
    assert_message(torn.load(&config), &["a.bin: it has 3 bytes, not a multiple of 4"]);
}

#[test]
fn mapped_file_samples_match_in_memory_tokens() {
    for (format, width) in [(Format::TokensU16, 2), (Format::TokensU32, 4)] {
        // The middle files are read into memory, the others mapped; no file ends at the end of a sample.
        let mut next = 0u32..;
        let tokens: Vec<Vec<u32>> =
            [50_001, 0, 3, 40_000].map(|len| next.by_ref().take(len).map(|id| id % 60_000).collect()).into();
        let bytes = |ids: &Vec<u32>| ids.iter().flat_map(|id| id.to_le_bytes()[..width].to_vec()).collect();
        let contents: Vec<Vec<u8>> = tokens.iter().map(bytes).collect();
        let names = ["a.bin", "b.bin", "c.bin", "d.bin"];
        let files: Vec<(&str, &[u8])> = names.into_iter().zip(contents.iter().map(Vec::as_slice)).collect();
        let files = Files::new(&files);
        let mut config = config(Packing::Stream, 1000);
        config.format = format;
        let (data, all) = (files.load(&config).unwrap(), tokens.concat());
        assert_eq!((data.len(), data.corpus.len()), (90, 90_004));
        for sample in 0..data.len() {
            let start = sample * 1000;
            let expected = (all[start..start + 1000].to_vec(), all[start + 1..start + 1001].to_vec());
            assert_eq!(data.sample(sample), expected, "{sample}");
        }
        data.check_vocabulary(60_000).unwrap();
        assert_message(data.check_vocabulary(59_999), &["d.bin: token id 59999 (sample 59, position 999)"]);
        config.packing = Packing::Documents;
        let data = files.load(&config).unwrap();
        assert_eq!(data.len(), 3);
        assert_eq!(data.sample(1).0[..3], tokens[2]);
        assert_eq!(data.sample(2).0, tokens[3][..1000]);
    }
}

#[test]
fn non_regular_token_file_is_rejected() {
    let files = Files::new(&[]);
    let mut config = config(Packing::Stream, 2);
    config.format = Format::TokensU16;
    let load = |name: &str| Dataset::load(&[name.to_owned()], &config, &Loading::quietly(Path::new("out")));
    let fifo = files.path("a.bin");
    rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR, 0)
        .unwrap();
    assert_message(load(&files.name("a.bin")), &["cannot read", "it is a FIFO, not a regular file"]);
    assert_message(load("/dev/zero"), &["it is a device, not a regular file"]);
}

#[test]
fn files_in_output_folder_are_not_data() {
    let files = Files::new(&[("a.txt", b"abcd"), ("out/metrics.jsonl", b"{}"), ("z/b.txt", b"efgh")]);
    std::os::unix::fs::symlink(files.path("out/metrics.jsonl"), files.path("link.jsonl")).unwrap();
    std::os::unix::fs::symlink(files.path("out"), files.path("z/latest")).unwrap();
    let config = config(Packing::Stream, 1);
    let digest = |out_dir: &str| {
        let folder = [files.folder.path().to_str().unwrap().to_owned()];
        let data = Dataset::load(&folder, &config, &Loading::quietly(&files.path(out_dir))).unwrap();
        (data.corpus.len(), data.digest())
    };
    assert_eq!(digest("out").0, 8);
    // Under any of its names, and before it exists.
    assert_eq!(digest("z/latest"), digest("out"));
    assert_eq!(digest("z/../out"), digest("out"));
    assert_eq!(digest("new/out").0, 12, "the outputs of another run are, in the file and by the link to it");
}

#[test]
fn data_path_in_output_folder_is_rejected() {
    let files = Files::new(&[("out/data/a.txt", b"abcd")]);
    std::os::unix::fs::symlink(files.path("out/data"), files.path("link")).unwrap();
    for path in ["out", "out/data", "out/data/a.txt", "link"] {
        let loaded = Dataset::load(
            &[files.name(path)],
            &config(Packing::Stream, 1),
            &Loading::quietly(&files.path("out")),
        );
        assert_message(loaded, &["lies in run.out_dir", "choose another run.out_dir"]);
    }
}

#[test]
fn missing_file_is_data_if_folder_would_yield_it() {
    let files = Files::new(&[("data/a.txt", b"abcd"), ("b.txt", b"efgh")]);
    let mut config = config(Packing::Stream, 1);
    config.train = vec![files.name("data")];
    config.eval = vec![EvalSet::of_paths(vec![files.name("b.txt")])];
    let is_data =
        |config: &DataConfig, name: &str| crate::is_data(config, &files.path("data/out"), &files.path(name));
    assert!(is_data(&config, "data/trace.json") && is_data(&config, "b.txt"));
    assert!(!is_data(&config, "data/out/trace.json") && !is_data(&config, "trace.json"));
    config.format = Format::Jsonl;
    assert!(!is_data(&config, "data/trace.json"));
}
