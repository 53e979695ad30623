//! `fsdp ckpt`: inspects, converts, verifies and compares checkpoints. The work itself is in `fsdp-ckpt`.

mod against_model;
mod convert;
mod diff;
mod inspect;
mod shared;
mod values;
mod verify;

use crate::args::CkptCommand;
use crate::error::CliError;

/// Runs a command; returns whether a verification found nothing damaged and a comparison no difference.
///
/// # Errors
/// [`CliError`]: the input is wrong, the output cannot be written, or the user interrupted.
pub(crate) fn run(command: &CkptCommand) -> Result<bool, CliError> {
    match command {
        CkptCommand::Inspect(args) => inspect::run(args).map(|()| true),
        CkptCommand::Convert(args) => convert::run(args).map(|()| true),
        CkptCommand::Verify(args) => verify::run(args),
        CkptCommand::Diff(args) => diff::run(args),
    }
}
