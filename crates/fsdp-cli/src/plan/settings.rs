//! Settings that affect the time and memory of a step, and the values to try for them.

use fsdp_config::{Device, Resolved};
use fsdp_core::model::ModelSpec;
use fsdp_core::schedule::{Accumulation, Checkpointing, Offload, Reshard};
use fsdp_core::wrap::WrapPolicy;
use fsdp_plan::cluster::{Cluster, Kind, LinkKind};

use crate::error::CliError;

/// The classes of layer lists and of embeddings.
const LIST: &str = "ModuleList";
const EMBEDDING: &str = "Embedding";

/// Maximum samples per micro-batch to try.
const MICRO_BATCH_MAX: usize = 64;

/// Places a run on a cluster: on the given number of nodes, all of its nodes, or as many as the run's ranks need.
///
/// # Errors
/// [`CliError`]: the run does not support the world size.
pub(super) fn place(config: &mut Resolved, cluster: &Cluster, nodes: Option<usize>) -> Result<(), CliError> {
    let per_node = cluster.devices_per_node();
    let refused = |what: String| CliError::Option { option: "--nodes", what };
    if let Some((nodes, available)) = nodes.zip(cluster.nodes).filter(|(nodes, available)| nodes > available)
    {
        return Err(refused(format!("{} has {available} nodes, not {nodes}", cluster.name)));
    }
    if let Some(nodes) = nodes.or(cluster.nodes) {
        let (ranks, replicas) = (nodes * per_node, config.fsdp.mesh.replicate);
        *config = config.at_world(ranks).map_err(|error| refused(error.to_string()))?;
        if config.fsdp.mesh.replicate != replicas {
            return Err(refused(format!(
                "{ranks} ranks cannot form fsdp.mesh.replicate = {replicas} replicas: change one of them"
            )));
        }
    }
    let ranks = config.run.ranks;
    let is_connected = cluster.network.is_some() || cluster.node.link.kind == LinkKind::Torus;
    if ranks > per_node && !is_connected {
        return Err(refused(format!(
            "{ranks} ranks need more than one node of {per_node} devices, and {} has no [network] between them",
            cluster.name
        )));
    }
    if ranks > per_node && !ranks.is_multiple_of(per_node) {
        return Err(refused(format!(
            "run.ranks = {ranks} do not fill whole nodes of {per_node} devices ({})",
            cluster.name
        )));
    }
    // The device determines the chunk size of logits.
    config.run.device = if cluster.kind == Kind::Cpu { Device::Cpu } else { Device::Cuda };
    Ok(())
}

/// One way to run the same training.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Settings {
    pub(super) wrap: WrapPolicy,
    pub(super) reshard: Reshard,
    pub(super) prefetch: [usize; 2],
    pub(super) accumulation: Accumulation,
    pub(super) checkpointing: Checkpointing,
    pub(super) offload: Offload,
    pub(super) replicas: usize,
    pub(super) micro_batch: usize,
}

impl Settings {
    /// The settings of a run file.
    pub(super) fn of(config: &Resolved) -> Self {
        Self {
            wrap: config.fsdp.wrap.clone(),
            reshard: config.fsdp.reshard_after_forward,
            prefetch: [config.fsdp.forward_prefetch, config.fsdp.backward_prefetch],
            accumulation: config.fsdp.accumulation,
            checkpointing: config.fsdp.activation_checkpointing,
            offload: config.fsdp.offload,
            replicas: config.fsdp.mesh.replicate,
            micro_batch: config.train.micro_batch_size,
        }
    }

    /// A run file with these settings.
    pub(super) fn applied(&self, config: &Resolved) -> Resolved {
        let mut config = config.clone();
        config.fsdp.wrap = self.wrap.clone();
        config.fsdp.reshard_after_forward = self.reshard;
        [config.fsdp.forward_prefetch, config.fsdp.backward_prefetch] = self.prefetch;
        config.fsdp.accumulation = self.accumulation;
        config.fsdp.activation_checkpointing = self.checkpointing;
        config.fsdp.offload = self.offload;
        config.fsdp.mesh.replicate = self.replicas;
        config.train.micro_batch_size = self.micro_batch;
        config
    }

    /// The differences from other settings, as written in run files.
    pub(super) fn differences(&self, from: &Self) -> Vec<String> {
        let mut all = Vec::new();
        if self.wrap != from.wrap {
            all.push(match &self.wrap {
                WrapPolicy::Classes(classes) => format!("fsdp.wrap = {classes:?}"),
                WrapPolicy::MinParams(min) => format!("fsdp.min_num_params = {min}"),
            });
        }
        if self.checkpointing != from.checkpointing {
            all.push(format!("fsdp.activation_checkpointing = \"{}\"", checkpointing(self.checkpointing)));
        }
        if self.reshard != from.reshard {
            all.push(format!("fsdp.reshard_after_forward = {}", reshard(self.reshard)));
        }
        for (index, key) in ["forward_prefetch", "backward_prefetch"].into_iter().enumerate() {
            if self.prefetch[index] != from.prefetch[index] {
                all.push(format!("fsdp.{key} = {}", self.prefetch[index]));
            }
        }
        if self.accumulation != from.accumulation {
            let when = if self.accumulation == Accumulation::Reduce { "reduce" } else { "unsharded" };
            all.push(format!("fsdp.accumulation = \"{when}\""));
        }
        if self.offload != from.offload {
            let offload = if self.offload == Offload::Cpu { "cpu" } else { "none" };
            all.push(format!("fsdp.offload = \"{offload}\""));
        }
        if self.replicas != from.replicas {
            all.push(format!("fsdp.mesh.replicate = {}", self.replicas));
        }
        if self.micro_batch != from.micro_batch {
            all.push(format!("train.micro_batch_size = {}", self.micro_batch));
        }
        all
    }

    /// All variants that change a single setting.
    pub(super) fn neighbors(&self, config: &Resolved, cluster: &Cluster, wraps: &[WrapPolicy]) -> Vec<Self> {
        let range = Range::of(config, cluster);
        let mut all = self.wrapped(wraps);
        let base = || self.clone();
        all.extend(range.checkpointing.map(|checkpointing| Self { checkpointing, ..base() }));
        all.extend(range.reshard.iter().map(|&reshard| Self { reshard, ..base() }));
        all.extend(range.prefetch.iter().map(|&prefetch| Self { prefetch, ..base() }));
        all.extend(range.accumulation.iter().map(|&accumulation| Self { accumulation, ..base() }));
        all.extend(range.offload.map(|offload| Self { offload, ..base() }));
        all.extend(range.replicas.iter().map(|&replicas| Self { replicas, ..base() }));
        all.extend(range.micro_batches.iter().map(|&micro_batch| Self { micro_batch, ..base() }));
        all.retain(|settings| settings != self);
        all
    }

    /// The same settings with each wrap policy.
    pub(super) fn wrapped(&self, wraps: &[WrapPolicy]) -> Vec<Self> {
        wraps.iter().map(|wrap| Self { wrap: wrap.clone(), ..self.clone() }).collect()
    }

    /// All combinations of settings, with the run file's wrap policy.
    pub(super) fn all(config: &Resolved, cluster: &Cluster) -> Vec<Self> {
        let range = Range::of(config, cluster);
        let mut all = vec![Self::of(config)];
        let mut each = |values: &dyn Fn(&dyn Fn() -> Self) -> Vec<Self>| {
            all = all.iter().flat_map(|settings| values(&|| settings.clone())).collect();
        };
        each(&|base| range.checkpointing.map(|checkpointing| Self { checkpointing, ..base() }).into());
        each(&|base| range.reshard.iter().map(|&reshard| Self { reshard, ..base() }).collect());
        each(&|base| range.prefetch.iter().map(|&prefetch| Self { prefetch, ..base() }).collect());
        each(&|base| {
            range.accumulation.iter().map(|&accumulation| Self { accumulation, ..base() }).collect()
        });
        each(&|base| range.offload.map(|offload| Self { offload, ..base() }).into());
        each(&|base| range.replicas.iter().map(|&replicas| Self { replicas, ..base() }).collect());
        each(&|base| range.micro_batches.iter().map(|&micro_batch| Self { micro_batch, ..base() }).collect());
        all
    }
}

/// Wrap policies to try: the run file's, by layers, and by parts of layers (attention and MLP); each with and without
/// embeddings as separate units.
pub(super) fn wraps(spec: &ModelSpec, given: &WrapPolicy) -> Vec<WrapPolicy> {
    let class = |module: usize| spec.modules[module].class.clone();
    let is_parent = |module: usize| spec.modules.iter().any(|other| other.parent == Some(module));
    let classes_of = |which: &dyn Fn(usize) -> bool| {
        let mut classes: Vec<String> =
            (1..spec.modules.len()).filter(|&index| which(index)).map(class).collect();
        classes.sort();
        classes.dedup();
        classes
    };
    let in_list = |module: usize| spec.modules[module].parent.is_some_and(|parent| class(parent) == LIST);
    let layers = classes_of(&|module| in_list(module));
    let parts = classes_of(&|module| {
        spec.modules[module].parent.is_some_and(|parent| layers.contains(&class(parent))) && is_parent(module)
    });
    let embeddings = classes_of(&|module| class(module) == EMBEDDING);
    let mut all = vec![given.clone()];
    for units in [layers, parts] {
        for beside in [Vec::new(), embeddings.clone()] {
            let policy = WrapPolicy::Classes(units.iter().cloned().chain(beside).collect());
            if !units.is_empty() && !all.contains(&policy) {
                all.push(policy);
            }
        }
    }
    all
}

/// The values to try.
struct Range {
    reshard: Vec<Reshard>,
    prefetch: [[usize; 2]; 3],
    checkpointing: [Checkpointing; 3],
    /// Several values only with several micro-batches.
    accumulation: Vec<Accumulation>,
    offload: [Offload; 2],
    replicas: Vec<usize>,
    micro_batches: Vec<usize>,
}

impl Range {
    fn of(config: &Resolved, cluster: &Cluster) -> Self {
        let (world, per_node) = (config.run.ranks, cluster.devices_per_node());
        let dp_degree = config.fsdp.mesh.dp_degree(world);
        let per_rank = config.train.global_batch_size / dp_degree;
        let is_size = |size: &usize| per_rank.is_multiple_of(*size) && *size <= MICRO_BATCH_MAX;
        // A replica spans whole nodes; half nodes, with twice as many replicas, never help.
        let mut replicas = vec![1];
        let nodes = world / per_node;
        replicas.extend((1..).map(|power| 1 << power).take_while(|&count| count <= nodes));
        replicas.retain(|count| nodes <= 1 || nodes.is_multiple_of(*count));
        replicas.retain(|count| dp_degree.is_multiple_of(*count));
        let mut reshard = vec![Reshard::Auto, Reshard::Never];
        if world > per_node && per_node > 1 {
            reshard.push(Reshard::ToGroup(per_node));
        }
        Self {
            reshard,
            prefetch: [[1, 1], [2, 1], [2, 2]],
            checkpointing: [Checkpointing::None, Checkpointing::Selective, Checkpointing::Full],
            accumulation: match per_rank {
                1 => vec![config.fsdp.accumulation],
                _ => vec![Accumulation::Reduce, Accumulation::Unsharded],
            },
            offload: [Offload::None, Offload::Cpu],
            replicas,
            micro_batches: (1..=per_rank.max(1)).filter(is_size).collect(),
        }
    }
}

/// The value as written in run files.
pub(super) fn checkpointing(value: Checkpointing) -> &'static str {
    match value {
        Checkpointing::None => "none",
        Checkpointing::Full => "full",
        Checkpointing::Selective => "selective",
    }
}

/// The value as written in run files.
pub(super) fn reshard(value: Reshard) -> String {
    match value {
        Reshard::Auto => "\"auto\"".to_owned(),
        Reshard::Always => "true".to_owned(),
        Reshard::Never => "false".to_owned(),
        Reshard::ToGroup(ranks) => ranks.to_string(),
    }
}
