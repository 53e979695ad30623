//! All unsafe code of the crate: the PJRT C API of a plugin, opened at run time.
//!
//! Nothing is needed at build time. The API is a table of functions, each of which takes a struct whose first field is
//! its size and whose fields occupy eight bytes each (narrower ones are padded); so a struct is an array of words here,
//! and a field is an index. `pjrt_c_api.h` of openxla/xla (Apache-2.0) has the fields in this order since version 0.50;
//! older versions, and other major versions, are not called. A plugin treats fields past the given size as absent, and
//! newer plugins accept structs from older callers.
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
