//! Arguments of `fsdp launch`.

use std::ffi::OsString;
use std::path::PathBuf;
use std::thread;

use clap::Args as ClapArgs;

/// A number of processes: given, or that of GPUs or cores.
fn processes(text: &str) -> Result<usize, String> {
    let gpus = || fsdp_cuda::device::gpu_count().map_err(|error| error.to_string());
    let number = match text {
        "auto" => gpus().unwrap_or(0).max(1),
        "gpu" => gpus()?,
        "cpu" => thread::available_parallelism().map_or(1, usize::from),
        _ => text.parse().unwrap_or(0),
    };
    let is_valid = (1..=4096).contains(&number);
    let error = || format!("expected a number from 1 to 4096, auto, gpu or cpu; this stands for {number}");
    if is_valid { Ok(number) } else { Err(error()) }
}

/// `fsdp launch`.
#[derive(Debug, ClapArgs)]
#[command(
    after_help = "The processes end together: when one fails, the others are told and end within seconds. After exit
code 75 or death by a signal all are restarted, and `train` continues from its newest checkpoint
(checkpoint.every). Configuration errors and failures that would recur end the launch at once.
SIGTERM, SIGINT and SIGUSR1 are passed on: the run saves and stops. A second SIGTERM or SIGINT
ends it at once.

It starts processes on this node alone. On several nodes, torchrun, srun and mpirun start
`fsdp train` itself: docs/clusters.md says how.

Examples:
  fsdp launch --nproc 4 -- train examples/quickstart.toml --set checkpoint.every=50
  fsdp launch --nproc 8 --max-restarts 100 --log-dir logs -- train run.toml --resume"
)]
pub(crate) struct LaunchArgs {
    /// Processes to start; run.ranks is a multiple of this number, and equal to it if not set
    #[arg(long, value_name = "N", default_value = "1", value_parser = processes)]
    pub(crate) nproc: usize,
    /// How many times all processes may be restarted
    #[arg(long, value_name = "K", default_value_t = 3)]
    pub(crate) max_restarts: u32,
    /// Write the output of processes to DIR/attempt-A/rank-R/ (the first one's is also shown here)
    #[arg(long, value_name = "DIR")]
    pub(crate) log_dir: Option<PathBuf>,
    /// What to start: `train RUN.toml ..`, `bench train ..`, `verify RUN.toml ..` or `doctor ..`
    #[arg(last = true, required = true, value_name = "COMMAND")]
    pub(crate) command: Vec<OsString>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_parse_number_cpu_or_auto() {
        assert_eq!(processes("3"), Ok(3));
        assert!(processes("cpu").unwrap() >= 1 && processes("auto").unwrap() >= 1);
        assert!(processes("0").is_err() && processes("x").is_err());
    }
}
