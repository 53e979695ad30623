//! All unsafe code of this crate: calls of foreign libraries, wrapped so that callers can not misuse them.
//!
//! | module | library |
//! |---|---|
//! | [`torch`] | libtorch, through the shim: what its bindings lack, and tensors over memory of ours |

#[cfg(feature = "torch")]
pub(crate) mod torch;
