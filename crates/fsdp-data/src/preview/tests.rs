use std::fs;

use fsdp_config::Packing;

use super::*;
use crate::dataset::IGNORE;
use crate::loading::Loading;
use crate::progress::Watch;
use crate::testing::config;

#[test]
fn preview_splits_sample_into_counted_and_masked_parts() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("a.jsonl");
    let mut config = config();
    config.packing = Packing::Documents;
    config.train = vec![file.to_str().unwrap().to_owned()];
    let show = |config: &DataConfig, text: &str| {
        fs::write(&file, text).unwrap();
        let loading = Loading { out_dir: &dir.path().join("out"), watch: &Watch::NONE, keeps: true };
        let dataset = Dataset::load(&config.train, config, &loading).unwrap();
        (dataset.has_ignored(), Preview::of(&dataset, 0, config).unwrap())
    };
    let part = |text: &str, counts| (text.to_owned(), counts);

    let short = show(&config, r#"{"prompt": "ab", "completion": "cde"}"#);
    let parts = vec![part("ab", false), part("cde", true)];
    assert_eq!(short, (true, Preview { parts, tokens: 5, counted: 3, is_open: false }));
    // Truncated tokens are not shown: eight inputs, and the target of the last.
    let long = show(&config, r#"{"prompt": "abcd", "completion": "efghijkl"}"#);
    let parts = vec![part("abcd", false), part("efghi", true)];
    assert_eq!(long, (true, Preview { parts, tokens: 9, counted: 5, is_open: false }));
    config.loss_on = fsdp_config::LossOn::All;
    let all = show(&config, r#"{"prompt": "ab", "completion": "cde"}"#);
    // The first token is not a target.
    let parts = vec![part("a", false), part("bcde", true)];
    assert_eq!(all, (false, Preview { parts, tokens: 5, counted: 4, is_open: false }));
}

#[test]
fn preview_of_joined_documents_includes_their_last_tokens() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("a.jsonl");
    let lines = [r#"{"prompt": "ab", "completion": "cd"}"#, r#"{"prompt": "e", "completion": "fg"}"#];
    fs::write(&file, lines.join("\n")).unwrap();
    let mut config = config();
    config.packing = Packing::Packed;
    config.train = vec![file.to_str().unwrap().to_owned()];
    let show = |config: &DataConfig| {
        let loading = Loading { out_dir: &dir.path().join("out"), watch: &Watch::NONE, keeps: true };
        let dataset = Dataset::load(&config.train, config, &loading).unwrap();
        let counted = dataset.sample(0).1.iter().filter(|&&target| target != IGNORE).count();
        let preview = Preview::of(&dataset, 0, config).unwrap();
        assert_eq!((dataset.len(), preview.counted), (1, counted));
        preview.parts
    };
    let part = |text: &str, counts| (text.to_owned(), counts);
    let parts = [part("ab", false), part("cd", true), part("e", false), part("fg", true)];
    assert_eq!(show(&config), parts);
    config.eos = Some(fsdp_config::EndToken::Token(fsdp_config::TokenRef::Id(b'.'.into())));
    let parts = [part("ab", false), part("cd.", true), part("e", false), part("fg.", true)];
    assert_eq!(show(&config), parts);
    config.packing = Packing::Stream;
    let parts = [part("ab", false), part("cd.", true), part("e", false), part("fg.", true)];
    assert_eq!(show(&config), parts);
}
