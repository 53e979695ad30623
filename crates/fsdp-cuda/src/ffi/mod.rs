//! All unsafe code of this crate: calls of foreign libraries, wrapped so that callers can not misuse them.
//!
//! | module | library |
//! |---|---|
//! | [`driver`], [`streams`] | libcuda: devices and their memory; streams, events, copies and launches |
//! | [`nvrtc`] | libnvrtc: kernels compiled at run time |

pub(crate) mod driver;
pub(crate) mod nvrtc;
pub(crate) mod streams;
