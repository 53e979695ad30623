//! The format-independent view of a checkpoint: named tensors, each covered by chunks that locate its bytes.
//!
//! Format readers fill it from metadata alone; tensor data is read only on demand. Everything that works across formats
//! (conversion, verification, comparison, listing) uses this view and knows no format.
//!
//! A [`Source`] is a sequence of bytes: a plain file, or a compressed item of one. A [`Chunk`] maps elements of a
//! tensor to an offset in a source. A [`Protection`] is a checksum that the format itself keeps over a range of a
//! source.

mod boxes;
mod contents;
mod coverage;
mod experts;
mod flatten;
mod join;
mod megatron;
mod opaque;
mod optimizer_name;
mod peft;
mod region;
mod role;
mod subtree;
mod text_part;
mod value;
mod wrappers;

pub(crate) use boxes::for_each_box;
pub use contents::{Checkpoint, Chunk, Key, Object, Protection, Role, Source, Tensor, join};
pub use experts::{ExpertNames, Experts, StackPlace, published_stack, stack_in_memory};
pub(crate) use experts::{STACKS_MAX, Weight as ExpertWeight, is_stack_of_experts, weights_of_stack};
pub(crate) use flatten::key_text;
pub use flatten::{Nested, Nesting, Tree, flatten, nest};
pub(crate) use megatron::{EXTRA_STATE, ModelSizes};
pub use optimizer_name::OptimizerName;
pub(crate) use optimizer_name::{number_span, parameter_span, with_parameter};
pub(crate) use peft::{Copies, MAGNITUDE};
pub use region::Region;
pub(crate) use region::{element_count, is_box_inside, len_bytes, packed_strides};
pub use role::Roles;
pub(crate) use role::has_model_step;
pub(crate) use text_part::is_of_text_part;
pub use value::{Global, Value};
pub(crate) use wrappers::Wrappers;
