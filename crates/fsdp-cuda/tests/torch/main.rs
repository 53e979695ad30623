//! libtorch as a backend, on the host.

mod mixed_precision;
mod operations;
mod parity;
mod ranks;
mod support;
