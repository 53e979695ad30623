use std::fs;
use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;

use arrow_array::types::Int32Type;
use arrow_array::{DictionaryArray, Int32Array, RecordBatch, StringArray};
use arrow_ipc::writer::StreamWriter;
use fsdp_config::{EndToken, Format, TokenRef};
use tempfile::TempDir;

use super::*;
use crate::testing::config;

fn written(name: &str, content: impl AsRef<[u8]>) -> (TempDir, Vec<String>) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(name);
    fs::write(&path, content).unwrap();
    (dir, vec![path.to_str().unwrap().to_owned()])
}

fn of(paths: &[String], config: &DataConfig, role: &Role, vocab: usize) -> Result<Outlook, DataError> {
    outlook(paths, config, &PathBuf::from("out"), role, vocab)
}

const BATCH: Role = Role::Training { global_batch: 4 };

#[test]
fn small_text_is_surveyed_fully_and_large_text_partially() {
    let (_dir, paths) = written("a.txt", "a".repeat(33));
    let found = of(&paths, &config(), &BATCH, 256).unwrap();
    assert_eq!(found.whole, Some(Whole { tokens: 33, samples: 4 }));
    // The cut is within a character of three bytes. The text ends there, and the invalid byte after it is not examined.
    let text = "\u{20ac}".repeat(SURVEY_BYTES / 3 + 1).into_bytes();
    let (_dir, paths) = written("b.txt", [&*text, &[0xff]].concat());
    let found = of(&paths, &config(), &BATCH, 256).unwrap();
    assert_eq!((found.whole, found.tokenizer_ids), (None, 256));
    assert_eq!(found.survey.about_tokens, text.len() as u64 + 1);
}

#[test]
fn file_that_expands_behind_surveyed_records_is_refused() {
    let long = "word ".repeat(1 << 14);
    let values = Arc::new(StringArray::from(vec!["x".repeat(1 << 10).as_str(), &long]));
    let batches = [vec![0; SURVEY_BYTES >> 9], vec![1; 10_000]].map(|keys| {
        let column = DictionaryArray::<Int32Type>::new(Int32Array::from(keys), Arc::clone(&values) as _);
        RecordBatch::try_from_iter([("text", Arc::new(column) as _)]).unwrap()
    });
    let mut arrow = StreamWriter::try_new(Vec::new(), &batches[0].schema()).unwrap();
    batches.iter().for_each(|batch| arrow.write(batch).unwrap());
    arrow.finish().unwrap();
    let mut lines = zstd::Encoder::new(Vec::new(), 1).unwrap();
    for (count, text) in [(SURVEY_BYTES >> 9, &"x".repeat(1 << 10)), (4000, &long)] {
        let line = format!("{{\"text\": \"{text}\"}}\n");
        (0..count).for_each(|_| lines.write_all(line.as_bytes()).unwrap());
    }
    for (name, bytes, position) in [
        ("a.arrow", arrow.into_inner().unwrap(), "a.arrow: row 4096: it has expanded to"),
        ("a.jsonl.zst", lines.finish().unwrap(), "a.jsonl.zst: line "),
    ] {
        let (_dir, paths) = written(name, bytes);
        let fault = of(&paths, &config(), &BATCH, 256).unwrap_err();
        assert!(matches!(fault, DataError::Expansion { .. }), "{fault}");
        assert!(fault.to_string().contains(position), "{fault}");
        let raised = DataConfig { expansion_max: 1 << 40, ..config() };
        assert_eq!(of(&paths, &raised, &BATCH, 256).unwrap().whole, None);
    }
}

#[test]
fn out_of_vocab_ids_in_surveyed_text_are_rejected() {
    let line = "{\"text\": \"abc\"}\n";
    let lines = line.repeat(SURVEY_BYTES / line.len() + 2);
    for text in [&line.repeat(12), &lines] {
        let (_dir, paths) = written("a.jsonl", text);
        of(&paths, &config(), &BATCH, 100).unwrap();
        let fault = of(&paths, &config(), &BATCH, 99).unwrap_err().to_string();
        assert!(fault.contains("a.jsonl: token id 99 ") && fault.contains("vocab_size is 99"), "{fault}");
    }
    let (_dir, paths) = written("b.jsonl", lines);
    let eos = DataConfig { eos: Some(EndToken::Token(TokenRef::Id(200))), ..config() };
    let fault = of(&paths, &eos, &BATCH, 200).unwrap_err().to_string();
    assert!(fault.contains("`data.eos` has id 200"), "{fault}");
}

#[test]
fn token_files_are_surveyed_completely() {
    let config = DataConfig { format: Format::TokensU16, ..config() };
    let mut ids = vec![7u16; 400_000];
    ids[390_000] = 500;
    let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
    let (_dir, paths) = written("a.bin", bytes);
    let found = of(&paths, &config, &BATCH, 501).unwrap();
    assert_eq!(found.whole, Some(Whole { tokens: 400_000, samples: 49_999 }));
    let fault = of(&paths, &config, &BATCH, 500).unwrap_err().to_string();
    assert!(fault.contains("token id 500 (sample 48749, position 8)"), "{fault}");
}

#[test]
fn too_few_samples_for_role_is_rejected() {
    let (_dir, paths) = written("a.txt", "a".repeat(9));
    for (role, expected) in [
        (BATCH, "1 samples of 8 tokens, fewer than one global batch of 4"),
        (Role::Source { index: 1 }, ""),
        (Role::Evaluation { set: "held".to_owned(), samples_max: 9 }, ""),
    ] {
        match of(&paths, &config(), &role, 256) {
            Ok(_) => assert_eq!(expected, "", "{role:?}"),
            Err(fault) => assert!(!expected.is_empty() && fault.to_string().contains(expected), "{fault}"),
        }
    }
    let (_dir, paths) = written("b.txt", "a".repeat(8));
    let fault = |role| of(&paths, &config(), &role, 256).unwrap_err().to_string();
    assert!(fault(Role::Source { index: 1 }).contains("data.source[1] holds no sample"));
    assert!(
        fault(Role::Evaluation { set: "held".to_owned(), samples_max: 9 }).contains("data.eval \"held\"")
    );
    let nowhere =
        of(&["nowhere".to_owned()], &config(), &Role::Evaluation { set: String::new(), samples_max: 9 }, 256);
    assert!(nowhere.unwrap_err().to_string().contains("check the paths of data.eval"));
}
