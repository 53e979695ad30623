//! A job: everything about a run that is equal on all ranks, computed before any rank starts.
//!
//! It combines the run file and the model: wrapping, layout, schedules, data and learning rates. Errors in them are
//! found here, so that a started run fails only for reasons outside its configuration.

use std::sync::Arc;
use std::thread;

use fsdp_config::{Device, OptimizerConfig, Packing, Ranks, Resolved};
use fsdp_core::layout::{Layout, Segment};
use fsdp_core::ledger::{self, LedgerInput, Moving};
use fsdp_core::memory::Usage;
use fsdp_core::model::ModelSpec;
use fsdp_core::plan::Plan;
use fsdp_core::program::BlockCall;
use fsdp_core::schedule::Policy;
use fsdp_core::update::{RankTables, RuleDecl, RuleState};
use fsdp_core::wrap;
use fsdp_core::{DType, Digest, Group, Mesh, Rank};
use fsdp_data::{RunData, Watch};
use fsdp_nn::Backend;
use fsdp_nn::cuts::{Chunks, Cuts};
use fsdp_nn::footprint::{RunShape, footprints};
use fsdp_nn::layer::Description;
use fsdp_nn::listing::{Listing, listings};
use fsdp_nn::model::{Architecture, Counted, ProgramOptions};

use crate::error::TrainError;
use crate::fit::{expect_compiled, expect_fit, expect_positions, expect_ranks, expect_settings};
use crate::init::InitSource;
use crate::lr::LrSchedule;
use crate::rule;

/// Limit on the micro-batches of a step per rank, times the blocks of the model. At this limit, a schedule has about
/// half a million operations; compiling and checking it takes some 150 MiB and a few seconds. A model of 126 layers may
/// accumulate over 500 micro-batches.
const BLOCK_ROUNDS_MAX: usize = 1 << 17;

/// A run that is ready to start.
#[derive(Clone, Debug)]
pub struct Job<A> {
    /// The resolved configuration.
    pub config: Resolved,
    /// The model.
    pub architecture: A,
    /// Layout, schedules and policies.
    pub plan: Arc<Plan>,
    /// Digest of configuration, data and plan, which ranks compare before they begin.
    pub digest: Digest,
    /// The source of initial parameters.
    pub init: InitSource,
    /// Training and evaluation data.
    pub data: Arc<RunData>,
    /// Learning rates.
    pub schedule: LrSchedule,
}

/// The memory that a rank of a job needs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Forecast {
    /// Peak bytes by category.
    pub(crate) usage: Usage,
    /// Additional bytes of ranks that share a storage pool, for values that come and go during a step.
    pub(crate) moving: Moving,
    /// Elements in the rank's shards of the parameters that it saves.
    pub(crate) shard_elements: usize,
}

/// The part of the configuration that is equal on all ranks. Each node may keep input files elsewhere and use another
/// number of cores; the content of the files is compared instead.
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
    /// Combines a configuration and a model.
    ///
    /// # Errors
    /// [`TrainError`]: data that cannot be read or does not fit the model, patterns or classes that match nothing,
    /// policies that do not fit the mesh.
    pub fn new(config: Resolved, architecture: A, init: InitSource) -> Result<Self, TrainError> {
        Self::watched(config, architecture, init, &Watch::NONE)
    }

    /// Like [`Job::new`], reporting progress of reading the data to `watch`.
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

    /// Like [`Job::new`], with data that was read before.
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
        Self::with_plan((config, architecture, init, data), plan, |plan| plan.spec.clone())
    }

    /// Creates a job that only evaluates a model: its training data is not read, and it has neither gradients nor
    /// optimizer state. Reports progress of reading the data to `watch`.
    ///
    /// # Errors
    /// Errors of [`Job::new`]; [`TrainError::Misfit`] if there are no evaluation sets.
    pub fn to_evaluate(
        mut config: Resolved,
        architecture: A,
        init: InitSource,
        watch: &Watch<'_>,
    ) -> Result<Self, TrainError> {
        // Without training there are no updates and no checkpoints that would need memory.
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
        Self::with_plan((config, architecture, init, data), plan, |_| described)
    }

    /// Creates a job from its plan. `described` returns the parameters that `init` must provide; with adapters, its
    /// trained parameters are those in the adapter files.
    fn with_plan(
        (config, architecture, init, data): (Resolved, A, InitSource, Arc<RunData>),
        plan: Result<Plan, TrainError>,
        described: impl FnOnce(&Plan) -> ModelSpec,
    ) -> Result<Self, TrainError> {
        expect_fit(&config, architecture.description())?;
        let plan = Arc::new(plan?);
        expect_chunks(&config, &architecture, &plan)?;
        init.check(&described(&plan))?;
        let schedule = LrSchedule::new(
            &config.train.lr_schedule,
            config.train.optimizer.lr().unwrap_or(0.0),
            config.train.steps,
        );
        let digest = Digest::of(&common(&config)).and(&data.digest()).and(&*plan);
        Ok(Self { config, architecture, plan, digest, init, data, schedule })
    }

    /// The options of the job's model program, on a rank with these chunks.
    pub(crate) fn program_options(&self, cuts: Cuts) -> ProgramOptions {
        program_options(&self.config, &self.architecture, &self.plan, cuts)
    }

    /// Predicts the memory that a rank needs for a training step, by category, with the ledger.
    ///
    /// # Errors
    /// Errors of the model, for operations that do not fit together.
    pub fn predict<M: Backend>(&self, rank: Rank) -> Result<Usage, TrainError> {
        predict::<M, A>(&self.config, &self.architecture, &self.plan, rank)
    }

    /// Predicts a lower bound of the memory that ranks hold at one time, with the ledger.
    ///
    /// # Errors
    /// Errors of the model, for operations that do not fit together.
    pub(crate) fn forecast<M: Backend>(&self) -> Result<Forecast, TrainError> {
        forecast::<M, A>(&self.config, &self.architecture, &self.plan)
    }

    /// Returns the same job for other ranks.
    ///
    /// # Errors
    /// Errors of [`Job::new`]: some ranks do not fit the policies.
    pub fn at(&self, ranks: impl Into<Ranks>) -> Result<Self, TrainError> {
        let config = self.config.at(ranks)?;
        expect_ranks(&config)?;
        Self::with_data(config, self.architecture.clone(), self.init.clone(), Arc::clone(&self.data))
    }

    /// Returns the same job in double precision.
    ///
    /// # Errors
    /// As [`Job::new`].
    pub(crate) fn in_double(&self) -> Result<Self, TrainError> {
        let mut config = self.config.clone();
        (config.fsdp.param_dtype, config.fsdp.reduce_dtype) = (DType::F64, DType::F64);
        config.train.loss_scale = None;
        Self::with_data(config, self.architecture.clone(), self.init.clone(), Arc::clone(&self.data))
    }
}

/// The options of a run's model program.
pub(crate) fn program_options(
    config: &Resolved,
    architecture: &impl Architecture,
    plan: &Plan,
    cuts: Cuts,
) -> ProgramOptions {
    ProgramOptions {
        dtype: plan.policy.param_dtype,
        seed: config.train_seed(),
        terms: config.train.loss_terms(architecture.description()),
        cuts,
    }
}

/// The chunks of samples and of experts that a rank has.
pub(crate) fn cuts(config: &Resolved, plan: &Plan, rank: Rank) -> Cuts {
    let of = |count: usize, group: Group| {
        let here = count / plan.mesh.group_size(group);
        Chunks { count, first: plan.mesh.index_in_group(rank, group) * here, here }
    };
    let samples = of(plan.policy.chunks, Group::CONTEXT);
    let experts = of(plan.policy.expert_chunks, Group::EXPERT);
    // A compiled step has the same sizes whatever the routes.
    Cuts { samples, experts, sends_rows: config.run.device != Device::Xla }
}

/// Predicts the memory that a rank needs for a training step of a plan, by category, with the ledger.
///
/// # Errors
/// Errors of the model, for operations that do not fit together.
pub fn predict<M: Backend, A: Architecture + Clone>(
    config: &Resolved,
    architecture: &A,
    plan: &Plan,
    rank: Rank,
) -> Result<Usage, TrainError> {
    with_ledger_input::<M, A, _>(config, architecture, plan, rank, |input| ledger::predict(&plan.step, input))
}

/// Predicts a lower bound of the memory that ranks of a plan hold at one time, with the ledger.
///
/// # Errors
/// Errors of the model, for operations that do not fit together.
pub(crate) fn forecast<M: Backend, A: Architecture + Clone>(
    config: &Resolved,
    architecture: &A,
    plan: &Plan,
) -> Result<Forecast, TrainError> {
    let compute_threads = match config.run.threads {
        0 => thread::available_parallelism().map_or(1, usize::from),
        threads => threads,
    };
    let segments = || plan.layout.units.iter().flat_map(|unit| &unit.segments);
    with_ledger_input::<M, A, _>(config, architecture, plan, Rank(0), |input| Forecast {
        usage: ledger::predict(&plan.step, input),
        moving: ledger::moving(&plan.step, input, plan.mesh.world(), compute_threads),
        shard_elements: segments()
            .filter(|segment| segment.trainable || plan.policy.frozen_master)
            .map(Segment::shard_len)
            .sum(),
    })
}

/// Measures the calls of a rank and passes them, as input of the ledger, to `compute`.
fn with_ledger_input<M: Backend, A: Architecture + Clone, T>(
    config: &Resolved,
    architecture: &A,
    plan: &Plan,
    rank: Rank,
    compute: impl FnOnce(&LedgerInput<'_>) -> T,
) -> Result<T, TrainError> {
    let tables = rank_tables::<M>(config, plan, rank)?;
    let footprints = footprints(
        architecture,
        &plan.spec,
        run_shape(config, architecture.description(), plan),
        plan.step.pass,
    )?;
    let input = LedgerInput {
        tables: &tables,
        calls: &footprints.calls,
        data_bytes: footprints.data_bytes * plan.step.rounds,
    };
    Ok(compute(&input))
}

/// Describes the contents of a rank's shards under a plan.
///
/// # Errors
/// Errors of the update rule, for patterns that match nothing.
pub fn rank_tables<M: Backend>(config: &Resolved, plan: &Plan, rank: Rank) -> Result<RankTables, TrainError> {
    let rule = rule::rule(&config.train, &plan.spec)?;
    Ok(plan.tables(&rule, rank))
}

/// Lists the operations of each call of a micro-batch, in order, and the shape for which they are listed.
///
/// # Errors
/// Errors of the model.
pub fn listed<A: Architecture + Clone>(
    config: &Resolved,
    architecture: &A,
    plan: &Plan,
) -> Result<(RunShape, Vec<(BlockCall, Listing)>), TrainError> {
    let shape = run_shape(config, architecture.description(), plan);
    Ok((shape, listings(architecture, &plan.spec, shape, plan.step.pass)?))
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
        cuts: cuts(config, plan, Rank(0)),
    }
}

/// Compiles layout and schedules for a configuration and a model; `evaluates` says whether there is evaluation data.
///
/// # Errors
/// [`TrainError`]: patterns or classes that match nothing, policies that do not fit the mesh.
pub fn plan(config: &Resolved, described: &ModelSpec, evaluates: bool) -> Result<Plan, TrainError> {
    let (spec, rule, Parts { layout, mesh, policy, rounds }) = trained(config, described)?;
    let evaluation_rounds = if evaluates { rounds } else { 0 };
    Ok(Plan::new(spec, layout, mesh, policy, &rule, rounds, evaluation_rounds)?)
}

/// Prepares the input for compiling a step: with the parameters frozen that the configuration names.
fn trained(config: &Resolved, described: &ModelSpec) -> Result<(ModelSpec, RuleDecl, Parts), TrainError> {
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
    // A run does not save the base of its adapters, so the compute copy suffices.
    let parts = parts(config, &spec, config.adapter.is_none())?;
    // Ranks create the rule for their own backend; its declaration is the same for all backends.
    let rule = rule::rule(&config.train, &spec)?.declare(parts.policy.param_dtype.master());
    Ok((spec, rule, parts))
}

/// Compiles the step of a configuration and a model for predictions only: its schedule is not proven safe.
///
/// # Errors
/// As [`plan`].
pub fn draft(config: &Resolved, described: &ModelSpec) -> Result<Plan, TrainError> {
    let (spec, rule, Parts { layout, mesh, policy, rounds }) = trained(config, described)?;
    Ok(Plan::new_unchecked(spec, layout, mesh, policy, &rule, rounds)?)
}

/// Compiles layout and schedule for evaluating a model without training it.
///
/// # Errors
/// [`TrainError`]: classes that match nothing, policies that do not fit the mesh.
fn plan_to_evaluate(config: &Resolved, described: &ModelSpec) -> Result<Plan, TrainError> {
    let mut spec = described.clone();
    spec.params.iter_mut().for_each(|param| param.trainable = false);
    // Terms that are added to the loss belong to training only.
    let Parts { layout, mesh, policy, rounds } = parts(config, &spec, false)?;
    Ok(Plan::to_evaluate(spec, layout, mesh, policy, rounds)?)
}

/// Checks that the model can be computed on chunks of samples and of experts, if they are cut.
///
/// # Errors
/// [`TrainError::Misfit`] that names the chunks which do not fit.
pub fn expect_chunks<A: Architecture + Clone>(
    config: &Resolved,
    architecture: &A,
    plan: &Plan,
) -> Result<(), TrainError> {
    let (fsdp, mixtures) = (&config.fsdp, &architecture.description().mixtures);
    let (chunks, key) = (plan.policy.expert_chunks, fsdp.expert_chunks_key());
    if let Some(experts) = mixtures.values().find(|experts| !experts.is_multiple_of(chunks)) {
        let nearest = (1..chunks).rev().find(|size| size.is_power_of_two() && experts.is_multiple_of(*size));
        let reason = format!(
            "{chunks} does not divide the {experts} experts of a mixture, but {} does",
            nearest.unwrap_or(1)
        );
        return Err(TrainError::Misfit { key, reason });
    }
    if chunks > 1 && mixtures.is_empty() {
        let reason = "the model has no mixtures whose experts could be cut: 1 is all that fits".to_owned();
        return Err(TrainError::Misfit { key, reason });
    }
    if plan.policy.chunks == 1 {
        return Ok(());
    }
    let misfit = |error: TrainError| TrainError::Misfit { key: fsdp.chunks_key(), reason: error.to_string() };
    listed(config, architecture, plan).map(drop).map_err(misfit)
}

/// The input of a schedule compiler.
struct Parts {
    layout: Layout,
    mesh: Mesh,
    policy: Policy,
    /// Micro-batches per rank and step.
    rounds: usize,
}

/// Prepares the input for compiling a model's schedules; `frozen_master` as in [`Policy`].
fn parts(config: &Resolved, spec: &ModelSpec, frozen_master: bool) -> Result<Parts, TrainError> {
    let sizes = &config.fsdp.mesh;
    let mesh = Mesh::of_world(config.run.ranks, sizes.replicate, sizes.context)?.with_expert(sizes.expert)?;
    let policy = Policy { frozen_master, ..config.fsdp.policy() }.resolve(mesh)?;
    let units = wrap::with_blocks(spec, wrap::units(spec, &config.fsdp.wrap)?, mesh.expert())?;
    let layout = Layout::new(spec, &units, mesh.shards(), policy.param_dtype);
    let rounds = config.train.micro_batches_per_step() / mesh.dp_degree();
    let blocks = spec.blocks.len();
    if rounds > BLOCK_ROUNDS_MAX / blocks {
        let reason = format!(
            "a step of {rounds} micro-batches per rank over {blocks} blocks of the model has a schedule that \
             is too long (micro-batches times blocks: at most {BLOCK_ROUNDS_MAX}); raise \
             train.micro_batch_size or run.ranks, or lower train.global_batch_size"
        );
        return Err(TrainError::Misfit { key: "train.global_batch_size", reason });
    }
    Ok(Parts { layout, mesh, policy, rounds })
}
