//! Tensors of a block, and how they are kept for backward.

use std::sync::Arc;

use fsdp_core::Error;
use fsdp_core::memory::{Buffer, Slice};

use super::forward::Scope;
use crate::backend::Backend;

/// A value on a tape, to which gradients are attributed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Value {
    /// Index on the tape.
    pub index: usize,
    /// Whether a trained parameter, of this block or an earlier one, has a part in it.
    pub needs_gradient: bool,
}

/// A matrix of rows that an operation made. Operations consume their inputs; clone a tensor to use it twice.
pub struct Tensor<M: Backend> {
    pub(super) buffer: M::Buffer,
    pub(super) value: Value,
    pub(super) width: usize,
    pub(super) again: Option<Arc<dyn Recompute<M>>>,
}

impl<M: Backend> Clone for Tensor<M> {
    fn clone(&self) -> Self {
        Self { buffer: self.buffer.clone(), value: self.value, width: self.width, again: self.again.clone() }
    }
}

impl<M: Backend> Tensor<M> {
    /// A tensor over a buffer of rows of `width` elements.
    pub fn new(buffer: M::Buffer, value: Value, width: usize) -> Self {
        Self { buffer, value, width, again: None }
    }

    /// The same tensor, whose contents need not be kept for backward because `again` can compute them.
    pub fn with_recompute(self, again: Arc<dyn Recompute<M>>) -> Self {
        Self { again: Some(again), ..self }
    }

    /// Elements of a row.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.buffer.len() / self.width
    }

    /// The value that gradients are attributed to.
    pub fn value(&self) -> Value {
        self.value
    }

    /// The elements.
    pub fn slice(&self) -> Slice<'_, M::Buffer> {
        Slice::whole(&self.buffer)
    }

    /// A handle of the storage.
    pub fn into_buffer(self) -> M::Buffer {
        self.buffer
    }

    /// What to keep of the tensor for backward.
    pub fn into_saved(self) -> Saved<M> {
        match self.again {
            Some(again) => Saved::Again(again),
            None => Saved::Kept(self.buffer),
        }
    }
}

/// A cheap operation that can make its output a second time.
pub trait Recompute<M: Backend>: Send + Sync {
    /// The output, in a new workspace buffer.
    ///
    /// # Errors
    /// Those of the memory.
    fn recompute(&self, scope: &Scope<'_, M>) -> Result<M::Buffer, Error>;
}

/// A tensor kept for backward.
pub enum Saved<M: Backend> {
    /// As its storage.
    Kept(M::Buffer),
    /// As a way to compute it again.
    Again(Arc<dyn Recompute<M>>),
}

impl<M: Backend> Saved<M> {
    /// The tensor's elements.
    ///
    /// # Errors
    /// Those of the memory.
    pub fn load(&self, scope: &Scope<'_, M>) -> Result<M::Buffer, Error> {
        match self {
            Saved::Kept(buffer) => Ok(buffer.clone()),
            Saved::Again(again) => again.recompute(scope),
        }
    }
}
