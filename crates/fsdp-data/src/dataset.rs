//! Samples: the inputs of the model and the targets it should predict.
//!
//! A sample is up to `seq_len + 1` tokens. The inputs are all but the last token, the targets all but the first, so
//! position p predicts the token after it, if that token counts. Bos and eos are added to documents depending on their
//! form ([`super::special`]).
//!
//! - Packing "stream" cuts the concatenated documents every `seq_len` tokens. Consecutive samples share one token, so
//!   that each token but the first is a target once; the incomplete rest is dropped.
//! - Packing "documents" makes one sample per document. Longer documents are truncated: at the end, without an eos,
//!   because the text does not end there; or after the bos, if the tokenizer truncates on the left. Shorter ones are
//!   padded.
//! - Packing "packed" puts several such documents into a sample ([`super::packed`]).

use fsdp_ckpt::digest::Digest;
use fsdp_config::{DataConfig, Packing};

use super::cache::Stage;
use super::corpus::Corpus;
use super::error::DataError;
use super::loading::Loading;
use super::packed::Packed;
use super::special::{AddedIds, Form, Special};
use super::tokenizer::Tokenizer;
use super::tokens::Token;
use super::warning::DataWarning;

/// A target that does not count in the loss.
pub(super) const IGNORE: u32 = u32::MAX;

/// Samples of equal length.
#[derive(Debug)]
pub(super) struct Dataset {
    pub(super) corpus: Corpus,
    seq_len: usize,
    special: Special,
    /// The documents in use, as indices into the corpus.
    documents: Vec<usize>,
    layout: Layout,
}

#[derive(Debug)]
enum Layout {
    /// Where each document starts in the stream, followed by the end of the stream.
    Stream(Vec<usize>),
    Documents,
    Packed(Packed),
}

/// Tokens of one document, including its bos and eos.
#[derive(Clone, Copy, Debug)]
struct Run {
    /// Index into the documents in use.
    document: usize,
    /// Number of tokens after bos that are truncated.
    skipped: usize,
    /// The first of the remaining tokens.
    from: usize,
    len: usize,
}

impl Dataset {
    /// Opens files and folders (`config.train` or `config.eval`) as `config` says. Token files are memory-mapped, so
    /// they must not change afterwards.
    ///
    /// # Errors
    /// If something cannot be read or tokenized, a path is inside the output folder, or a special token does not exist.
    pub(super) fn load(
        paths: &[String],
        config: &DataConfig,
        loading: &Loading<'_>,
    ) -> Result<Dataset, DataError> {
        let tokenizer = Tokenizer::load(&config.tokenizer)?;
        let special = Special::resolve(config, &tokenizer)?;
        let corpus = Corpus::open(paths, config, loading, &tokenizer)?;
        let mut dataset = Dataset {
            documents: (0..corpus.document_count()).collect(),
            corpus,
            seq_len: config.seq_len,
            special,
            layout: Layout::Documents,
        };
        dataset.drop_short(config.packing);
        let count =
            |form| dataset.documents.iter().filter(|&&index| dataset.corpus.form(index) == form).count();
        let warnings = special.warnings(config, tokenizer.digest().is_some(), count);
        dataset.corpus.warnings.extend(warnings);
        dataset.expect_targets(paths, config.packing)?;
        if config.packing != Packing::Stream {
            dataset.drop_uncounted();
        }
        dataset.layout = dataset.build_layout(config.packing);
        Ok(dataset)
    }

    fn build_layout(&self, packing: Packing) -> Layout {
        let documents = 0..self.documents.len();
        match packing {
            Packing::Stream => {
                let mut starts = vec![0];
                let mut end = 0;
                starts.extend(documents.map(|document| {
                    end += self.len_of(document);
                    end
                }));
                Layout::Stream(starts)
            }
            Packing::Documents => Layout::Documents,
            Packing::Packed => {
                let positions = documents.map(|document| self.clipped(document).len - 1);
                Layout::Packed(Packed::new(positions.collect(), self.seq_len))
            }
        }
    }

    /// Drops documents that are empty and, unless packing is "stream", those that have no target because they are a
    /// single token without bos and eos.
    fn drop_short(&mut self, packing: Packing) {
        let is_long = |document: usize| {
            let needs_second_token = packing != Packing::Stream && self.added_ids(document).count() == 0;
            self.corpus.document(self.documents[document]).len() > usize::from(needs_second_token)
        };
        let used = (0..self.documents.len()).filter(|&document| is_long(document));
        self.documents = used.map(|document| self.documents[document]).collect();
    }

    /// Checks that some document has a target that counts. Otherwise nothing would be learned, or there would be no
    /// samples without an explanation.
    fn expect_targets(&self, paths: &[String], packing: Packing) -> Result<(), DataError> {
        let documents = self.documents.len();
        let has_target = |document: usize| match packing {
            Packing::Stream => self.tokens(self.untruncated(document)).any(|token| token.counts),
            Packing::Documents | Packing::Packed => self.has_target(document),
        };
        if !self.has_ignored() || documents == 0 || (0..documents).any(has_target) {
            return Ok(());
        }
        let needed = (0..documents).filter_map(|document| self.inputs_to_target(document)).min();
        Err(DataError::NothingCounts { paths: paths.to_vec(), documents, seq_len: self.seq_len, needed })
    }

    /// Whether a document, as one sample, has a target that counts.
    fn has_target(&self, document: usize) -> bool {
        self.inputs_to_target(document).is_some_and(|inputs| inputs <= self.seq_len)
    }

    /// Returns the least number of inputs with which a sample of the document has a target that counts; `None` if there
    /// is none.
    fn inputs_to_target(&self, document: usize) -> Option<usize> {
        let run = self.untruncated(document);
        // The first token of a document is never a target.
        let mut counted = self.tokens(run).enumerate().skip(1).filter(|(_, token)| token.counts);
        match self.special.clips_left {
            true => counted.last().map(|(at, _)| run.len - at),
            false => counted.next().map(|(at, _)| at),
        }
    }

    /// Drops documents without a target that counts.
    fn drop_uncounted(&mut self) {
        if !self.has_ignored() {
            return;
        }
        let has_target = |&document: &usize| self.has_target(document);
        let used: Vec<usize> =
            (0..self.documents.len()).filter(has_target).map(|document| self.documents[document]).collect();
        let documents = self.documents.len() - used.len();
        if documents > 0 {
            self.corpus.warnings.push(DataWarning::Silent { documents, seq_len: self.seq_len });
        }
        self.documents = used;
    }

    /// Adds a warning about how much of the documents in the first `samples` samples is truncated.
    pub(super) fn warn_of_clipped(&mut self, samples: usize) {
        if matches!(self.layout, Layout::Stream(_)) {
            return;
        }
        let runs = (0..samples.min(self.len())).flat_map(|sample| self.runs(sample));
        let clipped = DataWarning::clipped(runs.map(|run| self.len_of(run.document) - run.len));
        self.corpus.warnings.extend(clipped);
    }

    /// Returns the number of samples.
    pub(super) fn len(&self) -> usize {
        match &self.layout {
            Layout::Stream(starts) => starts[self.documents.len()].saturating_sub(1) / self.seq_len,
            Layout::Documents => self.documents.len(),
            Layout::Packed(packed) => packed.len(),
        }
    }

    /// Whether some tokens do not count in the loss.
    pub(super) fn has_ignored(&self) -> bool {
        self.corpus.scan.has_ignored
    }

    /// Returns the number of tokens of all documents in use, including bos and eos.
    pub(super) fn tokens_len(&self) -> usize {
        match &self.layout {
            Layout::Stream(starts) => starts[self.documents.len()],
            _ => (0..self.documents.len()).map(|document| self.len_of(document)).sum(),
        }
    }

    /// Whether samples contain several documents that do not attend to each other: see [`Dataset::positions`].
    pub(super) fn is_packed(&self) -> bool {
        matches!(self.layout, Layout::Packed(_))
    }

    /// Number of inputs, and of targets, per sample.
    pub(super) fn seq_len(&self) -> usize {
        self.seq_len
    }

    /// Returns the CRC-64 of the tokens as read, each as four little-endian bytes, with the highest bit set if the
    /// token does not count. The bounds of documents are not included. For more than 256 MiB of token files, it covers
    /// only samples of them.
    pub(super) fn digest(&self) -> Digest {
        self.corpus.scan.digest
    }

    /// Returns warnings from reading the data.
    pub(super) fn warnings(&self) -> &[DataWarning] {
        &self.corpus.warnings
    }

    /// Caches the tokens of text for later starts if the cache is inside the output folder, where nothing may be
    /// created before the run is accepted. (Other caches are written already.) Returns a warning if that fails.
    pub(super) fn keep(&self) -> Option<DataWarning> {
        self.corpus.advance_to(Stage::Kept)
    }

    /// Writes these tokens early, for other processes of this run. They are deleted when the value is dropped, unless
    /// they are [kept](Dataset::keep). Returns a warning if that fails.
    pub(super) fn share(&self) -> Option<DataWarning> {
        self.corpus.advance_to(Stage::Shared)
    }

    /// Returns the tokens of a sample in the order in which the model sees them, each with whether it is a target that
    /// counts.
    ///
    /// # Panics
    /// If there is no such sample.
    pub(super) fn sample_tokens(&self, index: usize) -> Vec<Token> {
        let mut tokens: Vec<Token> = Vec::new();
        for run in self.runs(index) {
            // The first token of a sample, or of each document in a packed sample, has no input that predicts it.
            let first = if self.is_packed() || tokens.is_empty() { tokens.len() } else { usize::MAX };
            tokens.extend(self.tokens(run));
            if let Some(token) = tokens.get_mut(first) {
                token.counts = false;
            }
        }
        tokens
    }

    /// Whether a sample has tokens that do not count.
    ///
    /// # Panics
    /// If there is no such sample.
    pub(super) fn is_partly_silent(&self, index: usize) -> bool {
        self.runs(index).into_iter().flat_map(|run| self.tokens(run)).any(|token| !token.counts)
    }

    /// Whether a sample has answers that end with no token that stops generation.
    ///
    /// # Panics
    /// If there is no such sample.
    pub(super) fn is_open(&self, index: usize) -> bool {
        let form = |run: Run| self.corpus.form(self.documents[run.document]);
        self.runs(index).into_iter().any(|run| form(run) == Form::OpenConversation)
    }

    /// Writes a sample, or for `None` a masked sample in which no target counts.
    ///
    /// # Panics
    /// If there is no such sample, or a slice is not `seq_len` long.
    pub(super) fn fill(&self, index: Option<usize>, inputs: &mut [u32], targets: &mut [u32]) {
        assert_eq!((inputs.len(), targets.len()), (self.seq_len, self.seq_len), "slices are seq_len long");
        inputs.fill(self.special.pad);
        targets.fill(IGNORE);
        let runs = index.map_or_else(Vec::new, |index| self.runs(index));
        if !self.is_packed() {
            return write(runs.into_iter().flat_map(|run| self.tokens(run)), inputs, targets);
        }
        let mut start = 0;
        for run in runs {
            // The last token is not an input, only a target.
            let end = start + run.len - 1;
            write(self.tokens(run), &mut inputs[start..end], &mut targets[start..end]);
            start = end;
        }
    }

    /// Writes the position of each input of a packed sample (or for `None`, a masked one) within its document. The
    /// padding after the documents is treated as a document of its own.
    ///
    /// # Panics
    /// If there is no such sample, or the slice is not `seq_len` long.
    pub(super) fn positions(&self, index: Option<usize>, positions: &mut [u32]) {
        assert_eq!(positions.len(), self.seq_len, "a slice is seq_len long");
        let runs = index.map_or_else(Vec::new, |index| self.runs(index));
        let mut rest = positions;
        for len in runs.iter().map(|run| run.len - 1).chain([usize::MAX]) {
            let (document, others) = rest.split_at_mut(len.min(rest.len()));
            document.iter_mut().zip(0..).for_each(|(to, position)| *to = position);
            rest = others;
        }
    }

    /// Checks that every id that was read is below the vocabulary size of the model. (Long files were only sampled;
    /// each batch is checked again when it is used.)
    ///
    /// # Errors
    /// For the first id that is not.
    pub(super) fn check_vocabulary(&self, vocab_size: usize) -> Result<(), DataError> {
        self.special.check_vocabulary(self.corpus.forms(), vocab_size)?;
        let is_out_of_range = |id: u32| id as usize >= vocab_size;
        if !self.corpus.scan.id_max.is_some_and(is_out_of_range) {
            return Ok(());
        }
        // The id may not be part of any sample.
        for sample in 0..self.len() {
            let mut before = 0;
            for run in self.runs(sample) {
                if let Some((at, Token { id, .. })) =
                    self.tokens(run).enumerate().find(|(_, token)| is_out_of_range(token.id))
                {
                    let file = self.corpus.file_of_document(self.documents[run.document]).to_owned();
                    let reason = format!(
                        "token id {id} (sample {sample}, position {}), but the model's vocab_size is \
                         {vocab_size}; use the model's own tokenizer",
                        before + at
                    );
                    return Err(DataError::Malformed { file, reason });
                }
                before += run.len;
            }
        }
        Ok(())
    }

    /// Returns the tokens of a sample by document: at most `seq_len + 1`, or as many of each document in a packed
    /// sample.
    fn runs(&self, index: usize) -> Vec<Run> {
        match &self.layout {
            Layout::Stream(starts) => self.stream_runs(starts, index),
            Layout::Documents => vec![self.clipped(index)],
            Layout::Packed(packed) => packed.sample(index).map(|document| self.clipped(document)).collect(),
        }
    }

    /// Returns the tokens of a document, truncated to fit into a sample.
    fn clipped(&self, document: usize) -> Run {
        let total = self.len_of(document);
        let len = total.min(self.seq_len + 1);
        Run { document, skipped: if self.special.clips_left { total - len } else { 0 }, from: 0, len }
    }

    /// Returns the tokens of a document, whatever its length.
    fn untruncated(&self, document: usize) -> Run {
        Run { document, skipped: 0, from: 0, len: self.len_of(document) }
    }

    /// Returns the number of tokens of a document, including bos and eos.
    fn len_of(&self, document: usize) -> usize {
        self.corpus.document(self.documents[document]).len() + self.added_ids(document).count()
    }

    /// Returns the bos and eos of a document. A completion that already ends with eos does not get another one.
    fn added_ids(&self, document: usize) -> AddedIds {
        let index = self.documents[document];
        let form = self.corpus.form(index);
        let AddedIds { bos, eos } = self.special.added_ids(form);
        let end = self.corpus.document(index).end;
        let ends_with = |id: u32| {
            let last = end.checked_sub(1).and_then(|last| self.corpus.tokens(last..end).next());
            form == Form::Completion && last.is_some_and(|last| last.id == id)
        };
        AddedIds { bos, eos: eos.filter(|&id| !ends_with(id)) }
    }

    fn stream_runs(&self, starts: &[usize], index: usize) -> Vec<Run> {
        let (start, end) = (index * self.seq_len, (index + 1) * self.seq_len + 1);
        // The first document that overlaps the sample is the last one that starts at or before it.
        let low = starts.partition_point(|&first| first <= start) - 1;
        let run = |document: usize| {
            let (first, next) = (starts[document], starts[document + 1]);
            let from = start.max(first) - first;
            Run { document, skipped: 0, from, len: end.min(next) - first - from }
        };
        (low..self.documents.len()).take_while(|&document| starts[document] < end).map(run).collect()
    }

    fn tokens(&self, Run { document, skipped, from, len }: Run) -> impl Iterator<Item = Token> {
        let AddedIds { bos, eos } = self.added_ids(document);
        let [bos, eos] = [bos, eos].map(|id| id.map(Token::counted));
        let range = self.corpus.document(self.documents[document]);
        let before = usize::from(bos.is_some());
        let start = range.end.min(range.start + skipped + from.saturating_sub(before));
        let end = range.end.min(start.saturating_add(len));
        let eos = eos.filter(|_| end == range.end);
        let tokens = self.corpus.tokens(start..end);
        bos.filter(|_| from == 0).into_iter().chain(tokens).chain(eos).take(len)
    }
}

/// Writes all tokens but the last as inputs, and all but the first, if they count, as targets.
fn write(tokens: impl Iterator<Item = Token>, inputs: &mut [u32], targets: &mut [u32]) {
    for (position, token) in tokens.enumerate() {
        if let Some(input) = inputs.get_mut(position) {
            *input = token.id;
        }
        if let Some(before) = position.checked_sub(1).filter(|_| token.counts) {
            targets[before] = token.id;
        }
    }
}

#[cfg(test)]
mod tests;
