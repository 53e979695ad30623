use std::fs;
use std::sync::Mutex;

use rayon::ThreadPoolBuilder;

use super::*;
use crate::encoder::Encoder;
use crate::files::{DataFile, Kind};
use crate::progress::Watch;
use crate::record::Fields;
use crate::testing::chats;
use crate::tokenizer::Tokenizer;

/// Returns the documents of a text, tokenized with this many threads.
fn documents(text: &Text<'_>, threads: usize) -> Result<Vec<(usize, Vec<u32>)>, DataError> {
    let mut documents = Vec::new();
    let mut write = |batch: Encoded| -> Result<(), DataError> {
        let mut start = 0;
        for (end, _) in batch.ends {
            documents.push((batch.file, batch.ids[start..end].to_vec()));
            start = end;
        }
        Ok(())
    };
    let pool = ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
    // The output is written by one thread, outside of the pool.
    let mut encoded = Vec::new();
    let outcome = pool.install(|| {
        run(text, |batch| -> Result<(), DataError> {
            encoded.push(batch);
            Ok(())
        })
    });
    encoded.into_iter().try_for_each(&mut write)?;
    outcome.map(|()| documents)
}

#[test]
fn documents_keep_order_and_progress_reaches_total() {
    let dir = tempfile::tempdir().unwrap();
    // Several rounds, one of which is a single line.
    let mut lines: Vec<String> =
        (0..40_000).map(|index| format!("{index} {}", "x".repeat(index % 900))).collect();
    lines.push("y".repeat(ROUND_BYTES + 7));
    lines.push(String::new());
    let body: String = lines.iter().map(|text| format!("{{\"text\": \"{text}\"}}\n")).collect();
    let mut files = Vec::new();
    for name in ["a.jsonl", "b.jsonl"] {
        let path = dir.path().join(name);
        fs::write(&path, &body).unwrap();
        files.push(DataFile { path, named: true, kind: Kind::Jsonl, compression: None });
    }
    let tokenizer = Tokenizer::load("bytes").unwrap();
    let reports = Mutex::new(Vec::new());
    let watch = |now: Tokenizing| reports.lock().unwrap().push(now);
    let text = Text {
        files: &files,
        encoder: Encoder { tokenizer: &tokenizer, fields: Fields::new(None), chats: chats() },
        malformed: Malformed::Error,
        expansion_max: 1000,
        watch: &Watch::new(&watch),
    };
    let expected: Vec<(usize, Vec<u32>)> = (0..2)
        .flat_map(|file| lines.iter().map(move |text| (file, text.bytes().map(u32::from).collect())))
        .collect();
    for threads in [1, 3] {
        assert!(documents(&text, threads).unwrap() == expected, "{threads} threads");
    }
    let reports = reports.into_inner().unwrap();
    let last = reports.last().unwrap();
    let tokens = expected.iter().map(|(_, ids)| ids.len() as u64).sum();
    let all_bytes = 2 * body.len() as u64;
    assert_eq!(
        *last,
        Tokenizing { read_bytes: all_bytes, all_bytes, documents: 80_004, tokens, is_done: true }
    );
    assert!(reports.len() > 8, "{} reports", reports.len());
    // Each line has 13 bytes besides its text; in addition, a buffer may have been read ahead.
    let has_tokens = |now: &Tokenizing| now.read_bytes <= now.tokens + 13 * now.documents + (1 << 20);
    assert!(reports[..reports.len() - 1].iter().all(has_tokens), "{reports:?}");
}

#[test]
fn first_error_is_reported_for_any_thread_count() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.jsonl");
    let line = |index: usize| if index % 30_000 == 29_999 { "no JSON" } else { "{\"text\": \"abcdefgh\"}" };
    fs::write(&path, (0..100_000).map(|index| format!("{}\n", line(index))).collect::<String>()).unwrap();
    let tokenizer = Tokenizer::load("bytes").unwrap();
    let files = [DataFile { path, named: true, kind: Kind::Jsonl, compression: None }];
    let text = Text {
        files: &files,
        encoder: Encoder { tokenizer: &tokenizer, fields: Fields::new(None), chats: chats() },
        malformed: Malformed::Error,
        expansion_max: 1000,
        watch: &Watch::NONE,
    };
    for threads in [1, 2, 5] {
        let message = documents(&text, threads).unwrap_err().to_string();
        assert!(message.contains("line 30000: "), "{message}");
    }
}

/// A template that takes its time and then rejects every conversation is noticed as soon as for a single one.
#[cfg(feature = "tokenizers")]
#[test]
fn first_rejected_conversation_ends_the_round() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let slow = "{% for i in range(99999) %}{% endfor %}{{ raise_exception('no') }}";
    fs::write(path("slow.jinja"), slow).unwrap();
    let mut config = crate::testing::config();
    config.chat_template = Some(path("slow.jinja").to_str().unwrap().to_owned());
    let tokenizer = Tokenizer::load("bytes").unwrap();
    // Lines of a batch each, or of a sixtieth.
    let took = |lines: usize, len: usize| {
        let line =
            format!("{{\"messages\": [{{\"role\": \"user\", \"content\": \"{}\"}}]}}\n", "x".repeat(len));
        fs::write(path("a.jsonl"), line.repeat(lines)).unwrap();
        let text = Text {
            files: &[DataFile { path: path("a.jsonl"), named: true, kind: Kind::Jsonl, compression: None }],
            encoder: Encoder {
                tokenizer: &tokenizer,
                fields: Fields::new(None),
                chats: crate::chat::Chats::find(&config, &tokenizer).unwrap(),
            },
            malformed: Malformed::Error,
            expansion_max: 1000,
            watch: &Watch::NONE,
        };
        let start = std::time::Instant::now();
        let fault = documents(&text, 2).unwrap_err().to_string();
        assert!(fault.ends_with("a.jsonl: line 1: the chat template rejects it: no"), "{fault}");
        start.elapsed()
    };
    let one = took(1, 2000);
    for (lines, len) in [(100, 1 << 17), (60, 2000)] {
        assert!(took(lines, len) < 16 * one, "{one:?}");
    }
}
