//! `fsdp bench train`: the time of a training step on random tokens.

mod report;
pub(crate) mod tokens;
mod workload;

use std::time::{Duration, Instant};

use fsdp_comm::launch::{Launcher, Seat};
use fsdp_comm::process::cluster::Cluster;
use fsdp_core::engine::ProgramOrder;
use fsdp_core::memory::Usage;
use fsdp_nn::Backend;
use fsdp_train::memory::expect_room_to_train;
use fsdp_train::{Job, RankTrainer, TrainError};

use crate::args::BenchTrainArgs;
use crate::device::{Purpose, Work};
use crate::document::print;
use crate::error::CliError;
use crate::exit_code::Exit;
use crate::run_setup::Model;
use crate::{cluster, device, logging};

/// The measurements of one rank.
struct Measured {
    steps: Vec<Duration>,
    losses: Vec<f64>,
    usage: Usage,
}

/// Runs the steps and prints their times.
///
/// # Errors
/// [`CliError`]: the dimensions do not fit together, or the run failed.
pub(crate) fn run(args: &BenchTrainArgs) -> Result<Exit, CliError> {
    expect_timed_steps(args.warmup, args.steps)?;
    logging::install(None)?;
    let place = cluster::place()?;
    let ranks = args.ranks.or(place.map(|place| place.processes));
    let args = &BenchTrainArgs { ranks, ..args.clone() };
    let job = workload::job(args)?;
    device::expect(job.config.run.device)?;
    cluster::within(place, &job.config.run, args.network, |team| {
        let cluster = team.map(|team| team.cluster);
        let steps = Steps { job: &job, steps: args.steps as u64 };
        let ranks = device::on(&job.config.run, Purpose::Training, cluster, steps)??;
        if cluster.is_none_or(Cluster::is_leader) {
            let processes = cluster.map_or(1, |cluster| cluster.place().processes);
            let ranks_on_machine = cluster.map_or(args.ranks(), Cluster::ranks_on_machine);
            let report = report::Report::new(args, &job, &ranks, processes, ranks_on_machine);
            print(&report, args.json)?;
        }
        Ok(Exit::Done)
    })
}

/// Checks that steps remain after the warm-up.
fn expect_timed_steps(warmup: usize, steps: usize) -> Result<(), CliError> {
    if warmup < steps {
        return Ok(());
    }
    let what = format!("{warmup} warm-up steps of {steps} leave none to time; give more --steps");
    Err(CliError::Option { option: "--warmup", what })
}

/// Runs the steps on any device.
struct Steps<'a> {
    job: &'a Job<Model>,
    steps: u64,
}

impl Work for Steps<'_> {
    type Outcome = Result<Vec<Measured>, TrainError>;

    fn on<L: Launcher>(self, launcher: &L) -> Self::Outcome
    where
        L::Memory: Backend,
    {
        let ranks = self.job.config.run.ranks;
        expect_room_to_train::<L::Memory, _>(self.job, launcher.ranks_on_machine(ranks))?;
        Ok(launcher.launch(ranks, &|seat: Seat<L::Memory>| measure(self.job, seat, self.steps))?)
    }
}

fn measure<M: Backend>(job: &Job<Model>, seat: Seat<M>, steps: u64) -> Result<Measured, TrainError> {
    let mut trainer = RankTrainer::new(job, seat)?;
    let mut measured = Measured { steps: Vec::new(), losses: Vec::new(), usage: Usage::default() };
    for step in 0..steps {
        let start = Instant::now();
        let report = trainer.step(step, false, &mut ProgramOrder, &mut ())?;
        measured.steps.push(start.elapsed());
        measured.losses.push(report.loss);
    }
    measured.usage = trainer.usage();
    Ok(measured)
}
