use std::fs;
use std::path::{Path, PathBuf};

use fsdp_config::{EndToken, EvalSet, Format, LossOn, Malformed, TokenRef};
use proptest::prelude::*;
use tempfile::TempDir;

use super::*;

#[cfg(feature = "tokenizers")]
mod ends;
mod files;
mod tokens;

/// Whole words, with truncation and padding enabled, both of which must be ignored.
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

/// Files in a temporary folder that is deleted on drop.
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
        expansion_max: 1000,
        tokenizer: "bytes".to_owned(),
        cache: None,
        prompt: None,
        completion: None,
        chat_template: None,
        date: None,
        loss_on: LossOn::Answers,
        loss_on_reasoning: true,
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
fn stream_joins_files_in_order_and_samples_overlap_by_one() {
    let files = Files::new(&[("b.txt", b"efgh"), ("a/z.txt", b"abcd"), ("c.txt", b"i")]);
    let data = files.load(&config(Packing::Stream, 4)).unwrap();
    assert_eq!((data.len(), data.corpus.len(), data.seq_len()), (2, 9, 4));
    assert_eq!(data.sample(0), (ids("abcd"), ids("bcde")));
    assert_eq!(data.sample(1), (ids("efgh"), ids("fghi")));
}

#[test]
fn stream_frames_nonempty_documents_with_bos_and_eos() {
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
fn joining_documents_without_separator_warns() {
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
fn packed_documents_start_at_position_0() {
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
    // Truncated, and so without its eos.
    assert_eq!(data.sample(1).1, ids("bcdefg"));
    assert_eq!(positions(Some(1)), [0, 1, 2, 3, 4, 5]);
    assert_eq!(positions(None), [0, 1, 2, 3, 4, 5]);
}

#[test]
fn incomplete_last_sample_is_dropped() {
    for (text, samples) in [("", 0), ("a", 0), ("abcd", 0), ("abcde", 1), ("abcdefgh", 1), ("abcdefghi", 2)] {
        let files = Files::new(&[("a.txt", text.as_bytes())]);
        assert_eq!(files.load(&config(Packing::Stream, 4)).unwrap().len(), samples, "{text}");
    }
}

#[test]
fn documents_are_framed_clipped_and_padded() {
    let files = Files::new(&[("a.txt", b"ab"), ("b.txt", b"abcdefgh"), ("c.txt", b""), ("d.txt", b"abc")]);
    let mut config = config(Packing::Documents, 4);
    config.bos = Some(EndToken::Token(TokenRef::Id(1)));
    config.eos = Some(EndToken::Token(TokenRef::Token("\n".to_owned())));
    config.pad = TokenRef::Id(3);
    let mut data = files.load(&config).unwrap();
    assert_eq!(data.len(), 3);
    let (a, b, c, d) = (97, 98, 99, 100);
    assert_eq!(data.sample(0), (vec![1, a, b, 10], vec![a, b, 10, IGNORE]));
    assert_eq!(data.sample(1), (vec![1, a, b, c], vec![a, b, c, d]));
    assert_eq!(data.sample(2), (vec![1, a, b, c], vec![a, b, c, 10]));
    data.warn_of_clipped(data.len());
    // 1 abcdefgh 10 without its last five.
    assert!(
        data.warnings().contains(&DataWarning::Clipped { documents: 1, tokens: 5 }),
        "{:?}",
        data.warnings()
    );
}

#[test]
fn documents_without_target_are_not_samples() {
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
fn masked_sample_counts_no_targets() {
    let data = Files::new(&[("a.txt", b"abc")]).load(&config(Packing::Stream, 2)).unwrap();
    let (mut inputs, mut targets) = ([7; 2], [7; 2]);
    data.fill(None, &mut inputs, &mut targets);
    assert_eq!((inputs, targets), ([0; 2], [IGNORE; 2]));
}

proptest! {
    #[test]
    fn stream_samples_cover_tokens_in_order(
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
    fn packed_samples_contain_same_targets_as_documents(
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
        // The rest is padding.
        found.retain(|document| document[0].1 != IGNORE);
        expected.sort_unstable();
        found.sort_unstable();
        prop_assert_eq!(found, expected);
    }

    #[test]
    fn document_counts_as_many_targets_as_fit(
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
