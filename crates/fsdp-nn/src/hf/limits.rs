//! The maximum sizes in a `config.json`.
//!
//! An untrusted file must not determine how much memory its parsing takes, nor let a product of sizes overflow. Each
//! limit is several times that of any published model. Before any weight is allocated, memory grows with the
//! description of the layers (some kilobytes each) and with one number per pair of elements of a head. Together with
//! [`ELEMENTS_MAX`](fsdp_core::model::ELEMENTS_MAX), which bounds the parameters of any model, the limits keep every
//! count of elements and bytes within 63 bits.

/// Number of layers; the descriptions of this many take some 20 MiB.
pub(super) const LAYERS_MAX: usize = 1 << 12;
/// Elements per hidden state, and of all heads together.
pub(super) const WIDTH_MAX: usize = 1 << 20;
/// Inner width of the MLP: four times the hidden state, as in GPT-2.
pub(super) const INNER_MAX: usize = 4 * WIDTH_MAX;
/// Experts per layer. With the maximum number of layers that allows 16 million experts; the description of a model
/// takes a few hundred bytes for each.
pub(super) const EXPERTS_MAX: usize = 1 << 12;
/// Tokens in the vocabulary, and positions.
pub(super) const ROWS_MAX: usize = 1 << 24;
