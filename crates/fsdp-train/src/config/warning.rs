//! What a user should hear about a configuration that nevertheless runs.

/// Something that was written and does not do what one might think.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Warning {
    /// A key of an `fsdp_config.json` without a meaning here.
    #[error("{file}: `{key}` has no meaning here and is ignored")]
    Meaningless {
        /// The file.
        file: String,
        /// The key.
        key: String,
    },
    /// A key of an `fsdp_config.json` that only counts together with another.
    #[error("{file}: `{key}` has no effect without {needs}")]
    Needs {
        /// The file.
        file: String,
        /// The key.
        key: &'static str,
        /// What it needs.
        needs: &'static str,
    },
    /// A key of the run file that replaces what the `fsdp_config.json` says.
    #[error("`{key}` replaces what the fsdp_config.json says")]
    Overridden {
        /// The key, dotted.
        key: String,
    },
    /// `reshard_after_forward = 1`.
    #[error("`fsdp.reshard_after_forward` = 1 keeps whole parameters, as false does")]
    GroupsOfOne,
    /// `train.steps` is less than the schedule's `warmup_steps`.
    #[error(
        "the run ends within its warm-up: `train.steps` = {steps} ({steps_origin}) is less than \
         `train.lr_schedule.warmup_steps` = {warmup_steps} ({warmup_origin})"
    )]
    EndsInWarmup {
        /// The steps of the warm-up.
        warmup_steps: u64,
        /// Where they were written.
        warmup_origin: String,
        /// The steps of the run.
        steps: u64,
        /// Where they were written.
        steps_origin: String,
    },
}
