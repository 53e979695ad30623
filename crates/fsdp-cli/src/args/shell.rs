//! Arguments of `fsdp completions`, `fsdp man` and `fsdp schema`.

use std::path::PathBuf;

use clap::Args as ClapArgs;
use clap_complete::Shell;

/// `fsdp completions`.
#[derive(Debug, ClapArgs)]
#[command(after_help = "The script is printed; where it belongs depends on the shell.

Examples:
  fsdp completions bash > ~/.local/share/bash-completion/completions/fsdp
  fsdp completions zsh > ~/.zfunc/_fsdp            (with fpath+=~/.zfunc before compinit)
  fsdp completions fish > ~/.config/fish/completions/fsdp.fish")]
pub(crate) struct CompletionsArgs {
    /// The shell
    #[arg(value_name = "SHELL", value_enum)]
    pub(crate) shell: Shell,
}

/// `fsdp schema`.
#[derive(Debug, ClapArgs)]
#[command(
    after_help = "Editors that read JSON schemas of TOML (taplo, Even Better TOML) complete keys with it, explain
them, and mark unknown ones and wrong types. `fsdp check` finds keys that do not fit together.

Examples:
  fsdp schema > run.schema.json      (and in a run file, as its first line: #:schema ./run.schema.json)"
)]
pub(crate) struct SchemaArgs {}

/// `fsdp man`.
#[derive(Debug, ClapArgs)]
#[command(after_help = "There is a page for every command. Pages of the same names are replaced.

Examples:
  fsdp man ~/.local/share/man/man1 && man fsdp-train")]
pub(crate) struct ManArgs {
    /// The folder, which is created if needed
    #[arg(value_name = "DIR")]
    pub(crate) folder: PathBuf,
}
