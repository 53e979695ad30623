//! Arguments of several commands.

use std::path::PathBuf;

use clap::Args as ClapArgs;

/// A run file and changes to it.
#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct RunFileArgs {
    /// The run file (TOML)
    #[arg(value_name = "RUN.toml")]
    pub(crate) file: PathBuf,
    /// Change a key of the run file, such as --set train.steps=50 (may be repeated)
    #[arg(long = "set", value_name = "TABLE.KEY=VALUE")]
    pub(crate) overrides: Vec<String>,
}

/// How processes reach each other.
#[derive(Clone, Copy, Debug, ClapArgs)]
pub(crate) struct NetworkArgs {
    /// Connect processes on several nodes without a token: for networks that nobody else can reach
    #[arg(long)]
    pub(crate) insecure_network: bool,
}
