//! What a collective call is: its kind, its purpose, and what must be equal on all ranks that meet in it.

use std::fmt;

use crate::dtype::DType;

/// The kind of a collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CollectiveKind {
    /// Every rank receives the concatenation of all inputs, in rank order.
    AllGather,
    /// Every rank receives its part of the sum of all inputs.
    ReduceScatter,
    /// Every rank receives the sum of all inputs.
    AllReduce,
    /// Every rank receives what one rank of the group has.
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
            CollectiveKind::ReduceScatter => "reduce-scatter",
            CollectiveKind::AllReduce => "all-reduce",
            CollectiveKind::Broadcast { .. } => "broadcast",
            CollectiveKind::Split => "split",
            CollectiveKind::Connect => "connect",
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
    pub unit: Option<usize>,
    /// Type of the elements.
    pub dtype: DType,
    /// Elements of the unsharded side, over all segments.
    pub elements: usize,
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "#{} {}", self.sequence, self.kind.name())?;
        if let CollectiveKind::Broadcast { root } = self.kind {
            write!(f, " from place {root}")?;
        }
        write!(f, " ({}", self.purpose.name())?;
        if let Some(unit) = self.unit {
            write!(f, ", unit {unit}")?;
        }
        write!(f, ", {} x {})", self.elements, self.dtype)
    }
}
