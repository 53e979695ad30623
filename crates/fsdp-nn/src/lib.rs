//! Compute: kernels, tape, layers, models, update rules and the host backend.
