//! CUDA memory and kernels through the real bindings, on a fake driver.

#[path = "../fake_cuda/mod.rs"]
mod fake_cuda;

mod memory;
mod world;
