//! Arguments of `fsdp launch`.

use std::ffi::OsString;
use std::path::PathBuf;
use std::str::FromStr;
use std::thread;

use clap::Args as ClapArgs;

use super::NetworkArgs;

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

/// How many nodes a launch has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Nodes {
    /// The fewest that are enough.
    pub(crate) min: usize,
    /// The most that are used.
    pub(crate) max: usize,
}

impl FromStr for Nodes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (min, max) = text.split_once(':').unwrap_or((text, text));
        let number = |text: &str| text.parse().ok().filter(|number: &usize| (1..=4096).contains(number));
        let nodes = number(min).zip(number(max)).filter(|(min, max)| min <= max);
        let (min, max) = nodes.ok_or("expected a number from 1 to 4096, or a range such as 2:4")?;
        if min < max && min.next_power_of_two() > max {
            return Err(format!("a range needs a power of two, and there is none from {min} to {max}"));
        }
        Ok(Nodes { min, max })
    }
}

/// A host and a port; without one, that of torchrun.
fn endpoint(text: &str) -> Result<(String, u16), String> {
    let (host, port) = text.rsplit_once(':').unwrap_or((text, "29400"));
    let host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
    let port = port.parse().ok().filter(|_| !host.is_empty());
    port.map(|port| (host, port)).ok_or_else(|| "expected host:port".to_owned())
}

/// `fsdp launch`.
#[derive(Debug, ClapArgs)]
#[command(
    after_help = "The processes end together: when one fails, the others are told and end within seconds. After exit
code 75 or death by a signal all are restarted, and `train` continues from its newest checkpoint
(checkpoint.every). Configuration errors and failures that would recur end the launch at once.
SIGTERM, SIGINT and SIGUSR1 are passed on: the run saves and stops. A second SIGTERM or SIGINT
ends it at once.

On several nodes, start it on each of them (by srun, ssh or in pods: PET_* variables set options).
With MIN:MAX, after a failure the run continues with the nodes that are present after --node-wait:
the largest power of two of them, which keeps the bits; others are spares. Nodes that come later
join at the next checkpoint. A signal removes its node; on the coordinator's, it ends the launch.

torchrun, srun and mpirun start `fsdp train` just as well: see docs/clusters.md.

Examples:
  fsdp launch --nproc 4 -- train examples/quickstart.toml --set checkpoint.every=50
  fsdp launch --nproc 8 --max-restarts 100 --log-dir logs -- train run.toml --resume
  fsdp launch --nnodes 2:4 --nproc 8 --max-restarts 100 --log-dir logs -- train run.toml --resume"
)]
pub(crate) struct LaunchArgs {
    /// Processes to start; run.ranks is a multiple of this number, and equal to it if not set
    #[arg(long, value_name = "N", default_value = "1", env = "PET_NPROC_PER_NODE", value_parser = processes)]
    pub(crate) nproc: usize,
    /// Nodes: a number, or MIN:MAX; `fsdp launch` is started on each of them
    #[arg(long, value_name = "N|MIN:MAX", default_value = "1", env = "PET_NNODES")]
    pub(crate) nnodes: Nodes,
    /// Where the nodes meet: host:port of the first one [default: a folder in run.out_dir]
    #[arg(long, value_name = "HOST:PORT", env = "PET_RDZV_ENDPOINT", value_parser = endpoint)]
    endpoint: Option<(String, u16)>,
    /// The number of this node, from 0: ranks are assigned in this order [default: order of arrival]
    #[arg(long, value_name = "R", env = "PET_NODE_RANK")]
    pub(crate) node_rank: Option<usize>,
    /// How long to wait for missing nodes once there are enough, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    pub(crate) node_wait: u64,
    /// How many times all processes may be restarted
    #[arg(long, value_name = "K", default_value_t = 3, env = "PET_MAX_RESTARTS")]
    pub(crate) max_restarts: u32,
    /// Write the output of processes to DIR/attempt-A/rank-R/ (the first one's is also shown here)
    #[arg(long, value_name = "DIR")]
    pub(crate) log_dir: Option<PathBuf>,
    /// What to start: `train RUN.toml ..`, `bench train ..`, `verify RUN.toml ..` or `doctor ..`
    #[arg(last = true, required = true, value_name = "COMMAND")]
    pub(crate) command: Vec<OsString>,
    #[command(flatten)]
    pub(crate) network: NetworkArgs,
}

impl LaunchArgs {
    /// Where the nodes meet, if that is given: also by the variables that pods have.
    pub(crate) fn endpoint(&self) -> Option<(String, u16)> {
        let variable = |name: &str| std::env::var(name).ok();
        let from_pod = || Some((variable("PET_MASTER_ADDR")?, variable("PET_MASTER_PORT")?.parse().ok()?));
        self.endpoint.clone().or_else(from_pod)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_parse_number_or_range_with_power_of_two() {
        let parse = |text: &str| text.parse::<Nodes>().map(|nodes| (nodes.min, nodes.max));
        assert_eq!(parse("3"), Ok((3, 3)));
        assert_eq!(parse("2:4"), Ok((2, 4)));
        assert_eq!(parse("3:4"), Ok((3, 4)));
        for wrong in ["", "0", "4:2", "5:7", "1:x", "1:2:3"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn endpoint_parses_host_and_optional_port() {
        assert_eq!(endpoint("a:1"), Ok(("a".to_owned(), 1)));
        assert_eq!(endpoint("[::1]:2"), Ok(("::1".to_owned(), 2)));
        assert_eq!(endpoint("a"), Ok(("a".to_owned(), 29400)));
        assert!(endpoint(":1").is_err() && endpoint("a:x").is_err());
    }

    #[test]
    fn processes_parse_number_cpu_or_auto() {
        assert_eq!(processes("3"), Ok(3));
        assert!(processes("cpu").unwrap() >= 1 && processes("auto").unwrap() >= 1);
        assert!(processes("0").is_err() && processes("x").is_err());
    }
}
