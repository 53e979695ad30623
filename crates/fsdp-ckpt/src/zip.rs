//! Zip archives as torch uses them: stored records only.

pub(crate) mod writer;
