//! Checks data without running: all of it if it is small, otherwise its first records.

use std::path::Path;

use fsdp_ckpt::is_url;
use fsdp_config::{DataConfig, Packing, Resolved};
use fsdp_data::{Outlook, Role, Tokenizer, lost, outlook};

use super::{Findings, Verdict};
use crate::units::{bytes, grouped};

/// Paths that are read in the same way and for the same purpose.
struct Part {
    subject: String,
    paths: Vec<String>,
    config: DataConfig,
    role: Role,
}

impl Findings {
    /// Checks the data of a run, for a model with `vocab` token ids.
    pub(super) fn data(&mut self, config: &Resolved, vocab: usize) {
        let out_dir = Path::new(&config.run.out_dir);
        let tokenizer = self.tokenizer(&config.data.tokenizer);
        for Part { subject, paths, config, role } in parts(config) {
            if paths.iter().any(is_url) {
                let detail = "in an object store, which is not checked".to_owned();
                self.note(&subject, Verdict::Warning, detail);
                continue;
            }
            let lost = lost(&paths, &config, out_dir, &role);
            lost.iter().for_each(|error| self.record_error(&subject, error));
            if !lost.is_empty() || tokenizer.is_none() {
                continue;
            }
            let surveyed = outlook(&paths, &config, out_dir, &role, vocab);
            let Some(found) = self.record(&subject, surveyed, |found| describe_outlook(found, &config))
            else {
                continue;
            };
            for warning in warnings(&found, &config, &role, vocab) {
                self.note(&subject, Verdict::Warning, warning);
            }
        }
    }

    /// Loads the tokenizer; reports only failures.
    fn tokenizer(&mut self, name: &str) -> Option<Tokenizer> {
        let loaded = Tokenizer::load(name);
        if let Err(error) = &loaded {
            self.record_error("tokenizer", error);
        }
        loaded.ok()
    }
}

/// All training and evaluation data.
fn parts(config: &Resolved) -> Vec<Part> {
    let (data, global_batch) = (&config.data, config.train.global_batch_size);
    let sources = data.sources().into_iter().enumerate().map(|(index, source)| {
        let role = match data.source.len() {
            0 | 1 => Role::Training { global_batch },
            _ => Role::Source { index },
        };
        Part { subject: "data".to_owned(), config: data.of_source(&source), paths: source.path, role }
    });
    let sets = data.eval.iter().map(|set| {
        let subject =
            if set.name.is_empty() { "evaluation".to_owned() } else { format!("evaluation {}", set.name) };
        let role = Role::of_set(set, data, global_batch);
        Part { subject, paths: set.paths.clone(), config: data.clone(), role }
    });
    sources.chain(sets).collect()
}

/// What the run will warn about, and what it may reject once it has read everything, which the first records do not
/// show.
fn warnings(found: &Outlook, data: &DataConfig, role: &Role, vocab: usize) -> Vec<String> {
    let prefix = if found.whole.is_some() { "" } else { "of the first records: " };
    let mut warnings: Vec<String> =
        found.warnings.iter().map(|warning| format!("{prefix}{warning}")).collect();
    if found.whole.is_some() {
        return warnings;
    }
    let ids = found.tokenizer_ids;
    if ids > vocab {
        warnings.push(format!(
            "tokenizer {} has {} ids, but the model's vocab_size is {}: text with ids beyond it is refused; use the model's own \
             tokenizer",
            data.tokenizer,
            grouped(ids as u64),
            grouped(vocab as u64)
        ));
    }
    let samples = found.survey.about_tokens / data.seq_len as u64;
    if let &Role::Training { global_batch } = role
        && data.packing == Packing::Stream
        && samples < global_batch as u64
    {
        warnings.push(format!(
            "a global batch has {} samples, but there may be fewer; add data, or lower data.seq_len or \
             train.global_batch_size",
            grouped(global_batch as u64)
        ));
    }
    warnings
}

/// Rounds a number to two digits.
fn rounded(number: u64) -> String {
    let unit = 10u64.pow(number.checked_ilog10().unwrap_or(0).saturating_sub(1));
    grouped(number.saturating_add(unit / 2) / unit * unit)
}

fn describe_outlook(Outlook { survey, whole, .. }: &Outlook, data: &DataConfig) -> String {
    let files = match survey.files {
        1 => "1 file".to_owned(),
        files => format!("{} files", grouped(files as u64)),
    };
    let size = format!("{files}, {}", bytes(survey.bytes));
    if let Some(totals) = whole {
        return format!("{size}, {} tokens, {} samples", grouped(totals.tokens), grouped(totals.samples));
    }
    let samples = survey.about_tokens / data.seq_len as u64;
    let (tokens, samples) = (rounded(survey.about_tokens), rounded(samples));
    let examined = bytes(survey.examined);
    format!(
        "{size}, about {tokens} tokens by the first {examined}, the only part that is read here, {samples} samples"
    )
}
