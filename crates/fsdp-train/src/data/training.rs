//! The data that is trained on: one source, or several that are mixed.

use fsdp_ckpt::digest::{Digest, DigestKind};

use super::dataset::{Dataset, Loading};
use super::error::DataError;
use super::mix::{Mix, MixSampler};
use super::role::Role;
use super::sampler::Sampler;
use crate::config::{DataConfig, SourceConfig, TrainConfig};

/// Sources, and which of their samples a micro-batch holds.
#[derive(Debug)]
pub(crate) struct Training {
    sources: Vec<Source>,
    order: Order,
}

#[derive(Debug)]
struct Source {
    config: SourceConfig,
    dataset: Dataset,
    /// The number of samples of the sources before it: samples of a run have numbers that no others have.
    first: usize,
}

#[derive(Debug)]
enum Order {
    /// Epochs of the one source, the incomplete last batch of each dropped.
    One(Sampler),
    /// Fixed shares of several, each with epochs of its own.
    Mixed(MixSampler),
}

/// A sample of a source.
pub(crate) struct Sample<'a> {
    /// The source.
    pub(crate) dataset: &'a Dataset,
    /// Which of its samples; none stands for a masked one.
    pub(crate) index: Option<usize>,
    /// Its number among the samples of all sources.
    pub(crate) number: usize,
}

/// What a run takes from a source.
#[derive(Clone, Debug, PartialEq)]
pub struct SourceSummary {
    /// The paths, as the run file has them.
    pub paths: Vec<String>,
    /// The part of all samples of the run that come from it, of 1.
    pub share: f64,
    /// Its samples.
    pub samples: usize,
    /// The tokens of its documents.
    pub tokens: usize,
    /// How many times the run goes through it.
    pub epochs: f64,
}

/// Where in a source a step begins.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SourcePosition {
    /// The epoch of the source, from 0.
    pub epoch: u64,
    /// Samples of this epoch that were taken.
    pub taken: u64,
}

/// That each of several sources has a share of a mix.
///
/// # Errors
/// [`DataError::Share`].
pub(crate) fn expect_shares(data: &DataConfig) -> Result<(), DataError> {
    let weights: Vec<f64> = data.source.iter().map(|source| source.weight).collect();
    if weights.len() > 1 { Mix::new(&weights).map(drop) } else { Ok(()) }
}

impl Training {
    /// Reads the sources of a configuration whose paths are of this machine.
    ///
    /// # Errors
    /// [`DataError`]: as [`Dataset::load`]; too little data, or a share of no sample.
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

    /// The sources' samples, in their order, each with the key of its paths.
    pub(crate) fn named(&self) -> impl Iterator<Item = (String, &Dataset)> {
        let is_mixed = self.sources.len() > 1;
        let name =
            move |index| if is_mixed { format!("data.source[{index}]") } else { "data.train".to_owned() };
        self.sources.iter().enumerate().map(move |(index, source)| (name(index), &source.dataset))
    }

    /// The sources' samples, in their order.
    pub(crate) fn datasets(&self) -> impl Iterator<Item = &Dataset> {
        self.sources.iter().map(|source| &source.dataset)
    }

    /// Stands for all samples and their order but for the seed: of one source, the CRC-64 of its tokens; of several, that of
    /// their shares, numbers of samples and checksums.
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

    /// The number of samples of all sources.
    pub(crate) fn len(&self) -> usize {
        self.sources.last().map_or(0, |last| last.first + last.dataset.len())
    }

    /// Inputs, and targets, per sample.
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

    /// The seed of the order of samples, if they are shuffled.
    pub(crate) fn shuffle_seed(&self) -> Option<u64> {
        match &self.order {
            Order::One(sampler) => sampler.shuffle_seed(),
            Order::Mixed(sampler) => sampler.shuffle_seed(),
        }
    }

    /// The epoch of a step, and the step in it, all from 0. A mix has no epoch of its own: it is one that never ends.
    pub(crate) fn epoch(&self, step: u64) -> (u64, u64) {
        match &self.order {
            Order::One(sampler) => {
                let epoch = sampler.epoch(step);
                (epoch, step - epoch * sampler.steps_per_epoch())
            }
            Order::Mixed(_) => (0, step),
        }
    }

    /// Where each source of a mix is before a step, from 0; nothing where there is only one.
    pub(crate) fn positions(&self, step: u64) -> Vec<SourcePosition> {
        let Order::Mixed(sampler) = &self.order else { return Vec::new() };
        let position = |source| {
            let (epoch, taken) = sampler.position(source, step);
            SourcePosition { epoch, taken }
        };
        (0..self.sources.len()).map(position).collect()
    }

    /// The samples of a micro-batch of a step, both from 0.
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

    /// What a run of `steps` steps takes from each source.
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
