//! What a run remembers of its divergences: from where to where, and with which learning rate.

use std::path::Path;

use fsdp_ckpt::{is_url, objects};
use fsdp_config::Resolved;
use fsdp_config::input_file;
use serde::{Deserialize, Serialize};

use super::Unfit;
use crate::atomic_file::write_small;
use crate::error::TrainError;
use crate::train::folder::{ATTEMPTS_FILE, RESOLVED};

/// A state is given up once the run diverged from there with a learning rate and with this share of it: the error
/// advises a tenth each time, so that is after the advice was followed three times.
const SHARE: f64 = 1e-3;

/// The starts of a run that ended in a divergence, in order.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct Attempts(Vec<Attempt>);

/// A start of a run that ended in a divergence.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
struct Attempt {
    /// Steps done when it began.
    from: u64,
    /// Steps done when it diverged; less if the run has gone back to a state in between since, so that the states of
    /// `from` to `until` steps are those that this start went through.
    until: u64,
    /// The learning rate in the run file; `None` if the update rule has none.
    lr: Option<f64>,
}

impl Attempts {
    /// Reads the attempts of an output folder. A record that cannot be read is as good as none.
    pub(crate) fn read(out_dir: &Path) -> Self {
        read_small(&out_dir.join(ATTEMPTS_FILE))
            .and_then(|text| serde_json::from_slice(&text).ok())
            .unwrap_or_default()
    }

    /// Writes the attempts to an output folder.
    ///
    /// # Errors
    /// [`TrainError::Io`], [`TrainError::Checkpoint`].
    pub(super) fn write(&self, out_dir: &Path) -> Result<(), TrainError> {
        let text = serde_json::to_vec(self).expect("numbers can be written as JSON");
        write_small(&out_dir.join(ATTEMPTS_FILE), text)
    }

    /// Forgets what is known about states after `step` steps, for a run that computes them anew. `None` forgets
    /// everything, for a run that replaces an earlier one.
    ///
    /// # Errors
    /// [`TrainError::Io`], [`TrainError::Checkpoint`].
    pub(crate) fn forget_after(out_dir: &Path, step: Option<u64>) -> Result<(), TrainError> {
        let before = Self::read(out_dir);
        let kept = |attempt: &Attempt| {
            let until = attempt.until.min(step.filter(|&step| attempt.from <= step)?);
            Some(Attempt { until, ..*attempt })
        };
        let after = Self(before.0.iter().filter_map(kept).collect());
        if after == before { Ok(()) } else { after.write(out_dir) }
    }

    /// Forgets everything that does not hold for a run that replaces the one in an output folder: of a run that differs
    /// in its learning rate and its length alone, it is remembered which rates failed from the beginning.
    ///
    /// # Errors
    /// [`TrainError::Io`], [`TrainError::Checkpoint`].
    pub(crate) fn forget_replaced(out_dir: &Path, config: &Resolved) -> Result<(), TrainError> {
        let earlier = read_small(&out_dir.join(RESOLVED)).and_then(|text| String::from_utf8(text).ok());
        let [earlier, new] = [earlier, Some(config.to_toml())].map(|text| without_rate(&text?));
        let is_same = earlier.is_some() && earlier == new;
        Self::forget_after(out_dir, is_same.then_some(0))
    }

    /// Adds the start that has just diverged.
    pub(super) fn add(&mut self, from: u64, until: u64, lr: Option<f64>) {
        // Lowering a rate of zero changes nothing.
        self.0.push(Attempt { from, until, lr: lr.filter(|&lr| lr > 0.0) });
    }

    /// Why the state after `step` steps is given up, if it is: rates far apart have failed from there, or the last
    /// attempt began there and had no rate to lower.
    pub(super) fn given_up(&self, step: u64) -> Option<Unfit> {
        let (lowest, highest) = (self.lowest_lr(step), self.rates(step).reduce(f64::max));
        let began_here = self.0.last().is_some_and(|last| last.from == step && last.lr.is_none());
        let is_far = lowest.zip(highest).is_some_and(|(lowest, highest)| lowest <= highest * SHARE);
        (began_here || is_far).then_some(Unfit::Failed { lowest, highest })
    }

    /// The lowest learning rate that failed from the state after `step` steps.
    pub(super) fn lowest_lr(&self, step: u64) -> Option<f64> {
        self.rates(step).reduce(f64::min)
    }

    /// The learning rates of the attempts that went through the state after `step` steps.
    fn rates(&self, step: u64) -> impl Iterator<Item = f64> {
        self.0
            .iter()
            .filter(move |attempt| (attempt.from..=attempt.until).contains(&step))
            .filter_map(|a| a.lr)
    }
}

/// Reads a small file of an output folder. `None` if there is none, or it cannot be read.
fn read_small(path: &Path) -> Option<Vec<u8>> {
    match is_url(path) {
        true => objects::read(path).ok().flatten(),
        false => input_file::read(path, input_file::CONFIG_BYTES_MAX).ok(),
    }
}

/// The settings of a run without its learning rate and its length.
fn without_rate(resolved: &str) -> Option<toml::Table> {
    let mut table: toml::Table = toml::from_str(resolved).ok()?;
    let train = table.get_mut("train")?.as_table_mut()?;
    train.remove("steps");
    train.get_mut("optimizer")?.as_table_mut()?.remove("lr");
    Some(table)
}
