//! What a collective call is: its kind, its purpose, and what must be equal on all ranks that meet in it.

use std::fmt;

use crate::dtype::DType;
use crate::rank::Queue;
use crate::wrap::UnitId;

/// How a reduction combines the ranks' elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ReduceOp {
    /// They are added.
    Sum,
    /// Each is multiplied by the reciprocal of the number of ranks ([`ReduceOp::factor`]), and the product rounded to its
    /// dtype; then they are added. Floats only.
    Average,
}

impl ReduceOp {
    /// What elements are multiplied by before they are added, in a group of `ranks`; `None` when they are only added, or
    /// stay as they are because one rank is alone.
    /// It is rounded to the dtype of the elements where it is used ([`Memory::scale`](crate::Memory::scale)).
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
    /// Every output becomes the concatenation of all ranks' inputs, in rank order. Inputs are only read, and not handed back.
    AllGather,
    /// Every output becomes this rank's part of the sum or average of all ranks' inputs. Inputs come back released.
    ReduceScatter(ReduceOp),
    /// Every output becomes the sum or average of all ranks' outputs.
    AllReduce(ReduceOp),
    /// Every output becomes that of one rank of the group.
    Broadcast {
        /// The place in the group of the rank that has it.
        root: u32,
    },
    /// The group is cut into smaller groups.
    Split,
    /// The ranks of a group find each other.
    Connect,
}

impl CollectiveKind {
    /// The name used in messages and traces.
    pub const fn name(self) -> &'static str {
        match self {
            CollectiveKind::AllGather => "all-gather",
            CollectiveKind::ReduceScatter(_) => "reduce-scatter",
            CollectiveKind::AllReduce(_) => "all-reduce",
            CollectiveKind::Broadcast { .. } => "broadcast",
            CollectiveKind::Split => "split",
            CollectiveKind::Connect => "connect",
        }
    }

    /// The queue behind whose earlier work the buffers of a call are ready.
    pub const fn queue(self) -> Queue {
        match self {
            CollectiveKind::AllGather | CollectiveKind::Split | CollectiveKind::Connect => Queue::Gather,
            CollectiveKind::ReduceScatter(_)
            | CollectiveKind::AllReduce(_)
            | CollectiveKind::Broadcast { .. } => Queue::Reduce,
        }
    }

    /// How elements are combined, if this kind combines any.
    pub const fn reduce_op(self) -> Option<ReduceOp> {
        match self {
            CollectiveKind::ReduceScatter(op) | CollectiveKind::AllReduce(op) => Some(op),
            _ => None,
        }
    }
}

/// What a collective is for; part of its fingerprint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Purpose {
    /// Parameters of a unit, in forward.
    Forward,
    /// Parameters of a unit, in backward.
    Backward,
    /// Gradients of a unit.
    Gradient,
    /// Loss, norm and other scalars of a step.
    Scalars,
    /// Statistics that an update rule declares.
    UpdateRule,
    /// Setting up.
    Setup,
}

impl Purpose {
    /// The name used in messages and traces.
    pub const fn name(self) -> &'static str {
        match self {
            Purpose::Forward => "forward",
            Purpose::Backward => "backward",
            Purpose::Gradient => "gradient",
            Purpose::Scalars => "scalars",
            Purpose::UpdateRule => "update rule",
            Purpose::Setup => "setup",
        }
    }
}

/// Identifies a collective call: two ranks that meet in one collective must have equal fingerprints.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Fingerprint {
    /// Number of collectives issued on this group before.
    pub sequence: u64,
    /// The kind.
    pub kind: CollectiveKind,
    /// What it is for.
    pub purpose: Purpose,
    /// The unit concerned, if one is.
    pub unit: Option<UnitId>,
    /// Type of the elements.
    pub dtype: DType,
    /// Elements of the unsharded side, over all segments.
    pub elements: usize,
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "#{} {}", self.sequence, self.kind.name())?;
        match self.kind {
            CollectiveKind::Broadcast { root } => write!(f, " from place {root}")?,
            // Sums are the rule, so only what differs from it is said.
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
