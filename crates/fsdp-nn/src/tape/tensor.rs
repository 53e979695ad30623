//! Tensors of a block, and how they are kept for backward.

use std::sync::Arc;

use fsdp_core::Error;
use fsdp_core::memory::{Buffer, Slice};

use super::backward::Backward;
use super::forward::Scope;
use super::products::Mark;
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
    /// `None` in a recomputation, where nothing reads the contents.
    buffer: Option<M::Buffer>,
    value: Value,
    rows: usize,
    width: usize,
    again: Option<Arc<dyn Recompute<M>>>,
    /// The products that have a part in it and that nothing has read on the way.
    marks: Vec<Mark>,
}

impl<M: Backend> Clone for Tensor<M> {
    fn clone(&self) -> Self {
        Self {
            buffer: self.buffer.clone(),
            value: self.value,
            rows: self.rows,
            width: self.width,
            again: self.again.clone(),
            marks: self.marks.clone(),
        }
    }
}

impl<M: Backend> Tensor<M> {
    /// A tensor over a buffer of rows of `width` elements.
    pub fn new(buffer: M::Buffer, value: Value, width: usize) -> Self {
        let rows = buffer.len() / width;
        Self { buffer: Some(buffer), value, rows, width, again: None, marks: Vec::new() }
    }

    /// A tensor of which only the sizes are known: nothing reads its contents.
    pub(super) fn without_contents(rows: usize, value: Value, width: usize) -> Self {
        Self { buffer: None, value, rows, width, again: None, marks: Vec::new() }
    }

    /// The same tensor; to read its contents is to read those products.
    pub(super) fn with_marks(self, marks: Vec<Mark>) -> Self {
        Self { marks, ..self }
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
        self.rows
    }

    /// The value that gradients are attributed to.
    pub fn value(&self) -> Value {
        self.value
    }

    /// The elements.
    ///
    /// # Panics
    /// When a recomputation reads what its forward did not.
    pub fn slice(&self) -> Slice<'_, M::Buffer> {
        self.marks.iter().for_each(Mark::read);
        Slice::whole(self.buffer.as_ref().expect(UNREAD))
    }

    /// A handle of the storage.
    ///
    /// # Panics
    /// As [`Tensor::slice`].
    pub fn into_buffer(self) -> M::Buffer {
        self.marks.iter().for_each(Mark::read);
        self.buffer.expect(UNREAD)
    }

    /// The storage, if there are contents, for an operation that only passes them on; and the products to
    /// read with those of its output.
    pub(super) fn into_parts(self) -> (Option<M::Buffer>, Vec<Mark>) {
        (self.buffer, self.marks)
    }

    /// What to keep of the tensor for backward.
    ///
    /// # Panics
    /// As [`Tensor::slice`].
    pub fn into_saved(self) -> Saved<M> {
        match self.again {
            Some(again) => Saved::Again(again),
            None => Saved::Kept(self.into_buffer()),
        }
    }
}

const UNREAD: &str = "a recomputation reads only what its forward read";

/// A cheap operation that can make its output a second time.
pub trait Recompute<M: Backend>: Send + Sync {
    /// The output, in a new workspace buffer.
    ///
    /// # Errors
    /// Those of the memory.
    fn recompute(&self, scope: &Scope<'_, M>) -> Result<M::Buffer, Error>;

    /// The operation, if its backward makes its output on the way.
    fn backward_again(&self) -> Option<&dyn BackwardAgain<M>> {
        None
    }
}

/// An operation whose backward reads what its output is made of, so that one pass gives both.
pub trait BackwardAgain<M: Backend> {
    /// Takes the gradient of the output, passes on those of the inputs, and returns the output in the gradient's place.
    ///
    /// # Errors
    /// Those of the memory.
    fn backward_again(&self, walk: &mut Backward<'_, M>, gradient: M::Buffer) -> Result<M::Buffer, Error>;
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

    /// The operation that makes the tensor again in its backward, if there is one.
    pub(super) fn backward_again(&self) -> Option<&dyn BackwardAgain<M>> {
        match self {
            Saved::Kept(_) => None,
            Saved::Again(again) => again.backward_again(),
        }
    }
}
