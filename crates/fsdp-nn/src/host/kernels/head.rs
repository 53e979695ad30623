//! The map to logits and its cross-entropy, chunk by chunk.
//!
//! Logits exist for one chunk of rows at a time. If gradients are needed, they are turned into `softmax - one_hot` in
//! place before the products with the hidden states and the weight. If the gradient of the weight is narrower than
//! the type of arithmetic, it is rounded once per chunk.

use fsdp_core::Error;

use super::matmul::{Matrix, MatrixMut, matmul};
use crate::backend::{Outcome, Write};
use crate::host::HostMemory;
use crate::host::backend::Call;
use crate::host::buffer::HostBuffer;
use crate::host::element::{Element, Float};
use crate::host::floats::{Target, transfer};
use crate::host::math;
use crate::host::pool::Scratch;
use crate::host::raw::vectorized;
use crate::host::workers::{Workers, task_rows};
use crate::op::{Head, HeadDims, IGNORED_TARGET, LogitsDims, LossTerms};

impl HostMemory {
    pub(in crate::host) fn head<E: Element>(
        &self,
        op: &Head,
        operands: Call<'_, '_>,
    ) -> Result<Outcome, Error> {
        let workers = self.workers();
        match *op {
            Head::Loss { dims } => {
                let ([x, weight, targets], [losses, logits], more) = operands.split();
                let targets = self.elements(targets)?;
                check_targets(targets, dims.vocab)?;
                let (x, weight) = (self.elements::<E>(x)?, self.elements(weight)?);
                let logits = self.elements_mut(logits.slice)?;
                let losses = self.losses(dims.terms, losses, more)?;
                loss(workers, dims, x, weight, targets, losses, logits, None);
            }
            Head::LossBackward { dims, weight: trains, is_rounded } => {
                let ([x, weight, targets], [losses, logits, dx], mut more) = operands.split();
                let targets = self.elements(targets)?;
                check_targets(targets, dims.vocab)?;
                let (x, weight) = (self.elements::<E>(x)?, self.elements(weight)?);
                let logits = self.elements_mut(logits.slice)?;
                let dweight = if trains { more.next() } else { None };
                let dweight = dweight.map(|dweight| self.target(dweight)).transpose()?;
                let losses = self.losses(dims.terms, losses, more.skip(usize::from(is_rounded)))?;
                let gradients = HeadGradients { dx: self.elements_mut(dx.slice)?, dweight };
                loss(workers, dims, x, weight, targets, losses, logits, Some(gradients));
            }
            Head::Logits { dims } => {
                let ([x, weight], [logits], _) = operands.split();
                let (x, weight) = (self.elements::<E>(x)?, self.elements(weight)?);
                let logits = self.elements_mut::<E::Acc>(logits.slice)?;
                all_logits(workers, dims, x, weight, logits);
                cap_all(workers, dims, logits);
            }
            Head::CrossEntropy { .. } | Head::CrossEntropyBackward { .. } => {
                self.cross_entropy::<E::Acc>(op, operands)?;
            }
        }
        Ok(Outcome::Done)
    }

    /// Returns the destinations of losses; `more` begins with the z-losses, if there are any.
    fn losses<'o>(
        &self,
        terms: LossTerms,
        all: Write<'o, HostBuffer>,
        more: impl Iterator<Item = Write<'o, HostBuffer>>,
    ) -> Result<Losses<'o>, Error> {
        let z = more.take(usize::from(terms.z_loss > 0.0)).next();
        let z = z.map(|z| self.elements_mut(z.slice)).transpose()?;
        Ok(Losses { all: self.elements_mut(all.slice)?, z })
    }

    /// Computes the loss of existing logits, for backends with their own matrix products.
    fn cross_entropy<A: Float>(&self, op: &Head, operands: Call<'_, '_>) -> Result<(), Error> {
        let (Head::CrossEntropy { dims, .. } | Head::CrossEntropyBackward { dims, .. }) = *op else {
            return Ok(());
        };
        let targets = operands.reads.last().copied();
        let targets = self.elements(targets.expect("the targets are read"))?;
        check_targets(targets, dims.vocab)?;
        if let Head::CrossEntropy { .. } = op {
            let ([logits], [losses], more) = operands.split();
            let losses = self.losses(dims.terms, losses, more)?;
            losses_of::<A>(self.workers(), dims, self.elements(logits)?, targets, losses);
            return Ok(());
        }
        let (is_rounded, ([], [mut logits, losses], mut more)) =
            (matches!(op, Head::CrossEntropyBackward { is_rounded: true, .. }), operands.split());
        let rounded = if is_rounded { more.next() } else { None };
        let losses = self.losses(dims.terms, losses, more)?;
        let slopes = self.elements_mut(logits.slice.reborrow())?;
        cross_entropy::<A>(self.workers(), dims, slopes, targets, losses, true);
        if let Some(rounded) = rounded {
            transfer(self.floats(logits.slice.as_slice())?, self.floats_mut(rounded.slice)?, false);
        }
        Ok(())
    }
}

/// The losses of rows, and their z-loss parts, if any.
struct Losses<'a> {
    all: &'a mut [f64],
    z: Option<&'a mut [f64]>,
}

impl Losses<'_> {
    fn of_rows(&mut self, start: usize, rows: usize) -> Losses<'_> {
        let z = self.z.as_mut().map(|z| &mut z[start..start + rows]);
        Losses { all: &mut self.all[start..start + rows], z }
    }

    /// Splits the losses into tasks of `rows` rows.
    fn tasks(&mut self, rows: usize) -> impl Iterator<Item = Losses<'_>> {
        let mut z = self.z.as_mut().map(|z| z.chunks_mut(rows));
        self.all.chunks_mut(rows).map(move |all| Losses { all, z: z.as_mut().and_then(Iterator::next) })
    }
}

/// Checks that every counted target is a class, as it is in a valid batch.
fn check_targets(targets: &[u32], vocab: usize) -> Result<(), Error> {
    let other = targets.iter().find(|&&target| target != IGNORED_TARGET && target as usize >= vocab);
    assert_eq!(other, None, "a target is not one of {vocab} classes");
    Ok(())
}

/// The gradients of the sum of losses.
struct HeadGradients<'a, E> {
    dx: &'a mut [E],
    dweight: Option<Target<'a>>,
}

/// `logits = x W^T`.
fn all_logits<E: Element>(workers: &Workers, dims: HeadDims, x: &[E], weight: &[E], logits: &mut [E::Acc]) {
    let rows = x.len() / dims.hidden;
    let x = Matrix::new(x, rows, dims.hidden, dims.hidden);
    let weight = Matrix::new(weight, dims.vocab, dims.hidden, dims.hidden);
    let target = Target { data: E::Acc::floats_mut(&mut logits[..rows * dims.vocab]), accumulate: false };
    matmul(workers, MatrixMut::dense(target, rows, dims.vocab), x, weight.t());
}

/// Computes the losses, and the gradients if requested.
fn loss<E: Element>(
    workers: &Workers,
    dims: HeadDims,
    x: &[E],
    weight: &[E],
    targets: &[u32],
    mut losses: Losses<'_>,
    scratch: &mut [E::Acc],
    mut gradients: Option<HeadGradients<'_, E>>,
) {
    let chunk = dims.chunk_rows.clamp(1, dims.rows.max(1));
    let width = dims.hidden;
    for start in (0..dims.rows).step_by(chunk) {
        let rows = chunk.min(dims.rows - start);
        let x = &x[start * width..][..rows * width];
        let chunk_logits = &mut scratch[..rows * dims.vocab];
        all_logits(workers, dims, x, weight, chunk_logits);
        let losses = losses.of_rows(start, rows);
        let targets = &targets[start..start + rows];
        cross_entropy(workers, dims.logits(rows), chunk_logits, targets, losses, gradients.is_some());
        if let Some(gradients) = &mut gradients {
            let dx = &mut gradients.dx[start * width..][..rows * width];
            gradients_of_chunk(workers, dims, x, weight, chunk_logits, dx, gradients.dweight.as_mut());
        }
    }
}

/// Computes the losses of rows of logits, and replaces the logits by their gradients, or by scratch.
fn cross_entropy<A: Float>(
    workers: &Workers,
    dims: LogitsDims,
    logits: &mut [A],
    targets: &[u32],
    mut losses: Losses<'_>,
    with_gradient: bool,
) {
    let task = task_rows(dims.vocab);
    let tasks = logits.chunks_mut(task * dims.vocab).zip(losses.tasks(task));
    workers.each(tasks.zip(targets.chunks(task)), |((logits, losses), targets)| {
        let mut capping = Capping::new(workers, dims.vocab, dims.softcap);
        loss_rows(dims, capping.as_mut(), logits, losses.all, losses.z, targets, with_gradient);
    });
}

/// Computes the losses of rows of logits.
fn losses_of<A: Float>(
    workers: &Workers,
    dims: LogitsDims,
    logits: &[A],
    targets: &[u32],
    mut losses: Losses<'_>,
) {
    let task = task_rows(dims.vocab);
    let tasks = logits.chunks(task * dims.vocab).zip(losses.tasks(task));
    workers.each(tasks.zip(targets.chunks(task)), |((logits, losses), targets)| {
        let mut copy = workers.scratch::<A>(logits.len());
        copy.copy_from_slice(logits);
        let mut capping = Capping::new(workers, dims.vocab, dims.softcap);
        loss_rows(dims, capping.as_mut(), &mut copy, losses.all, losses.z, targets, false);
    });
}

/// A soft cap, and scratch for the derivatives of one row.
struct Capping<A: Float> {
    cap: A,
    slopes: Scratch<A>,
}

impl<A: Float> Capping<A> {
    fn new(workers: &Workers, vocab: usize, softcap: Option<f64>) -> Option<Self> {
        softcap.map(|cap| Self { cap: A::of(cap), slopes: workers.scratch(vocab) })
    }
}

/// Caps the logits of all rows, if there is a cap.
fn cap_all<A: Float>(workers: &Workers, dims: HeadDims, logits: &mut [A]) {
    let tasks = logits[..dims.rows * dims.vocab].chunks_mut(task_rows(dims.vocab) * dims.vocab);
    workers.each(tasks, |logits| {
        let Some(mut capping) = Capping::new(workers, dims.vocab, dims.softcap) else { return };
        logits.chunks_exact_mut(dims.vocab).for_each(|row| cap_row(capping.cap, row, &mut capping.slopes));
    });
}

vectorized! {
    /// Caps a row of logits, and writes its derivatives to `slopes`.
    fn cap_row<A: Float>(cap: A, row: &mut [A], slopes: &mut [A]) {
        for (value, slope) in row.iter_mut().zip(slopes) {
            let bent = math::tanh(*value / cap);
            *value = cap * bent;
            *slope = A::ONE - bent * bent;
        }
    }
}

vectorized! {
    /// Computes the loss of each row. With gradients, replaces its logits by `softmax - one_hot` plus the
    /// contribution of the loss terms, or by zeros if the target is ignored.
    fn loss_rows<A: Float>(
        dims: LogitsDims, capping: Option<&mut Capping<A>>, logits: &mut [A], losses: &mut [f64],
        z_losses: Option<&mut [f64]>, targets: &[u32], with_gradient: bool,
    ) {
        let (vocab, LossTerms { label_smoothing, z_loss, loss_scale, .. }) = (dims.vocab, dims.terms);
        let even = A::of(label_smoothing / vocab as f64);
        let (mut capping, mut z_losses) = (capping, z_losses);
        let rows = logits.chunks_exact_mut(vocab).zip(losses).zip(targets).enumerate();
        for (index, ((row, loss), &target)) in rows {
            if target == IGNORED_TARGET {
                *loss = 0.0;
                if let Some(z) = &mut z_losses {
                    z[index] = 0.0;
                }
                row.fill(A::ZERO);
                continue;
            }
            if let Some(capping) = &mut capping {
                cap_row(capping.cap, row, &mut capping.slopes);
            }
            let target = target as usize;
            let (largest, target_logit) = (math::max(row), row[target]);
            let mean = if label_smoothing > 0.0 { math::sum(row).as_f64() / vocab as f64 } else { 0.0 };
            let sum = math::exp_sum(row, A::ONE, largest);
            *loss = sum.as_f64().ln() + (largest.as_f64() - target_logit.as_f64());
            let normalizer = sum.as_f64().ln() + largest.as_f64();
            if label_smoothing > 0.0 {
                *loss += label_smoothing * (target_logit.as_f64() - mean);
            }
            if z_loss > 0.0 {
                let of_row = z_loss * normalizer * normalizer;
                *loss += of_row;
                if let Some(z) = &mut z_losses {
                    z[index] = of_row;
                }
            }
            if with_gradient {
                let scale = A::of(1.0 + 2.0 * z_loss * normalizer) / sum;
                row.iter_mut().for_each(|value| *value *= scale);
                if label_smoothing > 0.0 {
                    row.iter_mut().for_each(|value| *value = *value - even);
                }
                row[target] = row[target] - A::of(1.0 - label_smoothing);
                if let Some(capping) = &capping {
                    row.iter_mut().zip(&capping.slopes[..]).for_each(|(value, &slope)| *value *= slope);
                }
                if loss_scale != 1.0 {
                    row.iter_mut().for_each(|value| *value *= A::of(loss_scale));
                }
            }
        }
    }
}

/// `dx = dlogits W` and `dW += dlogits^T x` for a chunk of rows; the first chunk overwrites `dW` unless the target
/// accumulates, later ones add.
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
