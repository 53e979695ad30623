//! What a state says of the optimizer that made it.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::AtomicBool;

use fsdp_ckpt::checkpoint::{Checkpoint, Key, Role, Value};
use fsdp_ckpt::formats;

use super::counts::open_one;
use crate::checkpoint::{ImportSummary, StateTable};
use crate::error::TrainError;
use crate::job::Job;
use crate::rule;

/// The settings of an optimizer, by the parameters of a model.
#[derive(Clone, Debug)]
pub struct SavedOptimizer {
    /// Steps done; `None` if neither the optimizer nor the trainer counts them.
    pub steps: Option<u64>,
    /// For each parameter of the job's model, in its order, the settings of its group under PyTorch's names; empty if it is in
    /// none.
    pub settings: Vec<BTreeMap<String, Value>>,
}

impl SavedOptimizer {
    /// Finds the settings of the parameters of a job in a state.
    ///
    /// # Errors
    /// Errors of checkpoints that cannot be read or do not fit the model.
    pub fn read<A>(job: &Job<A>, path: &Path) -> Result<Self, TrainError> {
        let rule = rule::rule(&job.config.train, &job.plan.spec)?;
        let foreign = open_one(job, &StateTable::new(&job.plan, &rule), path)?;
        let steps = foreign.steps(job, None, &AtomicBool::new(false), &mut ImportSummary::default());
        Ok(Self { steps: steps.ok().map(|(steps, _)| steps), settings: foreign.settings().to_vec() })
    }
}

/// Refuses a state whose moments have too few bits to contain the gradient.
///
/// # Errors
/// [`TrainError::Input`] for such a state; errors of checkpoints that cannot be read.
pub fn expect_whole_moments(path: &Path) -> Result<(), TrainError> {
    match rounded_by(&formats::open(path)?) {
        Some((by, example)) => Err(TrainError::Input(format!(
            "{} has the moments of {by} in 8 bits or fewer ({example}), so they do not contain the gradient that was used; let \
             the program make the two steps with an optimizer that keeps its moments in 16 or 32 bits",
            path.display()
        ))),
        None => Ok(()),
    }
}

/// Refuses a state with moments, for a rule that keeps none.
///
/// # Errors
/// [`TrainError::Input`] for such a state; errors of checkpoints that cannot be read.
pub(super) fn expect_no_moments(path: &Path) -> Result<(), TrainError> {
    const MOMENTS: [&str; 3] = ["exp_avg", "exp_avg_sq", "momentum_buffer"];
    let checkpoint = formats::open(path)?;
    let is_moment = |path: &[Key]| matches!(path.last(), Some(Key::Name(name)) if MOMENTS.contains(&&**name));
    let mut tensors = checkpoint.tensors.iter().filter(|(_, tensor)| tensor.role == Role::Optimizer);
    match tensors.find(|(_, tensor)| is_moment(&tensor.path)) {
        Some((example, _)) => Err(TrainError::Input(format!(
            "{} has moments ({example}), and train.optimizer is sgd without momentum, which keeps none: name the optimizer \
             that the program used",
            path.display()
        ))),
        None => Ok(()),
    }
}

/// The library that rounded the moments of a state to 8 bits or fewer, and the name of such a moment.
fn rounded_by(checkpoint: &Checkpoint) -> Option<(&'static str, String)> {
    // bitsandbytes has a table of the 256 values that a moment may have beside each.
    const TABLES: [&str; 2] = ["qmap1", "qmap2"];
    let is_table = |path: &[Key]| matches!(path.last(), Some(Key::Name(name)) if TABLES.contains(&&**name));
    let tensors = checkpoint.tensors.iter().filter(|(_, tensor)| tensor.role == Role::Optimizer);
    let mut tables = tensors.filter(|(_, tensor)| is_table(&tensor.path));
    if let Some((name, _)) = tables.next() {
        return Some(("bitsandbytes", name.clone()));
    }
    let is_rounded =
        |module: &str, name: &str| module.starts_with("torchao") && name.starts_with("OptimState");
    let mut objects = checkpoint.opaque.iter();
    let found = objects.find(|(_, class)| is_rounded(&class.module, &class.name));
    found.map(|(name, _)| ("torchao", name.clone()))
}

#[cfg(test)]
mod tests;
