//! `[[train.optimizer.group]]`: parameters with settings of their own.

use super::error::ConfigError;
use super::kind::{NON_NEGATIVE, SOME_TEXTS};
use super::reader::Reader;
use super::table::table;
use super::written;

/// What `group` must be.
pub(super) const GROUPS: &str =
    "tables [[train.optimizer.group]] with patterns, and lr or lr_scale, and weight_decay";

table! {
    /// An entry of `[[train.optimizer.group]]`: settings of the parameters that no earlier entry names. What is not written
    /// is that of the optimizer.
    pub struct GroupConfig {
        /// Regular expressions, found anywhere in a name, of the parameters.
        patterns: Vec<String> = patterns(),
        /// Learning rate, which the schedule changes in the same proportion as the optimizer's.
        lr: Option<f64> = or_none(NON_NEGATIVE),
        /// Learning rate as a multiple of the optimizer's.
        lr_scale: Option<f64> = or_none(NON_NEGATIVE),
        /// Weight decay.
        weight_decay: Option<f64> = or_none(NON_NEGATIVE),
    }
}

/// The patterns of groups, with their keys.
pub(super) fn group_patterns(groups: &mut [GroupConfig]) -> impl Iterator<Item = (String, &mut Vec<String>)> {
    let key = |index| format!("train.optimizer.group[{index}].patterns");
    groups.iter_mut().enumerate().map(move |(index, group)| (key(index), &mut group.patterns))
}

impl GroupConfig {
    /// An entry that names something, with one learning rate.
    pub(super) fn read_checked(reader: &Reader<'_>) -> Result<GroupConfig, ConfigError> {
        let group = Self::read(reader)?;
        reader.required("patterns", SOME_TEXTS)?;
        if group.lr.is_some() && group.lr_scale.is_some() {
            return Err(reader.conflict("lr", "lr_scale", "remove one of them"));
        }
        Ok(group)
    }

    /// Its learning rate as a multiple of the optimizer's.
    ///
    /// # Panics
    /// Where it has one of its own, but the optimizer has none: that is refused when a file is read.
    pub fn scale(&self, base: Option<f64>) -> f64 {
        match self.lr {
            Some(lr) => lr / base.expect("a group has a learning rate only where the optimizer has one"),
            None => self.lr_scale.unwrap_or(1.0),
        }
    }
}
