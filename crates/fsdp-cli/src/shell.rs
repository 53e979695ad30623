//! `fsdp completions`, `fsdp man` and `fsdp schema`: what shells and `man` want to know of the command line, and editors of
//! run files.

use std::fs;

use clap::CommandFactory;

use crate::args::{Args, CompletionsArgs, ManArgs};
use crate::error::CliError;
use crate::output;

/// Prints the script with which a shell completes commands and options.
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
    output::print(&format!("{:#}\n", fsdp_train::config::schema()))
}

/// Writes a page for every command.
///
/// # Errors
/// [`CliError::Write`].
pub(crate) fn man(args: &ManArgs) -> Result<(), CliError> {
    fs::create_dir_all(&args.folder)
        .and_then(|()| clap_mangen::generate_to(Args::command(), &args.folder))
        .map_err(CliError::write(&args.folder))
}
