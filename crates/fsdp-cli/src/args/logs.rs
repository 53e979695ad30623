//! What is told on stderr, and in which form.

use clap::{Args as ClapArgs, ValueEnum};

/// Options of every command.
#[derive(Clone, Copy, Debug, Default, ClapArgs)]
#[command(next_help_heading = "Logging")]
pub(crate) struct LogArgs {
    /// Print no progress or notes, only warnings, errors and results
    #[arg(short, long, global = true)]
    pub(crate) quiet: bool,
    /// Write stderr as `text` for people, or as `json`: one object per line, with time, level, message and figures
    #[arg(
        long,
        global = true,
        value_name = "FORMAT",
        value_enum,
        default_value_t,
        hide_possible_values = true
    )]
    pub(crate) log_format: LogFormat,
}

/// The form of lines on stderr.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogFormat {
    /// Text for people
    #[default]
    Text,
    /// One JSON object per line: time, level, message and figures
    Json,
}
