//! Buffer declarations: everything that operations access and that outlives one operation.

use crate::dtype::DType;
use crate::layout::SegmentId;
use crate::memory::Category;
use crate::update::RankTables;
use crate::wrap::UnitId;

/// Index of a buffer in [`Schedule::buffers`](super::Schedule::buffers).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BufferId(pub u32);

impl BufferId {
    /// Returns the index.
    pub const fn index(self) -> usize {
        self.0 as usize
    }

    /// Converts an index.
    ///
    /// # Panics
    /// When the index is 2^32 or more.
    pub fn of(index: usize) -> Self {
        Self(u32::try_from(index).expect("a step has fewer than 2^32 buffers"))
    }
}

/// The memory that a buffer is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Place {
    /// In device memory.
    Device,
    /// In host memory.
    Host,
}

/// The purpose of a buffer. Buffers of one role that are used in turn, or of which a unit has several, are numbered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Role {
    /// This rank's rows of the parameters.
    Master,
    /// The copy of those rows in the compute dtype.
    Low,
    /// A tensor of the optimizer's state.
    State(usize),
    /// The part of a unit that is kept after forward.
    SubShard,
    /// Holds gathered parameters.
    Slot(usize),
    /// Holds a shard uploaded from the host.
    StagingSlot(usize),
    /// Holds the gradient of a micro-batch.
    GradientSlot(usize),
    /// Holds a reduced gradient until it is downloaded to the host.
    ReducedSlot(usize),
    /// Holds this rank's rows of directions, from which they are gathered into a gradient slot.
    DirectionSlot(usize),
    /// Scratch space of updates.
    Scratch,
    /// The unsharded gradient of a micro-batch, or a sum of several, until it is added.
    WholeSum(usize),
    /// A reduced gradient, or a sum of several, until it is added; with offload also the total, until it is downloaded.
    ShardedSum(usize),
    /// The sharded gradient: the total of the step, until the next step begins.
    ShardedGradient,
    /// Loss, norm and other scalars of the step.
    Scalars,
    /// Alternates with the scalars, so that those of one step can be read during the next.
    SpareScalars,
    /// The gradient factors that updates need, computed from the scalars.
    Factors,
    /// One integer that becomes 1 when an update writes a value that is not finite.
    NotFinite,
    /// Statistics of a phase of the update rule.
    Statistics(usize),
}

impl Role {
    /// Whether the buffer has contents before and after a step. (So do gradients, but a step first gives up those of
    /// the previous step.)
    pub const fn is_kept(self) -> bool {
        matches!(self, Role::Master | Role::Low | Role::State(_) | Role::Factors | Role::NotFinite)
    }
}

/// The declaration of a buffer.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct BufferDecl {
    /// The purpose.
    pub role: Role,
    /// The category in which it is counted.
    pub category: Category,
    /// Type of the elements.
    pub dtype: DType,
    /// Number of elements; `None` for optimizer state, which differs between ranks: see [`BufferDecl::len_on`].
    pub len: Option<usize>,
    /// The memory it is in.
    pub place: Place,
    /// The unit that owns the buffer; `None` if it is shared by units.
    pub unit: Option<UnitId>,
    /// The segment of a unit that it is for, if any.
    pub segment: Option<SegmentId>,
}

impl BufferDecl {
    /// Number of elements on the rank that the tables describe.
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

    /// The name in printed schedules, without the unit.
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
            Role::NotFinite => "non-finite flag".into(),
            Role::Statistics(phase) => format!("statistics {phase}"),
        }
    }
}

/// The buffers of a unit that outlive a step.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct UnitBuffers {
    /// Master parameters per segment.
    pub master: Vec<BufferId>,
    /// The low-precision copy per segment; one without computes with its master parameters.
    pub low: Vec<Option<BufferId>>,
    /// The sharded gradient per trainable segment.
    pub gradient: Vec<BufferId>,
    /// Optimizer state per trainable segment.
    pub state: Vec<Vec<BufferId>>,
    /// The trainable segments whose directions are gathered for an update.
    pub whole: Vec<SegmentId>,
}

impl UnitBuffers {
    /// The parameters in the dtype in which they are gathered, per segment.
    pub fn shard(&self) -> Vec<BufferId> {
        self.low.iter().zip(&self.master).map(|(low, &master)| low.unwrap_or(master)).collect()
    }

    /// Number of buffers of trainable segments that an update writes.
    pub fn updated_len(&self) -> usize {
        self.updated_lens().flatten().sum()
    }

    /// Splits what an update writes into the parameters (and their copy, if there is one) and the state of each trainable segment.
    ///
    /// # Panics
    /// If there are fewer than [`updated_len`](Self::updated_len).
    pub fn updated<'a>(&self, mut writes: &'a [BufferId]) -> impl Iterator<Item = [&'a [BufferId]; 2]> {
        let mut take = move |len| {
            let (ids, rest) = writes.split_at(len);
            writes = rest;
            ids
        };
        self.updated_lens().map(move |lens| lens.map(&mut take))
    }

    fn updated_lens(&self) -> impl Iterator<Item = [usize; 2]> {
        self.low.iter().zip(&self.state).map(|(low, state)| [1 + usize::from(low.is_some()), state.len()])
    }

    /// Index of a segment among those with directions; `None` if it has none.
    pub fn whole_index(&self, segment: SegmentId) -> Option<usize> {
        self.whole.iter().position(|&other| other == segment)
    }
}

/// The buffers that outlive a step.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Lasting {
    /// The buffers of each unit.
    pub units: Vec<UnitBuffers>,
    /// The scalars of the step.
    pub scalars: BufferId,
    /// The buffer that alternates with the scalars.
    pub spare_scalars: BufferId,
    /// The gradient factors that updates read.
    pub factors: BufferId,
    /// The non-finite flag.
    pub not_finite: BufferId,
    /// The statistics of each phase of the update rule.
    pub statistics: Vec<BufferId>,
    /// Scratch space for updates of units with directions; `None` if no unit has any.
    pub scratch: Option<BufferId>,
}
