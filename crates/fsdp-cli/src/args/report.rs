//! Arguments of `fsdp report`.

use std::path::PathBuf;

use clap::Args as ClapArgs;

/// `fsdp report`.
#[derive(Debug, ClapArgs)]
#[command(
    after_help = "The report is one HTML file that needs no network: curves of loss, evaluation, learning rate,
gradient norm, speed and waiting, with several runs overlaid; predicted memory by category, the
operations of a step on their queues, and the configurations with their differences. It is made from
metrics.jsonl and resolved.toml in each folder; memory and schedule also need the config.json in
model.path. Runs may still be in progress. An existing file is replaced only if it is a report.

Examples:
  fsdp report runs/quickstart
  fsdp report runs/a runs/b --output compared.html"
)]
pub(crate) struct ReportArgs {
    /// Output folders of runs (run.out_dir)
    #[arg(value_name = "RUN_DIR", required = true)]
    pub(crate) runs: Vec<PathBuf>,
    /// The file to write
    #[arg(short, long, value_name = "FILE", default_value = "report.html")]
    pub(crate) output: PathBuf,
}
