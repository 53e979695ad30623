//! All unsafe code of the crate: the PJRT C API of a plugin, opened at run time.
//!
//! Nothing of it is needed at build time. The API is a table of functions, each of which takes a struct whose first field is
//! its size and whose fields are eight bytes wide, or stand alone in eight bytes; so a struct is an array of words here, and a
//! field is its index (`pjrt_c_api.h` of openxla/xla, Apache-2.0, has them in this order since version 0.50; older versions, and
//! those of another major number, are not called). A plugin takes words behind the size that it is told as not given, and newer
//! plugins take what older callers leave out.
#![allow(unsafe_code)]

mod api;
mod client;
mod description;
mod elf;
mod executable;
mod key_value;
mod options;
mod topology;

pub(crate) use api::Plugin;
pub(crate) use client::{Client, DeviceBuffer};
pub(crate) use executable::Executable;
pub use executable::MemoryNeed;
pub(crate) use options::CompileOptions;
pub use options::Setting;
pub(crate) use topology::Topology;
