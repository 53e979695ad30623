//! Streaming export: a model is planned as a whole, written in place by any number of writers, and appears
//! under its final names only when every row has been written.
//!
//! ```text
//! ExportPlan::new ---- create() --> Export ------------------- commit(receipts) --> final names
//!    |  (a value:                   (owns the temporary files,                 \--> or an error, and nothing
//!    |   clone it, send it)          removes them when dropped)
//!    +-- writer() --> ExportWriter -- write_rows*(..) -- finish() --> Receipt
//!    +-- writer() --> ExportWriter -- write_rows*(..) -- finish() --> Receipt
//! ```
//!
//! The plan fixes every byte's place beforehand, so writers need not know of each other: each opens the
//! temporary files itself and writes at its own offsets. A [`Receipt`] says which rows a writer wrote; the
//! commit holds the receipts against the plan, so a row that nobody wrote, or that two wrote, is an error
//! and never a row of zeros in a finished file.
//!
//! Temporary files carry the final name with `.tmp` appended and lie beside it. They are locked while an
//! [`Export`] lives; leftovers of a killed process are overwritten by the next export to the same path.
//!
//! A sharded model is several files and an index, which no file system renames as one. The commit removes
//! the index of an older model first and puts the new one in place last: after a crash in between there is
//! no index, so no reader sees old and new files mixed.

mod commit;
mod coverage;
mod plan;
mod writer;

pub use commit::Export;
pub use coverage::Receipt;
pub(crate) use plan::cannot_lay_out;
pub use plan::{ExportPlan, PlannedFile};
pub use writer::ExportWriter;
