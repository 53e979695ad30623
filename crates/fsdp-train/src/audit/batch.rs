//! The micro-batches of the judged step, as they should be used, and with faults.

mod file;
mod shift;

use std::ops::Range;

use fsdp_nn::backend::IGNORED_TARGET;
use fsdp_nn::model::{Batch, RowFacts};

pub use self::file::read_batches;

/// A micro-batch as the other program had it. All lists are ordered by (row, position).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MicroBatch {
    /// Token ids.
    pub ids: Vec<u32>,
    /// The token to predict at each position; `None` does not count.
    pub targets: Vec<Option<u32>>,
    /// Tokens per row.
    pub seq: usize,
    /// Position of each token in its document, if rows have several.
    pub positions: Option<Vec<u32>>,
    /// Whether positions count on over documents, which only do not attend to each other: padding in front of text.
    pub runs_on: bool,
    /// For each token, whether it is text and not padding.
    pub is_text: Vec<bool>,
}

/// Other positions that count in the loss than those of the batch, or other targets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Labels {
    /// Also the text that the batch leaves out, such as prompts.
    WithPrompts,
    /// Also padding.
    WithPadding,
    /// All positions.
    All,
    /// The token after the next one: labels that were shifted by the data and again by the model.
    ShiftedTwice,
    /// The token itself: labels that nobody shifted.
    NotShifted,
    /// Without the last target of each row.
    WithoutLast,
}

/// Which tokens attend to each other, and what positions they have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Documents {
    /// As the positions of the batch say.
    Given,
    /// All of a row attend to each other, with the positions of the batch.
    Joined,
    /// All of a row attend to each other, and positions do not restart.
    Ignored,
    /// Documents do not attend to each other, but positions do not restart.
    RunOn,
    /// All of a row attend to each other, but positions restart this often.
    Restarting(usize),
}

impl MicroBatch {
    /// Number of positions that count.
    pub fn counted(&self) -> usize {
        self.targets.iter().flatten().count()
    }

    /// A micro-batch of the run file's own data.
    pub fn of_batch(batch: &Batch) -> Self {
        let Batch { ids, targets, seq, positions, .. } = batch;
        let targets: Vec<Option<u32>> =
            targets.iter().map(|&target| (target != IGNORED_TARGET).then_some(target)).collect();
        // As in training, rows after the last counted target are padding.
        let row = |row: &[Option<u32>]| {
            let text = row.iter().rposition(Option::is_some).map_or(0, |last| last + 1);
            (0..row.len()).map(move |at| at < text).collect::<Vec<_>>()
        };
        let is_text = targets.chunks(*seq).flat_map(row).collect();
        Self { ids: ids.clone(), targets, seq: *seq, positions: positions.clone(), runs_on: false, is_text }
    }

    /// Each row as a micro-batch of its own.
    pub(super) fn rows(&self) -> impl Iterator<Item = MicroBatch> {
        (0..self.ids.len()).step_by(self.seq).map(|first| {
            let row = first..first + self.seq;
            MicroBatch {
                ids: self.ids[row.clone()].to_vec(),
                targets: self.targets[row.clone()].to_vec(),
                positions: self.positions.as_ref().map(|positions| positions[row.clone()].to_vec()),
                is_text: self.is_text[row].to_vec(),
                ..*self
            }
        })
    }

    /// Whether rows have several documents.
    pub(super) fn is_packed(&self) -> bool {
        self.positions.is_some() && !self.runs_on
    }

    /// The same micro-batch with other labels.
    pub(super) fn labelled(&self, labels: Labels) -> MicroBatch {
        let target = |index: usize| -> Option<u32> {
            let row_end = (index / self.seq + 1) * self.seq;
            let token = |at: usize| (at < row_end).then(|| self.ids[at]);
            let (given, next) = (self.targets[index], index + 1);
            match labels {
                Labels::WithPrompts => given.or_else(|| token(next).filter(|_| self.is_text[next])),
                Labels::WithPadding => given.or_else(|| token(next).filter(|_| !self.is_text[next])),
                Labels::All => given.or_else(|| token(next)),
                Labels::ShiftedTwice => (next < row_end).then(|| self.targets[next]).flatten(),
                Labels::NotShifted if index.is_multiple_of(self.seq) => None,
                Labels::NotShifted => self.targets[index - 1],
                Labels::WithoutLast => {
                    given.filter(|_| self.targets[next..row_end].iter().any(Option::is_some))
                }
            }
        };
        MicroBatch { targets: (0..self.ids.len()).map(target).collect(), ..self.clone() }
    }

    /// The same as a batch of a model, and facts about its rows.
    /// With `hides_padding`, padding attends to text only, as it does under an attention mask.
    pub(super) fn to_batch(&self, documents: Documents, hides_padding: bool) -> (Batch, RowFacts) {
        let (seq, rows) = (self.seq, self.ids.len());
        let documents =
            if documents == Documents::Given && self.runs_on { Documents::RunOn } else { documents };
        let count_from = |first: usize| (0..rows).map(|at| (at % seq % first.max(1)) as u32).collect();
        let positions = match documents {
            Documents::Given | Documents::Joined => self.positions.clone(),
            Documents::Ignored => None,
            Documents::RunOn => Some(count_from(seq)),
            Documents::Restarting(parts) => Some(count_from(seq.div_ceil(parts))),
        };
        let samples = || (0..rows / seq).map(|sample| sample * seq..(sample + 1) * seq);
        let documents = match documents {
            Documents::Given | Documents::Ignored => None,
            Documents::Joined | Documents::Restarting(_) => Some(samples().collect()),
            Documents::RunOn => self.positions.as_ref().map(|positions| {
                let starts: Vec<usize> = (0..rows).filter(|&at| positions[at] == 0).collect();
                let ends = starts.iter().skip(1).copied().chain([rows]);
                starts.iter().copied().zip(ends).map(|(start, end)| start..end).collect()
            }),
        };
        let length = |sample: Range<usize>| {
            let last = sample.clone().rposition(|at| self.is_text[at] || self.targets[at].is_some());
            last.map_or(0, |last| last + 1)
        };
        let lengths = Some(samples().map(length).collect());
        let text = |sample: Range<usize>| {
            sample.clone().rposition(|at| self.is_text[at]).map_or(seq, |last| last + 1)
        };
        let keys_ends = if hides_padding { samples().map(text).collect() } else { Vec::new() };
        let targets = self.targets.iter().map(|target| target.unwrap_or(IGNORED_TARGET)).collect();
        let samples = (0..(rows / seq) as u64).collect();
        (
            Batch { ids: self.ids.clone(), targets, samples, seq, positions },
            RowFacts { documents, lengths, keys_ends },
        )
    }
}

#[cfg(test)]
mod tests;
