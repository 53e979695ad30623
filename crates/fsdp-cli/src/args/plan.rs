//! Arguments of `fsdp plan`.

use std::path::PathBuf;

use clap::{ArgGroup, Args as ClapArgs};

use super::shared::RunFileArgs;
use super::values::positive;

/// `fsdp plan`.
#[derive(Debug, ClapArgs)]
#[command(
    group = ArgGroup::new("where").required(true).args(["on", "cluster"]),
    after_help = "Nothing is run: the schedule that the run file compiles to is priced operation by operation, and
simulated with the queues and waits of the engine. No GPU, network or training data is needed.
Memory is exact; times are as good as docs/planning.md says, and come with a band.

Clusters by name: a100-40-sxm, a100-40-pcie, a100-80-sxm, a100-80-pcie, h100-sxm, h100-pcie, h200-sxm,
b200-sxm, mi300x, tpu-v4, tpu-v5e, tpu-v5p, cpu-2core, cpu-96core; short names for the usual ones:
a100-40, a100-80 or a100, h100, h200, b200. To describe your own, copy one with --print-cluster.

Examples:
  fsdp plan examples/llama-8b.toml --on h100-sxm --nodes 8
  fsdp plan examples/llama-8b.toml --on h100-sxm --nodes 2 --set fsdp.mesh.replicate=1 --search
  fsdp plan examples/llama-8b.toml --cluster examples/clusters/h100-8x8.toml
  fsdp plan examples/llama-8b.toml --on a100-80 --tokens 1.4e12 --price 2.1
  fsdp plan examples/llama-8b.toml --on h100-sxm --nodes 8 --trace plan.json   (open it in ui.perfetto.dev)
  fsdp plan examples/llama-8b.toml --on h100-sxm --nodes 8 --report plan.html
  fsdp plan examples/llama-8b.toml --on h100-sxm --print-cluster > mine.toml"
)]
pub(crate) struct PlanArgs {
    #[command(flatten)]
    pub(crate) run: RunFileArgs,
    /// A built-in cluster, by name
    #[arg(long, value_name = "NAME")]
    pub(crate) on: Option<String>,
    /// A cluster described by a file
    #[arg(long, value_name = "FILE")]
    pub(crate) cluster: Option<PathBuf>,
    /// Number of nodes, all of whose devices are ranks [default: `nodes` of the cluster's file, or what run.ranks needs]
    #[arg(long, value_name = "N", value_parser = positive)]
    pub(crate) nodes: Option<usize>,
    /// Try settings of the table `fsdp`, micro-batches and meshes, and print the best that fit
    #[arg(long)]
    pub(crate) search: bool,
    /// With --search: write a run file with the fastest settings that fit
    #[arg(long, value_name = "FILE", requires = "search")]
    pub(crate) write: Option<PathBuf>,
    /// Tokens of the whole run [default: those of train.steps]
    #[arg(long, value_name = "N", value_parser = above_zero, allow_negative_numbers = true)]
    pub(crate) tokens: Option<f64>,
    /// US dollars for a device and hour [default: the cluster's]
    #[arg(long, value_name = "DOLLARS", value_parser = above_zero, allow_negative_numbers = true)]
    pub(crate) price: Option<f64>,
    /// Write the predicted step as Chrome/Perfetto JSON; of existing files, only an earlier trace is replaced
    #[arg(long, value_name = "FILE", conflicts_with = "search")]
    pub(crate) trace: Option<PathBuf>,
    /// Write a report with charts: one HTML file that needs no network; of existing files, only a report is replaced
    #[arg(long, value_name = "FILE", conflicts_with = "search")]
    pub(crate) report: Option<PathBuf>,
    /// Print the description of the cluster, with the source of every number, and nothing else
    #[arg(long, conflicts_with = "json")]
    pub(crate) print_cluster: bool,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

fn above_zero(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|number: &f64| *number > 0.0 && *number <= 1e18);
    number.ok_or_else(|| "expected a number above 0 and at most 1e18".to_owned())
}
