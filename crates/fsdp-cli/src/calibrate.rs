//! `fsdp calibrate`: times operations and collectives on this machine and writes them to a file for `fsdp plan`.

mod collectives;
mod computing;
mod file;
mod machine;
mod models;
mod ranks;
mod watch;

use std::path::Path;
use std::process::{Command, Stdio};
use std::{env, fs, io};

use fsdp_config::{Device, RunConfig};
use fsdp_core::DType;
use fsdp_cuda::device::TooManyRanks;
use fsdp_plan::cluster::Cluster;
use fsdp_plan::measured::{Measured, Points, left_out};
use indicatif::{ProgressBar, ProgressStyle};

use crate::args::CalibrateArgs;
use crate::atomic_file::folder_of;
use crate::cluster::{self, Team};
use crate::device::host::total_threads;
use crate::error::CliError;
use crate::exit_code::Exit;
use crate::{device, logging, output};
use collectives::{Collectives, bytes_max};
use computing::{Samples, Step, Steps};
pub(crate) use file::read_cluster;
use file::{add, expect_compatible, expect_matching, expect_replaceable, write};
use models::{Shape, WHOLE_STEP_MODELS, shapes};
use ranks::{Ranks, device_name};

/// Number of times that all models are run.
const PASSES: usize = 3;

/// The dtypes that are timed.
const DTYPES: [DType; 2] = [DType::F32, DType::Bf16];

/// Measures and writes the file.
///
/// # Errors
/// [`CliError`]: the device is not available, the file has other contents, or a run failed.
pub(crate) fn run(args: &CalibrateArgs) -> Result<Exit, CliError> {
    logging::install(None)?;
    let device = args.device;
    device::expect(device)?;
    device::expect_operations(device, "--device")?;
    let Some(place) = cluster::place()? else { return run_single_process(args, device).map(|()| Exit::Done) };
    let previous = read_cluster(&args.out)?;
    let (previous, measured) = expect_compatible(previous, device, &args.out)?;
    let ranks = args.ranks.unwrap_or_else(|| device::world(Some(place), device == Device::Cuda).ranks);
    let run = shapes(device)[0].job(device, DType::F32, ranks)?.config.run;
    cluster::within(Some(place), &run, args.network, |team| {
        let Some(team) = team else { return Ok(Exit::Done) };
        let cluster = run_in_team(team, args, &run, (previous, measured))?;
        if team.cluster.is_leader() {
            write(&cluster, &args.out)?;
        }
        Ok(Exit::Done)
    })
}

impl CalibrateArgs {
    /// The models to run.
    fn shapes(&self) -> &'static [Shape] {
        let all = shapes(self.device);
        &all[..self.models.unwrap_or(all.len()).min(all.len())]
    }
}

/// Measures collectives and whole steps between processes, and adds them to earlier measurements.
fn run_in_team(
    team: Team<'_>,
    args: &CalibrateArgs,
    run: &RunConfig,
    (mut cluster, mut measured): (Cluster, Measured),
) -> Result<Cluster, CliError> {
    let (runner, ranks, transport) = (&Some(team.cluster), run.ranks, team.transport_name());
    if let Some(name) = device_name(run, runner)? {
        expect_matching("machine", &name, &measured.machine, &args.out)?;
    }
    let collectives = Collectives { ranks, transport, bytes_max: bytes_max(run.device) };
    add(&mut measured.collectives, runner.run(run, collectives)??);
    // The launcher may have started processes on several nodes.
    let place = team.cluster.place();
    let ranks_here = place.local_processes * (ranks / place.processes);
    cluster.node.devices.value = cluster.node.devices.value.max(ranks_here as f64);
    cluster.measured = Some(measured);
    let samples = steps(args, run.device, ranks, runner)?;
    add_steps(&mut cluster, &samples.steps(), transport)?;
    Ok(cluster)
}

/// Times whole steps of some models, unobserved.
fn steps(
    args: &CalibrateArgs,
    device: Device,
    ranks: usize,
    runner: &impl Ranks,
) -> Result<Samples, CliError> {
    let mut samples = Samples::default();
    for shape in WHOLE_STEP_MODELS.into_iter().filter_map(|index| args.shapes().get(index)) {
        for dtype in DTYPES {
            let job = shape.job(device, dtype, ranks)?;
            let label = format!("{shape:?} {dtype} {ranks}");
            let steps =
                Steps { job: &job, count: args.steps, label, is_observed: false, samples: &mut samples };
            runner.run(&job.config.run, steps)??;
        }
    }
    Ok(samples)
}

/// Adds whole steps as points: their times, and the forecasts from the cluster's other points.
fn add_steps(cluster: &mut Cluster, steps: &[Step], transport: &'static str) -> Result<(), CliError> {
    let points = steps.iter().map(|step| step.point(cluster, transport)).collect::<Result<Vec<_>, _>>()?;
    let measured = cluster.measured.as_mut().expect("steps come last");
    add(&mut measured.steps, [(transport.to_owned(), points)].into());
    Ok(())
}

/// Measures everything that one process can; starts others for the rest.
fn run_single_process(args: &CalibrateArgs, device: Device) -> Result<(), CliError> {
    let like = machine::like(args.like.as_deref(), device)?;
    let (threads, ranks_max) = thread_and_rank_limits(args, device)?;
    let single_rank_run = shapes(device)[0].job(device, DType::F32, 1)?.config.run;
    let machine = machine::name(device, device_name(&single_rank_run, &None)?, threads);
    expect_replaceable(&args.out, &machine)?;
    let worlds = worlds(ranks_max);
    let processes: &[usize] = if device == Device::Cuda { &[] } else { &worlds[1..] };
    let progress = bar(processes.len());
    let bytes_max = bytes_max(device);
    let (shapes, worlds, progress) = (args.shapes(), &worlds[..], &progress);
    let bench = Bench { args, device, threads, shapes, worlds, bytes_max, runner: None, progress };
    write(&bench.measure(like, machine)?, &args.out)?;
    for &ranks in processes {
        progress.set_message(format!("{ranks} processes"));
        launch(args, ranks)?;
        progress.inc(1);
    }
    progress.finish_and_clear();
    print_summary(&args.out)
}

/// The measurements of one process.
struct Bench<'a, R> {
    args: &'a CalibrateArgs,
    device: Device,
    /// Number of compute threads, or of GPUs.
    threads: usize,
    /// The models to run, and the rank counts.
    shapes: &'a [Shape],
    worlds: &'a [usize],
    /// Maximum bytes of collectives.
    bytes_max: usize,
    runner: R,
    progress: &'a ProgressBar,
}

impl<R: Ranks> Bench<'_, R> {
    /// Measures everything; returns this machine as a cluster, with the properties of `like` where nothing was
    /// measured.
    fn measure(&self, like: Cluster, machine: String) -> Result<Cluster, CliError> {
        let Self { args, device, threads, shapes, worlds, bytes_max, progress, .. } = *self;
        let computing: Vec<usize> = worlds.iter().copied().filter(|&ranks| ranks <= threads).collect();
        let runs = PASSES * computing.len() * DTYPES.len() * shapes.len();
        progress.inc_length((runs + worlds.len()) as u64);
        // First, so that an unwritable folder is reported before minutes have passed.
        let write_speed = machine::measure_write_speed(folder_of(&args.out))?;
        let mut measured = Measured {
            machine,
            device: device.name().to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            date: output::now(),
            threads,
            issue: 0.0,
            between_calls: 0.0,
            calls: Points::new(),
            operations: Points::new(),
            collectives: Points::new(),
            steps: Points::new(),
        };
        let mut whole_steps = self.compute(&computing)?.finish(&mut measured);
        let transport = if device == Device::Cuda { "nccl" } else { "threads" };
        for &ranks in worlds {
            progress.set_message(format!("collectives of {ranks} ranks"));
            let run = shapes[0].job(device, DType::F32, ranks)?.config.run;
            let collectives = Collectives { ranks, transport, bytes_max };
            add(&mut measured.collectives, self.runner.run(&run, collectives)??);
            if !computing.contains(&ranks) {
                whole_steps.extend(steps(args, device, ranks, &self.runner)?.steps());
            }
            progress.inc(1);
        }
        let ranks_max = worlds.last().copied().unwrap_or(1);
        let mut cluster = machine::cluster(like, measured, ranks_max, Some(write_speed));
        add_steps(&mut cluster, &whole_steps, transport)?;
        Ok(cluster)
    }

    fn compute(&self, worlds: &[usize]) -> Result<Samples, CliError> {
        let Self { args, device, shapes, progress, .. } = *self;
        let mut samples = Samples::default();
        // In this order, a disturbance of some seconds affects only one of a model's several runs.
        let models = DTYPES.into_iter().flat_map(|dtype| shapes.iter().map(move |shape| (dtype, shape)));
        let runs_of = |&ranks: &usize| models.clone().map(move |(dtype, shape)| (ranks, dtype, shape));
        for (ranks, dtype, shape) in (0..PASSES).flat_map(|_| worlds.iter().flat_map(runs_of)) {
            progress.set_message(format!("{dtype} on {ranks} ranks"));
            let job = shape.job(device, dtype, ranks)?;
            let label = format!("{shape:?} {dtype} {ranks}");
            let steps =
                Steps { job: &job, count: args.steps, label, is_observed: true, samples: &mut samples };
            self.runner.run(&job.config.run, steps)??;
            progress.inc(1);
        }
        Ok(samples)
    }
}

/// Number of compute threads, or of GPUs; and the maximum number of ranks to time.
fn thread_and_rank_limits(args: &CalibrateArgs, device: Device) -> Result<(usize, usize), CliError> {
    if device != Device::Cuda {
        let threads = total_threads(0);
        return Ok((threads, args.ranks.unwrap_or(2 * threads)));
    }
    let devices = fsdp_cuda::device::gpu_count().unwrap_or(1).max(1);
    match args.ranks.unwrap_or(devices) {
        ranks if ranks > devices => Err(TooManyRanks { ranks, devices }.into()),
        ranks => Ok((devices, ranks)),
    }
}

/// Powers of two up to `ranks_max`.
fn worlds(ranks_max: usize) -> Vec<usize> {
    (0..usize::BITS).map(|power| 1 << power).take_while(|&ranks| ranks <= ranks_max).collect()
}

/// Starts this program once per rank, to time collectives between processes.
fn launch(args: &CalibrateArgs, ranks: usize) -> Result<(), CliError> {
    let what = || format!("{ranks} processes");
    let failed = |source| CliError::Start { what: what(), source };
    let program = env::current_exe().map_err(failed)?;
    let mut command = Command::new(program);
    command.args(["launch", "--nproc", &ranks.to_string(), "--max-restarts", "0", "--", "calibrate"]);
    command
        .args(["--device", args.device.name(), "--steps", &args.steps.to_string(), "--out"])
        .arg(&args.out);
    if let Some(models) = args.models {
        command.args(["--models", &models.to_string()]);
    }
    let output = command.stdin(Stdio::null()).output().map_err(failed)?;
    if output.status.success() {
        return Ok(());
    }
    let stderr = String::from_utf8_lossy(&output.stderr);
    Err(failed(io::Error::other(format!("they ended with {}: {}", output.status, stderr.trim()))))
}

/// Prints a summary of a file.
fn print_summary(file: &Path) -> Result<(), CliError> {
    let cluster = read_cluster(file)?;
    let measured = cluster.measured.as_ref().expect("it was written with its points");
    let percent = |points: &Points| {
        left_out(points).map_or_else(|| "not known".to_owned(), |part| format!("{:.1} %", 100.0 * part))
    };
    let bytes = fs::metadata(file).map_or(0, |file| file.len());
    output::print(&format!(
        "{} points of {} ({}) in {} ({bytes} bytes)\n\
         error of each point predicted from the others (mean, weighted by time):\n\
         calls {}, other operations {}, collectives {}, whole steps {}\n",
        measured.len(),
        measured.machine,
        measured.device,
        file.display(),
        percent(&measured.calls),
        percent(&measured.operations),
        percent(&measured.collectives),
        percent(&measured.steps),
    ))
}

fn bar(steps: usize) -> ProgressBar {
    if !output::draws_bars() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("{bar:28} {pos}/{len} {msg}, ETA {eta}");
    ProgressBar::new(steps as u64).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

#[cfg(test)]
mod tests;
