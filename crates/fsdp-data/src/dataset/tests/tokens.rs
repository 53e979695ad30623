//! Tokenizers, vocabularies, and which tokens count in the loss.

use super::*;

#[test]
fn out_of_vocab_token_outside_samples_is_accepted() {
    let mut config = config(Packing::Stream, 2);
    config.format = Format::TokensU16;
    let data = Files::new(&[("a.bin", &[1, 0, 2, 0, 3, 0, 9, 0])]).load(&config).unwrap();
    data.check_vocabulary(4).unwrap();
    assert_message(data.check_vocabulary(3), &["a.bin: token id 3 (sample 0, position 2)"]);
}

#[cfg(feature = "tokenizers")]
#[test]
fn hugging_face_tokenizer_does_not_truncate_or_pad() {
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
fn byte_tokenizer_rejects_named_tokens() {
    let files = Files::new(&[("a.txt", b"abc")]);
    for packing in [Packing::Stream, Packing::Documents, Packing::Packed] {
        let mut config = config(packing, 2);
        config.bos = Some(EndToken::Token(TokenRef::Token("<s>".to_owned())));
        assert_message(files.load(&config), &["`data.bos` is \"<s>\"", "tokenizer \"bytes\"", "or an id"]);
    }
}

#[test]
fn rejects_unreadable_tokenizer() {
    let files = Files::new(&[("a.txt", b"abc"), ("bad.json", b"{}")]);
    for name in ["absent.json", "bad.json"] {
        let mut config = config(Packing::Stream, 2);
        config.tokenizer = files.name(name);
        assert_message(files.load(&config), &["cannot load tokenizer", name, "\"bytes\""]);
    }
}

#[test]
fn out_of_vocab_error_names_file_sample_and_position() {
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
fn out_of_vocab_error_position_includes_bos() {
    let files = Files::new(&[("a.txt", b"abc"), ("b.txt", b"abzab")]);
    let mut config = config(Packing::Documents, 8);
    config.bos = Some(EndToken::Token(TokenRef::Id(1)));
    let error = files.load(&config).unwrap().check_vocabulary(122);
    assert_message(error, &["b.txt: token id 122 (sample 1, position 3)"]);
}

/// Reads documents from JSON lines with the byte tokenizer.
pub(super) fn of_lines(text: &str, change: impl FnOnce(&mut DataConfig)) -> Dataset {
    read(text, change).unwrap()
}

fn read(text: &str, change: impl FnOnce(&mut DataConfig)) -> Result<Dataset, DataError> {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("a.jsonl");
    fs::write(&file, text).unwrap();
    let mut config = crate::testing::config();
    (config.packing, config.seq_len) = (Packing::Documents, 4);
    config.train = vec![file.to_str().unwrap().to_owned()];
    change(&mut config);
    Dataset::load(&config.train, &config, &Loading::quietly(&dir.path().join("out")))
}

/// Returns the least sample length with a target that counts, as reported by the error for shorter samples.
fn needed(text: &str, seq_len: usize, change: &dyn Fn(&mut DataConfig)) -> Option<usize> {
    let of = |seq_len| {
        read(text, |config| {
            change(config);
            config.seq_len = seq_len;
        })
    };
    let needed_for = |seq_len| match of(seq_len) {
        Err(DataError::NothingCounts { needed, .. }) => needed,
        other => panic!("{other:?}"),
    };
    let needed = needed_for(seq_len)?;
    assert_eq!(needed_for(needed - 1), Some(needed));
    let (_, targets) = of(needed).unwrap().sample(0);
    assert_eq!(targets.iter().filter(|&&target| target != IGNORE).count(), 1, "of {needed}: {targets:?}");
    Some(needed)
}

#[test]
fn prompt_is_input_but_not_target() {
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
fn prompt_masking_changes_digest_and_survives_stream_packing() {
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
fn documents_without_counted_target_are_dropped_with_warning() {
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

#[test]
fn no_counted_target_error_names_sufficient_seq_len() {
    let pair = r#"{"prompt": "abcde", "completion": "fg"}"#;
    let id = |id| Some(EndToken::Token(TokenRef::Id(id)));
    assert_eq!(needed(pair, 3, &|_| {}), Some(5));
    assert_eq!(needed(pair, 3, &|config| config.bos = id(1)), Some(6));
    assert_eq!(needed(pair, 3, &|config| config.packing = Packing::Packed), Some(5));
    let empty = r#"{"prompt": "abcde", "completion": ""}"#;
    for packing in [Packing::Stream, Packing::Documents, Packing::Packed] {
        assert_eq!(needed(empty, 4, &|config| config.packing = packing), None);
    }
    assert_eq!(needed(empty, 4, &|config| config.eos = id(2)), Some(5));
    // A stream includes its eos at any sample length.
    of_lines(empty, |config| (config.packing, config.eos) = (Packing::Stream, id(2)));
}

#[cfg(feature = "tokenizers")]
pub(super) mod with_tokenizer {
    use super::*;

    pub(in crate::dataset::tests) fn fixture(name: &str) -> String {
        format!("{}/tests/chats/tokenizers/{name}/tokenizer.json", env!("CARGO_MANIFEST_DIR"))
    }

    #[test]
    fn documents_get_bos_and_eos_from_tokenizer() {
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
    fn conversations_get_no_bos() {
        let chat = r#"{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "A test."}]}"#;
        let with = |bos| {
            of_lines(chat, |config| {
                (config.tokenizer, config.seq_len, config.bos) = (fixture("plain"), 64, bos);
            })
        };
        let [given, none] = [Some(EndToken::Token(TokenRef::Id(0))), None].map(with);
        assert_eq!(given.sample(0), none.sample(0));
        assert!(given.has_ignored());
    }

    #[test]
    fn left_truncating_tokenizer_drops_document_start() {
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

    #[test]
    fn left_truncation_counts_needed_seq_len_from_end() {
        let dir = tempfile::tempdir().unwrap();
        let template = dir.path().join("chat.jinja");
        let text = "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %} {{ m.content }} \
                    {% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}";
        fs::write(&template, text).unwrap();
        let chat = r#"{"messages": [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat"},
            {"role": "user", "content": "on the mat"}]}"#;
        let found = needed(&chat.replace('\n', ""), 2, &|config| {
            config.tokenizer = fixture("left");
            config.chat_template = Some(template.to_str().unwrap().to_owned());
        });
        assert!(found.is_some_and(|needed| needed > 2), "{found:?}");
    }
}
