//! Models: the trait that they implement, the program that runs them, and the included models.

mod adapted;
mod architecture;
mod batch;
mod counted;
mod decoder;
mod gpt2;
mod kinds;
mod micro_batch;
mod mlp;
mod program;
mod routers;
mod session;
pub mod unsharded;

pub use adapted::Adapted;
pub use architecture::Architecture;
pub(crate) use batch::token_bytes;
pub use batch::{Batch, RowFacts};
pub use counted::{Counted, StepParts};
pub use decoder::{
    Decoder, DecoderConfig, DeltaNet, LatentAttention, LayerConfig, Mixture, Names, NormKind, NormsPlace,
    PackedExperts, QkNorm, RopeConfig, RopeScaling, SharedExpert, Yarn,
};
pub use gpt2::{Gpt2, Gpt2Config};
#[cfg(test)]
pub(crate) use kinds::Kinds;
pub(crate) use kinds::Shape;
pub(crate) use micro_batch::{MicroBatchPlan, PlannedCall};
pub use mlp::{Mlp, MlpConfig};
pub use program::{ModelProgram, ProgramOptions};
pub(crate) use routers::router_bytes;
pub use session::Session;
