//! Symbolic contents of buffers: the parameters of which segment, the gradients of which micro-batches.
//!
//! Each operation states what every operand must hold before it and holds after it. A buffer must be empty before it is
//! filled, so nothing is lost.

mod update;

use std::collections::{BTreeMap, BTreeSet};

use super::{Names, Violation};
use crate::layout::{Layout, SegmentId};
use crate::mesh::{Axis, Group};
use crate::model::{ModelSpec, ParamId};
use crate::program::BlockCall;
use crate::rank::Queue;
#[cfg(test)]
use crate::schedule::Schedule;
use crate::schedule::{BufferId, Op, OpKind, Role};
use crate::wrap::UnitId;

/// A segment of a unit.
type Owner = (UnitId, SegmentId);

/// The part of a segment's parameters that a buffer holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    /// What one rank of a group holds.
    Of(Group),
    Whole,
}

/// The progress of a gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// Being written by blocks: the number of parameter uses it contains so far.
    Open(usize),
    /// Complete on this rank, not yet reduced.
    Whole,
    /// Reduced and sharded over this group.
    Sharded(Group),
    /// Then reduced over this one, too.
    Replicated(Group),
}

/// The contents of a buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Value {
    Nothing,
    Params {
        owner: Owner,
        part: Part,
        updated: bool,
    },
    State {
        owner: Owner,
        tensor: usize,
    },
    /// The sum over consecutive leaves, from the first to before the second. A leaf is a chunk of a micro-batch, for experts
    /// of one rank of the expert axis; they are numbered in the order of micro-batches.
    Gradient {
        owner: Owner,
        leaves: [usize; 2],
        stage: Stage,
    },
    GradientOfLastStep,
    /// A direction, which an update must read unsharded.
    Direction {
        owner: Owner,
        part: Part,
    },
    /// The scalars, with the losses of this many micro-batches.
    Scalars {
        losses: usize,
        norms: BTreeSet<Owner>,
        reduced: bool,
    },
    Factors {
        of_this_step: bool,
    },
    NotFinite,
    Statistics {
        phase: usize,
        parts: BTreeSet<Owner>,
        reduced: bool,
    },
}

/// The contents of all buffers at one point of a schedule.
pub(crate) struct Values<'a> {
    names: Names<'a>,
    spec: &'a ModelSpec,
    contents: Vec<Value>,
    round: usize,
    /// Number of reads of trained parameters by blocks, per segment.
    uses: BTreeMap<Owner, usize>,
    trained: BTreeSet<Owner>,
}

impl<'a> Values<'a> {
    /// Creates the contents before the first operation.
    pub(super) fn new(names: Names<'a>, spec: &'a ModelSpec) -> Self {
        let Names { schedule, layout } = names;
        let mut uses = BTreeMap::new();
        let used = spec.blocks.iter().flat_map(|block| layout.called(&block.params));
        for id in used.filter(|&id| spec.param(id).trainable) {
            *uses.entry(owner_of(layout, id)).or_default() += 1;
        }
        let mut values = Self {
            names,
            spec,
            contents: Vec::new(),
            round: 0,
            trained: uses.keys().copied().collect(),
            uses,
        };
        let initial = |index: usize| match schedule.buffers[index].role {
            Role::ShardedGradient => Value::GradientOfLastStep,
            _ => values.value_between_steps(index, false),
        };
        values.contents = (0..schedule.buffers.len()).map(initial).collect();
        values
    }

    #[cfg(test)]
    pub(crate) fn of(schedule: &'a Schedule, spec: &'a ModelSpec, layout: &'a Layout) -> Self {
        Self::new(Names { schedule, layout }, spec)
    }

    /// The contents of a buffer between steps, after a step that updates or before it.
    fn value_between_steps(&self, index: usize, updated: bool) -> Value {
        let decl = &self.names.schedule.buffers[index];
        match (decl.role, decl.unit.zip(decl.segment)) {
            (Role::Master | Role::Low, Some(owner)) => {
                let part = self.shard(owner.0);
                Value::Params { owner, part, updated: updated && self.trained.contains(&owner) }
            }
            (Role::State(tensor), Some(owner)) => Value::State { owner, tensor },
            (Role::Factors, _) => Value::Factors { of_this_step: updated },
            (Role::NotFinite, _) => Value::NotFinite,
            _ => Value::Nothing,
        }
    }

    /// Checks the contents after the last operation.
    pub(crate) fn end(&mut self) -> Result<(), Violation> {
        let trains = self.names.schedule.trains();
        for (index, decl) in self.names.schedule.buffers.iter().enumerate() {
            let expected = match (decl.role, decl.unit.zip(decl.segment)) {
                (Role::ShardedGradient, Some(owner)) if trains => self.total(owner),
                (Role::Scalars, _) => self.scalars(true),
                (Role::Statistics(phase), _) if trains => self.statistics(phase, true),
                _ => self.value_between_steps(index, trains),
            };
            self.expect_contents(self.names.schedule.ops.len(), BufferId::of(index), expected)?;
        }
        Ok(())
    }

    /// Checks and applies the next operation.
    pub(crate) fn apply(&mut self, at: usize, op: &Op) -> Result<(), Violation> {
        match op.kind {
            OpKind::BeginStep => self.begin_step(at, op),
            OpKind::BeginMicroBatch(round) => {
                self.round = round.0;
                self.check_operands(at, op, [0, 0])
            }
            OpKind::Upload(unit) => self.move_params(at, op, unit, [self.shard(unit); 2]),
            OpKind::AllGather { unit, group, .. } => {
                self.move_params(at, op, unit, [Part::Of(group), Part::Whole])
            }
            OpKind::KeepSubShard { unit, group } => {
                self.move_params(at, op, unit, [Part::Whole, Part::Of(group)])
            }
            OpKind::Reshard(unit) => {
                self.check_operands(at, op, [0, self.names.layout.unit(unit).segments.len()])?;
                let mut buffers = op.writes.iter().zip(owners(unit));
                buffers.try_for_each(|(&id, owner)| {
                    self.replace(at, id, params(owner, Part::Whole), Value::Nothing)
                })
            }
            OpKind::Call(call) => self.compute(at, op, call),
            OpKind::OpenGradient(unit) => {
                let segments = self.trained_segments(unit);
                self.check_operands(at, op, [0, segments * self.leaves(unit)])?;
                for (number, writes) in op.writes.chunks(segments.max(1)).enumerate() {
                    let (leaves, stage) = (self.leaf(unit, number), Stage::Open(0));
                    writes.iter().zip(owners(unit)).try_for_each(|(&id, owner)| {
                        self.replace(at, id, Value::Nothing, Value::Gradient { owner, leaves, stage })
                    })?;
                }
                Ok(())
            }
            OpKind::CloseGradient(unit) => self.advance(at, op, unit, [None, Some(Stage::Whole)]),
            OpKind::ReduceScatter { unit, group, .. } => {
                self.advance(at, op, unit, [Stage::Whole, Stage::Sharded(group)].map(Some))
            }
            OpKind::AllReduce { unit, group, .. } => {
                let stages = [Stage::Sharded(self.group(unit)), Stage::Replicated(group)];
                self.advance(at, op, unit, stages.map(Some))
            }
            OpKind::Download(unit) => self.advance(at, op, unit, [Some(self.last_stage(unit)); 2]),
            OpKind::Add { unit, queue } => self.add(at, op, unit, queue),
            OpKind::SquareNorm(unit) => self.add_square_norm(at, op, unit),
            OpKind::ReduceScalars => {
                let trains = self.names.schedule.trains();
                self.check_operands(at, op, [0, 1 + usize::from(trains)])?;
                self.replace(at, op.writes[0], self.scalars(false), self.scalars(true))?;
                let [before, after] = [false, true].map(|of_this_step| Value::Factors { of_this_step });
                op.writes[1..].iter().try_for_each(|&id| self.replace(at, id, before.clone(), after.clone()))
            }
            OpKind::Statistics { unit, phase } => self.add_statistics(at, op, unit, phase),
            OpKind::ReduceStatistics(phase) => {
                self.check_operands(at, op, [0, 1])?;
                self.replace(
                    at,
                    op.writes[0],
                    self.statistics(phase.0, false),
                    self.statistics(phase.0, true),
                )
            }
            OpKind::Direct(unit) => self.direct(at, op, unit),
            OpKind::GatherDirections { unit, group } => self.gather_directions(at, op, unit, group),
            OpKind::Update(unit) => self.check_update(at, op, unit),
        }
    }

    /// Moves or copies the parameters of a unit from one set of buffers to another.
    fn move_params(
        &mut self,
        at: usize,
        op: &Op,
        unit: UnitId,
        [from, to]: [Part; 2],
    ) -> Result<(), Violation> {
        self.check_operands(at, op, [self.names.layout.unit(unit).segments.len(); 2])?;
        for ((&read, &write), owner) in op.reads.iter().zip(&op.writes).zip(owners(unit)) {
            let before = params(owner, from);
            let after = if op.kind.gives_up_inputs() { Value::Nothing } else { before.clone() };
            self.replace(at, read, before, after)?;
            self.replace(at, write, Value::Nothing, params(owner, to))?;
        }
        Ok(())
    }

    /// Checks that a block finds its parameters, and the gradients that it adds to.
    fn compute(&mut self, at: usize, op: &Op, call: BlockCall) -> Result<(), Violation> {
        let read = self.names.layout.called(&self.spec.block(call.block()).params);
        let trained = read.clone().filter(|&id| call.is_backward() && self.spec.param(id).trainable);
        let this = &*self;
        let owners: Vec<Owner> = trained.map(|id| owner_of(self.names.layout, id)).collect();
        let most = owners.iter().map(|owner| self.leaves(owner.0)).max().unwrap_or(0);
        let of_leaf = |leaf: usize| {
            owners.iter().filter(move |owner| leaf < this.leaves(owner.0)).map(move |&o| (o, leaf))
        };
        let written: Vec<(Owner, usize)> = (0..most).flat_map(of_leaf).collect();
        let scalars = usize::from(call.is_last());
        self.check_operands(at, op, [read.clone().count(), written.len() + scalars])?;
        for (id, &buffer) in read.zip(&op.reads) {
            self.expect_contents(at, buffer, params(owner_of(self.names.layout, id), Part::Whole))?;
        }
        for ((owner, number), &buffer) in written.into_iter().zip(&op.writes) {
            let leaves = self.leaf(owner.0, number);
            let uses = match self.contents[buffer.index()] {
                Value::Gradient { stage: Stage::Open(uses), .. } => uses,
                _ => 0,
            };
            let [before, after] =
                [uses, uses + 1].map(|uses| Value::Gradient { owner, leaves, stage: Stage::Open(uses) });
            self.replace(at, buffer, before, after)?;
        }
        if call.is_last() {
            self.add_scalars(at, op.writes[op.writes.len() - 1], [self.round, self.round + 1], [])?;
        }
        Ok(())
    }

    /// The total gradient of a segment, as norm and update need it: every micro-batch once.
    fn total(&self, owner: Owner) -> Value {
        let leaves = [0, self.names.schedule.rounds * self.leaves(owner.0)];
        Value::Gradient { owner, leaves, stage: self.last_stage(owner.0) }
    }

    /// Number of leaves of a micro-batch.
    fn leaves(&self, unit: UnitId) -> usize {
        self.names.schedule.chunks * self.names.layout.unit(unit).blocks
    }

    /// A leaf of this micro-batch.
    fn leaf(&self, unit: UnitId, number: usize) -> [usize; 2] {
        let leaf = self.round * self.leaves(unit) + number;
        [leaf, leaf + 1]
    }

    /// The ranks that hold a unit together.
    fn group(&self, unit: UnitId) -> Group {
        self.names.layout.unit(unit).group()
    }

    /// What one of these ranks holds.
    fn shard(&self, unit: UnitId) -> Part {
        Part::Of(self.group(unit))
    }

    fn last_stage(&self, unit: UnitId) -> Stage {
        match self.names.schedule.mesh.size(Axis::Replicate) {
            1 => Stage::Sharded(self.group(unit)),
            _ => Stage::Replicated(Group::REPLICATE),
        }
    }

    /// The range of leaves in a gradient.
    fn leaves_in(&self, buffer: BufferId) -> [usize; 2] {
        match self.contents[buffer.index()] {
            Value::Gradient { leaves, .. } => leaves,
            _ => [0, 0],
        }
    }

    /// Advances a unit's gradient to its next stage (from `Open` if no stage is given), from the read to the written
    /// buffers, or in place.
    fn advance(
        &mut self,
        at: usize,
        op: &Op,
        unit: UnitId,
        stages: [Option<Stage>; 2],
    ) -> Result<(), Violation> {
        let segments = self.trained_segments(unit);
        let in_place = matches!(op.kind, OpKind::CloseGradient(_) | OpKind::AllReduce { .. });
        let sets = if matches!(op.kind, OpKind::CloseGradient(_)) { self.leaves(unit) } else { 1 };
        self.check_operands(at, op, [if in_place { 0 } else { segments }, sets * segments])?;
        let sources = if in_place { &op.writes } else { &op.reads };
        let owners = owners(unit).take(segments).cycle();
        for ((&read, &write), owner) in sources.iter().zip(&op.writes).zip(owners) {
            let (leaves, open) = (self.leaves_in(read), Stage::Open(self.uses[&owner]));
            let [before, after] =
                stages.map(|stage| Value::Gradient { owner, leaves, stage: stage.unwrap_or(open) });
            self.replace(at, read, before, Value::Nothing)?;
            self.replace(at, write, Value::Nothing, after)?;
        }
        Ok(())
    }

    /// Adds the sum over later leaves to the sum over the leaves just before them.
    fn add(&mut self, at: usize, op: &Op, unit: UnitId, queue: Queue) -> Result<(), Violation> {
        self.check_operands(at, op, [self.trained_segments(unit); 2])?;
        let stage = if queue == Queue::Compute { Stage::Whole } else { Stage::Sharded(self.group(unit)) };
        for ((&read, &write), owner) in op.reads.iter().zip(&op.writes).zip(owners(unit)) {
            let ([_, end], [start, middle]) = (self.leaves_in(read), self.leaves_in(write));
            let [from, into, sum] = [[middle, end], [start, middle], [start, end]]
                .map(|leaves| Value::Gradient { owner, leaves, stage });
            self.replace(at, read, from, Value::Nothing)?;
            self.replace(at, write, into, sum)?;
        }
        Ok(())
    }

    fn trained_segments(&self, unit: UnitId) -> usize {
        self.names.schedule.lasting.units[unit.0].gradient.len()
    }

    /// Checks the numbers of operands.
    fn check_operands(&self, at: usize, op: &Op, expected: [usize; 2]) -> Result<(), Violation> {
        let (reads, writes) = (op.reads.len(), op.writes.len());
        if [reads, writes] == expected {
            return Ok(());
        }
        Err(Violation::Operands { op: self.names.op(at), reads, writes, expected })
    }

    /// Checks that the buffer holds a value, and leaves it.
    fn expect_contents(&mut self, at: usize, buffer: BufferId, value: Value) -> Result<(), Violation> {
        self.replace(at, buffer, value.clone(), value)
    }

    /// Checks that the buffer holds `before`, and replaces it by `after`.
    fn replace(&mut self, at: usize, buffer: BufferId, before: Value, after: Value) -> Result<(), Violation> {
        let current = &mut self.contents[buffer.index()];
        if *current == before {
            *current = after;
            return Ok(());
        }
        Err(Violation::Contents {
            place: match at == self.names.schedule.ops.len() {
                true => "the end of the step".into(),
                false => format!("operation {}", self.names.op(at)),
            },
            buffer: self.names.buffer(buffer),
            expected: format!("{before:?}"),
            got: format!("{current:?}"),
        })
    }
}

fn owner_of(layout: &Layout, id: ParamId) -> Owner {
    let (unit, segment, _) = layout.find(id).expect("every parameter lies in a unit");
    (unit, segment)
}

/// The segments of a unit.
fn owners(unit: UnitId) -> impl Iterator<Item = Owner> + Clone {
    (0..).map(move |segment| (unit, SegmentId(segment)))
}

/// Parameters before the update.
fn params(owner: Owner, part: Part) -> Value {
    Value::Params { owner, part, updated: false }
}
