//! Training data: one source, or a mix of several.

use fsdp_ckpt::digest::{Digest, DigestKind};
use fsdp_config::{DataConfig, SourceConfig, TrainConfig};

use super::dataset::Dataset;
use super::error::DataError;
use super::loading::Loading;
use super::mix::{Mix, MixSampler};
use super::role::Role;
use super::sampler::Sampler;

/// The sources, and the order in which their samples form micro-batches.
#[derive(Debug)]
pub(crate) struct Training {
    sources: Vec<Source>,
    order: Order,
}

#[derive(Debug)]
struct Source {
    config: SourceConfig,
    dataset: Dataset,
    /// Number of samples in the sources before this one, so that sample numbers are unique within a run.
    first: usize,
}

#[derive(Debug)]
enum Order {
    /// Epochs of a single source; the incomplete last batch of each is dropped.
    One(Sampler),
    /// Fixed shares of several sources, each with its own epochs.
    Mixed(MixSampler),
}

/// A sample of a source.
pub(crate) struct Sample<'a> {
    /// The source.
    pub(crate) dataset: &'a Dataset,
    /// Index of the sample within the source; `None` for a masked sample.
    pub(crate) index: Option<usize>,
    /// Number of the sample among those of all sources.
    pub(crate) number: usize,
}

/// The use that a run makes of a source.
#[derive(Clone, Debug, PartialEq)]
pub struct SourceSummary {
    /// The paths, as written in the run file.
    pub paths: Vec<String>,
    /// Fraction of all samples of the run that come from this source, from 0 to 1.
    pub share: f64,
    /// Number of samples.
    pub samples: usize,
    /// Number of tokens in its documents.
    pub tokens: usize,
    /// Number of passes that the run makes over the source.
    pub epochs: f64,
}

/// Position in a source at the start of a step.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SourcePosition {
    /// The epoch of the source, from 0.
    pub epoch: u64,
    /// Number of samples of this epoch already taken.
    pub taken: u64,
}

/// Checks that each of several sources has a share of the mix.
///
/// # Errors
/// [`DataError::Share`].
pub fn expect_shares(data: &DataConfig) -> Result<(), DataError> {
    let weights: Vec<f64> = data.source.iter().map(|source| source.weight).collect();
    if weights.len() > 1 { Mix::new(&weights).map(drop) } else { Ok(()) }
}

impl Training {
    /// Reads the sources of a configuration with local paths.
    ///
    /// # Errors
    /// [`DataError`]: as [`Dataset::load`], or if there is too little data or a share without samples.
    pub(crate) fn load(
        data: &DataConfig,
        train: &TrainConfig,
        loading: &Loading<'_>,
        vocab: usize,
    ) -> Result<Training, DataError> {
        let key = data.train_key();
        let mut sources: Vec<Source> = Vec::new();
        for config in data.sources() {
            let dataset = Dataset::load(&config.path, &data.of_source(&config), loading);
            let mut dataset = dataset.map_err(|error| error.of_key(key))?;
            dataset.check_vocabulary(vocab)?;
            dataset.warn_of_clipped(dataset.len());
            let first = sources.last().map_or(0, |last| last.first + last.dataset.len());
            sources.push(Source { config, dataset, first });
        }
        let (global, micro) = (train.global_batch_size, train.micro_batch_size);
        let seed = data.shuffle.then_some(data.seed);
        let order = match &*sources {
            [Source { dataset, .. }] => {
                Order::One(Sampler::new(dataset.len(), dataset.seq_len(), global, micro, seed)?)
            }
            sources => {
                for (index, source) in sources.iter().enumerate() {
                    Role::Source { index }.expect(source.dataset.len(), data.seq_len)?;
                }
                let mix = Mix::new(&sources.iter().map(|source| source.config.weight).collect::<Vec<_>>())?;
                let samples = sources.iter().map(|source| source.dataset.len()).collect();
                Order::Mixed(MixSampler::new(mix, samples, global, micro, seed))
            }
        };
        Ok(Training { sources, order })
    }

    /// Returns the data sets of all sources, in order, each with the key of its paths.
    pub(crate) fn named(&self) -> impl Iterator<Item = (String, &Dataset)> {
        let is_mixed = self.sources.len() > 1;
        let name =
            move |index| if is_mixed { format!("data.source[{index}]") } else { "data.train".to_owned() };
        self.sources.iter().enumerate().map(move |(index, source)| (name(index), &source.dataset))
    }

    /// Returns the data sets of all sources, in order.
    pub(crate) fn datasets(&self) -> impl Iterator<Item = &Dataset> {
        self.sources.iter().map(|source| &source.dataset)
    }

    /// Digest of all samples and their order, except for the seed: for one source, the CRC-64 of its tokens; for
    /// several, the CRC-64 of their shares, numbers of samples and checksums.
    pub(crate) fn digest(&self) -> Digest {
        let mixed = match (&self.order, &*self.sources) {
            (Order::One(_), [only, ..]) => return only.dataset.digest(),
            (Order::One(_), []) => unreachable!("there is a source"),
            (Order::Mixed(mixed), _) => mixed,
        };
        let facts: Vec<String> = (self.sources.iter().enumerate())
            .map(|(index, Source { dataset, .. })| {
                format!("{} {} {}", mixed.mix().share(index), dataset.len(), dataset.digest())
            })
            .collect();
        DigestKind::Crc64.of(facts.join("\n").as_bytes())
    }

    /// Number of samples of all sources.
    pub(crate) fn len(&self) -> usize {
        self.sources.last().map_or(0, |last| last.first + last.dataset.len())
    }

    /// Number of inputs, and of targets, per sample.
    pub(crate) fn seq_len(&self) -> usize {
        self.sources[0].dataset.seq_len()
    }

    /// Micro-batches per step, V.
    pub(crate) fn micro_batches(&self) -> usize {
        match &self.order {
            Order::One(sampler) => sampler.micro_batches(),
            Order::Mixed(sampler) => sampler.micro_batches(),
        }
    }

    /// The seed of the order of samples; `None` if they are not shuffled.
    pub(crate) fn shuffle_seed(&self) -> Option<u64> {
        match &self.order {
            Order::One(sampler) => sampler.shuffle_seed(),
            Order::Mixed(sampler) => sampler.shuffle_seed(),
        }
    }

    /// Returns the epoch of a step, and the step within that epoch, all counted from 0. A mix has a single epoch that
    /// never ends.
    pub(crate) fn epoch(&self, step: u64) -> (u64, u64) {
        match &self.order {
            Order::One(sampler) => {
                let epoch = sampler.epoch(step);
                (epoch, step - epoch * sampler.steps_per_epoch())
            }
            Order::Mixed(_) => (0, step),
        }
    }

    /// Returns the position of each source of a mix before a step (from 0); empty if there is only one source.
    pub(crate) fn positions(&self, step: u64) -> Vec<SourcePosition> {
        let Order::Mixed(sampler) = &self.order else { return Vec::new() };
        let position = |source| {
            let (epoch, taken) = sampler.position(source, step);
            SourcePosition { epoch, taken }
        };
        (0..self.sources.len()).map(position).collect()
    }

    /// Returns the samples of a micro-batch of a step, both counted from 0.
    ///
    /// # Panics
    /// If the step has no such micro-batch.
    pub(crate) fn batch(&self, step: u64, micro_batch: usize) -> Vec<Sample<'_>> {
        let sample = |(source, index): (usize, usize)| {
            let Source { dataset, first, .. } = &self.sources[source];
            Sample { dataset, index: Some(index), number: first + index }
        };
        match &self.order {
            Order::One(sampler) => {
                sampler.batch(step, micro_batch).into_iter().map(|index| sample((0, index))).collect()
            }
            Order::Mixed(sampler) => sampler.batch(step, micro_batch).into_iter().map(sample).collect(),
        }
    }

    /// Summarizes the use that a run of `steps` steps makes of each source.
    #[expect(clippy::cast_precision_loss, reason = "numbers for people")]
    pub(crate) fn summary(&self, steps: u64) -> Vec<SourceSummary> {
        let summary = |(index, Source { config, dataset, .. }): (usize, &Source)| {
            let (share, epochs) = match &self.order {
                Order::One(sampler) => (1.0, steps as f64 / sampler.steps_per_epoch() as f64),
                Order::Mixed(sampler) => {
                    let (epoch, taken) = sampler.position(index, steps);
                    (sampler.mix().share(index), epoch as f64 + taken as f64 / dataset.len() as f64)
                }
            };
            let (samples, tokens) = (dataset.len(), dataset.tokens_len());
            SourceSummary { paths: config.path.clone(), share, samples, tokens, epochs }
        };
        self.sources.iter().enumerate().map(summary).collect()
    }
}

#[cfg(test)]
mod tests;
