//! Models: the trait that one implements, the program that runs it, and the models that come with it.

mod architecture;
mod batch;
mod gpt2;
mod llama;
mod mlp;
mod program;
pub mod unsharded;

pub use architecture::Architecture;
pub use batch::Batch;
pub use gpt2::{Gpt2, Gpt2Config};
pub use llama::{Llama, LlamaConfig};
pub use mlp::{Mlp, MlpConfig};
pub use program::{ModelProgram, ProgramOptions};
