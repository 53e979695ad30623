//! `fsdp completions`, `fsdp man` and `fsdp schema`: shell completions, man pages, and the schema of run files for
//! editors.

use std::fs;

use clap::CommandFactory;

use crate::args::{Args, CompletionsArgs, ManArgs};
use crate::error::CliError;
use crate::output;

/// Prints a shell's completion script.
///
/// # Errors
/// [`CliError::Write`].
pub(crate) fn completions(args: &CompletionsArgs) -> Result<(), CliError> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Args::command(), "fsdp", &mut script);
    output::print(&String::from_utf8_lossy(&script))
}

/// Prints the JSON schema of run files.
///
/// # Errors
/// [`CliError::Write`].
pub(crate) fn schema() -> Result<(), CliError> {
    output::print(&format!("{:#}\n", fsdp_config::schema()))
}

/// Writes a man page for every command.
///
/// # Errors
/// [`CliError::Write`].
pub(crate) fn man(args: &ManArgs) -> Result<(), CliError> {
    fs::create_dir_all(&args.folder)
        .and_then(|()| clap_mangen::generate_to(Args::command(), &args.folder))
        .map_err(CliError::write(&args.folder))
}
