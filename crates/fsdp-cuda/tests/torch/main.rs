//! libtorch as a backend, on the host.

mod operations;
