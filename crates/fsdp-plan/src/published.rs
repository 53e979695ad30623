//! Compares measured runs, published or one's own, with their predictions.
//!
//! A run is a line of a CSV ([`Row`]). It is compiled into a schedule like the project's own runs, with the policies of
//! its software, and priced with what that software does differently. Runs outside of the model are reported with a
//! reason.

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
