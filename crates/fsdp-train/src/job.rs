//! A job: everything about a run that is the same on all ranks, worked out before any rank starts.
//!
//! The run file and the model meet here: wrapping, layout, schedules, data and learning rates. What can be
//! wrong with them is found here, so that a started run fails only for reasons outside of the configuration.

use std::sync::Arc;
use std::thread;

use fsdp_core::layout::{Layout, Segment};
use fsdp_core::ledger::{self, LedgerInput, Moving};
use fsdp_core::memory::Usage;
use fsdp_core::model::ModelSpec;
use fsdp_core::plan::Plan;
use fsdp_core::schedule::Policy;
use fsdp_core::update::{RankTables, UpdateRule};
use fsdp_core::wrap;
use fsdp_core::{Digest, Mesh, Rank};
use fsdp_nn::HostMemory;
use fsdp_nn::footprint::{RunShape, footprints};
use fsdp_nn::layer::Description;
use fsdp_nn::listing::{Listing, listings};
use fsdp_nn::model::unsharded::BlockCall;
use fsdp_nn::model::{Architecture, Counted, ProgramOptions};

use crate::config::{ConfigError, OptimizerConfig, Packing, Resolved};
use crate::data::Watch;
use crate::error::TrainError;
use crate::fit::{expect_compiled, expect_fit, expect_positions, expect_ranks, expect_settings};
use crate::init::InitSource;
use crate::lr::LrSchedule;
use crate::rule::{self, TrainBackend};
use crate::run_data::RunData;

/// The most that micro-batches of a step on a rank, times blocks of the model, may be: the schedule then has about half a
/// million operations, whose compiling and checking takes some 150 MiB and a few seconds. A model of 126 layers may
/// accumulate over 500 micro-batches.
const BLOCK_ROUNDS_MAX: usize = 1 << 17;

/// A run, ready to be started.
#[derive(Clone, Debug)]
pub struct Job<A> {
    /// The configuration.
    pub config: Resolved,
    /// The model.
    pub architecture: A,
    /// Layout, schedules and policies.
    pub plan: Arc<Plan>,
    /// Stands for configuration and plan: ranks compare it before they begin.
    pub digest: Digest,
    /// Where initial parameters come from.
    pub init: InitSource,
    /// Training and evaluation data.
    pub data: Arc<RunData>,
    /// Learning rates.
    pub schedule: LrSchedule,
}

/// The memory of a rank of a job.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Forecast {
    /// By category.
    pub(crate) usage: Usage,
    /// What ranks that share storage hold besides what they keep.
    pub(crate) moving: Moving,
    /// Elements of its shards of the parameters that it saves.
    pub(crate) shard_elements: usize,
}

/// What is the same on all ranks: where a node keeps the files that it reads, and how many of its cores compute, is its own
/// business. What is in the files is compared instead.
fn common(config: &Resolved) -> Resolved {
    let mut common = config.clone();
    common.model.path.clear();
    if let Some(adapter) = &mut common.adapter {
        adapter.path = None;
    }
    common.data.train.clear();
    common.data.source.iter_mut().for_each(|source| source.path.clear());
    common.data.eval.clear();
    common.data.cache = None;
    common.run.threads = 0;
    common
}

impl<A: Architecture + Clone> Job<A> {
    /// Puts a configuration and a model together.
    ///
    /// # Errors
    /// [`TrainError`]: data that can not be read or does not fit the model, patterns or classes that match
    /// nothing, policies that do not fit the mesh.
    pub fn new(config: Resolved, architecture: A, init: InitSource) -> Result<Self, TrainError> {
        Self::watched(config, architecture, init, &Watch::NOBODY)
    }

    /// As [`Job::new`]; `watch` is told how far the data is.
    ///
    /// # Errors
    /// As [`Job::new`].
    pub fn watched(
        config: Resolved,
        architecture: A,
        init: InitSource,
        watch: &Watch<'_>,
    ) -> Result<Self, TrainError> {
        expect_settings(&config, &architecture)?;
        expect_positions(&config, &architecture)?;
        let data = Arc::new(RunData::load(&config, architecture.head().vocab, watch)?);
        Self::with_data(config, architecture, init, data)
    }

    /// As [`Job::new`], with data that was read before.
    ///
    /// # Errors
    /// As [`Job::new`].
    pub fn with_data(
        config: Resolved,
        architecture: A,
        init: InitSource,
        data: Arc<RunData>,
    ) -> Result<Self, TrainError> {
        let spec = &architecture.description().spec;
        let plan = plan(&config, spec, data.has_evaluation());
        Self::planned((config, architecture, init, data), plan, |plan| plan.spec.clone())
    }

    /// A job that evaluates a model and trains nothing: its training data is not read, and there is room for neither gradients
    /// nor optimizer state. `watch` is told how far the data is.
    ///
    /// # Errors
    /// As [`Job::new`]; [`TrainError::Misfit`] without evaluation sets.
    pub fn to_evaluate(
        mut config: Resolved,
        architecture: A,
        init: InitSource,
        watch: &Watch<'_>,
    ) -> Result<Self, TrainError> {
        // What is not trained has no update, and no checkpoint to make room for.
        config.train.optimizer = OptimizerConfig::none();
        config.train.ema_decay = None;
        config.checkpoint.every = 0;
        config.fsdp.frozen.clear();
        expect_ranks(&config)?;
        expect_compiled(&config, &architecture)?;
        expect_positions(&config, &architecture)?;
        let data = Arc::new(RunData::to_evaluate(&config, architecture.head().vocab, watch)?);
        let described = architecture.description().spec.clone();
        let plan = plan_to_evaluate(&config, &described);
        Self::planned((config, architecture, init, data), plan, |_| described)
    }

    /// A job with its plan. Parameters begin as `described` by what it returns: of these the trained ones are those of adapters.
    fn planned(
        (config, architecture, init, data): (Resolved, A, InitSource, Arc<RunData>),
        plan: Result<Plan, TrainError>,
        described: impl FnOnce(&Plan) -> ModelSpec,
    ) -> Result<Self, TrainError> {
        expect_fit(&config, architecture.description())?;
        let plan = Arc::new(plan?);
        init.check(&described(&plan))?;
        let schedule = LrSchedule::new(
            &config.train.lr_schedule,
            config.train.optimizer.lr().unwrap_or(0.0),
            config.train.steps,
        );
        let digest = Digest::of(&common(&config)).and(&data.digest()).and(&*plan);
        Ok(Self { config, architecture, plan, digest, init, data, schedule })
    }

    /// What the model of the job computes with.
    pub(crate) fn program_options(&self) -> ProgramOptions {
        program_options(&self.config, &self.architecture, &self.plan)
    }

    /// The memory that a rank needs for a training step, by category, as the ledger predicts it.
    ///
    /// # Errors
    /// Those of the model: operations that do not fit each other.
    pub fn predict<M: TrainBackend>(&self, rank: Rank) -> Result<Usage, TrainError> {
        predict::<M, A>(&self.config, &self.architecture, &self.plan, rank)
    }

    /// What ranks surely hold at one time, as far as the ledger can tell.
    ///
    /// # Errors
    /// Those of the model: operations that do not fit each other.
    pub(crate) fn forecast<M: TrainBackend>(&self) -> Result<Forecast, TrainError> {
        forecast::<M, A>(&self.config, &self.architecture, &self.plan)
    }

    /// The same job on another number of ranks; the mesh keeps its replicas where they still divide.
    ///
    /// # Errors
    /// As [`Job::new`]: some sizes do not fit the policies.
    pub fn at_world(&self, world: usize) -> Result<Self, TrainError> {
        let config = self.config.at_world(world)?;
        expect_ranks(&config)?;
        Self::with_data(config, self.architecture.clone(), self.init.clone(), Arc::clone(&self.data))
    }
}

/// What the model of a run computes with.
pub(crate) fn program_options(
    config: &Resolved,
    architecture: &impl Architecture,
    plan: &Plan,
) -> ProgramOptions {
    ProgramOptions {
        dtype: plan.policy.param_dtype,
        seed: config.train_seed(),
        terms: config.train.loss_terms(architecture.description()),
    }
}

/// The memory that a rank needs for a training step of a plan, by category, as the ledger predicts it.
///
/// # Errors
/// Those of the model: operations that do not fit each other.
pub fn predict<M: TrainBackend, A: Architecture + Clone>(
    config: &Resolved,
    architecture: &A,
    plan: &Plan,
    rank: Rank,
) -> Result<Usage, TrainError> {
    measured::<M, A, _>(config, architecture, plan, rank, |input| ledger::predict(&plan.step, input))
}

/// What ranks of a plan surely hold at one time, as far as the ledger can tell.
///
/// # Errors
/// Those of the model: operations that do not fit each other.
pub(crate) fn forecast<M: TrainBackend, A: Architecture + Clone>(
    config: &Resolved,
    architecture: &A,
    plan: &Plan,
) -> Result<Forecast, TrainError> {
    let computing = match config.run.threads {
        0 => thread::available_parallelism().map_or(1, usize::from),
        threads => threads,
    };
    let segments = || plan.layout.units.iter().flat_map(|unit| &unit.segments);
    measured::<M, A, _>(config, architecture, plan, Rank(0), |input| Forecast {
        usage: ledger::predict(&plan.step, input),
        moving: ledger::moving(&plan.step, input, plan.mesh.world(), computing),
        shard_elements: segments()
            .filter(|segment| segment.trainable || plan.policy.frozen_master)
            .map(Segment::shard_len)
            .sum(),
    })
}

/// What is said of a rank's memory once its calls are measured.
fn measured<M: TrainBackend, A: Architecture + Clone, T>(
    config: &Resolved,
    architecture: &A,
    plan: &Plan,
    rank: Rank,
    say: impl FnOnce(&LedgerInput<'_>) -> T,
) -> Result<T, TrainError> {
    let tables = rank_tables::<M>(config, plan, rank)?;
    let footprints = footprints(
        architecture,
        &plan.spec,
        run_shape(config, architecture.description(), plan),
        &calls(plan),
    )?;
    let input = LedgerInput {
        tables: &tables,
        calls: &footprints.calls,
        data_bytes: footprints.data_bytes * plan.step.rounds,
    };
    Ok(say(&input))
}

/// What the shards of a rank of a plan hold.
///
/// # Errors
/// Those of the update rule: patterns that match nothing.
pub fn rank_tables<M: TrainBackend>(
    config: &Resolved,
    plan: &Plan,
    rank: Rank,
) -> Result<RankTables, TrainError> {
    let rule = M::rule(&config.train, &plan.spec)?;
    Ok(RankTables::new(plan, &*rule, rank))
}

/// What the calls of a micro-batch of a step run, in order, and for which shape.
///
/// # Errors
/// Those of the model.
pub fn listed<A: Architecture + Clone>(
    config: &Resolved,
    architecture: &A,
    plan: &Plan,
) -> Result<(RunShape, Vec<(BlockCall, Listing)>), TrainError> {
    let (shape, calls) = (run_shape(config, architecture.description(), plan), calls(plan));
    let listings = listings(architecture, &plan.spec, shape, &calls)?;
    Ok((shape, calls.into_iter().zip(listings).collect()))
}

fn run_shape(config: &Resolved, model: &Description, plan: &Plan) -> RunShape {
    RunShape {
        samples: config.train.micro_batch_size,
        seq: config.data.seq_len,
        dtype: plan.policy.param_dtype,
        gradient_dtype: plan.policy.reduce_dtype,
        head_chunks: config.run.device.head_chunks(),
        terms: config.train.loss_terms(model),
        packed: config.data.packing == Packing::Packed,
    }
}

/// The calls of a micro-batch.
fn calls(plan: &Plan) -> Vec<BlockCall> {
    plan.step.calls().into_iter().filter_map(BlockCall::of).collect()
}

impl Resolved {
    /// The same configuration on another number of ranks; the mesh keeps its replicas where they still divide.
    ///
    /// # Errors
    /// [`TrainError::Config`] when the number does not divide the micro-batches of a step.
    pub fn at_world(&self, world: usize) -> Result<Self, TrainError> {
        let mut config = self.clone();
        config.run.ranks = world;
        if !world.is_multiple_of(config.fsdp.mesh.replicate) {
            config.fsdp.mesh.replicate = 1;
        }
        let micro_batches = self.train.micro_batches_per_step();
        if micro_batches.is_multiple_of(world) {
            return Ok(config);
        }
        Err(ConfigError::Divisibility {
            origin: format!("a world of {world}"),
            divisor_key: "run.ranks",
            divisor: world as u64,
            dividend_key: "the micro-batches of a step",
            dividend: micro_batches as u64,
        }
        .into())
    }

    /// Whether anybody asks which losses evaluations gave.
    pub(crate) fn watches(&self) -> bool {
        self.train.early_stop.is_some() || self.checkpoint.keep_best > 0
    }

    /// The seed of everything random in training but the order of data: dropout masks.
    pub fn train_seed(&self) -> u64 {
        self.model.seed
    }
}

/// Layout and schedules of a configuration and a model; `evaluates` says whether there is evaluation data.
///
/// # Errors
/// [`TrainError`]: patterns or classes that match nothing, policies that do not fit the mesh.
pub fn plan(config: &Resolved, described: &ModelSpec, evaluates: bool) -> Result<Plan, TrainError> {
    let spec = trained(config, described)?;
    // A base is not the run's to keep: the copy that computes is enough.
    let Parts { layout, mesh, policy, rounds } = parts(config, &spec, config.adapter.is_none())?;
    // Ranks make rules for their devices; all declare the same.
    let rule: Box<dyn UpdateRule<HostMemory>> = HostMemory::rule(&config.train, &spec)?;
    let rule = rule.declare(policy.param_dtype.master());
    let evaluation_rounds = if evaluates { rounds } else { 0 };
    Ok(Plan::new(spec, layout, mesh, policy, &rule, rounds, evaluation_rounds)?)
}

/// A model with the parameters frozen that the configuration names.
fn trained(config: &Resolved, described: &ModelSpec) -> Result<ModelSpec, TrainError> {
    let mut spec = described.clone();
    for id in rule::matching(&spec, "fsdp.frozen", &config.fsdp.frozen)? {
        spec.params[id.0].trainable = false;
    }
    if config.train.z_loss > 0.0 {
        Counted::with_z_loss(&mut spec);
    }
    if spec.params.iter().all(|param| !param.trainable) {
        let reason = "it matches every parameter of the model: nothing is left to train".to_owned();
        return Err(TrainError::Misfit { key: "fsdp.frozen", reason });
    }
    Ok(spec)
}

/// The step of a configuration and a model to predict with: nobody has proven its schedule safe.
///
/// # Errors
/// As [`plan`].
pub fn draft(config: &Resolved, described: &ModelSpec) -> Result<Plan, TrainError> {
    let spec = trained(config, described)?;
    let Parts { layout, mesh, policy, rounds } = parts(config, &spec, config.adapter.is_none())?;
    let rule: Box<dyn UpdateRule<HostMemory>> = HostMemory::rule(&config.train, &spec)?;
    let rule = rule.declare(policy.param_dtype.master());
    Ok(Plan::unproven(spec, layout, mesh, policy, &rule, rounds)?)
}

/// Layout and schedule of a configuration and a model that is evaluated and not trained.
///
/// # Errors
/// [`TrainError`]: classes that match nothing, policies that do not fit the mesh.
fn plan_to_evaluate(config: &Resolved, described: &ModelSpec) -> Result<Plan, TrainError> {
    let mut spec = described.clone();
    spec.params.iter_mut().for_each(|param| param.trainable = false);
    // What it adds to the loss is of training.
    let Parts { layout, mesh, policy, rounds } = parts(config, &spec, false)?;
    Ok(Plan::to_evaluate(spec, layout, mesh, policy, rounds)?)
}

/// What schedules are compiled from.
struct Parts {
    layout: Layout,
    mesh: Mesh,
    policy: Policy,
    /// Micro-batches of a step per rank.
    rounds: usize,
}

/// What schedules of a model are compiled from; `frozen_master` as in [`Policy`].
fn parts(config: &Resolved, spec: &ModelSpec, frozen_master: bool) -> Result<Parts, TrainError> {
    let mesh = Mesh::of_world(config.run.ranks, config.fsdp.mesh.replicate)?;
    let policy = Policy { frozen_master, ..config.fsdp.policy() }.resolve(mesh)?;
    let units = wrap::units(spec, &config.fsdp.wrap)?;
    let layout = Layout::new(spec, &units, mesh.shards(), policy.param_dtype);
    let rounds = config.train.micro_batches_per_step() / mesh.world();
    let blocks = spec.blocks.len();
    if rounds > BLOCK_ROUNDS_MAX / blocks {
        let reason = format!(
            "a step of {rounds} micro-batches per rank over {blocks} blocks of the model has a schedule that is too \
             long (micro-batches times blocks may be {BLOCK_ROUNDS_MAX}); raise train.micro_batch_size or run.ranks, or \
             lower train.global_batch_size"
        );
        return Err(TrainError::Misfit { key: "train.global_batch_size", reason });
    }
    Ok(Parts { layout, mesh, policy, rounds })
}
