//! The safetensors format.
//!
//! ```text
//! 0            8                        8 + N                                   end of file
//! +------------+--------------------------+----------+----------+-- .. --+----------+
//! | N, u64 LE  | header: JSON, N bytes,   | tensor   | tensor   |        | tensor   |
//! |            | padded with spaces       | 0        | 1        |        | last     |
//! +------------+--------------------------+----------+----------+-- .. --+----------+
//!                                          data offsets count from here
//! {"__metadata__":{"format":"pt"},"w":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}, ..}
//! ```
//!
//! Elements are little-endian, in C order. Tensors may be in any order but have no gaps or overlaps, and the last one
//! ends the file, so a header that passes [`Header::parse`] accounts for every byte.
//!
//! A header is untrusted input. Its length is bounded ([`HEADER_LEN_MAX`]) and compared with the file before anything
//! is allocated; all arithmetic is checked; and every rule above is verified once, in [`Header::parse`]. After that,
//! offsets are trusted.

mod header;
mod header_json;
mod reader;
mod tensor_type;

pub(crate) use header::row_bytes;
pub use header::{HEADER_LEN_MAX, Header, Metadata, TensorEntry, TensorSpec};
pub use reader::SafetensorsReader;
pub(crate) use reader::malformed;
pub use tensor_type::TensorType;
