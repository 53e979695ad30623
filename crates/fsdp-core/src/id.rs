//! The numbers of parameters, blocks and units, by which operations, collectives and errors name parts of a model.

/// Index of a parameter in [`ModelSpec::params`](crate::model::ModelSpec::params).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ParamId(pub usize);

/// Index of a block in [`ModelSpec::blocks`](crate::model::ModelSpec::blocks).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockId(pub usize);

/// Index of a unit; the root unit, if it holds parameters, is unit 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct UnitId(pub usize);
