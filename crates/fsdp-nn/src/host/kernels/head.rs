//! The map to logits and its cross-entropy, chunk by chunk.
//!
//! Logits exist for one chunk of rows at a time; with gradients they are turned into `softmax - one_hot` in
//! place before the products with the hidden states and the weight. When the gradient of the weight is
//! narrower than the type of arithmetic it is rounded once per chunk.

use super::matmul::{Matrix, MatrixMut, matmul};
use crate::backend::{HeadDims, IGNORED_TARGET};
use crate::host::element::{Element, Float};
use crate::host::floats::Target;
use crate::host::math;
use crate::host::raw::vectorized;
use crate::host::workers::{Workers, task_rows};
use fsdp_core::Error;

/// Checks that every target that counts is a class, as those of a batch are.
pub(crate) fn check_targets(targets: &[u32], vocab: usize) -> Result<(), Error> {
    let other = targets.iter().find(|&&target| target != IGNORED_TARGET && target as usize >= vocab);
    assert_eq!(other, None, "a target is not one of {vocab} classes");
    Ok(())
}

/// The gradients of the sum of losses.
pub(crate) struct HeadGradients<'a, E> {
    pub(crate) dx: &'a mut [E],
    pub(crate) dweight: Option<Target<'a>>,
}

/// `logits = x W^T`.
pub(crate) fn logits<E: Element>(
    workers: &Workers,
    dims: HeadDims,
    x: &[E],
    weight: &[E],
    logits: &mut [E::Acc],
) {
    let rows = x.len() / dims.hidden;
    let x = Matrix::new(x, rows, dims.hidden, dims.hidden);
    let weight = Matrix::new(weight, dims.vocab, dims.hidden, dims.hidden);
    let target = Target { data: E::Acc::floats_mut(&mut logits[..rows * dims.vocab]), accumulate: false };
    matmul(workers, MatrixMut::dense(target, rows, dims.vocab), x, weight.t());
}

/// The losses, and the gradients if asked for.
pub(crate) fn loss<E: Element>(
    workers: &Workers,
    dims: HeadDims,
    x: &[E],
    weight: &[E],
    targets: &[u32],
    losses: &mut [f64],
    scratch: &mut [E::Acc],
    mut gradients: Option<HeadGradients<'_, E>>,
) {
    let chunk = dims.chunk_rows.clamp(1, dims.rows.max(1));
    let width = dims.hidden;
    for start in (0..dims.rows).step_by(chunk) {
        let rows = chunk.min(dims.rows - start);
        let x = &x[start * width..][..rows * width];
        let chunk_logits = &mut scratch[..rows * dims.vocab];
        logits(workers, dims, x, weight, chunk_logits);
        let losses = &mut losses[start..start + rows];
        let targets = &targets[start..start + rows];
        cross_entropy(workers, dims.vocab, chunk_logits, targets, losses, gradients.is_some());
        if let Some(gradients) = &mut gradients {
            let dx = &mut gradients.dx[start * width..][..rows * width];
            gradients_of_chunk(workers, dims, x, weight, chunk_logits, dx, gradients.dweight.as_mut());
        }
    }
}

/// The losses of rows of logits, which become their gradients, or scratch.
pub(crate) fn cross_entropy<A: Float>(
    workers: &Workers,
    vocab: usize,
    logits: &mut [A],
    targets: &[u32],
    losses: &mut [f64],
    with_gradient: bool,
) {
    let task = task_rows(vocab);
    let tasks = logits.chunks_mut(task * vocab).zip(losses.chunks_mut(task));
    workers.each(tasks.zip(targets.chunks(task)), |((logits, losses), targets)| {
        loss_rows(vocab, logits, losses, targets, with_gradient);
    });
}

/// The losses of rows of logits.
pub(crate) fn losses<A: Float>(
    workers: &Workers,
    vocab: usize,
    logits: &[A],
    targets: &[u32],
    losses: &mut [f64],
) {
    let task = task_rows(vocab);
    let tasks = logits.chunks(task * vocab).zip(losses.chunks_mut(task));
    workers.each(tasks.zip(targets.chunks(task)), |((logits, losses), targets)| {
        let mut copy = workers.scratch::<A>(logits.len());
        copy.copy_from_slice(logits);
        loss_rows(vocab, &mut copy, losses, targets, false);
    });
}

vectorized! {
    /// The loss of each row; with gradients its logits become `softmax - one_hot`, or zeros where ignored.
    fn loss_rows<A: Float>(
        vocab: usize, logits: &mut [A], losses: &mut [f64], targets: &[u32], with_gradient: bool,
    ) {
        for ((row, loss), &target) in logits.chunks_exact_mut(vocab).zip(losses).zip(targets) {
            if target == IGNORED_TARGET {
                *loss = 0.0;
                row.fill(A::ZERO);
                continue;
            }
            let target = target as usize;
            let (largest, own) = (math::max(row), row[target]);
            let sum = math::exp_sum(row, A::ONE, largest);
            *loss = sum.as_f64().ln() + (largest.as_f64() - own.as_f64());
            if with_gradient {
                let scale = A::ONE / sum;
                row.iter_mut().for_each(|value| *value *= scale);
                row[target] = row[target] - A::ONE;
            }
        }
    }
}

/// `dx = dlogits W` and `dW += dlogits^T x` for a chunk of rows; the first chunk overwrites `dW` if the
/// target says so, later ones add.
fn gradients_of_chunk<E: Element>(
    workers: &Workers,
    dims: HeadDims,
    x: &[E],
    weight: &[E],
    dlogits: &[E::Acc],
    dx: &mut [E],
    dweight: Option<&mut Target<'_>>,
) {
    let (rows, width) = (x.len() / dims.hidden, dims.hidden);
    let dlogits = Matrix::new(dlogits, rows, dims.vocab, dims.vocab);
    let target = Target { data: E::floats_mut(dx), accumulate: false };
    let weight = Matrix::new(weight, dims.vocab, width, width);
    matmul(workers, MatrixMut::dense(target, rows, width), dlogits, weight);
    if let Some(dweight) = dweight {
        let dst = MatrixMut::dense(dweight.reborrow(), dims.vocab, width);
        matmul(workers, dst, dlogits.t(), Matrix::new(x, rows, width, width));
        dweight.accumulate = true;
    }
}
