//! A run file with all defaults filled in, and what follows from it.

use fsdp_core::{Axis, Mesh};

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

/// The ranks of a world, and how they are arranged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ranks {
    /// So many. The mesh keeps its context axis, or a part of it that divides them, and its replicas if their number
    /// divides what is left.
    Count(usize),
    /// Those of a mesh.
    On(Mesh),
}

impl Ranks {
    /// Number of ranks.
    pub fn count(self) -> usize {
        match self {
            Ranks::Count(count) => count,
            Ranks::On(mesh) => mesh.world(),
        }
    }
}

impl From<usize> for Ranks {
    fn from(count: usize) -> Self {
        Ranks::Count(count)
    }
}

impl From<Mesh> for Ranks {
    fn from(mesh: Mesh) -> Self {
        Ranks::On(mesh)
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

    /// Returns the same configuration for other ranks.
    ///
    /// # Errors
    /// [`ConfigError::Divisibility`] if the chunks of samples do not divide their positions, the context axis or the expert axis
    /// does not divide its chunks, or the ranks that train on different data do not divide the micro-batches of a step.
    pub fn at(&self, ranks: impl Into<Ranks>) -> Result<Self, ConfigError> {
        let (mut config, ranks) = (self.clone(), ranks.into());
        let world = ranks.count();
        config.run.ranks = world;
        let mesh = &mut config.fsdp.mesh;
        match ranks {
            Ranks::Count(_) => {
                while !world.is_multiple_of(mesh.context) {
                    mesh.context /= 2;
                }
                if !mesh.dp_degree(world).is_multiple_of(mesh.replicate) {
                    mesh.replicate = 1;
                }
                while !(world / mesh.replicate).is_multiple_of(mesh.expert) {
                    mesh.expert /= 2;
                }
            }
            Ranks::On(axes) => {
                (mesh.replicate, mesh.context) = (axes.size(Axis::Replicate), axes.size(Axis::Context));
                mesh.expert = axes.expert();
            }
        }
        let (context, dp_degree) = (config.fsdp.mesh.context, config.fsdp.mesh.dp_degree(world));
        let chunks = ("fsdp.chunks.context", config.fsdp.chunks());
        let key = if context > 1 { "run.ranks / fsdp.mesh.context" } else { "run.ranks" };
        let rules = [
            (chunks, ("data.seq_len", self.data.seq_len)),
            (("fsdp.mesh.context", context), chunks),
            (
                ("fsdp.mesh.expert", config.fsdp.mesh.expert),
                ("fsdp.chunks.expert", config.fsdp.expert_chunks()),
            ),
            ((key, dp_degree), ("the micro-batches of a step", self.train.micro_batches_per_step())),
        ];
        let broken =
            rules.into_iter().find(|((_, divisor), (_, dividend))| !dividend.is_multiple_of(*divisor));
        let Some(((divisor_key, divisor), (dividend_key, dividend))) = broken else { return Ok(config) };
        let (divisor, dividend) = (divisor as u64, dividend as u64);
        let origin = format!("a world of {world}");
        Err(ConfigError::Divisibility { origin, divisor_key, divisor, dividend_key, dividend })
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
