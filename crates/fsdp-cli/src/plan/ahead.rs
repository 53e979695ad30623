//! A run on a cluster: combines schedule, work, memory and time.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use fsdp_config::{Resolved, RunConfig, Transport};
use fsdp_core::ledger::{self, LedgerInput};
use fsdp_core::memory::Usage;
use fsdp_core::plan::Plan;
use fsdp_core::schedule::{Checkpointing, Offload};
use fsdp_core::wrap::WrapPolicy;
use fsdp_core::{Queue, Rank};
use fsdp_nn::HostMemory;
use fsdp_nn::footprint::{Footprints, footprints};
use fsdp_nn::model::Architecture as _;
use fsdp_plan::cluster::{Cluster, Kind};
use fsdp_plan::{Calls, Constants, Forecast, Planned, Software, StepWork, band, forecast};
use fsdp_train::metrics::FlopModel;
use fsdp_train::{TrainError, draft, expect_positions, listed, rank_tables};

use super::settings;
use crate::error::CliError;
use crate::run_setup::{Model, RunSetup};

/// Bytes that a GPU holds in addition to what a step declares: context, cuBLAS workspace and NCCL buffers. Assumed.
const BESIDE_BYTES: u64 = 1 << 30;

/// A run on a cluster.
#[derive(Debug)]
pub(super) struct RunForecast<'a> {
    pub(super) config: Resolved,
    pub(super) cluster: &'a Cluster,
    pub(super) plan: Plan,
    pub(super) usage: Usage,
    /// The memory held by the calls of a micro-batch.
    pub(super) held: Arc<Footprints>,
    pub(super) forecast: Forecast,
    /// Minimum and maximum seconds of a step.
    pub(super) band: [f64; 2],
    pub(super) flops: FlopModel,
    /// FLOPs of products in a rank's step, recomputation included.
    pub(super) done_flops: f64,
}

/// The state shared by all settings of a run, and results cached for some of them.
pub(super) struct Forecaster<'a> {
    pub(super) config: &'a Resolved,
    pub(super) cluster: &'a Cluster,
    /// The ways to wrap the model into units.
    pub(super) wraps: Vec<WrapPolicy>,
    constants: &'a Constants,
    model: Model,
    flops: FlopModel,
    calls: Mutex<BTreeMap<Kept, Requirements>>,
}

/// What the requirements of a micro-batch's calls depend on: samples, what forward keeps, the chunks of a sample and those
/// of a rank, the chunks of experts and the ranks that have them.
type Kept = (usize, &'static str, [usize; 4]);

/// The requests of a micro-batch's calls, and the memory they hold.
type Requirements = (Arc<Calls>, Arc<Footprints>);

impl<'a> Forecaster<'a> {
    /// Creates the state for a run file.
    ///
    /// # Errors
    /// [`CliError`]: the model cannot be built, or does not support the sequence length.
    pub(super) fn new(
        setup: &'a RunSetup,
        cluster: &'a Cluster,
        constants: &'a Constants,
    ) -> Result<Self, CliError> {
        let (config, model) = (&setup.config, setup.build()?);
        expect_positions(config, &model)?;
        let described = model.description();
        let flops = setup.flops(&draft(config, &described.spec)?.spec, &described.token_shares);
        let wraps = settings::wraps(&described.spec, &config.fsdp.wrap);
        Ok(Self { config, cluster, wraps, constants, flops, calls: Mutex::default(), model })
    }

    /// The number of experts of the model's mixtures, if it has any.
    pub(super) fn experts(&self) -> Option<usize> {
        self.model.description().mixtures.values().next().copied()
    }

    /// The requirements of a plan's micro-batch.
    fn requirements(&self, config: &Resolved, plan: &Plan) -> Result<Requirements, CliError> {
        let kept = settings::checkpointing(config.fsdp.activation_checkpointing);
        let chunks = [plan.policy.chunks, plan.step.chunks, plan.policy.expert_chunks, plan.mesh.expert()];
        let key = (config.train.micro_batch_size, kept, chunks);
        if let Some(requirements) = self.calls().get(&key) {
            return Ok(requirements.clone());
        }
        let (shape, listed) = listed(config, &self.model, plan)?;
        let held = footprints(&self.model, &plan.spec, shape, plan.step.pass).map_err(TrainError::from)?;
        let requirements = (Arc::new(Calls::new(shape, &listed)), Arc::new(held));
        self.calls().insert(key, requirements.clone());
        Ok(requirements)
    }

    fn calls(&self) -> MutexGuard<'_, BTreeMap<Kept, Requirements>> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Predicts the run with other settings.
    ///
    /// # Errors
    /// [`CliError`]: settings that the mesh does not support, or a dtype without a known peak.
    pub(super) fn forecast(&self, config: &Resolved) -> Result<RunForecast<'a>, CliError> {
        let plan = draft(config, &self.model.description().spec)?;
        let (calls, held) = self.requirements(config, &plan)?;
        let tables = rank_tables::<HostMemory>(config, &plan, Rank(0))?;
        let work = StepWork::new(&plan, calls, &tables);
        let data_bytes = held.data_bytes * plan.step.rounds;
        let input = LedgerInput { tables: &tables, calls: &held.calls, data_bytes };
        let priced = |cluster: &Cluster| {
            let (software, constants) = (Software::OURS, self.constants);
            let transport = transport(&config.run, cluster);
            forecast(&Planned { plan: &plan, work: &work, cluster, software, constants, transport })
        };
        let forecast = priced(self.cluster)?;
        let [less, more] = band::around(self.cluster, &forecast);
        let mut slowest = forecast.seconds;
        if plan.mesh.world() > band::LARGE_WORLD {
            slowest = priced(&band::slower(self.cluster))?.seconds.max(slowest);
        }
        Ok(RunForecast {
            done_flops: done_flops(&plan, &work),
            config: config.clone(),
            band: [forecast.seconds * (1.0 - less), slowest * (1.0 + more)],
            cluster: self.cluster,
            usage: ledger::predict(&plan.step, &input),
            held: Arc::clone(&held),
            forecast,
            flops: self.flops,
            plan,
        })
    }
}

impl Forecaster<'_> {
    /// Executed product FLOPs of a step, as a multiple of those without checkpointing.
    ///
    /// # Errors
    /// Those of [`Forecaster::forecast`].
    pub(super) fn recompute_factor(&self, run: &RunForecast<'_>) -> Result<f64, CliError> {
        let mut config = run.config.clone();
        config.fsdp.activation_checkpointing = Checkpointing::None;
        Ok(run.done_flops / self.forecast(&config)?.done_flops)
    }

    /// Seconds of PyTorch's FSDP2 with the run's settings, compiled and not; only for GPUs without offload, and
    /// optimizers that do not need whole matrices.
    ///
    /// # Errors
    /// Those of [`Forecaster::forecast`].
    pub(super) fn fsdp2(&self, run: &RunForecast<'_>) -> Result<Option<[f64; 2]>, CliError> {
        let (config, plan) = (&run.config, &run.plan);
        let needs_whole_matrices = plan.step.lasting.scratch.is_some();
        if self.cluster.kind != Kind::Gpu || config.fsdp.offload != Offload::None || needs_whole_matrices {
            return Ok(None);
        }
        let tables = rank_tables::<HostMemory>(config, plan, Rank(0))?;
        let work = &StepWork::new(plan, self.requirements(config, plan)?.0, &tables);
        let seconds = |is_compiled| {
            let software = Software::fsdp2(is_compiled, config.fsdp.activation_checkpointing);
            let (cluster, constants) = (self.cluster, self.constants);
            let planned = Planned { plan, work, cluster, software, constants, transport: "nccl" };
            forecast(&planned).map(|forecast| forecast.seconds)
        };
        Ok(Some([seconds(true)?, seconds(false)?]))
    }
}

impl RunForecast<'_> {
    /// Peak bytes of a device.
    pub(super) fn device_bytes(&self) -> u64 {
        self.usage.device.total_peak_bytes as u64 + self.beside_bytes()
    }

    /// The part of the peak that the step does not declare.
    pub(super) fn beside_bytes(&self) -> u64 {
        if self.cluster.kind == Kind::Gpu { BESIDE_BYTES } else { 0 }
    }

    /// Memory of a device in bytes, or a rank's share of it.
    pub(super) fn capacity(&self) -> u64 {
        self.cluster.device.memory.value as u64 / self.cluster.sharing(self.plan.mesh.world()) as u64
    }

    /// Number of devices used by the ranks.
    pub(super) fn devices(&self) -> f64 {
        let world = self.plan.mesh.world();
        world as f64 / self.cluster.sharing(world) as f64
    }

    /// Whether the peak fits into a device.
    pub(super) fn fits(&self) -> bool {
        self.device_bytes() <= self.capacity()
    }

    /// Tokens per step, over all ranks.
    pub(super) fn tokens(&self) -> f64 {
        (self.config.train.global_batch_size * self.config.data.seq_len) as f64
    }

    /// Tokens per second, over all ranks.
    pub(super) fn tokens_per_second(&self) -> f64 {
        self.tokens() / self.forecast.seconds
    }

    /// Peak of all devices, in FLOP/s.
    pub(super) fn peak(&self) -> f64 {
        let peak = self.cluster.peak(self.plan.policy.param_dtype).expect("the step has been priced with it");
        peak * self.devices()
    }

    /// Utilization: of the model's FLOPs including attention, and of 6 FLOPs per parameter.
    pub(super) fn utilization(&self) -> [f64; 2] {
        let speed = self.tokens_per_second();
        [self.flops.flops_per_token(), self.flops.flops_per_token_6n()]
            .map(|flops| flops * speed / self.peak())
    }

    /// Seconds in which a queue is busy.
    pub(super) fn busy(&self, queue: Queue) -> f64 {
        self.forecast.timeline.busy(&self.plan.step, queue)
    }
}

/// The transport of collectives: memory between ranks in one process on a host, unless the run file specifies
/// processes.
fn transport(run: &RunConfig, cluster: &Cluster) -> &'static str {
    match run.transport {
        Transport::Mpi => "mpi",
        Transport::Tcp => "tcp",
        Transport::Nccl => "nccl",
        Transport::Auto if cluster.kind == Kind::Cpu => "threads",
        Transport::Auto => "nccl",
    }
}

fn done_flops(plan: &Plan, work: &StepWork) -> f64 {
    plan.step.ops.iter().filter_map(|op| work.call(op)).map(fsdp_plan::CallWork::flops).sum()
}
