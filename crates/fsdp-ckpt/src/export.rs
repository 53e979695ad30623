//! Streaming export: a model is planned as a whole, written in place by any number of writers, and appears under its
//! final names only once every row has been written.
//!
//! ```text
//! ExportPlan::new ---- create() --> Export ------------------- commit(receipts) --> final names
//!    |  (a value:                   (owns the temporary files,                 \--> or an error, and nothing
//!    |   clone it, send it)          removes them when dropped)
//!    +-- writer() --> ExportWriter -- write_rows*(..) -- finish() --> Receipt
//!    +-- writer() --> ExportWriter -- write_rows*(..) -- finish() --> Receipt
//! ```
//!
//! The plan fixes the place of every byte, so writers are independent: each opens the temporary files itself and writes
//! at its own offsets. A [`Receipt`] records which rows a writer wrote. The commit compares the receipts with the plan,
//! so a row that was never written, or was written twice, is an error and not a row of zeros in a finished file.
//!
//! A temporary file has the final name with `.tmp` appended, in the same directory. It is locked while an [`Export`]
//! lives; the next export to the same path overwrites leftovers of a killed process.
//!
//! A sharded model is several files and an index, which no file system can rename together. The commit removes the
//! index of an older model first and renames the new one last: after a crash in between there is no index, so readers
//! never see old and new files mixed.

mod commit;
mod coverage;
mod plan;
mod writer;

pub use commit::Export;
pub use coverage::Receipt;
pub(crate) use plan::cannot_lay_out;
pub use plan::{ExportPlan, PlannedFile};
pub use writer::ExportWriter;
