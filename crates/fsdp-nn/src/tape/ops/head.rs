//! The end of a model: hidden states to logits to losses, in chunks of rows.
//!
//! These are no nodes: the last block runs forward and backward in one, so nothing of them is recorded.

use fsdp_core::Error;
use fsdp_core::memory::{Buffer, Category, Slice, SliceMut};
use fsdp_core::program::Gradients;

use crate::backend::{Backend, HeadDims};
use crate::conformance::Calls;
use crate::error::ModelError;
use crate::layer::Head;
use crate::tape::{Scope, Tensor};

fn check<M: Backend>(scope: &Scope<'_, M>, head: &Head, x: &Tensor<M>) -> Result<HeadDims, Error> {
    if x.width() != head.hidden {
        let source = ModelError::Width { op: "head", expected: head.hidden, got: x.width() };
        return Err(scope.error(source));
    }
    let (rows, vocab) = (x.rows(), head.vocab);
    let chunk_rows = scope.memory.head_chunks().rows(rows, vocab);
    Ok(HeadDims { rows, hidden: head.hidden, vocab, chunk_rows })
}

/// The loss of every row, without gradients.
///
/// # Errors
/// A width that does not fit, a parameter that is not there, or those of the memory.
pub fn head_loss<M: Backend>(
    scope: &Scope<'_, M>,
    head: &Head,
    x: Tensor<M>,
    targets: Slice<'_, M::Buffer>,
    losses: SliceMut<'_, M::Buffer>,
) -> Result<(), Error> {
    let dims = check(scope, head, &x)?;
    let mut logits = scope.statistics(Category::Workspace, dims.chunk_rows * dims.vocab)?;
    let weight = scope.param(head.weight)?;
    scope.memory.head_loss(dims, x.slice(), weight, targets, losses, SliceMut::whole(&mut logits))
}

/// The loss of every row, and the gradients of their sum: of the weight into `gradients`, of the hidden
/// states returned.
///
/// # Errors
/// As [`head_loss`].
pub fn head_loss_backward<M: Backend>(
    scope: &Scope<'_, M>,
    head: &Head,
    x: Tensor<M>,
    targets: Slice<'_, M::Buffer>,
    losses: SliceMut<'_, M::Buffer>,
    gradients: &mut Gradients<M::Buffer>,
) -> Result<M::Buffer, Error> {
    let dims = check(scope, head, &x)?;
    let mut dx = scope.allocate(Category::Activation, x.slice().len)?;
    let chunk = dims.chunk_rows * dims.vocab;
    let mut logits = scope.statistics(Category::Workspace, chunk)?;
    let rounds = scope.memory.head_chunks().round(x.slice().buffer.dtype());
    let mut dlogits = if rounds { Some(scope.allocate(Category::Workspace, chunk)?) } else { None };
    let weight = scope.param(head.weight)?;
    scope.memory.head_loss_backward(
        dims,
        x.slice(),
        weight,
        targets,
        losses,
        SliceMut::whole(&mut logits),
        dlogits.as_mut().map(SliceMut::whole),
        SliceMut::whole(&mut dx),
        gradients.target(head.weight),
    )?;
    Ok(dx)
}

/// The logits of every row, in the master dtype.
///
/// # Errors
/// As [`head_loss`].
pub fn head_logits<M: Backend>(scope: &Scope<'_, M>, head: &Head, x: Tensor<M>) -> Result<M::Buffer, Error> {
    let dims = check(scope, head, &x)?;
    let mut logits = scope.statistics(Category::Activation, dims.rows * dims.vocab)?;
    let weight = scope.param(head.weight)?;
    scope.memory.head_logits(dims, x.slice(), weight, SliceMut::whole(&mut logits))?;
    Ok(logits)
}
