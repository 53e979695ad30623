//! A run file with all defaults filled in, and what follows from it.

use super::adapter::AdapterConfig;
use super::checkpoint::CheckpointConfig;
use super::data::DataConfig;
use super::error::ConfigError;
use super::fsdp::FsdpConfig;
use super::model::ModelConfig;
use super::reader::Reader;
use super::run::RunConfig;
use super::table::table;
use super::train::TrainConfig;
use super::writer;

table! {
    /// A run file with all defaults filled in.
    pub struct Resolved {
        /// The model.
        model: ModelConfig = table(ModelConfig::read),
        /// The adapter to train instead of the model's own parameters.
        adapter: Option<AdapterConfig> = table_or_none(AdapterConfig::read),
        /// Training and evaluation data.
        data: DataConfig = table(DataConfig::read),
        /// Batches, steps and optimizer.
        train: TrainConfig = table(TrainConfig::read),
        /// Sharding.
        fsdp: FsdpConfig = table(FsdpConfig::read),
        /// Checkpoints.
        checkpoint: CheckpointConfig = table(CheckpointConfig::read),
        /// Device, ranks and output.
        run: RunConfig = table(RunConfig::read),
    }
}

/// The world that a run starts in, as far as a run file may leave it open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct World {
    /// Number of ranks.
    pub ranks: usize,
    /// Number of nodes that they are on; `None` if no launcher says it.
    pub nodes: Option<usize>,
}

impl World {
    /// Ranks without a launcher.
    pub const fn of_ranks(ranks: usize) -> World {
        World { ranks, nodes: None }
    }
}

impl Resolved {
    /// Returns the text of `resolved.toml`; parsing it gives an equal configuration.
    ///
    /// # Panics
    /// Never for a value that was parsed: all of its parts have a TOML form.
    pub fn to_toml(&self) -> String {
        toml::to_string(self).expect("a configuration read from TOML can be written as TOML")
    }

    /// Returns the same configuration for another number of ranks. The mesh keeps its context axis, or a part of it that
    /// divides the ranks, and its replicas if their number divides what is left.
    ///
    /// # Errors
    /// [`ConfigError::Divisibility`] if the ranks that train on different data do not divide the micro-batches of a step.
    pub fn at_world(&self, world: usize) -> Result<Self, ConfigError> {
        let mut config = self.clone();
        config.run.ranks = world;
        let indivisible = |divisor_key, divisor: usize, dividend_key, dividend: usize| {
            let (divisor, dividend) = (divisor as u64, dividend as u64);
            let origin = format!("a world of {world}");
            Err(ConfigError::Divisibility { origin, divisor_key, divisor, dividend_key, dividend })
        };
        let mesh = &mut config.fsdp.mesh;
        while !world.is_multiple_of(mesh.context) {
            mesh.context /= 2;
        }
        let dp_degree = mesh.dp_degree(world);
        if !dp_degree.is_multiple_of(mesh.replicate) {
            mesh.replicate = 1;
        }
        let micro_batches = self.train.micro_batches_per_step();
        if !micro_batches.is_multiple_of(dp_degree) {
            return indivisible("run.ranks", dp_degree, "the micro-batches of a step", micro_batches);
        }
        Ok(config)
    }

    /// Whether early stopping or the best checkpoints depend on evaluation losses.
    pub fn watches_loss(&self) -> bool {
        self.train.early_stop.is_some() || self.checkpoint.keep_best > 0
    }

    /// The seed of all randomness in training except for the order of data: of dropout masks.
    pub fn train_seed(&self) -> u64 {
        self.model.seed
    }
}
