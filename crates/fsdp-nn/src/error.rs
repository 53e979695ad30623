//! What can go wrong in a model, apart from the memory underneath.
//!
//! Blocks report these inside [`fsdp_core::Error::Program`], which names the block.

/// A model, its data or its description does not fit.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// An operation was given rows of another width than its parameters have.
    #[error("{op} expects rows of {expected} elements, but was given rows of {got}")]
    Width {
        /// The operation.
        op: &'static str,
        /// What its parameters say.
        expected: usize,
        /// What the tensor has.
        got: usize,
    },
    /// A block was called before what it builds on.
    #[error("{call} needs {missing}, which no earlier call left behind")]
    OutOfOrder {
        /// What was called.
        call: &'static str,
        /// What is not there.
        missing: &'static str,
    },
    /// Activation checkpointing was asked of a block outside all layers.
    #[error("only the blocks of a repeated layer can be recomputed, and this one belongs to none")]
    NotInLayer,
    /// A micro-batch that the step does not have.
    #[error("micro-batch {round} was asked for, but this rank's step has {rounds}")]
    NoMicroBatch {
        /// The micro-batch, counted from 0.
        round: usize,
        /// How many there are.
        rounds: usize,
    },
    /// A batch whose parts have different lengths.
    #[error(
        "a batch of {samples} samples of {seq} tokens has {ids} ids, {targets} targets and positions of {positions} tokens"
    )]
    BatchShape {
        /// Number of samples.
        samples: usize,
        /// Tokens per sample.
        seq: usize,
        /// Number of ids.
        ids: usize,
        /// Number of targets.
        targets: usize,
        /// Number of positions; as many as ids where there need be none.
        positions: usize,
    },
    /// A token that the vocabulary does not have.
    #[error(
        "token id {id} is outside the vocabulary of {vocab}; choose the tokenizer the model was made for"
    )]
    Token {
        /// The token.
        id: u32,
        /// Size of the vocabulary.
        vocab: usize,
    },
    /// A position that continues no document.
    #[error(
        "token {row} of the batch has position {position}; a sample begins at 0, and each token has the position after that \
         of the token before it, or begins a document at 0"
    )]
    Position {
        /// The token.
        row: usize,
        /// Its position.
        position: u32,
    },
    /// A sequence beyond the position table.
    #[error("sequences of {seq} tokens exceed the model's {positions} positions")]
    Positions {
        /// Tokens per sample.
        seq: usize,
        /// Rows of the position table.
        positions: usize,
    },
}
