//! What is composed of ATen's operations instead of having a kernel of ours: the same bits.

#[path = "../../device/kernels.rs"]
mod kernels;
mod subject;
#[path = "../../device/update.rs"]
mod update;
#[path = "../../device/values.rs"]
mod values;
