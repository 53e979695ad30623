//! All unsafe code of this crate: calls into shared libraries that are opened when they are needed.
//!
//! What is above sees safe functions. Every unsafe block says which facts it relies on, and who checked them.

pub mod library;
pub(crate) mod nccl;
