//! Models that a program may have computed by mistake: values that the families of `config.json` are known to have, and
//! settings that are easily lost.

mod adapters;
mod dropouts;
mod functions;
mod rotary;
mod stated;
mod windows;

use fsdp_train::audit::Setting;

pub(super) use self::dropouts::without_dropout;
pub(super) use self::stated::Stated;
use crate::run_setup::Model;

/// Settings to try for rows of at most so many tokens, the likely ones first.
pub(super) fn settings(stated: &Stated, longest: usize) -> Vec<Setting<Model>> {
    let mut settings = rotary::settings(stated);
    settings.extend(windows::settings(stated, longest));
    settings.extend(functions::settings(stated));
    settings.extend(adapters::scale(stated));
    settings.extend(dropouts::settings(stated));
    settings
}
