//! What users of the library need, from the crates that have it.
#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

pub use fsdp_core::Error;

pub mod model {
    //! What a model is made of: its description, and the computation of each block.
    //!
    //! A model implements [`Architecture`]: a [`Description`], built with [`Describe`] from layers, and for each block the
    //! calls to a [`Builder`]. [`HfConfig`] builds the model of a Hugging Face `config.json`.

    pub use fsdp_core::model::BlockId;
    pub use fsdp_nn::ModelError;
    pub use fsdp_nn::graph::{Builder, Tensor};
    pub use fsdp_nn::hf::HfConfig;
    pub use fsdp_nn::layer::{
        Attention, Describe, Description, Embedding, Head, Init, LayerNorm, Linear, Norm, RmsNorm, Rope,
    };
    pub use fsdp_nn::model::Architecture;
    pub use fsdp_nn::op::Function;
}

pub mod ranks {
    //! Where ranks run: as threads of this process, with memory and kernels of the host.
    //!
    //! [`Threads`] starts them. Ranks in several processes, on GPUs and on XLA devices are started by the command.

    pub use fsdp_nn::{HostMemory, HostOptions};
    pub use fsdp_sim::{ThreadOptions, Threads};
}

pub mod run {
    //! Runs: the run file, training, evaluation, and verification against unsharded training.
    //!
    //! [`Resolved`] is a run file with all its defaults. With a model and its weights it is a [`Job`], which is checked
    //! before any rank starts.

    pub use fsdp_config::{ConfigError, Loaded, Resolved};
    pub use fsdp_data::contain_chat_templates;
    pub use fsdp_train::evaluate::{Evaluated, evaluate};
    pub use fsdp_train::train::{Reporter, Resume, RunOptions, Summary, train};
    pub use fsdp_train::verify::{VerifyOptions, VerifyReport, verify};
    pub use fsdp_train::{InitSource, Job, TrainError};
}

pub mod checkpoint {
    //! Checkpoints of any format: reading, converting, verifying and comparing them.
    //!
    //! [`open`] finds out the format, and reads no more than the names and shapes. Tensors are never held in memory as a
    //! whole.

    pub use fsdp_ckpt::Error;
    pub use fsdp_ckpt::checkpoint::{Checkpoint, Tensor};
    pub use fsdp_ckpt::conversion::{Conversion, ConversionReport, Target, convert};
    pub use fsdp_ckpt::diff::{Diff, Tolerance, diff};
    pub use fsdp_ckpt::formats::open;
    pub use fsdp_ckpt::transfer::{NoProgress, Options, Progress};
    pub use fsdp_ckpt::verify::{Verification, verify};
}
