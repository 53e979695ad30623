//! The engine: executes a schedule on one rank.
//!
//! It is a loop with one `match` over the operations. It knows no policy: what differs between policies is
//! which operations the compiler emitted. All buffers are allocated when the engine is made; a step
//! allocates nothing.

mod buffers;
mod execute;
mod issue;
mod load;
mod scalars;

pub use buffers::UnitShards;
pub use issue::{IssueOrder, Observer, ProgramOrder};
pub use load::Origin;
pub use scalars::{StepInput, StepReport};

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::checker;
use crate::comm::{Comm, Pending, ReduceOp, Traffic};
use crate::digest::Digest;
use crate::error::Error;
use crate::layout::Layout;
use crate::memory::{Category, Memory};
use crate::model::ModelSpec;
use crate::program::{Gradients, Params, Program};
use crate::rank::{Mesh, Rank};
use crate::schedule::{Compiler, OpId, Policy, Reshard, Schedule, compile_evaluation, compile_step};
use crate::update::UpdateRule;

use buffers::{SlotMap, UnitBuffers};

/// The communicators of one rank.
pub struct Comms<M: Memory> {
    /// All-gathers over the shard axis.
    gather: Comm<M>,
    /// All-gathers over the sub-groups of `reshard_after_forward = n`.
    sub_gather: Option<Comm<M>>,
    /// Reductions over the shard axis.
    reduce: Comm<M>,
    /// All-reduces, and broadcasts of what only the first replica reads, over the replicate axis.
    replicate: Option<Comm<M>>,
    /// Scalars over all ranks.
    world: Comm<M>,
}

impl<M: Memory> Comms<M> {
    /// Cuts the communicators of a mesh out of two communicators of the whole world: gathers and reductions
    /// get one each, so that they do not wait for each other. Before that, all ranks compare `digest`, which
    /// stands for everything that must be the same on all of them.
    ///
    /// # Errors
    /// [`Error::Comm`]; [`CommError::Differs`](crate::comm::CommError::Differs) when a rank was started differently.
    pub fn connect(
        memory: &M,
        mut gathers: Comm<M>,
        mut reductions: Comm<M>,
        mesh: Mesh,
        policy: &Policy,
        digest: Digest,
    ) -> Result<Self, Error> {
        gathers.agree(memory, digest)?;
        let rank = gathers.world_rank();
        let (replica, shard) = (mesh.replica_of(rank), mesh.shard_of(rank));
        let sub_gather = match policy.reshard_after_forward {
            Reshard::ToGroup(n) => Some(gathers.split(memory, rank.0 / n)?),
            _ => None,
        };
        let gather = gathers.split(memory, replica)?;
        let reduce = reductions.split(memory, replica)?;
        let replicate = match mesh.replicas() {
            1 => None,
            _ => Some(reductions.split(memory, shard)?),
        };
        Ok(Self { gather, sub_gather, reduce, replicate, world: reductions })
    }

    /// What this rank communicated so far.
    pub fn traffic(&self) -> Traffic {
        let mut traffic = Traffic::default();
        for comm in
            [Some(&self.gather), self.sub_gather.as_ref(), Some(&self.reduce), self.replicate.as_ref()]
                .into_iter()
                .flatten()
                .chain([&self.world])
        {
            traffic += comm.traffic();
        }
        traffic
    }
}

/// Everything that is the same on all ranks.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The model.
    pub spec: ModelSpec,
    /// Its layout.
    pub layout: Layout,
    /// The mesh.
    pub mesh: Mesh,
    /// The resolved policy.
    pub policy: Policy,
    /// The schedule of a training step.
    pub step: Schedule,
    /// The schedule of an evaluation.
    pub evaluation: Option<Schedule>,
}

impl Plan {
    /// Compiles and checks the schedules: `rounds` micro-batches per step and rank, and `evaluation_rounds`
    /// batches per evaluation and rank (0: none).
    ///
    /// # Errors
    /// [`Error::Policy`], [`Error::Schedule`].
    pub fn new(
        spec: ModelSpec,
        layout: Layout,
        mesh: Mesh,
        policy: Policy,
        statistics_phases: usize,
        rounds: usize,
        evaluation_rounds: usize,
    ) -> Result<Self, Error> {
        let policy = policy.resolve(mesh)?;
        let compiler = Compiler { spec: &spec, layout: &layout, mesh, policy: &policy, statistics_phases };
        let step = compile_step(&compiler, rounds)?;
        checker::check(&step, &spec, &layout)?;
        let evaluation = match evaluation_rounds {
            0 => None,
            rounds => Some(compile_evaluation(&compiler, rounds)?),
        };
        if let Some(evaluation) = &evaluation {
            checker::check(evaluation, &spec, &layout)?;
        }
        Ok(Self { spec, layout, mesh, policy, step, evaluation })
    }

    /// The number of ranks that a reduced gradient is the average over: what it is multiplied by to be the sum of all
    /// leaves again. 1 where gradients are summed.
    pub fn averaged_ranks(&self) -> usize {
        match self.policy.reduce_op {
            ReduceOp::Sum => 1,
            ReduceOp::Average => self.mesh.world(),
        }
    }
}

/// One rank of a sharded training run.
pub struct Engine<M: Memory, P: Program<M>> {
    memory: Arc<M>,
    plan: Arc<Plan>,
    rank: Rank,
    comms: Comms<M>,
    program: P,
    rule: Box<dyn UpdateRule<M>>,
    units: Vec<UnitBuffers<M::Buffer>>,
    slots: Vec<Option<Vec<M::Buffer>>>,
    gradient_slots: Vec<Option<Vec<M::Buffer>>>,
    staging_slots: Vec<Vec<M::Buffer>>,
    reduced_slots: Vec<Option<Vec<M::Buffer>>>,
    params: Params<M::Buffer>,
    gradients: Gradients<M::Buffer>,
    in_flight: BTreeMap<OpId, Pending<M>>,
    events: BTreeMap<OpId, M::Event>,
    scalars: scalars::Scalars<M>,
}

impl<M: Memory, P: Program<M>> Engine<M, P> {
    /// Allocates everything that a step needs. Parameters, gradients and optimizer state are zero.
    ///
    /// # Errors
    /// Those of the memory.
    pub fn new(
        memory: Arc<M>,
        plan: Arc<Plan>,
        comms: Comms<M>,
        program: P,
        rule: Box<dyn UpdateRule<M>>,
    ) -> Result<Self, Error> {
        let rank = comms.world.world_rank();
        let shard = plan.mesh.shard_of(rank);
        let allocator = buffers::Allocator { memory: &*memory, plan: &plan, rule: &*rule, shard };
        let units =
            (0..plan.layout.units.len()).map(|unit| allocator.unit(unit)).collect::<Result<_, _>>()?;
        let slots = allocator.slots(&plan.step.slots, Category::Unsharded, plan.policy.param_dtype)?;
        let gradient_slots =
            allocator.slots(&plan.step.gradient_slots, Category::GradientSlot, plan.policy.reduce_dtype)?;
        let staging_slots =
            allocator.slots(&plan.step.staging_slots, Category::HostStaging, plan.policy.param_dtype)?;
        let reduced_slots =
            allocator.slots(&plan.step.reduced_slots, Category::HostStaging, plan.policy.reduce_dtype)?;
        let scalars = scalars::Scalars::new(&*memory, &*rule, plan.averaged_ranks())?;
        Ok(Self {
            memory,
            plan,
            rank,
            comms,
            program,
            rule,
            units,
            slots,
            gradient_slots,
            staging_slots: staging_slots.into_iter().flatten().collect(),
            reduced_slots,
            params: Params::default(),
            gradients: Gradients::default(),
            in_flight: BTreeMap::new(),
            events: BTreeMap::new(),
            scalars,
        })
    }

    /// This rank.
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// What is the same on all ranks.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// This rank's memory.
    pub fn memory(&self) -> &Arc<M> {
        &self.memory
    }

    /// The model, to hand it data.
    pub fn program_mut(&mut self) -> &mut P {
        &mut self.program
    }

    /// What this rank communicated so far.
    pub fn traffic(&self) -> Traffic {
        self.comms.traffic()
    }

    /// This rank's shards of a unit: master parameters, last gradient, optimizer state, and what they hold.
    pub fn shards(&self, unit: usize) -> UnitShards<'_, M::Buffer> {
        self.units[unit].shards()
    }

    /// Issues one training step: on a device with queues of its own it may still be under way on return.
    ///
    /// After an error the engine can not go on: ranks may have stopped at different places.
    ///
    /// # Errors
    /// Whatever failed first on this rank; [`Error::Comm`] names another rank that failed.
    ///
    /// # Panics
    /// When the reports of two steps were not read ([`Engine::report`]).
    pub fn step(
        &mut self,
        input: StepInput,
        order: &mut dyn IssueOrder,
        observer: &mut dyn Observer,
    ) -> Result<(), Error> {
        let plan = Arc::clone(&self.plan);
        self.scalars.begin(&*self.memory, Some(input), input.stop)?;
        let slots = SlotMap::new(&plan.step, &plan.step);
        self.run_or_abort(&plan.step, &slots, order, observer)
    }

    /// The report of the oldest step whose report was not read, if there is one; waits until it is there.
    ///
    /// # Errors
    /// Those of the memory; [`Error::Comm`] when a collective was cut off before the report was read.
    pub fn report(&mut self) -> Result<Option<StepReport>, Error> {
        let report = self.scalars.report(&*self.memory)?;
        self.comms.world.check()?;
        Ok(report)
    }

    /// Runs the evaluation schedule; the report has the loss and the count of targets only.
    ///
    /// # Errors
    /// As [`Engine::step`].
    ///
    /// # Panics
    /// When the plan has no evaluation, or the report of a step was not read.
    pub fn evaluate(
        &mut self,
        stop: bool,
        order: &mut dyn IssueOrder,
        observer: &mut dyn Observer,
    ) -> Result<StepReport, Error> {
        let plan = Arc::clone(&self.plan);
        let schedule = plan.evaluation.as_ref().expect("the plan was made with evaluation rounds");
        assert!(self.scalars.is_read(), "the reports of all steps are read before an evaluation");
        self.scalars.begin(&*self.memory, None, stop)?;
        let slots = SlotMap::new(&plan.step, schedule);
        self.run_or_abort(schedule, &slots, order, observer)?;
        Ok(self.report()?.expect("an evaluation was just issued"))
    }

    /// Returns when every rank has called it. Before a rank waits for others in any other way than by a
    /// collective, they must have come as far: ranks that share cores run only while others wait in one.
    ///
    /// # Errors
    /// [`Error::Comm`].
    pub fn meet(&mut self) -> Result<(), Error> {
        self.any(false).map(drop)
    }

    /// Whether any rank says yes: the same answer on all. Every rank calls it, as [`Engine::meet`].
    ///
    /// # Errors
    /// [`Error::Comm`].
    pub fn any(&mut self, yes: bool) -> Result<bool, Error> {
        let answers = self.scalars.ask(&*self.memory, &mut self.comms.world, yes)?;
        self.comms.world.check()?;
        Ok(answers.any)
    }

    /// Whether all parameters and all optimizer state that the steps so far wrote, on all ranks, are finite: the same
    /// answer everywhere. Every rank calls it, as [`Engine::meet`], and waits for its updates.
    ///
    /// # Errors
    /// [`Error::Comm`].
    pub fn state_is_finite(&mut self) -> Result<bool, Error> {
        let answers = self.scalars.ask(&*self.memory, &mut self.comms.world, false)?;
        self.comms.world.check()?;
        Ok(answers.state_finite)
    }

    /// Runs a schedule; when it fails, tells the other ranks why before the collectives in flight are dropped.
    fn run_or_abort(
        &mut self,
        schedule: &Schedule,
        slots: &SlotMap,
        order: &mut dyn IssueOrder,
        observer: &mut dyn Observer,
    ) -> Result<(), Error> {
        let result = self.run(schedule, slots, order, observer);
        if let Err(error) = &result {
            self.comms.world.abort(&error.to_string());
        }
        result
    }
}
