//! The largest sizes of a `config.json`, in one place.
//!
//! A file that somebody else wrote must not decide how much memory its reading takes, nor let a product of sizes overflow.
//! Each limit is several times what any published model has. What grows with a size before any weight is allocated is the
//! description of the layers (some kilobytes each) and one number per pair of elements of a head. Together with
//! [`ELEMENTS_MAX`](fsdp_core::model::ELEMENTS_MAX), which bounds the parameters of any model, they keep every count of
//! elements and bytes within 63 bits.

/// Layers: their descriptions then take some 20 MiB.
pub(super) const LAYERS_MAX: usize = 1 << 12;
/// Elements of a hidden state, and of all heads together.
pub(super) const WIDTH_MAX: usize = 1 << 20;
/// Elements between the two halves of the MLP: four times as many, as GPT-2 has them.
pub(super) const INNER_MAX: usize = 4 * WIDTH_MAX;
/// Experts of a layer. With as many layers as there may be they are a million: the description of a model takes a few
/// hundred bytes for each.
pub(super) const EXPERTS_MAX: usize = 1 << 12;
/// Tokens of a vocabulary, and positions.
pub(super) const ROWS_MAX: usize = 1 << 24;
