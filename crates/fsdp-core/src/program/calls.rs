//! The calls of blocks that a micro-batch consists of.

use super::ForwardMode;
use crate::model::{BlockId, ModelSpec};

/// Number of a micro-batch on its rank, counted from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Round(pub usize);

/// One call of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BlockCall {
    /// Forward of a block other than the last one.
    Forward(BlockId, ForwardMode),
    /// Forward of the last block, the loss, and backward.
    ForwardBackward(BlockId),
    /// Forward of the last block and the loss.
    Evaluate(BlockId),
    /// Backward of a block other than the last one; frees what forward saved for it.
    Backward(BlockId),
}

impl BlockCall {
    /// The block.
    pub const fn block(self) -> BlockId {
        match self {
            BlockCall::Forward(block, _)
            | BlockCall::ForwardBackward(block)
            | BlockCall::Evaluate(block)
            | BlockCall::Backward(block) => block,
        }
    }

    /// Whether the block is the last one.
    pub const fn is_last(self) -> bool {
        matches!(self, BlockCall::ForwardBackward(_) | BlockCall::Evaluate(_))
    }

    /// Whether the call computes gradients.
    pub const fn is_backward(self) -> bool {
        matches!(self, BlockCall::ForwardBackward(_) | BlockCall::Backward(_))
    }

    /// Whether the call belongs to an evaluation.
    pub const fn evaluates(self) -> bool {
        matches!(self, BlockCall::Forward(_, ForwardMode::Evaluate) | BlockCall::Evaluate(_))
    }

    /// The name used in printed schedules and traces.
    pub const fn name(self) -> &'static str {
        match self {
            BlockCall::Forward(_, ForwardMode::Recompute) => "recompute",
            BlockCall::Forward(..) | BlockCall::Evaluate(_) => "forward",
            BlockCall::ForwardBackward(_) => "forward-backward",
            BlockCall::Backward(_) => "backward",
        }
    }
}

/// What forward saves for backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Checkpointing {
    /// Everything.
    None,
    /// Only the input of every layer; layers are recomputed in backward.
    Full,
    /// The input of every layer and the outputs of matrix products and of attention; all else is recomputed.
    Selective,
}

impl Checkpointing {
    /// The mode in which recomputed layers run forward; `None` if no layer is recomputed.
    pub const fn forward_mode(self) -> Option<ForwardMode> {
        match self {
            Checkpointing::None => None,
            Checkpointing::Full => Some(ForwardMode::Checkpoint),
            Checkpointing::Selective => Some(ForwardMode::CheckpointProducts),
        }
    }
}

/// The purpose of running a micro-batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Pass {
    /// Loss and gradients.
    Train(Checkpointing),
    /// The loss only.
    Evaluate,
}

/// Returns the calls of a micro-batch, in order: forward of all blocks, then backward down to the first block with a
/// trained parameter, with the layers recomputed that are checkpointed.
///
/// # Panics
/// When the model has no blocks.
pub fn calls(spec: &ModelSpec, pass: Pass) -> Vec<BlockCall> {
    let last = BlockId(spec.blocks.len() - 1);
    let forward = |mode: &dyn Fn(BlockId) -> ForwardMode| {
        (0..last.0).map(|block| BlockCall::Forward(BlockId(block), mode(BlockId(block)))).collect()
    };
    let Pass::Train(checkpointing) = pass else {
        let mut calls: Vec<BlockCall> = forward(&|_| ForwardMode::Evaluate);
        calls.push(BlockCall::Evaluate(last));
        return calls;
    };
    let first = spec.first_trainable_block().unwrap_or(last);
    // Layers below the first trained parameter save nothing for backward, so they need no checkpointing.
    let checkpointed = |block: BlockId| {
        let layer = spec.block(block).layer;
        let reaches = || spec.blocks[first.0..].iter().any(|other| other.layer == layer);
        checkpointing.forward_mode().filter(|_| layer.is_some() && reaches())
    };
    let mut calls: Vec<BlockCall> = forward(&|block| checkpointed(block).unwrap_or(ForwardMode::Record));
    calls.push(BlockCall::ForwardBackward(last));
    for block in (first.0..last.0).rev().map(BlockId) {
        let layer = spec.block(block).layer;
        let ends_layer = spec.blocks[block.0 + 1].layer != layer || block.0 + 1 == last.0;
        if ends_layer && checkpointed(block).is_some() {
            let start = (0..=block.0).rev().take_while(|&other| spec.blocks[other].layer == layer).last();
            let members = (start.unwrap_or(block.0)..=block.0).map(BlockId);
            calls.extend(members.map(|member| BlockCall::Forward(member, ForwardMode::Recompute)));
        }
        calls.push(BlockCall::Backward(block));
    }
    calls
}
