//! Tokens that are added around documents, depending on their form.

use super::tokens::{of_lines, with_tokenizer::fixture};
use super::*;

const CHAT: &str =
    r#"{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "A test."}]}"#;

/// Returns the tokens of each document as a sample of its own, and the warnings.
fn documents(
    lines: &[&str],
    tokenizer: &str,
    [bos, eos]: [Option<EndToken>; 2],
) -> (Vec<Vec<u32>>, Vec<String>) {
    let change = |packing| {
        let (tokenizer, bos, eos) = (tokenizer.to_owned(), bos.clone(), eos.clone());
        move |config: &mut DataConfig| {
            (config.packing, config.seq_len, config.tokenizer) = (packing, 40, tokenizer);
            (config.bos, config.eos) = (bos, eos);
        }
    };
    let text = lines.join("\n");
    let data = of_lines(&text, change(Packing::Documents));
    let ids = |sample| data.sample_tokens(sample).iter().map(|token| token.id).collect::<Vec<_>>();
    let alone: Vec<Vec<u32>> = (0..data.len()).map(ids).collect();
    let stream = of_lines(&text, change(Packing::Stream));
    assert_eq!(stream.tokens_len(), alone.iter().map(Vec::len).sum::<usize>(), "joined as they are alone");
    (alone, data.warnings().iter().map(ToString::to_string).collect())
}

fn id(id: u32) -> Option<EndToken> {
    Some(EndToken::Token(TokenRef::Id(id)))
}

const AUTO: [Option<EndToken>; 2] = [Some(EndToken::Auto), Some(EndToken::Auto)];

#[test]
fn token_ids_get_only_explicit_bos_and_eos() {
    let lines = [r#"{"input_ids": [0, 7, 8]}"#, r#"{"text": "the cat"}"#];
    let (auto, warnings) = documents(&lines, &fixture("bos"), AUTO);
    assert_eq!((&auto[0], auto[1][0], warnings), (&vec![0, 7, 8], 0, vec![]));
    let (given, _) = documents(&lines, &fixture("bos"), [id(5), id(6)]);
    assert_eq!(given[0], [5, 0, 7, 8, 6]);
    assert_eq!((given[1][0], given[1].last()), (5, Some(&6)));
}

#[test]
fn text_next_to_conversation_keeps_bos_and_eos() {
    let text = r#"{"text": "the cat"}"#;
    let both = |ends: [Option<EndToken>; 2]| documents(&[text, CHAT], &fixture("plain"), ends);
    let (none, _) = both([None, None]);
    let (ended, warnings) = both([Some(EndToken::Auto), id(9)]);
    assert_eq!(ended, [[&none[0][..], &[9]].concat(), none[1].clone()]);
    let [warning] = &*warnings else { panic!("{warnings:?}") };
    assert!(warning.starts_with("data.bos and data.eos are not added to 1 conversations"), "{warning}");
    let (_, warnings) = both(AUTO);
    assert!(warnings.is_empty(), "{warnings:?}");
}

#[test]
fn auto_eos_ends_completion_exactly_once() {
    let lines =
        [r#"{"prompt": "the", "completion": " cat"}"#, r#"{"prompt": "the", "completion": " cat</s>"}"#];
    let eos = Tokenizer::load(&fixture("plain")).unwrap().eos().unwrap();
    let (open, warnings) = documents(&lines, &fixture("plain"), [None, None]);
    assert!(!open[0].contains(&eos) && warnings.is_empty(), "{warnings:?}");
    let (ended, warnings) = documents(&lines, &fixture("plain"), AUTO);
    assert_eq!(ended, [[&open[0][..], &[eos]].concat(), open[1].clone()]);
    assert_eq!((open[1].last(), warnings), (Some(&eos), vec![]));
}

#[test]
fn auto_eos_falls_back_to_model_config_files() {
    let dir = tempfile::tempdir().unwrap();
    let tokenizer = dir.path().join("tokenizer.json");
    fs::copy(fixture("plain"), &tokenizer).unwrap();
    let pair = [r#"{"prompt": "the", "completion": " cat"}"#];
    let of = || documents(&pair, tokenizer.to_str().unwrap(), AUTO);
    let (open, warnings) = of();
    let [warning] = &*warnings else { panic!("{warnings:?}") };
    assert!(warning.starts_with("1 completions have no token that ends them"), "{warning}");
    for (file, text, end) in [
        ("config.json", "{\"eos_token_id\": 3}", 3),
        ("generation_config.json", "{\"eos_token_id\": [4, 5]}", 4),
    ] {
        fs::write(dir.path().join(file), text).unwrap();
        assert_eq!(of(), (vec![[&open[0][..], &[end]].concat()], vec![]));
    }
}

#[test]
fn clipped_warning_counts_only_used_samples() {
    let lines = [r#"{"text": "abc"}"#, r#"{"text": "abcdefg"}"#, r#"{"text": "abcdefghi"}"#].join("\n");
    for packing in [Packing::Documents, Packing::Packed, Packing::Stream] {
        let warnings = |samples| {
            let mut data = of_lines(&lines, |config| config.packing = packing);
            data.warn_of_clipped(samples);
            data.warnings().to_vec()
        };
        let clipped = |documents, tokens| vec![DataWarning::Clipped { documents, tokens }];
        let expected = match packing {
            Packing::Stream => [vec![], vec![]],
            Packing::Documents | Packing::Packed => [clipped(1, 2), clipped(2, 6)],
        };
        assert_eq!([warnings(2), warnings(usize::MAX)], expected);
    }
}
