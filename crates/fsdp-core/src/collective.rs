//! The identity of a collective call: its kind, its purpose, and everything that must match on all participating ranks.

use std::fmt;

use crate::dtype::DType;
use crate::id::UnitId;
use crate::rank::Queue;

/// How a reduction combines the ranks' elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ReduceOp {
    /// Elements are added.
    Sum,
    /// Each element is multiplied by the reciprocal of the number of ranks ([`ReduceOp::factor`]) and the product
    /// rounded to its dtype; the products are then added. Floats only.
    Average,
}

impl ReduceOp {
    /// The factor that elements are multiplied by before they are added, in a group of `ranks`; `None` for sums, and
    /// for a group of one rank, which leaves elements unchanged. The factor is rounded to the dtype of the elements
    /// when applied ([`Arithmetic::Scale`](crate::memory::Arithmetic::Scale)).
    pub fn factor(self, ranks: usize) -> Option<f64> {
        match self {
            ReduceOp::Average if ranks > 1 => Some(1.0 / ranks as f64),
            ReduceOp::Sum | ReduceOp::Average => None,
        }
    }
}

/// The kind of a collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CollectiveKind {
    /// Every output becomes the concatenation of all ranks' inputs, in rank order. Inputs are only read and not
    /// returned.
    AllGather,
    /// Every output becomes this rank's part of the sum or average of all ranks' inputs. Inputs are returned released.
    ReduceScatter(ReduceOp),
    /// Every output becomes the sum or average of all ranks' outputs.
    AllReduce(ReduceOp),
    /// Inputs and outputs have one part for each rank: part `i` of an output becomes this rank's part of rank `i`'s
    /// input. Inputs are only read and not returned.
    AllToAll,
    /// Every output becomes a copy of the root's output.
    Broadcast {
        /// The root's index in the group.
        root: u32,
    },
    /// The group is split into smaller groups.
    Split,
    /// The ranks of a group connect to each other.
    Connect,
}

impl CollectiveKind {
    /// The name used in messages and traces.
    pub const fn name(self) -> &'static str {
        match self {
            CollectiveKind::AllGather => "all-gather",
            CollectiveKind::ReduceScatter(_) => "reduce-scatter",
            CollectiveKind::AllReduce(_) => "all-reduce",
            CollectiveKind::AllToAll => "all-to-all",
            CollectiveKind::Broadcast { .. } => "broadcast",
            CollectiveKind::Split => "split",
            CollectiveKind::Connect => "connect",
        }
    }

    /// Whether inputs are given up: they are returned released.
    pub const fn gives_up_inputs(self) -> bool {
        matches!(self, CollectiveKind::ReduceScatter(_))
    }

    /// How elements are combined; `None` if this kind combines none.
    pub const fn reduce_op(self) -> Option<ReduceOp> {
        match self {
            CollectiveKind::ReduceScatter(op) | CollectiveKind::AllReduce(op) => Some(op),
            _ => None,
        }
    }
}

/// The purpose of a collective; part of its fingerprint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Purpose {
    /// Gathers the parameters of a unit for forward.
    Forward,
    /// Gathers the parameters of a unit for backward.
    Backward,
    /// Reduces the gradients of a unit.
    Gradient,
    /// Redistributes activations, or their gradients, between operations of a block.
    Activations,
    /// Reduces loss, norm and other scalars of a step.
    Scalars,
    /// Reduces statistics or gathers directions for an update rule.
    UpdateRule,
    /// Setup before the first step.
    Setup,
}

impl Purpose {
    /// The name used in messages and traces.
    pub const fn name(self) -> &'static str {
        match self {
            Purpose::Forward => "forward",
            Purpose::Backward => "backward",
            Purpose::Gradient => "gradient",
            Purpose::Activations => "activations",
            Purpose::Scalars => "scalars",
            Purpose::UpdateRule => "update rule",
            Purpose::Setup => "setup",
        }
    }
}

/// Identifies a collective call: all ranks that take part in one collective must have equal fingerprints.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Fingerprint {
    /// Number of collectives issued on this group before this one.
    pub sequence: u64,
    /// The kind.
    pub kind: CollectiveKind,
    /// The purpose.
    pub purpose: Purpose,
    /// The unit whose data is communicated; `None` if the call concerns no unit.
    pub unit: Option<UnitId>,
    /// Type of the elements; U8 if segments of several types are moved.
    pub dtype: DType,
    /// Number of elements of this type on the unsharded side, over all segments.
    pub elements: usize,
}

impl Fingerprint {
    /// The queue that the call waits for: its buffers are ready once earlier work of this queue is done.
    pub const fn queue(&self) -> Queue {
        match self.kind {
            _ if matches!(self.purpose, Purpose::Activations) => Queue::Compute,
            CollectiveKind::AllGather | CollectiveKind::Split | CollectiveKind::Connect => Queue::Gather,
            CollectiveKind::ReduceScatter(_)
            | CollectiveKind::AllReduce(_)
            | CollectiveKind::AllToAll
            | CollectiveKind::Broadcast { .. } => Queue::Reduce,
        }
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "#{} {}", self.sequence, self.kind.name())?;
        match self.kind {
            CollectiveKind::Broadcast { root } => write!(f, " from place {root}")?,
            // Sums are the common case and not spelled out.
            kind if kind.reduce_op() == Some(ReduceOp::Average) => f.write_str(" by average")?,
            _ => {}
        }
        write!(f, " ({}", self.purpose.name())?;
        if let Some(UnitId(unit)) = self.unit {
            write!(f, ", unit {unit}")?;
        }
        write!(f, ", {} x {})", self.elements, self.dtype)
    }
}
