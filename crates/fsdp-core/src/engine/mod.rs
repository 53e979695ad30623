//! The engine: executes a schedule on one rank.
//!
//! It consists of a table of buffers and a loop with one `match` over the operations, which look up their operands in
//! the table by id. It does not interpret policies: they differ only in the buffers and operations that the compiler
//! emitted. All buffers of the schedule are created with the engine (a memory may defer their storage to the first
//! write); during a step, only the program allocates (activations, workspace).

mod execute;
mod issue;
mod load;
mod scalars;
mod shards;
mod table;
mod update;

pub use issue::{IssueOrder, Observer, ProgramOrder};
pub use load::Origin;
pub use scalars::StepInput;
pub use shards::UnitShards;

pub use crate::scalars::StepReport;

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::comm::{Comms, Pending, Traffic};
use crate::error::Error;
use crate::memory::Memory;
use crate::plan::Plan;
use crate::program::{Gradients, Program};
use crate::rank::Rank;
use crate::schedule::{OpId, Schedule};
use crate::update::{RankTables, Updates};

use table::Table;

/// One rank of a sharded training run.
pub struct Engine<M: Memory, P: Program<M>> {
    memory: Arc<M>,
    plan: Arc<Plan>,
    rank: Rank,
    comms: Comms<M>,
    program: P,
    rule: Box<dyn Updates<M>>,
    table: Table<M::Buffer>,
    tables: RankTables,
    /// The open gradients of each leaf of a micro-batch.
    gradients: Vec<Gradients<M::Buffer>>,
    in_flight: BTreeMap<OpId, Pending<M>>,
    events: BTreeMap<OpId, M::Event>,
    scalars: scalars::Scalars<M>,
    /// Reusable lists for state tensors and statistics while the update rule has them.
    buffer_lists: [Vec<M::Buffer>; 2],
    /// Whether the gradients of the last step are still available.
    has_gradients: bool,
}

impl<M: Memory, P: Program<M>> Engine<M, P> {
    /// Allocates all buffers of a step. Parameters and optimizer state are zero.
    ///
    /// # Errors
    /// The errors of the memory.
    pub fn new(
        memory: Arc<M>,
        plan: Arc<Plan>,
        comms: Comms<M>,
        program: P,
        rule: Box<dyn Updates<M>>,
    ) -> Result<Self, Error> {
        let rank = comms.rank();
        let tables = plan.tables(&*rule, rank);
        let mut table = Table::allocate(&*memory, &plan.step.buffers, &tables)?;
        let scalars = scalars::Scalars::new(&*memory, &plan, &mut table)?;
        let gradients = (0..plan.leaves()).map(|_| Gradients::default()).collect();
        Ok(Self {
            memory,
            plan,
            rank,
            comms,
            program,
            rule,
            table,
            tables,
            gradients,
            in_flight: BTreeMap::new(),
            events: BTreeMap::new(),
            scalars,
            buffer_lists: [Vec::new(), Vec::new()],
            has_gradients: false,
        })
    }

    /// This rank.
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// The plan, which is the same on all ranks.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// This rank's memory.
    pub fn memory(&self) -> &Arc<M> {
        &self.memory
    }

    /// The model, through which its data is set.
    pub fn program_mut(&mut self) -> &mut P {
        &mut self.program
    }

    /// Collectives and bytes that this rank has communicated so far.
    pub fn traffic(&self) -> Traffic {
        self.comms.traffic()
    }

    /// Issues one training step; on a device with asynchronous queues it may still be running on return.
    ///
    /// After an error the engine cannot continue, because ranks may have stopped at different operations.
    ///
    /// # Errors
    /// The first failure on this rank; [`Error::Comm`] names another rank that failed.
    ///
    /// # Panics
    /// When the reports of two earlier steps have not been read ([`Engine::report`]).
    pub fn step(
        &mut self,
        input: StepInput,
        order: &mut dyn IssueOrder,
        observer: &mut dyn Observer,
    ) -> Result<(), Error> {
        let plan = Arc::clone(&self.plan);
        self.scalars.begin(&mut self.table, Some(input), input.stop);
        self.run_or_abort(&plan.step, order, observer)?;
        self.has_gradients = true;
        Ok(())
    }

    /// Returns the oldest report that has not been read, or `None` if all have been; blocks until it is available.
    ///
    /// # Errors
    /// The errors of the memory; [`Error::Comm`] when a collective was cut off before the report was read.
    pub fn report(&mut self) -> Result<Option<StepReport>, Error> {
        let report = self.scalars.report(&*self.memory, &self.table)?;
        self.comms.world().check()?;
        Ok(report)
    }

    /// Runs the evaluation schedule; the report contains only the loss and the target count.
    ///
    /// # Errors
    /// As [`Engine::step`].
    ///
    /// # Panics
    /// When the plan has no evaluation, or the report of a step has not been read.
    pub fn evaluate(
        &mut self,
        stop: bool,
        order: &mut dyn IssueOrder,
        observer: &mut dyn Observer,
    ) -> Result<StepReport, Error> {
        let plan = Arc::clone(&self.plan);
        let schedule = plan.evaluation.as_ref().expect("the plan was made with evaluation rounds");
        assert!(self.scalars.is_read(), "the reports of all steps are read before an evaluation");
        self.scalars.begin(&mut self.table, None, stop);
        self.has_gradients = false;
        self.run_or_abort(schedule, order, observer)?;
        Ok(self.report()?.expect("an evaluation was just issued"))
    }

    /// A barrier: returns when every rank has called it. It is required before a rank waits for others by any means
    /// other than a collective (a file, a message): when ranks share cores, some of them run only while others wait in
    /// a collective.
    ///
    /// # Errors
    /// [`Error::Comm`].
    pub fn meet(&mut self) -> Result<(), Error> {
        self.any(false).map(drop)
    }

    /// Returns whether any rank passed `true`: a vote with the same result on all ranks. A barrier, as
    /// [`Engine::meet`].
    ///
    /// # Errors
    /// [`Error::Comm`].
    pub fn any(&mut self, flag: bool) -> Result<bool, Error> {
        let flags = self.scalars.reduce_flag(&*self.memory, &mut self.table, self.comms.world(), flag)?;
        self.comms.world().check()?;
        Ok(flags.any)
    }

    /// Returns whether all parameters and all optimizer state written by the steps so far are finite on all ranks. The
    /// result is the same everywhere. A barrier, as [`Engine::meet`], that also waits for the updates of all ranks.
    ///
    /// # Errors
    /// [`Error::Comm`].
    pub fn state_is_finite(&mut self) -> Result<bool, Error> {
        let flags = self.scalars.reduce_flag(&*self.memory, &mut self.table, self.comms.world(), false)?;
        self.comms.world().check()?;
        Ok(flags.state_finite)
    }

    /// Runs a schedule; if it fails, reports the reason to the other ranks before the collectives in flight are
    /// dropped.
    fn run_or_abort(
        &mut self,
        schedule: &Schedule,
        order: &mut dyn IssueOrder,
        observer: &mut dyn Observer,
    ) -> Result<(), Error> {
        self.memory.begin_schedule();
        let result = self.run(schedule, order, observer).and_then(|()| self.memory.end_schedule());
        if let Err(error) = &result {
            self.comms.world().abort(&error.to_string(), error.kind());
        }
        result
    }
}
