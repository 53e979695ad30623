//! Measures how close training steps of a named model come to the limits of a device.
//!
//! Times steps by the wall clock, then observes a few more: when each queue was busy, and how much communication was
//! exposed. Then measures the ceilings: a large product, a large copy.
#![forbid(unsafe_code)]

mod cards;
mod ceilings;
mod clock;
mod device;
mod models;
mod observed;
mod report;
mod timeline;

use std::error::Error;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{fs, io};

use clap::{Parser, ValueEnum};
use fsdp_comm::launch::{Launcher, Seat};
use fsdp_config::Resolved;
use fsdp_core::engine::ProgramOrder;
use fsdp_core::memory::Usage;
use fsdp_nn::Backend;
use fsdp_nn::hf::{HfConfig, HfModel};
use fsdp_nn::model::Architecture;
use fsdp_nn::random;
use fsdp_train::{InitSource, Job, RankTrainer, TrainError};
use tempfile::TempPath;

use ceilings::Ceilings;
use clock::{Clock, DeviceBytes};
use device::{Device, Work};
use models::{ModelName, Workload};
use observed::Observed;
use report::Report;

/// Number of observed steps: enough for a median.
const OBSERVED_STEPS: u64 = 5;

/// How close training steps of a named model come to the limits of a device
#[derive(Clone, Debug, Parser)]
#[command(
    name = "fsdp-gpu-bench",
    after_help = "Parameters and compute are bf16, master weights and reductions f32; the optimizer is AdamW with
gradients clipped at 1.0. Steps are timed, then a few more are observed: when each queue was busy,
and how much communication was not hidden behind compute; then the ceilings of the device are
measured (a large matrix product, a large copy). Model FLOPs are 6N + 12 L d T per token. The mean
is over the steps after the warm-up."
)]
struct Args {
    /// The model
    #[arg(long, value_name = "NAME", value_enum, default_value_t = ModelName::Gpt2Small)]
    model: ModelName,
    /// What computes
    #[arg(long, value_name = "DEVICE", value_enum, default_value_t = Device::Cuda)]
    device: Device,
    /// Ranks, one per GPU
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = positive)]
    ranks: usize,
    /// Sequences of a rank's step [default: the model's]
    #[arg(long, value_name = "N", value_parser = positive)]
    batch: Option<usize>,
    /// What backward recomputes
    #[arg(long, value_name = "POLICY", value_enum, default_value_t = Checkpointing::None)]
    checkpointing: Checkpointing,
    /// Steps to run
    #[arg(long, value_name = "N", default_value_t = 30, value_parser = positive)]
    steps: usize,
    /// Warm-up steps, which are not timed
    #[arg(long, value_name = "N", default_value_t = 10)]
    warmup: usize,
    /// Peak in TFLOP/s, for the MFU [default: the data sheet's, for known cards]
    #[arg(long, value_name = "TFLOP/S")]
    peak_tflops: Option<f64>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// What backward recomputes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Checkpointing {
    /// Nothing
    None,
    /// Layers, except matrix products and attention
    Selective,
    /// Layers
    Full,
}

/// The name of a value on the command line and in run files.
fn name(value: impl ValueEnum) -> String {
    value.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
}

fn positive(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|&number| number > 0).ok_or_else(|| "expected a number above 0".to_owned())
}

/// The measurements of one rank.
struct Measured {
    ceilings: Ceilings,
    /// Time from report to report.
    steps: Vec<Duration>,
    /// Host time to issue a step to an idle device.
    issues: Vec<Duration>,
    losses: Vec<f64>,
    observed: Observed,
    usage: Usage,
    device: Option<DeviceBytes>,
    device_name: Option<String>,
    attention_kernels: Option<&'static str>,
}

/// Writes a file of random tokens for a step, and the target of the last one.
fn tokens(count: usize, vocab: usize) -> io::Result<TempPath> {
    let token = |index| (random::uniform(random::key(&[0]), index) * vocab as f64) as u32;
    let bytes: Vec<u8> = (0..=count as u64).flat_map(|index| token(index).to_le_bytes()).collect();
    let file = tempfile::Builder::new().prefix("fsdp-bench-").suffix(".u32").tempfile()?.into_temp_path();
    fs::write(&file, bytes)?;
    Ok(file)
}

/// Builds the job from the text that a user would write, so that the benchmark takes the path of every other run.
fn job(args: &Args, workload: &Workload) -> Result<Job<HfModel>, Box<dyn Error>> {
    let architecture = HfConfig::parse(&workload.config.to_string())?.build()?;
    let global_batch = workload.batch * args.ranks;
    let tokens = tokens(global_batch * workload.seq, workload.vocab)?;
    let run = format!(
        r#"
[model]
path = "made of options"
[data]
train = [{tokens:?}]
format = "tokens-u32"
seq_len = {seq}
[train]
steps = {steps}
micro_batch_size = {batch}
global_batch_size = {global_batch}
grad_clip = 1.0
optimizer = {{ name = "adamw", lr = 1e-4, betas = [0.9, 0.95], weight_decay = 0.1 }}
[fsdp]
wrap = ["{wrap}"]
param_dtype = "bf16"
reduce_dtype = "f32"
accumulation_order = "running"
activation_checkpointing = "{checkpointing}"
[run]
device = "{device}"
ranks = {ranks}
out_dir = "unused"
"#,
        tokens = tokens.display().to_string(),
        seq = workload.seq,
        steps = args.steps,
        batch = workload.batch,
        wrap = workload.wrap,
        checkpointing = name(args.checkpointing),
        device = name(args.device),
        ranks = args.ranks,
    );
    let loaded = Resolved::parse(&run, "the benchmark", &[])?;
    let init = Arc::new(architecture.description().init.clone());
    let init = InitSource::Random { seed: loaded.config.model.seed, init };
    Ok(Job::new(loaded.config, architecture, init)?)
}

/// Measures on any device.
struct Measure<'a> {
    job: &'a Job<HfModel>,
    steps: u64,
}

impl Work for Measure<'_> {
    type Outcome = Result<Vec<Measured>, TrainError>;

    fn on<L: Launcher>(self, launcher: &L) -> Self::Outcome
    where
        L::Memory: Backend + Clock,
    {
        let ranks = self.job.config.run.ranks;
        Ok(launcher.launch(ranks, &|seat: Seat<L::Memory>| measure(self.job, seat, self.steps))?)
    }
}

fn measure<M>(job: &Job<HfModel>, seat: Seat<M>, steps: u64) -> Result<Measured, TrainError>
where
    M: Backend + Clock,
{
    let memory = Arc::clone(&seat.memory);
    let mut trainer = RankTrainer::new(job, seat)?;
    let ahead = usize::from(memory.is_asynchronous());
    let (mut times, mut issues, mut losses) = (Vec::new(), Vec::new(), Vec::new());
    let mut clock = Instant::now();
    for step in 0..steps {
        trainer.issue(step, false, &mut ProgramOrder, &mut ())?;
        let ahead = if step + 1 == steps { 0 } else { ahead };
        while trainer.unread() > ahead {
            losses.extend(trainer.report()?.map(|(_, report)| report.loss));
            times.push(clock.elapsed());
            clock = Instant::now();
        }
    }
    // While the device is behind, the host would wait for room in its queues.
    for step in steps..steps + OBSERVED_STEPS {
        let begin = Instant::now();
        trainer.issue(step, false, &mut ProgramOrder, &mut ())?;
        issues.push(begin.elapsed());
        trainer.report()?;
    }
    let steps = steps + OBSERVED_STEPS;
    let observed = observed::measure(&mut trainer, &memory, steps..steps + OBSERVED_STEPS)?;
    let (usage, device) = (trainer.usage(), memory.device_bytes());
    let (device_name, attention_kernels) = (memory.device_name(), memory.attention_kernels());
    // The ceilings allocate large buffers, so they come after everything that is counted.
    drop(trainer);
    let ceilings = ceilings::measure(&*memory)?;
    Ok(Measured {
        ceilings,
        steps: times,
        issues,
        losses,
        observed,
        usage,
        device,
        device_name,
        attention_kernels,
    })
}

fn run(args: &Args) -> Result<(), Box<dyn Error>> {
    if args.warmup >= args.steps {
        return Err("--warmup: no steps remain to be timed; give more --steps".into());
    }
    let workload = args.model.workload();
    let workload = Workload { batch: args.batch.unwrap_or(workload.batch), ..workload };
    let job = job(args, &workload)?;
    let ranks = device::run(args.device, args.ranks, Measure { job: &job, steps: args.steps as u64 })??;
    let report = Report::new(args, &workload, &job, &ranks);
    print!("{}", if args.json { report.json() } else { report.text() });
    Ok(())
}

fn main() -> ExitCode {
    if let Err(error) = run(&Args::parse()) {
        eprintln!("error: {error}");
        return ExitCode::from(2);
    }
    ExitCode::SUCCESS
}
