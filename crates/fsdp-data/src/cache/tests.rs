use std::sync::Barrier;
use std::thread;

use fsdp_config::{EndToken, Format, LossOn, Malformed, Packing, TokenRef};
use tempfile::TempDir;

use super::*;
use crate::dataset::Dataset;
use crate::encoder::Encoder;
use crate::files::{DataFile, Kind};
use crate::image::ImageWriter;
use crate::loading::Loading;
use crate::progress::Watch;
use crate::record::Fields;
use crate::special::Form;
use crate::testing::chats;
use crate::tokenizer::Tokenizer;

const TEXT: &str = "the cat sat the cat sat the dog";

/// A text, its tokenizer, and a cache folder.
struct Fixture {
    folder: TempDir,
    config: DataConfig,
}

impl Fixture {
    fn new() -> Fixture {
        let folder = tempfile::tempdir().unwrap();
        let name = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
        let config = DataConfig {
            train: vec![name("a.txt")],
            eval: Vec::new(),
            eval_every: 0,
            eval_batches: 0,
            format: Format::Text,
            column: None,
            malformed: Malformed::Error,
            expansion_max: 1000,
            tokenizer: name("tokenizer.json"),
            cache: Some(name("kept/here")),
            prompt: None,
            completion: None,
            chat_template: None,
            date: None,
            loss_on: LossOn::Answers,
            loss_on_reasoning: true,
            packing: Packing::Stream,
            bos: None,
            eos: None,
            pad: TokenRef::Id(0),
            seq_len: 2,
            shuffle: false,
            seed: 0,
            source: Vec::new(),
        };
        let place = Fixture { folder, config };
        place.write_tokenizer(["the", "cat", "sat"]);
        fs::write(place.path("a.txt"), TEXT).unwrap();
        place
    }

    /// Writes a tokenizer that knows three words.
    fn write_tokenizer(&self, [one, two, three]: [&str; 3]) {
        let text = format!(
            r#"{{"version": "1.0", "pre_tokenizer": {{"type": "Whitespace"}}, "model": {{"type": "WordLevel",
            "vocab": {{"{one}": 1, "{two}": 2, "{three}": 3, "<unk>": 4}}, "unk_token": "<unk>"}}}}"#
        );
        fs::write(self.path("tokenizer.json"), text).unwrap();
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn load(&self) -> Dataset {
        Dataset::load(&self.config.train, &self.config, &Loading::quietly(&self.path("out"))).unwrap()
    }

    /// Returns the files in the cache folder.
    fn kept(&self) -> Vec<PathBuf> {
        let folder = self.config.cache_folder(&self.path("out"));
        fs::read_dir(folder)
            .map_or(Vec::new(), |entries| entries.map(|entry| entry.unwrap().path()).collect())
    }

    /// Returns the only file in the cache.
    fn file(&self) -> PathBuf {
        let [file] = self.kept().try_into().unwrap();
        file
    }

    /// Replaces the only file, which is read-only as a guard against writes by mistake.
    fn replace(&self, bytes: &[u8]) {
        let file = self.file();
        fs::remove_file(&file).unwrap();
        fs::write(file, bytes).unwrap();
    }
}

fn ids(data: &Dataset) -> Vec<u32> {
    let inputs = (0..data.len()).flat_map(|index| data.sample(index).0);
    inputs.collect()
}

#[test]
fn cached_tokens_are_reused() {
    let place = Fixture::new();
    let first = place.load();
    assert_eq!(ids(&first), [1, 2, 3, 1, 2, 3]);
    let second = place.load();
    assert_eq!((ids(&second), second.digest()), (ids(&first), first.digest()));

    // Different tokens under the same key show that the tokens do not come from the tokenizer.
    let file = DataFile { path: place.path("a.txt"), named: true, kind: Kind::Text, compression: None };
    let tokenizer = Tokenizer::load(&place.config.tokenizer).unwrap();
    let text = Text {
        files: &[file],
        encoder: Encoder { tokenizer: &tokenizer, fields: Fields::new(None), chats: chats() },
        malformed: Malformed::Error,
        expansion_max: 1000,
        watch: &Watch::NONE,
    };
    let mut other = ImageWriter::new(Vec::new());
    other.push(0, &[7, 8, 9], Form::Text).unwrap();
    place.replace(&other.finish(text.key().unwrap().digest).unwrap());
    let marked = place.load();
    assert_eq!((ids(&marked), marked.corpus.len(), marked.warnings()), (vec![7, 8], 3, &[][..]));
}

#[test]
fn cache_key_covers_exactly_inputs_that_determine_tokens() {
    let mut place = Fixture::new();
    let mut files = Vec::new();
    let mut changed = |place: &Fixture, what: &str, is_new: bool| {
        let data = place.load();
        assert_eq!(data.warnings(), [], "{what}");
        assert_eq!(place.kept().len() > files.len(), is_new, "{what}");
        files = place.kept();
    };
    changed(&place, "the first time", true);
    place.config.seq_len = 20;
    place.config.packing = Packing::Documents;
    place.config.eos = Some(EndToken::Token(TokenRef::Id(0)));
    changed(&place, "samples", false);
    fs::rename(place.path("a.txt"), place.path("b.txt")).unwrap();
    place.config.train = vec![place.path("b.txt").to_str().unwrap().to_owned()];
    changed(&place, "the name of a file", false);
    fs::write(place.path("b.txt"), TEXT.replace("dog", "cat")).unwrap();
    changed(&place, "text of the same length", true);
    place.write_tokenizer(["the", "sat", "cat"]);
    changed(&place, "the tokenizer", true);
    fs::write(place.path("b.txt"), "{\"text\": \"the cat\"}\n").unwrap();
    changed(&place, "text", true);
    place.config.format = Format::Jsonl;
    changed(&place, "the format", true);
    fs::write(place.path("b.txt"), "{\"text\": \"the\"}\n").unwrap();
    changed(&place, "text", true);
    // Two files differ from one file with the content of both.
    place.config.train.push(place.config.train[0].clone());
    changed(&place, "a second file", true);
}

#[test]
fn cache_preserves_documents_and_their_files() {
    let mut place = Fixture::new();
    let folder = place.path("data");
    fs::create_dir(&folder).unwrap();
    let texts: [(&str, &[u8]); 4] = [("a", b"the"), ("b", b"\xff"), ("c", b"cat sat"), ("d", b"cat unknown")];
    texts.iter().for_each(|(name, text)| fs::write(folder.join(name), text).unwrap());
    place.config.train = vec![folder.to_str().unwrap().to_owned()];
    place.config.packing = Packing::Documents;
    place.config.bos = Some(EndToken::Token(TokenRef::Id(0)));
    for time in ["first", "second"] {
        let data = place.load();
        let samples: Vec<Vec<u32>> = (0..data.len()).map(|index| data.sample(index).0).collect();
        assert_eq!(samples, [[0, 1], [0, 2], [0, 2]], "{time}");
        let beyond = data.check_vocabulary(4).unwrap_err().to_string();
        assert!(beyond.contains("data/d: token id 4 (sample 2, position 2)"), "{time}: {beyond}");
    }
}

#[test]
fn damaged_or_foreign_cache_file_is_rebuilt_with_warning() {
    let place = Fixture::new();
    let (sound, expected) = (place.load().digest(), ids(&place.load()));
    let whole = fs::read(place.file()).unwrap();
    let mut faults: Vec<(Vec<u8>, &str)> = (0..whole.len())
        .map(|at| {
            let mut changed = whole.clone();
            changed[at] ^= 1;
            (changed, "")
        })
        .collect();
    faults.extend(
        [0, 1, 55, 56, whole.len() - 1].map(|len| (whole[..len].to_vec(), "not a file of tokenized text")),
    );
    faults.push((whole[4..].to_vec(), "it has 100 bytes, its trailer says 104"));
    faults.push((b"#!/bin/sh\n".repeat(20), "it is not a file of tokenized text"));
    let mut other = ImageWriter::new(Vec::new());
    other.push(0, &[1], Form::Text).unwrap();
    faults.push((other.finish(Digest::of(&"another")).unwrap(), "it holds the tokens of another text"));
    for (bytes, fault) in faults {
        place.replace(&bytes);
        let again = place.load();
        assert_eq!((again.digest(), ids(&again)), (sound, expected.clone()));
        let [warning] = again.warnings() else { panic!("{fault}: {:?}", again.warnings()) };
        let warning = warning.to_string();
        assert!(warning.contains(fault) && warning.contains("is tokenized again"), "{warning}");
        assert_eq!(fs::read(place.file()).unwrap(), whole);
        assert_eq!(place.load().warnings(), []);
    }
}

#[test]
fn concurrent_loads_produce_single_cache_file() {
    let place = Fixture::new();
    fs::write(place.path("a.txt"), TEXT.repeat(5000)).unwrap();
    let alone = {
        let data = place.load();
        fs::remove_file(place.file()).unwrap();
        (data.digest(), ids(&data))
    };
    let begin = Barrier::new(8);
    let load = || {
        begin.wait();
        let data = place.load();
        assert_eq!(data.warnings(), []);
        assert_eq!((data.digest(), ids(&data)), alone);
    };
    thread::scope(|scope| (0..8).for_each(|_| drop(scope.spawn(load))));
    assert_eq!(place.kept(), [place.file()], "one file, and nothing beside it");
    assert_eq!(place.load().warnings(), []);
}

#[test]
fn unwritable_cache_folder_only_warns() {
    let mut place = Fixture::new();
    // Not even root can write there.
    for folder in ["/proc/fsdp", place.path("a.txt/below").to_str().unwrap()] {
        place.config.cache = Some(folder.to_owned());
        let data = place.load();
        assert_eq!(ids(&data), [1, 2, 3, 1, 2, 3]);
        let warning = data.warnings().last().unwrap().to_string();
        assert!(
            warning.starts_with(&format!("tokens are not cached in {folder}, so each start")),
            "{warning}"
        );
    }
}

#[test]
fn cache_in_output_folder_is_written_only_on_keep() {
    let mut place = Fixture::new();
    for cache in [None, Some("out/inside"), Some("out")] {
        place.config.cache = cache.map(|name| place.path(name).to_str().unwrap().to_owned());
        let data = place.load();
        assert!(!place.path("out").exists());
        assert_eq!(data.keep(), None);
        let kept = fs::read(place.file()).unwrap();
        let again = place.load();
        assert_eq!((ids(&again), again.warnings()), (ids(&data), &[][..]));
        assert_eq!(again.keep(), None);
        assert_eq!(fs::read(place.file()).unwrap(), kept);
        fs::remove_dir_all(place.path("out")).unwrap();
    }
    let data = place.load();
    fs::write(place.path("out"), "no folder").unwrap();
    let warning = data.keep().unwrap().to_string();
    assert!(warning.contains("tokens are not cached"), "{warning}");
}

#[test]
fn large_uncached_tokens_are_intact_and_leave_no_file() {
    let mut place = Fixture::new();
    place.config.tokenizer = "bytes".to_owned();
    let long = TEXT.repeat(IN_MEMORY_BYTES_MAX / 4 / TEXT.len() + 9);
    fs::write(place.path("a.txt"), &long).unwrap();
    for out in ["out/deep", "a.txt/no/folder"] {
        let data =
            Dataset::load(&place.config.train, &place.config, &Loading::quietly(&place.path(out))).unwrap();
        assert_eq!(data.corpus.len(), long.len());
        assert!(
            data.corpus.tokens(0..long.len()).map(|token| token.id).eq(long.bytes().map(u32::from)),
            "{out}"
        );
        let names: Vec<_> =
            fs::read_dir(place.folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(names.len(), 2, "{names:?}");
    }
}

#[test]
fn byte_tokens_are_not_cached() {
    let mut place = Fixture::new();
    place.config.tokenizer = "bytes".to_owned();
    let data = place.load();
    assert_eq!((data.corpus.len(), data.keep()), (TEXT.len(), None));
    assert_eq!(place.kept(), [] as [PathBuf; 0]);
}

#[test]
fn cache_folder_is_excluded_from_data() {
    let mut place = Fixture::new();
    let folder = place.path("data");
    fs::create_dir(&folder).unwrap();
    fs::write(folder.join("a.txt"), TEXT).unwrap();
    place.config.train = vec![folder.to_str().unwrap().to_owned()];
    place.config.cache = Some(folder.join("kept").to_str().unwrap().to_owned());
    let first = place.load();
    assert_eq!(place.kept().len(), 1);
    assert_eq!(place.load().digest(), first.digest());
    assert_eq!(place.kept().len(), 1);

    place.config.cache = place.config.train.first().cloned();
    let refused =
        Dataset::load(&place.config.train, &place.config, &Loading::quietly(&place.path("out"))).unwrap_err();
    let message = refused.to_string();
    assert!(
        message.contains("lies in data.cache") && message.contains("choose another data.cache"),
        "{message}"
    );
}

#[test]
fn temporary_files_of_killed_starts_are_removed() {
    let place = Fixture::new();
    let folder = place.path("kept/here");
    let written = create_temporary(&folder).unwrap();
    let [abandoned, other] = ["new-AbCdEf.tmp", "new-notes.txt"].map(|name| folder.join(name));
    for path in [&abandoned, &other] {
        fs::write(path, "begun").unwrap();
        fs::set_permissions(path, Permissions::from_mode(READ_ONLY)).unwrap();
    }
    let first = place.load();
    assert!(!abandoned.exists() && other.exists() && written.path().exists());
    // Also by a start that finds its tokens.
    fs::write(&abandoned, "begun").unwrap();
    assert_eq!(place.load().digest(), first.digest());
    assert!(!abandoned.exists() && written.path().exists());
    drop(written);
    assert_eq!(place.kept().len(), 2);
}
