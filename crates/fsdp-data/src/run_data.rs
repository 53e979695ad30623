//! The data of a run, by step and micro-batch.

use std::path::Path;

use fsdp_ckpt::digest::{Digest, DigestKind};
use fsdp_config::{DataConfig, EvalSet, Resolved};
use fsdp_nn::model::Batch;
use serde::{Deserialize, Serialize};

use super::dataset::Dataset;
use super::error::DataError;
use super::eval::EvalSampler;
use super::fetched::fetched;
use super::loading::Loading;
use super::preview::Preview;
use super::progress::Watch;
use super::role::Role;
use super::training::{Sample, SourcePosition, SourceSummary, Training};
use super::warning::DataWarning;

/// Number of samples to search for one with tokens that do not count in the loss.
const PREVIEW_SEARCH_MAX: usize = 1 << 12;

/// Training and evaluation data with their samplers.
#[derive(Debug)]
pub struct RunData {
    /// `None` if a model is only evaluated.
    train: Option<Training>,
    eval: Vec<EvalData>,
}

/// A position in the training data, at the beginning of a step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataPosition {
    /// The epoch, from 0.
    pub epoch: u64,
    /// The step in that epoch, from 0.
    pub step_in_epoch: u64,
    /// The seed of the sample order; `None` if samples are not shuffled.
    pub seed: Option<u64>,
    /// Number of samples in the data.
    pub samples: u64,
    /// CRC-64 of all tokens; with several sources, of their shares and checksums.
    pub digest: String,
    /// The position in each source, if there are several.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sources: Vec<SourcePosition>,
}

/// A set of evaluation data.
#[derive(Debug)]
struct EvalData {
    name: String,
    dataset: Dataset,
    sampler: EvalSampler,
}

impl RunData {
    /// Reads the configured data, for a model with a vocabulary of `vocab` tokens. Reports progress to `watch`.
    ///
    /// # Errors
    /// Data that is unreadable, too short, in the output folder, missing in its object store, or with tokens outside
    /// the vocabulary.
    pub fn load(config: &Resolved, vocab: usize, watch: &Watch<'_>) -> Result<Self, DataError> {
        let loading = Loading { out_dir: Path::new(&config.run.out_dir), watch, keeps: true };
        let data = fetched(&config.data)?;
        let train = Some(Training::load(&data, &config.train, &loading, vocab)?);
        Ok(Self { train, eval: evaluation(config, &data, &loading, vocab)? })
    }

    /// Reads only the evaluation data.
    ///
    /// # Errors
    /// Errors of [`RunData::load`]; [`DataError::NothingToEvaluate`] if the configuration names no evaluation data.
    pub fn to_evaluate(config: &Resolved, vocab: usize, watch: &Watch<'_>) -> Result<Self, DataError> {
        if config.data.eval.is_empty() {
            return Err(DataError::NothingToEvaluate);
        }
        let loading = Loading { out_dir: Path::new(&config.run.out_dir), watch, keeps: true };
        Ok(Self { train: None, eval: evaluation(config, &fetched(&config.data)?, &loading, vocab)? })
    }

    /// No data, for work on the state of a run.
    pub fn none() -> Self {
        Self { train: None, eval: Vec::new() }
    }

    fn train(&self) -> &Training {
        self.train.as_ref().expect("who evaluates a model takes no training step")
    }

    /// The digest of all training tokens or, without training data, of all evaluation tokens.
    pub fn digest(&self) -> Digest {
        let of_evaluation = || {
            let sets: Vec<String> = self.eval.iter().map(|set| set.dataset.digest().to_string()).collect();
            DigestKind::Crc64.of(sets.join("\n").as_bytes())
        };
        self.train.as_ref().map_or_else(of_evaluation, Training::digest)
    }

    /// Warnings from reading the data, each with the configuration key of the data in question.
    pub fn warnings(&self) -> impl Iterator<Item = (String, &DataWarning)> {
        let train = self.train.iter().flat_map(Training::named);
        let sets = self.eval.iter().map(|EvalData { name, dataset, .. }| match &**name {
            "" => ("data.eval".to_owned(), dataset),
            name => (format!("data.eval \"{name}\""), dataset),
        });
        let all = train.chain(sets);
        all.flat_map(|(key, dataset)| dataset.warnings().iter().map(move |warning| (key.clone(), warning)))
    }

    /// Writes those tokenized texts to disk that belong into the output folder.
    pub fn keep(&self) -> impl Iterator<Item = DataWarning> {
        self.datasets().filter_map(Dataset::keep)
    }

    /// Makes such tokens available to other processes of this run. If that fails, they tokenize the text themselves.
    pub fn share(&self) {
        for warning in self.datasets().filter_map(Dataset::share) {
            tracing::info!("{warning}");
        }
    }

    /// Returns the first training sample in which some tokens do not count in the loss, to show the user which ones do.
    /// `None` if the first few thousand samples contain none.
    ///
    /// # Errors
    /// A tokenizer that cannot be read again.
    pub fn first_sample(&self, config: &DataConfig) -> Result<Option<Preview>, DataError> {
        let train = self.train();
        if !train.datasets().any(Dataset::has_ignored) {
            return Ok(None);
        }
        let batches = (0..).flat_map(|step| (0..train.micro_batches()).map(move |index| (step, index)));
        let mut samples = batches.flat_map(|(step, index)| train.batch(step, index)).take(PREVIEW_SEARCH_MAX);
        let is_shown = |sample: &Sample<'_>| {
            sample
                .index
                .filter(|&index| sample.dataset.has_ignored() && sample.dataset.is_partly_silent(index))
        };
        let found = samples.find_map(|sample| is_shown(&sample).map(|index| (sample.dataset, index)));
        let Some((dataset, index)) = found else { return Ok(None) };
        Ok(Some(Preview::of(dataset, index, &fetched(config)?)?))
    }

    fn datasets(&self) -> impl Iterator<Item = &Dataset> {
        self.train.iter().flat_map(Training::datasets).chain(self.eval.iter().map(|set| &set.dataset))
    }

    /// The position in the training data at which step `step` (from 0) begins.
    pub fn position(&self, step: u64) -> DataPosition {
        let (epoch, step_in_epoch) = self.train().epoch(step);
        DataPosition {
            epoch,
            step_in_epoch,
            seed: self.train().shuffle_seed(),
            samples: self.train().len() as u64,
            digest: self.digest().to_string(),
            sources: self.train().positions(step),
        }
    }

    /// Micro-batches per step, V.
    pub fn micro_batches(&self) -> usize {
        self.train().micro_batches()
    }

    /// Tokens per sample.
    pub fn seq_len(&self) -> usize {
        self.train().seq_len()
    }

    /// Number of samples in the training data.
    pub fn samples(&self) -> usize {
        self.train().len()
    }

    /// Summarizes what a run of `steps` steps takes from each source of its training data.
    pub fn sources(&self, steps: u64) -> Vec<SourceSummary> {
        self.train().summary(steps)
    }

    /// Whether there is evaluation data.
    pub fn has_evaluation(&self) -> bool {
        !self.eval.is_empty()
    }

    /// Micro-batch `index` of training step `step` (both from 0).
    ///
    /// # Panics
    /// If the step has no such micro-batch.
    pub fn train_batch(&self, step: u64, index: usize) -> Batch {
        batch(&self.train().batch(step, index), self.train().seq_len())
    }

    /// The evaluation sets, in the order of the configuration: their names and numbers of global batches.
    pub fn eval_sets(&self) -> impl ExactSizeIterator<Item = (&str, usize)> {
        self.eval.iter().map(|set| (&*set.name, set.sampler.batches()))
    }

    /// Micro-batch `index` of global batch `global` of an evaluation set, given by its index in
    /// [`eval_sets`](Self::eval_sets).
    ///
    /// # Panics
    /// If there is no such micro-batch.
    pub fn eval_batch(&self, set: usize, global: usize, index: usize) -> Batch {
        let EvalData { dataset, sampler, .. } = &self.eval[set];
        let sample = |index: Option<usize>| Sample { dataset, index, number: index.unwrap_or(0) };
        batch(&sampler.batch(global, index).into_iter().map(sample).collect::<Vec<_>>(), dataset.seq_len())
    }
}

/// Reads the evaluation sets from local paths.
fn evaluation(
    config: &Resolved,
    data: &DataConfig,
    loading: &Loading<'_>,
    vocab: usize,
) -> Result<Vec<EvalData>, DataError> {
    let (global, micro) = (config.train.global_batch_size, config.train.micro_batch_size);
    let read = |set: &EvalSet| -> Result<EvalData, DataError> {
        let name = set.name.clone();
        let mut dataset =
            Dataset::load(&set.paths, data, loading).map_err(|error| error.of_key("data.eval"))?;
        dataset.check_vocabulary(vocab)?;
        let role = Role::of_set(set, data, global);
        role.expect(dataset.len(), dataset.seq_len())?;
        dataset.warn_of_clipped(role.samples_max());
        let sampler =
            EvalSampler::new(dataset.len().min(role.samples_max()), global, micro, data.eval_batches);
        Ok(EvalData { name, dataset, sampler })
    };
    data.eval.iter().map(read).collect()
}

/// Concatenates samples into a batch.
fn batch(samples: &[Sample<'_>], seq: usize) -> Batch {
    let mut ids = vec![0; samples.len() * seq];
    let mut targets = vec![0; samples.len() * seq];
    for ((sample, ids), targets) in samples.iter().zip(ids.chunks_mut(seq)).zip(targets.chunks_mut(seq)) {
        sample.dataset.fill(sample.index, ids, targets);
    }
    let positions = samples.first().is_some_and(|sample| sample.dataset.is_packed()).then(|| {
        let mut positions = vec![0; samples.len() * seq];
        for (sample, positions) in samples.iter().zip(positions.chunks_mut(seq)) {
            sample.dataset.positions(sample.index, positions);
        }
        positions
    });
    let samples = samples.iter().map(|sample| sample.number as u64).collect();
    Batch { ids, targets, samples, seq, positions }
}
