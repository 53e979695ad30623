//! Warnings about a configuration that can nevertheless run.

/// A setting that does not have the effect one might expect.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Warning {
    /// A key of an `fsdp_config.json` that has no meaning here.
    #[error("{file}: `{key}` has no meaning here and is ignored")]
    Meaningless {
        /// Name of the file.
        file: String,
        /// The key, without a leading `fsdp_`.
        key: String,
    },
    /// A key of an `fsdp_config.json` that Hugging Face reads, and that changes nothing here.
    #[error("{file}: `{key}` has no effect here: {why}")]
    NoEffect {
        /// Name of the file.
        file: String,
        /// The key, without a leading `fsdp_`.
        key: &'static str,
        /// The reason.
        why: &'static str,
    },
    /// What was made of a sharding strategy of an `fsdp_config.json`.
    #[error("{file}: `{key}` = {strategy} is taken as {settings}")]
    Strategy {
        /// Name of the file.
        file: String,
        /// The key, without a leading `fsdp_`.
        key: &'static str,
        /// PyTorch's name of the strategy.
        strategy: &'static str,
        /// The settings that are the same.
        settings: &'static str,
    },
    /// The mesh that a sharding strategy led to.
    #[error("`fsdp.mesh.replicate` = {replicate}, the number of {over}")]
    Replicas {
        /// Number of replicas.
        replicate: usize,
        /// What holds a replica each: ranks or nodes.
        over: &'static str,
    },
    /// A sharding strategy with a replica on every node, whose number no launcher says.
    #[error(
        "`fsdp.mesh.replicate` = 1: no launcher says how many nodes there are, so all ranks count as one node; `fsdp.mesh` = \
         {{ replicate = N }} sets their number"
    )]
    OneNode,
    /// A key of an `fsdp_config.json` that has an effect only together with another.
    #[error("{file}: `{key}` has no effect without {needs}")]
    Needs {
        /// Name of the file.
        file: String,
        /// The key, without a leading `fsdp_`.
        key: &'static str,
        /// The setting that the key requires.
        needs: &'static str,
    },
    /// A key of the run file that replaces a setting of the `fsdp_config.json`.
    #[error("`{key}` overrides the fsdp_config.json")]
    Overridden {
        /// The key, dotted.
        key: String,
    },
    /// `reshard_after_forward = 1`, which has the same effect as `false`.
    #[error("`fsdp.reshard_after_forward` = 1 keeps whole parameters, as false does")]
    GroupsOfOne,
    /// `train.steps` is less than the schedule's `warmup_steps`.
    #[error(
        "the run ends within its warm-up: `train.steps` = {steps} ({steps_origin}) is less than \
         `train.lr_schedule.warmup_steps` = {warmup_steps} ({warmup_origin})"
    )]
    EndsInWarmup {
        /// Warm-up steps.
        warmup_steps: u64,
        /// The file or `--set` that wrote `warmup_steps`.
        warmup_origin: String,
        /// Steps of the run.
        steps: u64,
        /// The file or `--set` that wrote `train.steps`.
        steps_origin: String,
    },
}
