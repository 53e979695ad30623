//! Finds in a checkpoint of any trainer the content that training needs, by the names of a model: weights, optimizer
//! states and step counts.
//!
//! Trainers agree on the tensors and differ in everything around them: prefixes, wrappers in names, flat or nested
//! states, states by parameter number. Names are compared without wrappers, and may share any prefix. [`Found`] lists
//! the tensors of the checkpoint that belong to each parameter; [`StateRows`] reads rows of them. [`ModelWeights`] are
//! the initial weights of a run that does not resume.

mod adapters;
mod bitsandbytes;
mod decoded;
mod found;
mod mxfp4;
mod names;
mod numbered;
mod optimizer;
mod rows;
mod statistics;
mod steps;
mod wanted;
mod weights;

pub use bitsandbytes::{Nf4Weight, SavedNested, SavedScales};
pub use found::Found;
pub use mxfp4::Mxfp4Weight;
pub use rows::StateRows;
pub use statistics::Statistics;
pub use steps::Count;
pub use wanted::Wanted;
pub use weights::{ModelWeights, ViewedModel};

#[cfg(test)]
mod tests;
