//! Measured runs, published or one's own, beside what is predicted of them.
//!
//! A run is a line of a CSV ([`Row`]). It is compiled into a schedule as ours are, with the policies that its software has, and
//! priced with what that software does differently. What the model does not cover is told apart by a reason.

mod check;
mod recipe;
mod row;
mod run;

pub use check::{Check, Checked, Errors, check, project};
pub use row::{Row, RowError, read};
pub use run::{Prepared, Run};
