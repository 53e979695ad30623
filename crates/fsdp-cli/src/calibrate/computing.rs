//! Times operations, calls and whole steps of small models.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use fsdp_comm::launch::{Launcher, Seat};
use fsdp_core::engine::ProgramOrder;
use fsdp_core::plan::Plan;
use fsdp_core::{DType, Rank};
use fsdp_nn::Backend;
use fsdp_plan::cluster::Cluster;
use fsdp_plan::measured::{Measured, Point, Points};
use fsdp_plan::{Calls, Constants, Listed, Planned, Software, StepWork, forecast};
use fsdp_train::{Job, RankTrainer, TrainError, listed, rank_tables};

use super::watch::{OpTimes, Watch};
use crate::device::Work;
use crate::device::clock::Clock;
use crate::error::CliError;
use crate::run_setup::Model;

/// Steps that are not counted: they allocate memory and warm caches.
const WARM_UP: u64 = 1;

/// Times of equal work, keyed by its name, ranks and sizes.
#[derive(Default)]
pub(super) struct Samples {
    calls: Times,
    operations: Times,
    /// Seconds per operation of a step beyond the operations' own times.
    issue: Vec<f64>,
    between_calls: Vec<f64>,
    /// Unobserved steps, keyed by their description.
    steps: BTreeMap<String, Step>,
}

/// A step and its times.
pub(super) struct Step {
    plan: Arc<Plan>,
    work: StepWork,
    seconds: Vec<f64>,
}

impl Step {
    /// The step as a point: its time, and the forecast from the cluster's other points.
    ///
    /// # Errors
    /// [`ClusterError`](fsdp_plan::cluster::ClusterError): the cluster does not have the dtype.
    pub(super) fn point(&self, cluster: &Cluster, transport: &'static str) -> Result<Point, CliError> {
        let (plan, work, software) = (&*self.plan, &self.work, Software::OURS);
        let constants = &Constants::fitted();
        let predicted = forecast(&Planned { plan, work, cluster, software, constants, transport })?;
        Ok(Measured::step(
            plan.mesh.world(),
            predicted.timeline.end,
            lower_quartile(&mut self.seconds.clone()),
        ))
    }
}

/// The key's last part is the bits of [`Point::size`], followed by those of its work.
type Times = BTreeMap<(String, usize, Vec<u64>), Vec<f64>>;

/// The steps of a model.
pub(super) struct Steps<'a> {
    pub(super) job: &'a Job<Model>,
    pub(super) count: usize,
    /// Identifies the model.
    pub(super) label: String,
    /// Whether operations are observed, too.
    pub(super) is_observed: bool,
    pub(super) samples: &'a mut Samples,
}

/// A step of a rank: its seconds, and the observed operations.
type ObservedStep = (f64, Vec<OpTimes>);

impl Work for Steps<'_> {
    type Outcome = Result<(), TrainError>;

    fn on<L: Launcher>(self, launcher: &L) -> Self::Outcome
    where
        L::Memory: Backend + Clock,
    {
        let Self { job, count, label, is_observed, samples } = self;
        let ranks = job.config.run.ranks;
        let measured =
            launcher.launch(ranks, &|seat: Seat<L::Memory>| measure(job, seat, count as u64, is_observed))?;
        samples.add::<L::Memory>(job, label, &measured[0])
    }
}

/// The measurements of a rank.
struct Measurement {
    observed: Vec<ObservedStep>,
    /// Seconds of unobserved steps.
    steps: Vec<f64>,
}

fn measure<M: Backend + Clock>(
    job: &Job<Model>,
    seat: Seat<M>,
    count: u64,
    is_observed: bool,
) -> Result<Measurement, TrainError> {
    let memory = Arc::clone(&seat.memory);
    let mut trainer = RankTrainer::new(job, seat)?;
    let mut measured = Measurement { observed: Vec::new(), steps: Vec::new() };
    for step in 0..WARM_UP + count {
        let begin = Instant::now();
        trainer.step(step, false, &mut ProgramOrder, &mut ())?;
        measured.steps.extend((step >= WARM_UP).then(|| begin.elapsed().as_secs_f64()));
    }
    if is_observed {
        let (mut watch, _guard) = Watch::new(&memory);
        for step in WARM_UP + count..WARM_UP + 2 * count {
            let begin = Instant::now();
            trainer.step(step, false, &mut ProgramOrder, &mut watch)?;
            measured.observed.push((begin.elapsed().as_secs_f64(), watch.take()?));
        }
    }
    Ok(measured)
}

impl Samples {
    fn add<M: Backend>(
        &mut self,
        job: &Job<Model>,
        label: String,
        measured: &Measurement,
    ) -> Result<(), TrainError> {
        let (plan, ranks) = (&job.plan, job.config.run.ranks);
        let (shape, listings) = listed(&job.config, &job.architecture, plan)?;
        let calls = Arc::new(Calls::new(shape, &listings));
        let tables = rank_tables::<M>(&job.config, plan, Rank(0))?;
        let work = StepWork::new(plan, calls, &tables);
        let dtype = plan.policy.param_dtype;
        for (seconds, seen) in &measured.observed {
            let mut op_seconds = 0.0;
            for OpTimes { op, seconds, calls } in seen {
                op_seconds += seconds;
                let kind = plan.step.op(*op).kind;
                let block_call = kind.call();
                let steps =
                    block_call.and_then(|block_call| listings.iter().find(|(call, _)| *call == block_call));
                if let Some((_, listing)) = steps {
                    assert_eq!(calls.len(), listing.list.steps.len(), "a block runs what it lists");
                    let listed = listing.list.steps.iter().map(|step| Listed::of(step, shape));
                    listed
                        .zip(calls)
                        .for_each(|(listed, &seconds)| self.call(&listed, dtype, ranks, seconds));
                    let inside: f64 = calls.iter().sum();
                    self.between_calls.push((seconds - inside) / calls.len().max(1) as f64);
                } else if !kind.is_collective() {
                    let point = work.ops[op.0].point();
                    let key = key(kind.name().to_owned(), ranks, &point.size, point.work);
                    self.operations.entry(key).or_default().push(*seconds);
                }
            }
            if ranks == 1 {
                self.issue.push((seconds - op_seconds) / plan.step.ops.len() as f64);
            }
        }
        let step = || Step { plan: Arc::clone(plan), work, seconds: Vec::new() };
        self.steps.entry(label).or_insert_with(step).seconds.extend(&measured.steps);
        Ok(())
    }

    fn call(&mut self, listed: &Listed, dtype: DType, ranks: usize, seconds: f64) {
        let key = key(format!("{} {dtype}", listed.op), ranks, &listed.size, listed.work);
        self.calls.entry(key).or_default().push(seconds);
    }

    /// Stores the undisturbed times in `measured`; returns the steps.
    pub(super) fn finish(mut self, measured: &mut Measured) -> Vec<Step> {
        measured.calls = points(self.calls);
        measured.operations = points(self.operations);
        measured.issue = lower_quartile(&mut self.issue).max(0.0);
        measured.between_calls = lower_quartile(&mut self.between_calls).max(0.0);
        self.steps.into_values().collect()
    }

    /// Returns only the steps.
    pub(super) fn steps(self) -> Vec<Step> {
        self.steps.into_values().collect()
    }
}

fn key(what: String, ranks: usize, size: &[f64], work: f64) -> (String, usize, Vec<u64>) {
    (what, ranks, size.iter().chain([&work]).map(|size| size.to_bits()).collect())
}

fn points(times: Times) -> Points {
    let mut points = Points::new();
    for ((what, ranks, sizes), mut seconds) in times {
        let mut size: Vec<f64> = sizes.into_iter().map(f64::from_bits).collect();
        let work = size.pop().expect("a key has its work");
        // Clock resolution may yield 0.
        let seconds = lower_quartile(&mut seconds).max(1e-9);
        points.entry(what).or_default().push(Point { ranks, size, work, seconds });
    }
    points
}

/// The lower quartile, because disturbances only lengthen a measurement; 0 if empty.
pub(super) fn lower_quartile(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 4).copied().unwrap_or(0.0)
}
