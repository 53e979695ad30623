//! Checks that operations composed of ATen's give the same bits as the project's own kernels.

#[path = "../../device/kernels.rs"]
mod kernels;
mod subject;
#[path = "../../device/update.rs"]
mod update;
#[path = "../../device/values.rs"]
mod values;
