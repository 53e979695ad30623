//! Settings that affect the time and memory of a step, and the values to try for them.

use fsdp_config::{Device, MeshConfig, Resolved};
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
        let (ranks, MeshConfig { replicate: replicas, context, expert, .. }) =
            (nodes * per_node, config.fsdp.mesh.clone());
        *config = config.at(ranks).map_err(|error| refused(error.to_string()))?;
        if config.fsdp.mesh.replicate != replicas {
            return Err(refused(format!(
                "{ranks} ranks cannot form fsdp.mesh.replicate = {replicas} replicas: change one of them"
            )));
        }
        for (key, before, after, of) in [
            ("context", context, config.fsdp.mesh.context, ranks),
            ("expert", expert, config.fsdp.mesh.expert, ranks / replicas),
        ] {
            if before != after {
                let of = if of == ranks {
                    format!("{ranks} ranks")
                } else {
                    format!("the {of} ranks of a replica")
                };
                let what = format!("fsdp.mesh.{key} = {before} does not divide {of}: change one of them");
                return Err(refused(what));
            }
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
    pub(super) context: usize,
    pub(super) expert: usize,
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
            context: config.fsdp.mesh.context,
            expert: config.fsdp.mesh.expert,
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
        config.fsdp.mesh.context = self.context;
        config.fsdp.mesh.expert = self.expert;
        config.fsdp.chunks.context = Some(config.fsdp.chunks().max(self.context));
        config.fsdp.chunks.expert = Some(config.fsdp.expert_chunks().max(self.expert));
        config.train.micro_batch_size = self.micro_batch;
        config
    }

    /// The differences from other settings, as written in run files.
    pub(super) fn differences(&self, from: &Self) -> Vec<String> {
        let wrap = match &self.wrap {
            WrapPolicy::Classes(classes) => format!("wrap = {classes:?}"),
            WrapPolicy::MinParams(min) => format!("min_num_params = {min}"),
        };
        let when = if self.accumulation == Accumulation::Reduce { "reduce" } else { "unsharded" };
        let offload = if self.offload == Offload::Cpu { "cpu" } else { "none" };
        let [forward, backward] = self.prefetch;
        let micro_batch = format!("train.micro_batch_size = {}", self.micro_batch);
        let all = [
            (self.wrap != from.wrap, wrap),
            (
                self.checkpointing != from.checkpointing,
                format!("activation_checkpointing = \"{}\"", checkpointing(self.checkpointing)),
            ),
            (self.reshard != from.reshard, format!("reshard_after_forward = {}", reshard(self.reshard))),
            (forward != from.prefetch[0], format!("forward_prefetch = {forward}")),
            (backward != from.prefetch[1], format!("backward_prefetch = {backward}")),
            (self.accumulation != from.accumulation, format!("accumulation = \"{when}\"")),
            (self.offload != from.offload, format!("offload = \"{offload}\"")),
            (self.replicas != from.replicas, format!("mesh.replicate = {}", self.replicas)),
            (self.context != from.context, format!("mesh.context = {}", self.context)),
            (self.expert != from.expert, format!("mesh.expert = {}", self.expert)),
        ];
        let of_table = all.into_iter().filter(|(differs, _)| *differs).map(|(_, key)| format!("fsdp.{key}"));
        of_table.chain((self.micro_batch != from.micro_batch).then_some(micro_batch)).collect()
    }

    /// All variants that change a single setting.
    pub(super) fn neighbors(&self, config: &Resolved, cluster: &Cluster, wraps: &[WrapPolicy]) -> Vec<Self> {
        let mut all = self.wrapped(wraps);
        all.extend(axes(config, cluster).iter().flatten().map(|change| change(self)));
        all.retain(|settings| settings != self);
        all
    }

    /// The same settings with each wrap policy.
    pub(super) fn wrapped(&self, wraps: &[WrapPolicy]) -> Vec<Self> {
        wraps.iter().map(|wrap| Self { wrap: wrap.clone(), ..self.clone() }).collect()
    }

    /// The same settings with each size of the context axis.
    pub(super) fn sharing_samples(&self, contexts: &[usize]) -> Vec<Self> {
        contexts.iter().map(|&context| Self { context, ..self.clone() }).collect()
    }

    /// The same settings with each size of the expert axis.
    pub(super) fn sharing_experts(&self, sizes: &[usize]) -> Vec<Self> {
        sizes.iter().map(|&expert| Self { expert, ..self.clone() }).collect()
    }

    /// All combinations of settings, with the run file's wrap policy, context axis and expert axis.
    pub(super) fn all(config: &Resolved, cluster: &Cluster) -> Vec<Self> {
        let each = |all: Vec<Self>, axis: Vec<Change>| -> Vec<Self> {
            all.iter().flat_map(|settings| axis.iter().map(|change| change(settings))).collect()
        };
        axes(config, cluster).into_iter().fold(vec![Self::of(config)], each)
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

/// Sizes of the context axis to try: those within a node, for all-to-alls between nodes are slow.
pub(super) fn contexts(config: &Resolved, cluster: &Cluster) -> Vec<usize> {
    let sizes = (0..).map(|power| 1 << power).take_while(|&size| size <= cluster.devices_per_node());
    sizes
        .filter(|&size| config.run.ranks.is_multiple_of(size) && config.data.seq_len.is_multiple_of(size))
        .collect()
}

/// Sizes of the expert axis to try for mixtures of so many experts: those within a node, for rows travel as often as there
/// are ranks. None without mixtures.
pub(super) fn expert_axes(config: &Resolved, cluster: &Cluster, experts: Option<usize>) -> Vec<usize> {
    let sizes = (0..).map(|power| 1 << power).take_while(|&size| size <= cluster.devices_per_node());
    let fits = |size: &usize| {
        config.run.ranks.is_multiple_of(*size) && experts.is_some_and(|experts| experts.is_multiple_of(*size))
    };
    sizes.filter(fits).collect()
}

/// Settings with one of them changed.
type Change = Box<dyn Fn(&Settings) -> Settings>;

/// Each value of a setting.
fn axis<T: Clone + 'static>(values: impl IntoIterator<Item = T>, set: fn(&mut Settings, T)) -> Vec<Change> {
    let change = |value: T| -> Change {
        Box::new(move |settings| {
            let mut settings = settings.clone();
            set(&mut settings, value.clone());
            settings
        })
    };
    values.into_iter().map(change).collect()
}

/// The values to try of each setting but the wrap policy, the context axis and the expert axis.
fn axes(config: &Resolved, cluster: &Cluster) -> [Vec<Change>; 7] {
    let (world, per_node) = (config.run.ranks, cluster.devices_per_node());
    let dp_degree = config.fsdp.mesh.dp_degree(world);
    let per_rank = config.train.global_batch_size / dp_degree;
    let is_size = move |size: &usize| per_rank.is_multiple_of(*size) && *size <= MICRO_BATCH_MAX;
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
    let accumulation = match per_rank {
        1 => vec![config.fsdp.accumulation],
        _ => vec![Accumulation::Reduce, Accumulation::Unsharded],
    };
    let checkpointing = [Checkpointing::None, Checkpointing::Selective, Checkpointing::Full];
    [
        axis(checkpointing, |settings, value| settings.checkpointing = value),
        axis(reshard, |settings, value| settings.reshard = value),
        axis([[1, 1], [2, 1], [2, 2]], |settings, value| settings.prefetch = value),
        axis(accumulation, |settings, value| settings.accumulation = value),
        axis([Offload::None, Offload::Cpu], |settings, value| settings.offload = value),
        axis(replicas, |settings, value| settings.replicas = value),
        axis((1..=per_rank.max(1)).filter(is_size), |settings, value| settings.micro_batch = value),
    ]
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
