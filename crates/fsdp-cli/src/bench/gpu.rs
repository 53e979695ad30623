//! `fsdp bench gpu`: how close a named model comes to the device's limits.
//!
//! Times steps by the wall clock, then observes a few more: when each queue was busy, and how much communication was
//! exposed. Then measures the ceilings: a large product, a large copy.

mod cards;
mod ceilings;
mod models;
mod observed;
mod report;
mod timeline;

use std::sync::Arc;
use std::time::{Duration, Instant};

use fsdp_comm::launch::{Launcher, Seat};
use fsdp_core::engine::ProgramOrder;
use fsdp_core::memory::Usage;
use fsdp_nn::Backend;
use fsdp_nn::hf::{HfConfig, HfModel};
use fsdp_train::config::Resolved;
use fsdp_train::{Job, RankTrainer, TrainError};

pub(crate) use models::ModelName;

use super::tokens::Tokens;
use crate::args::BenchGpuArgs;
use crate::clock::{Clock, DeviceBytes};
use crate::device::{self, Work};
use crate::error::CliError;
use crate::{logging, output, run_setup};
use ceilings::Ceilings;
use models::Workload;
use observed::Observed;

/// Number of observed steps: enough for a median.
const OBSERVED_STEPS: u64 = 5;

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

/// Measures and prints the results.
///
/// # Errors
/// [`CliError`]: the device is not available, or the run failed.
pub(crate) fn run(args: &BenchGpuArgs) -> Result<(), CliError> {
    super::expect_timed_steps(args.warmup, args.steps)?;
    logging::install(None)?;
    let workload = args.workload();
    let job = job(args, &workload)?;
    device::expect(job.config.run.device)?;
    device::expect_operations(job.config.run.device, "--device")?;
    let ranks = device::training(&job.config.run, None, Measure { job: &job, steps: args.steps as u64 })??;
    let report = report::Report::new(args, &workload, &job, &ranks);
    output::print(&if args.json { report.json() } else { report.text() })
}

impl BenchGpuArgs {
    fn workload(&self) -> Workload {
        let workload = self.model.workload();
        Workload { batch: self.batch.unwrap_or(workload.batch), ..workload }
    }
}

/// Builds the job from the text that a user would write, so that the benchmark takes the path of every other run.
fn job(args: &BenchGpuArgs, workload: &Workload) -> Result<Job<HfModel>, CliError> {
    let model = HfConfig::parse(&workload.config.to_string())
        .map_err(|source| CliError::Model { origin: "bench gpu".to_owned(), source })?;
    let architecture = model.build()?;
    let global_batch = workload.batch.saturating_mul(args.ranks);
    let tokens = Tokens::of_step("--batch", global_batch, workload.seq)?;
    tokens.write(workload.vocab)?;
    let run = format!(
        r#"
[model]
path = "made of options"
[data]
train = [{tokens}]
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
        tokens = tokens.toml(),
        seq = workload.seq,
        steps = args.steps,
        batch = workload.batch,
        wrap = workload.wrap,
        checkpointing = args.checkpointing.name(),
        device = args.device.name(),
        ranks = args.ranks,
    );
    let loaded = Resolved::parse(&run, "bench gpu", &[])?;
    let init = run_setup::random(loaded.config.model.seed, &architecture);
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
