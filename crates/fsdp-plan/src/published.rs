//! Measured runs, published or one's own, beside what is predicted of them.
//!
//! A run is a line of a CSV ([`Row`]). It is compiled into a schedule as ours are, with the policies that its software has, and
//! priced with what that software does differently. What the model does not cover is told apart by a reason.

mod check;
mod columns;
mod error;
mod hardware;
mod memory;
mod recipe;
mod row;
mod run;
mod sizes;
mod words;

pub use check::{Check, Checked, Errors, Found, check, project};
pub use error::RowError;
pub use memory::PeakMemory;
pub use row::{Row, Runs, read};
pub use run::{Prepared, Run};
