//! A run: its model, schedule and work, and its measurement.

use std::sync::Arc;

use fsdp_core::layout::Layout;
use fsdp_core::plan::Plan;
use fsdp_core::schedule::Policy;
use fsdp_core::update::RuleState;
use fsdp_core::wrap::{self, WrapPolicy};
use fsdp_core::{Axis, Error, Mesh, Rank};
use fsdp_nn::backend::HeadChunks;
use fsdp_nn::cuts::Cuts;
use fsdp_nn::footprint::RunShape;
use fsdp_nn::listing::listings;
use fsdp_nn::model::{Architecture, Decoder};
use fsdp_nn::op::LossTerms;
use fsdp_nn::update::{AdamW, Rule};
use fsdp_plan::cluster::{Cluster, ClusterError};
use fsdp_plan::{Calls, Constants, Forecast, Planned, Software, StepWork, band, forecast};

use crate::hardware;
use crate::recipe::{self, INCOMPLETE};
use crate::row::Row;
use crate::sizes::Sizes;
use crate::words::Words;

/// The most devices of a run, and the most tokens of a micro-batch.
const DEVICES_MAX: f64 = (1 << 20) as f64;
const TOKENS_MAX: f64 = (1 << 22) as f64;

/// Columns that a row must fill: with numbers above 0, or words.
const NEEDED: [&str; 10] =
    ["layers", "hidden", "heads", "ffn", "vocab", "seq", "micro_batch", "devices", "sharding", "act_ckpt"];

/// The most micro-batches that a schedule is compiled for.
const ROUNDS_MAX: usize = 256;

/// A run that the model covers.
#[derive(Clone, Debug)]
pub(crate) struct Run {
    /// The row, as written in the file.
    pub(crate) row: Row,
    /// The hardware.
    pub(crate) cluster: Cluster,
    /// The software.
    pub(crate) software: Software,
    /// How values that are missing or not understood were interpreted.
    pub(crate) assumed: Vec<String>,
    mesh: Mesh,
    policy: Policy,
    sizes: Sizes,
    micro_batch: usize,
    /// Published number of micro-batches per step and rank: not always a whole number.
    accumulated: f64,
}

/// A run with its compiled schedule.
#[derive(Clone, Debug)]
pub(crate) struct Prepared {
    /// The run.
    pub(crate) run: Run,
    /// The plan with its schedule.
    pub(crate) plan: Plan,
    /// The work of the schedule.
    pub(crate) work: StepWork,
}

impl Run {
    /// Interprets a row.
    ///
    /// # Errors
    /// The reason for which the run is outside of the model.
    pub(crate) fn of(row: &Row) -> Result<Self, String> {
        let words = &Words::of(row);
        let missing = || format!("{INCOMPLETE}: no {}", row.missing(&NEEDED).join(", "));
        let sizes = Sizes::of(row, words).ok_or_else(missing)?;
        let (Some(world), Some(micro)) = (row.number("devices"), row.number("micro_batch")) else {
            return Err(missing());
        };
        if words.checkpointing.is_empty() || words.sharding.is_empty() {
            return Err(missing());
        }
        let cluster = hardware::cluster(row);
        if let Some(reason) = recipe::outside(words, cluster.as_ref()) {
            return Err(reason.to_owned());
        }
        let cluster = cluster.expect("what has none is outside");
        if micro.fract() != 0.0 {
            return Err(format!("a micro-batch of {micro} samples"));
        }
        if let Some(reason) = sizes.contradiction() {
            return Err(reason);
        }
        if world > DEVICES_MAX || micro * sizes.seq as f64 > TOKENS_MAX {
            return Err(format!("{world} devices with {micro} samples each, more than any run has"));
        }
        let world = world as usize;
        let mesh = recipe::mesh(words, world, &cluster);
        let mesh = mesh.ok_or_else(|| format!("a mesh impossible with {world} devices"))?;
        let tokens = micro * sizes.seq as f64 * world as f64;
        let accumulated = row.number("global_batch_tokens").map_or(1.0, |global| (global / tokens).max(1.0));
        Ok(Self {
            software: recipe::software(words, mesh, &cluster, sizes.is_gated),
            policy: recipe::policy(words, mesh),
            assumed: recipe::assumed(words).into_iter().chain(sizes.assumed(row, words)).collect(),
            row: row.clone(),
            cluster,
            mesh,
            sizes,
            micro_batch: micro as usize,
            accumulated,
        })
    }

    /// Compiles the schedule of the run.
    ///
    /// # Errors
    /// The reason for which the run cannot be compiled into a schedule.
    pub(crate) fn prepare(self) -> Result<Prepared, String> {
        let (plan, work) = self.compile().map_err(|error| error.to_string())?;
        Ok(Prepared { run: self, plan, work })
    }

    fn compile(&self) -> Result<(Plan, StepWork), Error> {
        let architecture = Decoder::new(&self.sizes.config())?;
        let spec = architecture.description().spec.clone();
        let units = wrap::units(&spec, &WrapPolicy::Classes(vec!["LlamaDecoderLayer".to_owned()]))?;
        let policy = self.policy;
        let layout = Layout::new(&spec, &units, self.mesh.size(Axis::Shard), policy.param_dtype);
        let rule = Rule::new(AdamW::default());
        let decl = rule.declare(policy.param_dtype.master());
        let plan = Plan::new_unchecked(spec, layout, self.mesh, policy, &decl, self.rounds())?;
        let shape = RunShape {
            samples: self.micro_batch,
            seq: self.sizes.seq,
            dtype: policy.param_dtype,
            gradient_dtype: policy.reduce_dtype,
            head_chunks: HeadChunks::Large,
            terms: LossTerms::default(),
            packed: false,
            cuts: Cuts::WHOLE,
        };
        let listed = listings(&architecture, &plan.spec, shape, plan.step.pass)?;
        let tables = plan.tables(&rule, Rank(0));
        let work = StepWork::new(&plan, Arc::new(Calls::new(shape, &listed)), &tables);
        Ok((plan, work))
    }

    /// Number of micro-batches in the schedule; any further ones are assumed to take as long as these.
    fn rounds(&self) -> usize {
        (self.accumulated.round() as usize).clamp(1, ROUNDS_MAX)
    }

    /// Tokens per step and device.
    fn tokens(&self) -> f64 {
        self.accumulated * (self.micro_batch * self.sizes.seq) as f64
    }

    /// Measured seconds of a step, if the source states them as time, as tokens, or as floating-point operations
    /// (converted by the formula that the source says it uses).
    pub(crate) fn measured(&self) -> Option<f64> {
        let (row, source) = (&self.row, self.row.word("source"));
        if let Some(time) = row.number("step_time_ms") {
            return Some(time / 1e3);
        }
        if let Some(tokens) = row.number("tokens_per_s_per_device") {
            return Some(self.tokens() / tokens);
        }
        // This rate counts recomputation, so it gives only a lower bound.
        if source.contains("hardware utilisation") {
            return None;
        }
        let sizes = &self.sizes;
        let parameters = row.number("params").unwrap_or_else(|| sizes.parameters());
        let is_maxtext = source.contains("maxtext") && !sizes.is_tied;
        let embedding = if is_maxtext { (sizes.vocab * sizes.hidden) as f64 } else { 0.0 };
        let scores = if source.contains("stas00") { 6.0 } else { 12.0 };
        let attention = scores * (sizes.layers * sizes.heads * sizes.head_dim * sizes.seq) as f64;
        let flops = 6.0 * (parameters - embedding) + attention;
        row.number("tflops_per_device").map(|speed| self.tokens() * flops / (speed * 1e12))
    }
}

impl Prepared {
    fn forecast_on(&self, cluster: &Cluster, constants: &Constants) -> Result<Forecast, ClusterError> {
        let Self { run, plan, work } = self;
        let software = run.software;
        forecast(&Planned { plan, work, cluster, software, constants, transport: "nccl" })
    }

    /// Predicted seconds of a step.
    ///
    /// # Errors
    /// [`ClusterError::NoPeak`].
    pub(crate) fn seconds(&self, constants: &Constants) -> Result<f64, ClusterError> {
        Ok(self.step_seconds(&self.forecast_on(&self.run.cluster, constants)?))
    }

    /// The shortest and longest expected step in seconds, for worlds so large that collectives of all ranks may be much
    /// slower; `None` for others.
    ///
    /// # Errors
    /// [`ClusterError::NoPeak`].
    pub(crate) fn band(&self, constants: &Constants) -> Result<Option<[f64; 2]>, ClusterError> {
        if self.plan.mesh.world() <= band::LARGE_WORLD {
            return Ok(None);
        }
        let slower = self.forecast_on(&band::slower(&self.run.cluster), constants)?;
        let seconds = self.seconds(constants)?;
        let slowest = self.step_seconds(&slower).max(seconds);
        Ok(Some([seconds * (1.0 - band::OF_FITTED), slowest * (1.0 + band::OF_FITTED)]))
    }

    /// Seconds of all micro-batches, if the schedule has fewer.
    fn step_seconds(&self, forecast: &Forecast) -> f64 {
        forecast.seconds * self.run.accumulated / self.run.rounds() as f64
    }
}
