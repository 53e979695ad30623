//! Compares measured runs of others with their predictions, and fits the constants of prices to them.
//!
//! A run is a line of a CSV ([`row::Row`]). It is compiled into a schedule like the project's own runs, with the policies of
//! its software, and priced with what that software does differently. Runs outside of the model are reported with a
//! reason.
#![forbid(unsafe_code)]

mod check;
mod columns;
mod error;
mod expected;
mod fit;
mod hardware;
mod memory;
mod recipe;
mod report;
mod row;
mod run;
mod sizes;
mod table;
mod words;

use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Parser, Subcommand};

use row::Runs;

/// Measured runs, published or one's own, beside their predictions
#[derive(Debug, Parser)]
#[command(
    name = "fsdp-published",
    after_help = "The columns are those of tools/published/data/published.csv; layers, hidden, heads, ffn, vocab, seq,
micro_batch, devices, device_type, sharding and act_ckpt are required. A run is compiled as a schedule
with the policies of its software, and priced with what that does differently; runs that the model does
not cover are listed with the reason."
)]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Predict the runs of a CSV, and report how far predictions are from measurements
    Check {
        /// The runs
        #[arg(value_name = "RUNS.csv")]
        file: PathBuf,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Fit the constants of prices to the runs of a CSV, and report how far predictions are from them
    Fit {
        /// The runs
        #[arg(value_name = "RUNS.csv", default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/data/published.csv"))]
        file: PathBuf,
        /// Also leave one group of runs out of the fit at a time, and report the errors of these
        #[arg(long)]
        cv: bool,
        /// Write the constants to crates/fsdp-plan/constants.toml
        #[arg(long)]
        write: bool,
    },
}

/// Reads the runs of a file.
fn read(file: &Path) -> Result<Runs, Box<dyn Error>> {
    let name = file.display().to_string();
    let text = fs::read_to_string(file).map_err(|error| format!("cannot read {name}: {error}"))?;
    let runs = row::read(&text, &name)?;
    for column in &runs.ignored {
        eprintln!("warning: {name}: column `{column}` is unknown, and ignored");
    }
    Ok(runs)
}

fn main() -> ExitCode {
    let done = match Args::parse().command {
        Command::Check { file, json } => read(&file).map(|runs| report::print(&runs, json)),
        Command::Fit { file, cv, write } => read(&file).and_then(|runs| fit::run(&runs.rows, cv, write)),
    };
    if let Err(error) = done {
        eprintln!("error: {error}");
        return ExitCode::from(2);
    }
    ExitCode::SUCCESS
}
