//! `[[train.optimizer.group]]`: parameter groups with their own settings.

use super::error::ConfigError;
use super::kind::{NON_NEGATIVE, SOME_TEXTS};
use super::reader::Reader;
use super::table::table;
use super::writer;

/// Description of the accepted values of `group`.
pub(super) const GROUPS: &str =
    "tables [[train.optimizer.group]] with patterns, and lr or lr_scale, and weight_decay";

table! {
    /// An entry of `[[train.optimizer.group]]`: settings of its parameters, unless an earlier entry names them. Keys left out
    /// have the optimizer's values.
    pub struct GroupConfig {
        /// Regular expressions, found anywhere in a name, of the parameters.
        patterns: Vec<String> = patterns(),
        /// Learning rate, scaled by the schedule like the optimizer's.
        lr: Option<f64> = or_none(NON_NEGATIVE),
        /// Learning rate as a multiple of the optimizer's.
        lr_scale: Option<f64> = or_none(NON_NEGATIVE),
        /// Weight decay.
        weight_decay: Option<f64> = or_none(NON_NEGATIVE),
    }
}

/// Returns the patterns of each group, with their dotted keys.
pub(super) fn group_patterns(groups: &mut [GroupConfig]) -> impl Iterator<Item = (String, &mut Vec<String>)> {
    let key = |index| format!("train.optimizer.group[{index}].patterns");
    groups.iter_mut().enumerate().map(move |(index, group)| (key(index), &mut group.patterns))
}

impl GroupConfig {
    /// Reads an entry, which must have patterns and at most one of `lr` and `lr_scale`.
    pub(super) fn read_checked(reader: &Reader<'_>) -> Result<GroupConfig, ConfigError> {
        let group = Self::read(reader)?;
        reader.required("patterns", SOME_TEXTS)?;
        if group.lr.is_some() && group.lr_scale.is_some() {
            return Err(reader.conflict("lr", "lr_scale", "remove one of them"));
        }
        Ok(group)
    }

    /// Returns the group's learning rate as a multiple of the optimizer's.
    ///
    /// # Panics
    /// If the group has its own learning rate but the optimizer has none; reading a run file rejects that.
    pub fn scale(&self, base: Option<f64>) -> f64 {
        match self.lr {
            Some(lr) => lr / base.expect("a group has a learning rate only where the optimizer has one"),
            None => self.lr_scale.unwrap_or(1.0),
        }
    }
}
