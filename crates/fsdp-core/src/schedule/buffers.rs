//! Declared buffers: everything that outlives an operation and that operations touch.

use crate::dtype::DType;
use crate::layout::SegmentId;
use crate::memory::Category;
use crate::update::RankTables;
use crate::wrap::UnitId;

/// Index of a buffer in [`Schedule::buffers`](super::Schedule::buffers).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BufferId(pub u32);

impl BufferId {
    /// The index.
    pub const fn index(self) -> usize {
        self.0 as usize
    }

    /// The buffer of an index.
    ///
    /// # Panics
    /// When there could be no such buffer.
    pub fn of(index: usize) -> Self {
        Self(u32::try_from(index).expect("a step has fewer than 2^32 buffers"))
    }
}

/// Where a buffer lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Place {
    /// In the device's memory.
    Device,
    /// In host memory.
    Host,
}

/// What a buffer is for. Buffers of one role that are taken in turn, or of which a unit has several, are numbered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Role {
    /// This rank's rows of the parameters.
    Master,
    /// Their copy in the dtype that computes.
    Low,
    /// A tensor of the optimizer's state.
    State(usize),
    /// The part of a unit kept after forward.
    SubShard,
    /// Holds gathered parameters.
    Slot(usize),
    /// Holds a shard on its way from the host.
    StagingSlot(usize),
    /// Holds the gradient of a micro-batch.
    GradientSlot(usize),
    /// Holds a reduced gradient on its way to the host.
    ReducedSlot(usize),
    /// Holds this rank's rows of directions, to be gathered into a gradient slot.
    DirectionSlot(usize),
    /// Room that updates work in.
    Scratch,
    /// The whole gradient of a micro-batch, or a sum of some, that waits to be added.
    WholeSum(usize),
    /// A reduced gradient, or a sum of some, that waits to be added; under offload also the total, until it is downloaded.
    ShardedSum(usize),
    /// The sharded gradient: the total of the step, until the next one begins.
    ShardedGradient,
    /// Loss, norm and other scalars of the step.
    Scalars,
    /// Takes turns with the scalars, so that those of one step may be read in the next one.
    SpareScalars,
    /// What updates need of the scalars.
    Factors,
    /// One integer: 1 when an update has written a value that is not finite.
    NotFinite,
    /// Statistics of a phase of the update rule.
    Statistics(usize),
}

impl Role {
    /// Whether the buffer is filled before a step begins, and after it. (Gradients are, too, but a step first gives up
    /// those of the one before.)
    pub const fn is_kept(self) -> bool {
        matches!(self, Role::Master | Role::Low | Role::State(_) | Role::Factors | Role::NotFinite)
    }
}

/// The declaration of a buffer.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct BufferDecl {
    /// What it is for.
    pub role: Role,
    /// As what it is counted.
    pub category: Category,
    /// Type of the elements.
    pub dtype: DType,
    /// Number of elements; `None` for the state of the optimizer, which differs between ranks: see [`BufferDecl::len_on`].
    pub len: Option<usize>,
    /// Where it lies.
    pub place: Place,
    /// The unit whose own it is, if it is one's.
    pub unit: Option<UnitId>,
    /// Which of a unit's segments it is for.
    pub segment: Option<SegmentId>,
}

impl BufferDecl {
    /// Number of elements on the rank of these tables.
    ///
    /// # Panics
    /// When the tables are of another layout or update rule.
    pub fn len_on(&self, tables: &RankTables) -> usize {
        let Role::State(tensor) = self.role else {
            return self.len.expect("only state differs between ranks");
        };
        let (Some(unit), Some(segment)) = (self.unit, self.segment) else {
            unreachable!("state belongs to a segment of a unit")
        };
        tables.unit(unit).state[segment.0][tensor].len
    }

    /// What printed schedules call it, without its unit.
    pub fn name(&self) -> String {
        match self.role {
            Role::Master => "shard".into(),
            Role::Low => "low-precision shard".into(),
            Role::State(tensor) => format!("state {tensor}"),
            Role::SubShard => "sub-shard".into(),
            Role::Slot(number) => format!("slot {number}"),
            Role::StagingSlot(number) => format!("staging slot {number}"),
            Role::GradientSlot(number) => format!("gradient slot {number}"),
            Role::ReducedSlot(number) => format!("reduced slot {number}"),
            Role::DirectionSlot(number) => format!("direction slot {number}"),
            Role::Scratch => "scratch".into(),
            Role::WholeSum(number) => format!("whole sum {number}"),
            Role::ShardedSum(number) => format!("sum {number}"),
            Role::ShardedGradient => "sharded gradient".into(),
            Role::Scalars | Role::SpareScalars => "scalars".into(),
            Role::Factors => "factors".into(),
            Role::NotFinite => "note of what is not finite".into(),
            Role::Statistics(phase) => format!("statistics {phase}"),
        }
    }
}

/// The buffers of a unit that outlive a step.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct UnitBuffers {
    /// Master parameters per segment.
    pub master: Vec<BufferId>,
    /// Their copies per segment, of the first ones; the masters of the others are what computes.
    pub low: Vec<BufferId>,
    /// The sharded gradient per trainable segment.
    pub gradient: Vec<BufferId>,
    /// Optimizer state per trainable segment.
    pub state: Vec<Vec<BufferId>>,
    /// The trainable segments whose directions are gathered for an update.
    pub whole: Vec<SegmentId>,
}

impl UnitBuffers {
    /// The parameters as they are gathered, per segment.
    pub fn shard(&self) -> Vec<BufferId> {
        self.low.iter().chain(&self.master[self.low.len()..]).copied().collect()
    }

    /// How many buffers of a trainable segment an update writes: master parameters, their copy, state.
    pub fn stride(&self) -> usize {
        1 + usize::from(!self.low.is_empty()) + self.state.first().map_or(0, Vec::len)
    }

    /// Which of the segments with directions this one is.
    pub fn whole_index(&self, segment: SegmentId) -> Option<usize> {
        self.whole.iter().position(|&other| other == segment)
    }
}

/// The buffers that outlive a step.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Lasting {
    /// Those of each unit.
    pub units: Vec<UnitBuffers>,
    /// The scalars of the step.
    pub scalars: BufferId,
    /// What takes turns with them.
    pub spare_scalars: BufferId,
    /// What updates need of them.
    pub factors: BufferId,
    /// The note of what is not finite.
    pub not_finite: BufferId,
    /// The statistics of each phase of the update rule.
    pub statistics: Vec<BufferId>,
    /// Room that updates of units with directions work in; none if no unit has any.
    pub scratch: Option<BufferId>,
}
