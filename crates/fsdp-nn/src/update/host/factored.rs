//! The passes of [`Adafactor`] over one shard, row by row.

use fsdp_core::Error;
use fsdp_core::memory::{Slice, SliceMut};
use fsdp_core::update::{self, Piece, SegmentShard};

use super::finite_check::FiniteCheck;
use super::pass::{HostScalars, Scale};
use crate::host::element::Float;
use crate::host::floats::{Floats, transfer};
use crate::host::math::sum1;
use crate::host::raw::vectorized;
use crate::host::{HostBuffer, HostMemory};
use crate::update::adafactor::{Adafactor, AdafactorFactors};

/// Block size for parameters without rows.
const BLOCK_ELEMS: usize = 1024;

/// The stages of a step: two phases of statistics, then the update.
pub(super) enum Stage<'a> {
    /// Advances the row means and full second moments; computes the sums of phase 0.
    Moments { sums: &'a mut [f64] },
    /// Advances the column means; computes the sums of phase 1.
    Norms { moments: &'a [f64], sums: &'a mut [f64] },
    /// Updates the parameters.
    Update { moments: &'a [f64], norms: &'a [f64] },
}

impl<'a> Stage<'a> {
    /// The stage of a factored rule.
    pub(super) fn of(
        memory: &HostMemory,
        stage: &'a mut update::Stage<'_, HostBuffer>,
    ) -> Result<Self, Error> {
        let read = |sums: &'a HostBuffer| memory.elements::<f64>(Slice::whole(sums));
        Ok(match stage {
            update::Stage::Statistics { earlier: [], sums } => {
                Stage::Moments { sums: memory.elements_mut(SliceMut::whole(sums))? }
            }
            update::Stage::Statistics { earlier: [moments, ..], sums } => {
                Stage::Norms { moments: read(moments)?, sums: memory.elements_mut(SliceMut::whole(sums))? }
            }
            update::Stage::Update { statistics: [moments, norms] } => {
                Stage::Update { moments: read(moments)?, norms: read(norms)? }
            }
            update::Stage::Update { .. } | update::Stage::Direct { .. } => {
                panic!("a stage that a factored rule did not declare")
            }
        })
    }
}

impl Adafactor {
    pub(super) fn typed<A: Float>(
        &self,
        memory: &HostMemory,
        shard: &mut SegmentShard<'_, HostBuffer>,
        scalars: &HostScalars,
        mut stage: Stage<'_>,
    ) -> Result<(), Error> {
        let (pieces, limits) = (shard.pieces, FiniteCheck::finite(shard));
        let mut pass = Pass::<A>::new(self, memory, shard, scalars)?;
        for piece in pieces {
            pass.piece(piece, &mut stage);
        }
        if pass.end().exceeds(&limits) { shard.note_not_finite(memory) } else { Ok(()) }
    }
}

/// The tensors of a shard. The state slices hold the pieces not yet processed.
pub(super) struct Pass<'a, A: Float> {
    rule: &'a Adafactor,
    scalars: &'a HostScalars,
    scale: Scale<A>,
    gradient: Floats<'a>,
    params: &'a mut [A],
    rows: &'a mut [A],
    cols: &'a mut [A],
    full: &'a mut [A],
    average: &'a mut [A],
    block: Vec<A>,
    /// Per column: sums of squares in phase 0, later factors of the update.
    sums: Vec<f64>,
    factors: Vec<A>,
    /// Largest magnitudes written so far.
    largest: FiniteCheck<A>,
}

/// The scalars that apply the update of a parameter.
#[derive(Clone, Copy)]
struct Step<A> {
    rate: A,
    keep: A,
    clip: A,
    beta1: Option<A>,
}

impl<A: Float> Step<A> {
    /// Computes the scalars from the sums of squares of the parameter and of its update.
    fn new(factors: &AdafactorFactors, squares: f64, norm: f64) -> Self {
        let rms = |sum: f64| (sum / factors.len as f64).sqrt();
        let rate = factors.learning_rate(rms(squares));
        Self {
            rate: A::of(rate),
            keep: A::of(1.0 - factors.decay * rate),
            clip: A::of((rms(norm) / factors.clip_threshold).max(1.0)),
            beta1: factors.beta1.map(A::of),
        }
    }
}

impl<'a, A: Float> Pass<'a, A> {
    pub(super) fn new(
        rule: &'a Adafactor,
        memory: &HostMemory,
        shard: &'a mut SegmentShard<'_, HostBuffer>,
        scalars: &'a HostScalars,
    ) -> Result<Self, Error> {
        let mut state = Vec::new();
        for buffer in shard.state.iter_mut() {
            state.push(memory.elements_mut::<A>(SliceMut::whole(buffer))?);
        }
        let mut state = state.into_iter();
        let mut next = || state.next().unwrap_or_default();
        Ok(Self {
            rule,
            scalars,
            scale: Scale::new(scalars),
            gradient: memory.floats(Slice::whole(shard.gradient))?,
            params: memory.elements_mut(SliceMut::whole(shard.params))?,
            rows: next(),
            cols: next(),
            full: next(),
            average: next(),
            block: Vec::new(),
            sums: Vec::new(),
            factors: Vec::new(),
            largest: FiniteCheck::none(),
        })
    }

    /// Returns the largest magnitudes that the pass wrote.
    pub(super) fn end(self) -> FiniteCheck<A> {
        self.largest
    }

    /// Processes the next piece.
    pub(super) fn piece(&mut self, piece: &Piece, stage: &mut Stage<'_>) {
        let factors = &self.rule.factors(piece.param, self.scalars.step, self.scalars.lr);
        match stage {
            Stage::Moments { sums } => self.moments(piece, factors, &mut sums[factors.start..]),
            Stage::Norms { moments, sums } => {
                self.advance_cols(factors, &moments[factors.start..]);
                sums[piece.param.0] += self.norm(piece, factors, &moments[factors.start..]);
            }
            Stage::Update { moments, norms } => {
                let moments = &moments[factors.start..];
                self.update(piece, factors, moments, Step::new(factors, moments[0], norms[piece.param.0]));
            }
        }
        match factors.cols {
            Some(cols) => {
                advance(&mut self.rows, piece.len / cols);
                advance(&mut self.cols, cols);
            }
            None => advance(&mut self.full, piece.len),
        }
    }

    fn moments(&mut self, piece: &Piece, factors: &AdafactorFactors, sums: &mut [f64]) {
        sums[0] += square_sum(&self.params[piece.offset..][..piece.len]);
        let (eps, beta2) = (A::of(factors.eps), A::of(factors.beta2));
        let rest = A::ONE - beta2;
        let Some(cols) = factors.cols else {
            for start in (0..piece.len).step_by(BLOCK_ELEMS) {
                let len = BLOCK_ELEMS.min(piece.len - start);
                self.load(piece.offset + start, len);
                let moment = &mut self.full[start..start + len];
                self.largest =
                    advance_full(self.largest, self.scale, [beta2, rest, eps], &self.block, moment);
            }
            return;
        };
        self.sums.clear();
        self.sums.resize(cols, 0.0);
        for row in 0..piece.len / cols {
            self.load(piece.offset + row * cols, cols);
            let mean = A::of(add_squares(self.scale, eps, &self.block, &mut self.sums) / cols as f64);
            self.rows[row] = self.rows[row] * beta2 + rest * mean;
            self.largest.state(self.rows[row]);
            sums[1] += self.rows[row].as_f64();
        }
        sums[2..2 + cols].iter_mut().zip(&self.sums).for_each(|(sum, part)| *sum += part);
    }

    fn advance_cols(&mut self, factors: &AdafactorFactors, moments: &[f64]) {
        let Some(cols) = factors.cols else { return };
        let (count, beta2) = ((factors.len / cols) as f64, A::of(factors.beta2));
        let rest = A::ONE - beta2;
        for (mean, sum) in self.cols[..cols].iter_mut().zip(&moments[2..]) {
            *mean = *mean * beta2 + rest * A::of(sum / count);
            self.largest.state(*mean);
        }
    }

    /// Returns the sum of squares of the update before clipping.
    fn norm(&mut self, piece: &Piece, factors: &AdafactorFactors, moments: &[f64]) -> f64 {
        self.prepare(factors);
        let width = factors.cols.unwrap_or(BLOCK_ELEMS);
        let mut sum = 0.0;
        for start in (0..piece.len).step_by(width) {
            self.direction(piece, factors, moments, start, width.min(piece.len - start));
            sum += square_sum(&self.block);
        }
        sum
    }

    fn update(&mut self, piece: &Piece, factors: &AdafactorFactors, moments: &[f64], step: Step<A>) {
        self.prepare(factors);
        let width = factors.cols.unwrap_or(BLOCK_ELEMS);
        for start in (0..piece.len).step_by(width) {
            let len = width.min(piece.len - start);
            self.direction(piece, factors, moments, start, len);
            let at = piece.offset + start;
            finish(step, &mut self.block);
            if let Some(beta1) = step.beta1 {
                average_in(beta1, &mut self.average[at..at + len], &mut self.block);
            }
            let params = &mut self.params[at..at + len];
            self.largest = apply(self.largest, step.keep, &self.block, params);
        }
    }

    /// Computes the reciprocal square roots of the column means.
    fn prepare(&mut self, factors: &AdafactorFactors) {
        self.factors.clear();
        let cols = &self.cols[..factors.cols.unwrap_or(0)];
        self.factors.extend(cols.iter().map(|&mean| A::ONE / mean.sqrt()));
    }

    /// Writes the gradient divided by the root of the second moment to the block.
    fn direction(
        &mut self,
        piece: &Piece,
        factors: &AdafactorFactors,
        moments: &[f64],
        start: usize,
        len: usize,
    ) {
        self.load(piece.offset + start, len);
        let Some(cols) = factors.cols else {
            return divide_by_root(self.scale, &self.full[start..start + len], &mut self.block);
        };
        let mean = A::of(moments[1] / (factors.len / cols) as f64);
        let row = A::ONE / (self.rows[start / cols] / mean).sqrt();
        multiply_by_factors(self.scale, row, &self.factors, &mut self.block);
    }

    /// Loads the unscaled gradient into the block.
    fn load(&mut self, start: usize, len: usize) {
        self.block.resize(len, A::ZERO);
        transfer(self.gradient.range(start, len), A::floats_mut(&mut self.block), false);
    }
}

/// Drops the first `count` elements of a slice.
fn advance<A>(slice: &mut &mut [A], count: usize) {
    *slice = &mut std::mem::take(slice)[count..];
}

vectorized! {
    fn square_sum<A: Float>(values: &[A]) -> f64 {
        sum1(values, |value| value.as_f64() * value.as_f64())
    }
}

vectorized! {
    /// Adds `gradient^2 + eps` to the column sums and returns the sum of the row.
    fn add_squares<A: Float>(scale: Scale<A>, eps: A, gradient: &[A], cols: &mut [f64]) -> f64 {
        for (sum, &g) in cols.iter_mut().zip(gradient) {
            let g = scale.of(g);
            *sum += (g * g + eps).as_f64();
        }
        sum1(gradient, |g| {
            let g = scale.of(g);
            (g * g + eps).as_f64()
        })
    }
}

vectorized! {
    /// Advances the full second moment; returns the largest magnitudes so far.
    fn advance_full<A: Float>(
        largest: FiniteCheck<A>,
        scale: Scale<A>,
        factors: [A; 3],
        gradient: &[A],
        moment: &mut [A],
    ) -> FiniteCheck<A> {
        let (mut largest, [beta2, rest, eps]) = (largest, factors);
        for (moment, &g) in moment.iter_mut().zip(gradient) {
            let g = scale.of(g);
            *moment = *moment * beta2 + rest * (g * g + eps);
            largest.state(*moment);
        }
        largest
    }
}

vectorized! {
    fn divide_by_root<A: Float>(scale: Scale<A>, moment: &[A], gradient: &mut [A]) {
        for (g, moment) in gradient.iter_mut().zip(moment) {
            *g = scale.of(*g) / moment.sqrt();
        }
    }
}

vectorized! {
    fn multiply_by_factors<A: Float>(scale: Scale<A>, row: A, cols: &[A], gradient: &mut [A]) {
        for (g, &col) in gradient.iter_mut().zip(cols) {
            *g = scale.of(*g) * (row * col);
        }
    }
}

vectorized! {
    fn finish<A: Float>(step: Step<A>, update: &mut [A]) {
        update.iter_mut().for_each(|u| *u = *u / step.clip * step.rate);
    }
}

vectorized! {
    /// Advances the running mean of updates, and replaces the update with it.
    fn average_in<A: Float>(beta1: A, average: &mut [A], update: &mut [A]) {
        for (average, u) in average.iter_mut().zip(update) {
            *average = *average * beta1 + (A::ONE - beta1) * *u;
            *u = *average;
        }
    }
}

vectorized! {
    /// Applies the update; returns the largest magnitudes so far.
    fn apply<A: Float>(largest: FiniteCheck<A>, keep: A, update: &[A], params: &mut [A]) -> FiniteCheck<A> {
        let mut largest = largest;
        for (p, &u) in params.iter_mut().zip(update) {
            *p = *p * keep - u;
            // A non-finite running mean of updates makes the parameter non-finite.
            largest.param(*p);
        }
        largest
    }
}
