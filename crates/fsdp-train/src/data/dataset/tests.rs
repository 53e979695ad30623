use std::fs;
use std::path::{Path, PathBuf};

use proptest::prelude::*;
use tempfile::TempDir;

use super::*;
use crate::config::{EndToken, EvalSet, Format, LossOn, Malformed, TokenRef};

/// Words, with truncation and padding switched on, which must not be obeyed.
#[cfg(feature = "tokenizers")]
const TOKENIZER: &str = r#"{
  "version": "1.0",
  "truncation": {"max_length": 2, "strategy": "LongestFirst", "stride": 0, "direction": "Right"},
  "padding": {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": null, "pad_id": 0,
              "pad_type_id": 0, "pad_token": "<pad>"},
  "added_tokens": [{"id": 0, "content": "<pad>", "single_word": false, "lstrip": false, "rstrip": false,
                    "normalized": false, "special": true}],
  "normalizer": null, "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null, "decoder": null,
  "model": {"type": "WordLevel", "vocab": {"<pad>": 0, "the": 1, "cat": 2, "sat": 3, "<unk>": 4, "<s>": 5},
            "unk_token": "<unk>"}
}"#;

/// Files in a folder that vanishes with the value.
struct Files {
    folder: TempDir,
}

impl Files {
    fn new(files: &[(&str, &[u8])]) -> Files {
        let folder = tempfile::tempdir().unwrap();
        for (name, bytes) in files {
            let path = folder.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, bytes).unwrap();
        }
        Files { folder }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn name(&self, name: &str) -> String {
        self.path(name).to_str().unwrap().to_owned()
    }

    fn load(&self, config: &DataConfig) -> Result<Dataset, DataError> {
        Dataset::load(
            &[self.folder.path().to_str().unwrap().to_owned()],
            config,
            &Loading::quietly(&self.path("out")),
        )
    }
}

fn config(packing: Packing, seq_len: usize) -> DataConfig {
    DataConfig {
        train: Vec::new(),
        eval: Vec::new(),
        eval_every: 0,
        eval_batches: 0,
        format: Format::Text,
        column: None,
        malformed: Malformed::Error,
        tokenizer: "bytes".to_owned(),
        cache: None,
        prompt: None,
        completion: None,
        chat_template: None,
        date: None,
        loss_on: LossOn::Answers,
        packing,
        bos: None,
        eos: None,
        pad: TokenRef::Id(0),
        seq_len,
        shuffle: false,
        seed: 0,
        source: Vec::new(),
    }
}

fn ids(text: &str) -> Vec<u32> {
    text.bytes().map(u32::from).collect()
}

#[track_caller]
fn assert_message<T: std::fmt::Debug>(result: Result<T, DataError>, fragments: &[&str]) {
    let message = result.unwrap_err().to_string();
    for fragment in fragments {
        assert!(message.contains(fragment), "`{fragment}` is not in `{message}`");
    }
}

#[test]
fn a_stream_joins_files_in_order_and_samples_share_one_token() {
    let files = Files::new(&[("b.txt", b"efgh"), ("a/z.txt", b"abcd"), ("c.txt", b"i")]);
    let data = files.load(&config(Packing::Stream, 4)).unwrap();
    assert_eq!((data.len(), data.corpus.len(), data.seq_len()), (2, 9, 4));
    assert_eq!(data.sample(0), (ids("abcd"), ids("bcde")));
    assert_eq!(data.sample(1), (ids("efgh"), ids("fghi")));
}

#[test]
fn a_stream_has_bos_and_eos_around_every_document_that_is_not_empty() {
    let files = Files::new(&[("a.txt", b"ab"), ("b.txt", b""), ("c.txt", b"cde"), ("d.txt", b"f")]);
    let mut config = config(Packing::Stream, 3);
    config.eos = Some(EndToken::Token(TokenRef::Id(2)));
    let data = files.load(&config).unwrap();
    let [a, b, c, d, e] = [97, 98, 99, 100, 101];
    let samples = |data: &Dataset| (0..data.len()).map(|index| data.sample(index)).collect::<Vec<_>>();
    // a b 2 c d e 2 f 2
    assert_eq!(samples(&data), [(vec![a, b, 2], vec![b, 2, c]), (vec![c, d, e], vec![d, e, 2])]);
    config.bos = Some(EndToken::Token(TokenRef::Id(1)));
    let data = files.load(&config).unwrap();
    // 1 a b 2 1 c d e 2 1 f 2
    let expected =
        [(vec![1, a, b], vec![a, b, 2]), (vec![2, 1, c], vec![1, c, d]), (vec![d, e, 2], vec![e, 2, 1])];
    assert_eq!(samples(&data), expected);
    let file = files.path("b.txt");
    assert_eq!(data.warnings(), [DataWarning::Empty { count: 1, file }]);
}

#[test]
#[cfg(feature = "tokenizers")]
fn documents_that_are_joined_without_a_token_between_them_are_told() {
    let files = Files::new(&[
        ("words.json", TOKENIZER.as_bytes()),
        ("data/a.txt", b"the cat"),
        ("data/b.txt", b"sat"),
    ]);
    let mut config = config(Packing::Stream, 1);
    config.tokenizer = files.name("words.json");
    let warnings = |config: &DataConfig, path: &str| {
        Dataset::load(&[files.name(path)], config, &Loading::quietly(&files.path("out")))
            .unwrap()
            .warnings()
            .to_vec()
    };
    assert_eq!(warnings(&config, "data"), [DataWarning::Joined { documents: 2 }]);
    assert_eq!(warnings(&config, "data/a.txt"), []);
    config.eos = Some(EndToken::Token(TokenRef::Id(5)));
    assert_eq!(warnings(&config, "data"), []);
    config.eos = None;
    config.packing = Packing::Packed;
    assert_eq!(warnings(&config, "data"), []);
}

#[test]
fn a_packed_sample_holds_documents_that_begin_at_position_0() {
    let files = Files::new(&[("a.txt", b"ab"), ("b.txt", b"abcdefgh"), ("c.txt", b""), ("d.txt", b"abc")]);
    let mut config = config(Packing::Packed, 6);
    config.eos = Some(EndToken::Token(TokenRef::Token("\n".to_owned())));
    config.pad = TokenRef::Id(3);
    let data = files.load(&config).unwrap();
    assert_eq!((data.len(), data.is_packed()), (2, true));
    let (a, b, c) = (97, 98, 99);
    // The last token of a document is a target only.
    assert_eq!(data.sample(0), (vec![a, b, a, b, c, 3], vec![b, 10, b, c, 10, IGNORE]));
    let positions = |index| {
        let mut positions = vec![9; 6];
        data.positions(index, &mut positions);
        positions
    };
    assert_eq!(positions(Some(0)), [0, 1, 0, 1, 2, 0]);
    // Clipped, and so without its eos.
    assert_eq!(data.sample(1).1, ids("bcdefg"));
    assert_eq!(positions(Some(1)), [0, 1, 2, 3, 4, 5]);
    assert_eq!(positions(None), [0, 1, 2, 3, 4, 5]);
}

#[test]
fn an_incomplete_last_sample_is_dropped() {
    for (text, samples) in [("", 0), ("a", 0), ("abcd", 0), ("abcde", 1), ("abcdefgh", 1), ("abcdefghi", 2)] {
        let files = Files::new(&[("a.txt", text.as_bytes())]);
        assert_eq!(files.load(&config(Packing::Stream, 4)).unwrap().len(), samples, "{text}");
    }
}

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
fn a_named_file_is_read_even_if_hidden_and_must_be_text() {
    let files = Files::new(&[(".hidden", b"yes"), ("bad.txt", b"ab\xffcd")]);
    let load = |name: &str| {
        Dataset::load(&[files.name(name)], &config(Packing::Stream, 1), &Loading::quietly(Path::new("out")))
    };
    assert_eq!(load(".hidden").unwrap().corpus.len(), 3);
    assert_message(load("bad.txt"), &["bad.txt: it is not UTF-8 text (byte 2)"]);
    assert_message(load("absent.txt"), &["cannot read", "absent.txt", "[data]"]);
}

#[test]
fn rejects_folders_without_a_file_of_the_format() {
    let files = Files::new(&[("a.txt", b"\xff")]);
    let mut config = config(Packing::Stream, 1);
    assert_message(files.load(&config), &["no UTF-8 text files in"]);
    config.format = Format::Jsonl;
    assert_message(files.load(&config), &["no *.jsonl files in"]);
    config.format = Format::TokensU16;
    assert_message(files.load(&config), &["no *.bin files in"]);
}

#[test]
fn documents_are_framed_clipped_and_padded() {
    let files = Files::new(&[("a.txt", b"ab"), ("b.txt", b"abcdefgh"), ("c.txt", b""), ("d.txt", b"abc")]);
    let mut config = config(Packing::Documents, 4);
    config.bos = Some(EndToken::Token(TokenRef::Id(1)));
    config.eos = Some(EndToken::Token(TokenRef::Token("\n".to_owned())));
    config.pad = TokenRef::Id(3);
    let data = files.load(&config).unwrap();
    assert_eq!(data.len(), 3);
    let (a, b, c, d) = (97, 98, 99, 100);
    assert_eq!(data.sample(0), (vec![1, a, b, 10], vec![a, b, 10, IGNORE]));
    assert_eq!(data.sample(1), (vec![1, a, b, c], vec![a, b, c, d]));
    assert_eq!(data.sample(2), (vec![1, a, b, c], vec![a, b, c, 10]));
    // 1 abcdefgh 10 without its first five.
    assert!(
        data.warnings().contains(&DataWarning::Clipped { documents: 1, tokens: 5 }),
        "{:?}",
        data.warnings()
    );
}

#[test]
fn documents_without_a_target_are_no_samples() {
    let files = Files::new(&[("a.txt", b"a"), ("b.txt", b"ab")]);
    let mut config = config(Packing::Documents, 4);
    assert_eq!(
        files.load(&config).unwrap().sample(0),
        (vec![97, 98, 0, 0], vec![98, IGNORE, IGNORE, IGNORE])
    );
    config.eos = Some(EndToken::Token(TokenRef::Id(0)));
    assert_eq!(files.load(&config).unwrap().len(), 2);
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
        ("{\"text\": 1}", "\"text\" is a number, and must be a string"),
        ("text", "a string or token ids under \"text\""),
    ] {
        let files = Files::new(&[("a.jsonl", format!("{{\"text\": \"a\"}}\n{line}\n").as_bytes())]);
        assert_message(files.load(&config), &["a.jsonl: line 2: ", fault]);
    }
}

#[test]
fn token_files_are_little_endian_and_whole() {
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
fn samples_of_mapped_files_are_those_of_tokens_in_memory() {
    for (format, width) in [(Format::TokensU16, 2), (Format::TokensU32, 4)] {
        // The middle ones are read, the others mapped; none ends where a sample does.
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
fn a_token_beyond_the_vocabulary_that_no_sample_holds_is_no_error() {
    let mut config = config(Packing::Stream, 2);
    config.format = Format::TokensU16;
    let data = Files::new(&[("a.bin", &[1, 0, 2, 0, 3, 0, 9, 0])]).load(&config).unwrap();
    data.check_vocabulary(4).unwrap();
    assert_message(data.check_vocabulary(3), &["a.bin: token id 3 (sample 0, position 2)"]);
}

#[test]
fn token_files_are_regular_files() {
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

#[cfg(feature = "tokenizers")]
#[test]
fn a_hugging_face_tokenizer_neither_truncates_nor_pads() {
    let files =
        Files::new(&[("data/a.txt", b"the cat sat the dog"), ("tokenizer.json", TOKENIZER.as_bytes())]);
    let mut config = config(Packing::Documents, 6);
    config.tokenizer = files.name("tokenizer.json");
    config.bos = Some(EndToken::Token(TokenRef::Token("<s>".to_owned())));
    config.pad = TokenRef::Token("<pad>".to_owned());
    let data = Dataset::load(&[files.name("data")], &config, &Loading::quietly(Path::new("out"))).unwrap();
    assert_eq!(data.sample(0), (vec![5, 1, 2, 3, 1, 4], vec![1, 2, 3, 1, 4, IGNORE]));
    assert_eq!(Tokenizer::load(&config.tokenizer).unwrap().vocab_size(), 6);
    config.eos = Some(EndToken::Token(TokenRef::Token("</s>".to_owned())));
    assert_message(
        Dataset::load(&[files.name("data")], &config, &Loading::quietly(Path::new("out"))),
        &["`data.eos` is \"</s>\"", "tokenizer.json"],
    );
}

#[test]
fn rejects_tokens_that_bytes_do_not_have() {
    let files = Files::new(&[("a.txt", b"abc")]);
    for packing in [Packing::Stream, Packing::Documents, Packing::Packed] {
        let mut config = config(packing, 2);
        config.bos = Some(EndToken::Token(TokenRef::Token("<s>".to_owned())));
        assert_message(files.load(&config), &["`data.bos` is \"<s>\"", "tokenizer \"bytes\"", "or an id"]);
    }
}

#[test]
fn rejects_a_tokenizer_that_cannot_be_read() {
    let files = Files::new(&[("a.txt", b"abc"), ("bad.json", b"{}")]);
    for name in ["absent.json", "bad.json"] {
        let mut config = config(Packing::Stream, 2);
        config.tokenizer = files.name(name);
        assert_message(files.load(&config), &["cannot load tokenizer", name, "\"bytes\""]);
    }
}

#[test]
fn tokens_beyond_the_vocabulary_are_named_by_file_sample_and_position() {
    let files = Files::new(&[("a.txt", b"abc"), ("b.txt", b"abzab"), ("c.txt", b"y")]);
    let data = files.load(&config(Packing::Stream, 2)).unwrap();
    data.check_vocabulary(256).unwrap();
    data.check_vocabulary(usize::from(b'z') + 1).unwrap();
    let error = data.check_vocabulary(usize::from(b'z'));
    assert_message(error, &["b.txt: token id 122 (sample 2, position 1)", "vocab_size is 122"]);
    let mut config = config(Packing::Documents, 8);
    config.bos = Some(EndToken::Token(TokenRef::Id(256)));
    let data = files.load(&config).unwrap();
    assert_message(data.check_vocabulary(256), &["`data.bos` has id 256", "vocab_size is 256"]);
    assert_message(data.check_vocabulary(100), &["`data.bos`"]);
}

#[test]
fn a_document_beyond_the_vocabulary_is_named_with_its_framed_position() {
    let files = Files::new(&[("a.txt", b"abc"), ("b.txt", b"abzab")]);
    let mut config = config(Packing::Documents, 8);
    config.bos = Some(EndToken::Token(TokenRef::Id(1)));
    let error = files.load(&config).unwrap().check_vocabulary(122);
    assert_message(error, &["b.txt: token id 122 (sample 1, position 3)"]);
}

#[test]
fn a_masked_sample_counts_no_target() {
    let data = Files::new(&[("a.txt", b"abc")]).load(&config(Packing::Stream, 2)).unwrap();
    let (mut inputs, mut targets) = ([7; 2], [7; 2]);
    data.fill(None, &mut inputs, &mut targets);
    assert_eq!((inputs, targets), ([0; 2], [IGNORE; 2]));
}

proptest! {
    #[test]
    fn samples_of_a_stream_cover_the_tokens_in_order(
        lengths in proptest::collection::vec(0usize..40, 1..6), seq_len in 1usize..12,
    ) {
        let mut next = 0u32..;
        let texts: Vec<Vec<u8>> = lengths
            .iter()
            .map(|&len| next.by_ref().take(len).flat_map(u32::to_le_bytes).collect())
            .collect();
        let names: Vec<String> = (0..texts.len()).map(|index| format!("{index}.bin")).collect();
        let listed: Vec<(&str, &[u8])> =
            names.iter().map(String::as_str).zip(texts.iter().map(Vec::as_slice)).collect();
        let files = Files::new(&listed);
        let mut config = config(Packing::Stream, seq_len);
        config.format = Format::TokensU32;
        let data = files.load(&config).unwrap();

        let tokens: usize = lengths.iter().sum();
        prop_assert_eq!(data.len(), tokens.saturating_sub(1) / seq_len);
        let targets: Vec<u32> = (0..data.len()).flat_map(|index| data.sample(index).1).collect();
        let inputs: Vec<u32> = (0..data.len()).flat_map(|index| data.sample(index).0).collect();
        let covered = u32::try_from(data.len() * seq_len).unwrap();
        prop_assert_eq!(inputs, (0..covered).collect::<Vec<_>>());
        prop_assert_eq!(targets, (1..=covered).collect::<Vec<_>>());
    }

    #[test]
    fn packed_samples_hold_what_documents_would(
        lengths in prop::collection::vec(0usize..15, 1..12), bos: bool, eos: bool, seq_len in 1usize..12,
    ) {
        let names: Vec<String> = (0..lengths.len()).map(|index| format!("{index:02}.txt")).collect();
        let texts: Vec<Vec<u8>> = lengths.iter().zip(b'a'..).map(|(&len, letter)| vec![letter; len]).collect();
        let listed: Vec<(&str, &[u8])> =
            names.iter().map(String::as_str).zip(texts.iter().map(Vec::as_slice)).collect();
        let files = Files::new(&listed);
        let mut config = config(Packing::Documents, seq_len);
        config.bos = bos.then_some(EndToken::Token(TokenRef::Id(1)));
        config.eos = eos.then_some(EndToken::Token(TokenRef::Id(2)));
        let alone = files.load(&config).unwrap();
        config.packing = Packing::Packed;
        let packed = files.load(&config).unwrap();
        prop_assert!(packed.len() <= alone.len());
        let counted = |(inputs, targets): (Vec<u32>, Vec<u32>)| -> Vec<(u32, u32)> {
            inputs.into_iter().zip(targets).filter(|(_, target)| *target != IGNORE).collect()
        };
        let mut expected: Vec<_> = (0..alone.len()).map(|index| counted(alone.sample(index))).collect();
        let mut found = Vec::new();
        for index in 0..packed.len() {
            let mut positions = vec![9; seq_len];
            packed.positions(Some(index), &mut positions);
            let (inputs, targets) = packed.sample(index);
            for ((input, target), position) in inputs.into_iter().zip(targets).zip(positions) {
                if position == 0 {
                    found.push(Vec::new());
                }
                let document = found.last_mut().unwrap();
                prop_assert_eq!(document.len(), position as usize);
                document.push((input, target));
            }
        }
        // What is left is padding.
        found.retain(|document| document[0].1 != IGNORE);
        expected.sort_unstable();
        found.sort_unstable();
        prop_assert_eq!(found, expected);
    }

    #[test]
    fn a_document_counts_as_many_targets_as_fit(
        len in 1usize..20, bos: bool, eos: bool, seq_len in 1usize..12,
    ) {
        let files = Files::new(&[("a.txt", &vec![b'x'; len])]);
        let mut config = config(Packing::Documents, seq_len);
        config.bos = bos.then_some(EndToken::Token(TokenRef::Id(1)));
        config.eos = eos.then_some(EndToken::Token(TokenRef::Id(2)));
        let data = files.load(&config).unwrap();
        let framed = len + usize::from(bos) + usize::from(eos);
        prop_assert_eq!(data.len(), usize::from(framed > 1));
        if framed > 1 {
            let (inputs, targets) = data.sample(0);
            let counted = targets.iter().take_while(|&&target| target != IGNORE).count();
            prop_assert_eq!(counted, (framed - 1).min(seq_len));
            prop_assert!(targets[counted..].iter().all(|&target| target == IGNORE));
            prop_assert!(inputs[1..].iter().zip(&targets).all(|(i, t)| *t == IGNORE || i == t));
        }
    }
}

#[test]
fn what_lies_in_the_output_folder_is_not_data() {
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
    // By whatever name, and also before it is there.
    assert_eq!(digest("z/latest"), digest("out"));
    assert_eq!(digest("z/../out"), digest("out"));
    assert_eq!(digest("new/out").0, 12, "the outputs of another run are, in the file and by the link to it");
}

#[test]
fn data_in_the_output_folder_is_refused() {
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
fn a_file_that_is_not_there_yet_is_data_where_a_folder_would_yield_it() {
    let files = Files::new(&[("data/a.txt", b"abcd"), ("b.txt", b"efgh")]);
    let mut config = config(Packing::Stream, 1);
    config.train = vec![files.name("data")];
    config.eval = vec![EvalSet::of_paths(vec![files.name("b.txt")])];
    let is_data = |config: &DataConfig, name: &str| {
        crate::data::is_data(config, &files.path("data/out"), &files.path(name))
    };
    assert!(is_data(&config, "data/trace.json") && is_data(&config, "b.txt"));
    assert!(!is_data(&config, "data/out/trace.json") && !is_data(&config, "trace.json"));
    config.format = Format::Jsonl;
    assert!(!is_data(&config, "data/trace.json"));
}

/// Documents by the tokenizer of bytes, of JSON lines.
fn of_lines(text: &str, change: impl FnOnce(&mut DataConfig)) -> Dataset {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("a.jsonl");
    fs::write(&file, text).unwrap();
    let mut config = crate::data::testing::config();
    (config.packing, config.seq_len) = (Packing::Documents, 4);
    config.train = vec![file.to_str().unwrap().to_owned()];
    change(&mut config);
    Dataset::load(&config.train, &config, &Loading::quietly(&dir.path().join("out"))).unwrap()
}

#[test]
fn a_prompt_is_an_input_and_no_target() {
    let data = of_lines(r#"{"prompt": "ab", "completion": "cd"}"#, |config| {
        config.eos = Some(EndToken::Token(TokenRef::Id(0)));
    });
    assert_eq!(data.sample(0), (vec![97, 98, 99, 100], vec![IGNORE, 99, 100, 0]));
    let named = of_lines(r#"{"q": "ab", "a": "cd"}"#, |config| {
        (config.prompt, config.completion) = (Some("q".to_owned()), Some("a".to_owned()));
    });
    assert_eq!(named.sample(0), (vec![97, 98, 99, 100], vec![IGNORE, 99, 100, IGNORE]));
}

#[test]
fn what_counts_is_in_the_digest_and_joined_documents_keep_it() {
    let masked =
        of_lines(r#"{"prompt": "ab", "completion": "cde"}"#, |config| config.packing = Packing::Stream);
    assert_eq!(masked.sample(0), (vec![97, 98, 99, 100], vec![IGNORE, 99, 100, 101]));
    let whole = of_lines(r#"{"text": "abcde"}"#, |config| config.packing = Packing::Stream);
    assert_eq!(whole.sample(0), (vec![97, 98, 99, 100], vec![98, 99, 100, 101]));
    assert_ne!(masked.digest(), whole.digest());
    masked.check_vocabulary(102).unwrap();
    masked.check_vocabulary(101).unwrap_err();
}

#[test]
fn documents_of_which_nothing_counts_are_left_out_and_told() {
    let lines = concat!(
        r#"{"prompt": "abcde", "completion": "f"}"#,
        "\n",
        r#"{"prompt": "a", "completion": "b"}"#,
        "\n",
        r#"{"prompt": "abc", "completion": ""}"#
    );
    let data = of_lines(lines, |_| {});
    assert_eq!((data.len(), data.sample(0).1), (1, vec![98, IGNORE, IGNORE, IGNORE]));
    let [warning] = data.warnings() else { panic!("{:?}", data.warnings()) };
    assert!(warning.to_string().starts_with("2 documents are left out"), "{warning}");
}

#[cfg(feature = "tokenizers")]
mod with_tokenizer {
    use super::*;

    fn fixture(name: &str) -> String {
        format!("{}/tests/chats/tokenizers/{name}/tokenizer.json", env!("CARGO_MANIFEST_DIR"))
    }

    #[test]
    fn what_a_tokenizer_puts_around_texts_is_put_around_documents() {
        let sample = |name: &str, bos: Option<EndToken>| {
            let data = of_lines(r#"{"text": "Hi, who are you?"}"#, |config| {
                (config.tokenizer, config.seq_len, config.bos) = (fixture(name), 16, bos);
            });
            let (inputs, targets) = data.sample(0);
            let len = targets.iter().position(|&target| target == IGNORE).unwrap();
            (inputs[0], targets[len - 1])
        };
        let [bos, eos] = [("bos", 0), ("both", 2)];
        assert_eq!(sample(bos.0, Some(EndToken::Auto)).0, bos.1);
        assert_ne!(sample(bos.0, None).0, bos.1);
        assert_ne!(sample("plain", Some(EndToken::Auto)).0, 0);
        assert_eq!(sample(eos.0, Some(EndToken::Auto)), (1, eos.1));
    }

    #[test]
    fn nothing_is_put_around_conversations() {
        let chat = r#"{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "A test."}]}"#;
        let with = |bos| {
            of_lines(chat, |config| {
                (config.tokenizer, config.seq_len, config.bos) = (fixture("plain"), 64, bos);
            })
        };
        let [given, none] = [Some(EndToken::Token(TokenRef::Id(0))), None].map(with);
        assert_eq!(given.sample(0), none.sample(0));
        assert!(given.has_silent());
    }

    #[test]
    fn what_is_too_long_loses_its_beginning_where_the_tokenizer_says_so() {
        let words = r#"{"text": "the cat sat on the mat"}"#;
        let data = |eos| {
            of_lines(words, |config| {
                (config.tokenizer, config.seq_len, config.eos) = (fixture("left"), 2, eos);
            })
        };
        let tokenizer = Tokenizer::load(&fixture("left")).unwrap();
        let ids = tokenizer.encode("the cat sat on the mat").unwrap();
        // Three tokens: two inputs, and the target of the second.
        assert_eq!(data(None).sample(0), (ids[3..5].to_vec(), ids[4..].to_vec()));
        let end = EndToken::Auto;
        assert_eq!(data(Some(end)).sample(0), (ids[4..].to_vec(), vec![ids[5], 2]));
    }
}
