//! Errors of models, apart from those of the memory.
//!
//! Blocks report them inside [`fsdp_core::Error::Program`], which names the block.

use fsdp_core::DType;
use fsdp_core::program::BlockCall;

/// An inconsistency in a model, its data or its description.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// The width of a tensor differs from the width that the operation's parameters imply.
    #[error("{op} expects rows of {expected} elements, but was given rows of {got}")]
    Width {
        /// Name of the operation.
        op: &'static str,
        /// Elements per row, according to the parameters.
        expected: usize,
        /// Elements per row of the tensor.
        got: usize,
    },
    /// The heads of attention cannot be shared evenly among chunks of samples.
    #[error(
        "{heads} query heads and {kv_heads} key heads cannot be shared among {chunks} chunks of samples, but among {fitting}"
    )]
    SharedHeads {
        /// Number of query heads.
        heads: usize,
        /// Number of key/value heads.
        kv_heads: usize,
        /// Number of chunks.
        chunks: usize,
        /// The most chunks below that among which they can be shared.
        fitting: usize,
    },
    /// A parameter is gathered in another dtype than the operation that reads it computes in.
    #[error(
        "`{name}` is gathered in {gathered}, but what reads it computes in {dtype}: {}",
        if *gathered == gathered.master() {
            "norms, linear maps, routers with their corrections, and A_log with dt_bias can be kept wider than the others"
        } else {
            "keep it as wide as the others that are read with it"
        }
    )]
    Dtype {
        /// Name of the parameter.
        name: String,
        /// Its dtype.
        gathered: DType,
        /// The dtype of the operation.
        dtype: DType,
    },
    /// Linear attention over samples in chunks.
    #[error(
        "linear attention carries a state from token to token, so samples cannot be cut into {chunks} chunks for the ranks of a \
         context axis; without that axis they are whole"
    )]
    LinearAttention {
        /// Number of chunks.
        chunks: usize,
    },
    /// The experts of a mixture cannot be cut into chunks.
    #[error("the {experts} experts of a mixture cannot be cut into {chunks} equal chunks")]
    ExpertChunks {
        /// Number of experts.
        experts: usize,
        /// Number of chunks.
        chunks: usize,
    },
    /// Samples that cannot be cut into chunks.
    #[error("samples of {seq} positions cannot be cut into {chunks} equal chunks")]
    Chunks {
        /// Number of chunks.
        chunks: usize,
        /// Positions of a sample.
        seq: usize,
    },
    /// A block was called out of order.
    #[error("expected the call {expected:?}, got {got:?}")]
    OutOfOrder {
        /// The next call of the micro-batch; `None` after the last one.
        expected: Option<BlockCall>,
        /// The call that was made.
        got: BlockCall,
    },
    /// The plan of a micro-batch is wrong.
    #[error("the plan of the block's operations is wrong: {fault}; please report this")]
    Plan {
        /// What is wrong.
        fault: PlanFault,
    },
    /// A micro-batch index beyond the step's micro-batches.
    #[error("micro-batch {round} was requested, but this rank's step has {rounds}")]
    NoMicroBatch {
        /// Index of the micro-batch, from 0.
        round: usize,
        /// Number of micro-batches in the step.
        rounds: usize,
    },
    /// The parts of a batch differ in length.
    #[error(
        "a batch of {samples} samples of {seq} tokens has {ids} ids, {targets} targets and {positions} positions"
    )]
    BatchShape {
        /// Number of samples.
        samples: usize,
        /// Tokens per sample.
        seq: usize,
        /// Number of token ids.
        ids: usize,
        /// Number of targets.
        targets: usize,
        /// Number of positions; equal to the number of ids if the batch has none.
        positions: usize,
    },
    /// A token id outside the vocabulary.
    #[error("token id {id} is outside the vocabulary of {vocab}; use the model's own tokenizer")]
    Token {
        /// The token id.
        id: u32,
        /// Size of the vocabulary.
        vocab: usize,
    },
    /// A position that neither continues a document nor begins one.
    #[error(
        "token {row} of the batch has position {position}; positions start at 0 in each sample, and each is \
         the previous one plus 1, or 0 where a document begins"
    )]
    Position {
        /// Index of the token in the batch.
        row: usize,
        /// Its position.
        position: u32,
    },
    /// A sequence longer than the position table.
    #[error("sequences of {seq} tokens exceed the model's {positions} positions")]
    Positions {
        /// Tokens per sample.
        seq: usize,
        /// Rows of the position table.
        positions: usize,
    },
}

/// A fault in the plan of a micro-batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanFault {
    /// An operation accesses a place that is not live.
    #[error("a place is accessed before it begins or after it ends")]
    NotLive,
    /// An operation writes to the data of the micro-batch, or to a parameter.
    #[error("what is only read is written")]
    ReadOnly,
    /// A place begins while it is live.
    #[error("a place begins while it is live")]
    Live,
    /// An operation reads what nothing has written.
    #[error("what is read was not written")]
    Unwritten,
    /// An operation overwrites what nothing has read.
    #[error("what was written is overwritten before it is read")]
    Unread,
    /// A place is accessed or ends, or a list does, before a redistribution from or to it is complete.
    #[error("a place is accessed or ends while its redistribution runs")]
    InFlight,
    /// A value is left at the end.
    #[error("a value is still live after the last call")]
    Left,
    /// A loss or a gradient is not the one that the model's graphs define.
    #[error("a loss or gradient differs from the one that the model defines")]
    Differs,
}
