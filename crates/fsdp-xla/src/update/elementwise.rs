//! Element-wise rules: one pass over a shard.

use fsdp_core::Queue;
use fsdp_core::layout::Segment;
use fsdp_core::memory::{Buffer, Slice, SliceMut};
use fsdp_core::model::ParamId;
use fsdp_core::update::{SegmentShard, StepScalars};
use fsdp_nn::update::{Calculation, ElementwiseRule, Groups, Input};

use crate::buffer::XlaBuffer;
use crate::hlo::{Builder, Element, Value};
use crate::trace::Trace;

const QUEUE: Queue = Queue::Compute;

/// The segment of a shard.
pub(super) fn segment<'s>(shard: &SegmentShard<'s, XlaBuffer>) -> &'s Segment {
    shard.segment.expect("schedules update segments")
}

impl Builder {
    fn calculate(&mut self, calculation: Calculation<Value>) -> Value {
        match calculation {
            Calculation::Add(a, b) => self.add(&a, &b),
            Calculation::Subtract(a, b) => self.subtract(&a, &b),
            Calculation::Multiply(a, b) => self.multiply(&a, &b),
            Calculation::Divide(a, b) => self.divide(&a, &b),
            Calculation::SquareRoot(a) => self.unary("sqrt", &a),
            Calculation::IfLess(a, b, then, otherwise) => {
                let is_less = self.compare("LT", &a, &b);
                self.select(&is_less, &then, &otherwise)
            }
        }
    }
}

impl Trace {
    /// Applies a rule to a shard. If the step is finite, the results are kept, and non-finite ones are noted.
    pub(super) fn elementwise(
        &mut self,
        rule: &dyn ElementwiseRule,
        shard: &mut SegmentShard<'_, XlaBuffer>,
        scalars: &StepScalars<'_, XlaBuffer>,
    ) {
        let mut params = self.load(QUEUE, Slice::whole(shard.params));
        // Updates run one after the other, after the note that each of them makes last; XLA for CPUs would otherwise compute
        // all new parameters before replacing any old one.
        let note = self.load(QUEUE, Slice::whole(shard.not_finite));
        params = self.hlo.after(&params, &note);
        let state: Vec<Value> =
            shard.state.iter().map(|buffer| self.load(QUEUE, Slice::whole(buffer))).collect();
        let (gradient, is_finite) = self.scaled_gradient(shard, scalars);
        let factors = self.factors(rule, shard, scalars, params.element());
        let (formula, constants) = rule.formula();
        let constant = |hlo: &mut Builder, value: f64| hlo.float(value, params.dims(), params.element());
        let constants: Vec<Value> = constants.iter().map(|&value| constant(&mut self.hlo, value)).collect();
        let input = |input| match input {
            Input::Gradient => gradient.clone(),
            Input::Param => params.clone(),
            Input::State(index) => state[index].clone(),
            Input::Factor(index) => factors[index].clone(),
            Input::Constant(index) => constants[index].clone(),
        };
        let (new_params, new_state) = formula.results(input, |calculation| self.hlo.calculate(calculation));
        let mut non_finite = Vec::new();
        if let Some(new) = new_params {
            non_finite.push(self.exceeding(&new, shard.largest_param()));
            let kept = self.hlo.select(&is_finite, &new, &params);
            self.store(QUEUE, &SliceMut::whole(shard.params), &kept);
        }
        let largest = shard.params.dtype().largest();
        for ((new, old), buffer) in new_state.iter().zip(&state).zip(shard.state.iter_mut()) {
            non_finite.push(self.exceeding(new, largest));
            let kept = self.hlo.select(&is_finite, new, old);
            self.store(QUEUE, &SliceMut::whole(buffer), &kept);
        }
        self.note(shard, &is_finite, &non_finite);
    }

    /// The scaled and clipped gradient in the dtype of the parameters, and whether the step counts.
    pub(super) fn scaled_gradient(
        &mut self,
        shard: &SegmentShard<'_, XlaBuffer>,
        scalars: &StepScalars<'_, XlaBuffer>,
    ) -> (Value, Value) {
        let (len, element) = (shard.params.len(), shard.params.dtype().into());
        let gradient = self.load(QUEUE, Slice::whole(shard.gradient));
        let [scale, clip, finite] = self.gradient_factors(scalars, element);
        let mut gradient = self.hlo.convert(&gradient, element);
        for factor in [scale, clip] {
            let factor = self.hlo.fill(&factor, &[len]);
            gradient = self.hlo.multiply(&gradient, &factor);
        }
        let zero = self.hlo.zeros(&[], element);
        let is_finite = self.hlo.compare("NE", &finite, &zero);
        (gradient, is_finite)
    }

    /// The three factors of a step.
    fn gradient_factors(&mut self, scalars: &StepScalars<'_, XlaBuffer>, element: Element) -> [Value; 3] {
        let all = self.load(QUEUE, scalars.factors);
        [0, 1, 2].map(|index| {
            let factor = self.hlo.range(&all, index..index + 1);
            let factor = self.hlo.reshape(&factor, &[]);
            self.hlo.convert(&factor, element)
        })
    }

    /// Broadcasts the factors of a rule to all elements: from one number each, or from tables with a number per row.
    fn factors(
        &mut self,
        rule: &dyn ElementwiseRule,
        shard: &SegmentShard<'_, XlaBuffer>,
        scalars: &StepScalars<'_, XlaBuffer>,
        element: Element,
    ) -> Vec<Value> {
        let of = |param| rule.factors_of(param, scalars.step, scalars.lr);
        let (len, row_len, first) = (shard.params.len(), segment(shard).row_len, of(ParamId(0)));
        if rule.groups().is_none_or(Groups::is_uniform) {
            let all = self.input_floats(&first, element);
            let of_all = |index| {
                let one = self.hlo.range(&all, index..index + 1);
                self.hlo.fill(&one, &[len])
            };
            return (0..first.len()).map(of_all).collect();
        }
        // A row without a parameter is padding: multiplied by ones, it stays zero.
        let mut rows = vec![vec![1.0; first.len()]; len / row_len];
        for piece in shard.pieces {
            let piece_rows = piece.offset / row_len..(piece.offset + piece.len).div_ceil(row_len);
            rows[piece_rows].fill(of(piece.param));
        }
        let of_rows = |index: usize| {
            let column: Vec<f64> = rows.iter().map(|row| row[index]).collect();
            let column = self.input_floats(&column, element);
            let all = self.hlo.broadcast(&column, &[0], &[rows.len(), row_len]);
            self.hlo.reshape(&all, &[len])
        };
        (0..first.len()).map(of_rows).collect()
    }

    /// Number of elements whose magnitude exceeds `limit` or is NaN.
    pub(super) fn exceeding(&mut self, x: &Value, limit: f64) -> Value {
        let hlo = &mut self.hlo;
        let magnitudes = hlo.unary("abs", x);
        let limit = hlo.float(limit, x.dims(), x.element());
        let fits = hlo.compare("LE", &magnitudes, &limit);
        let (zero, one) = (hlo.int(0, x.dims(), Element::I32), hlo.int(1, x.dims(), Element::I32));
        let exceeds = hlo.select(&fits, &zero, &one);
        hlo.sum(&exceeds, &[0])
    }

    /// Sets the note of a shard if `non_finite` counts any element that the step has kept.
    pub(super) fn note(
        &mut self,
        shard: &mut SegmentShard<'_, XlaBuffer>,
        is_finite: &Value,
        non_finite: &[Value],
    ) {
        let note = self.load(QUEUE, Slice::whole(shard.not_finite));
        let none = self.hlo.int(0, &[], Element::I32);
        let count = non_finite.iter().fold(none.clone(), |count, more| self.hlo.add(&count, more));
        let all_finite = self.hlo.compare("EQ", &count, &none);
        let (zero, one) = (self.hlo.int(0, &[1], Element::I64), self.hlo.int(1, &[1], Element::I64));
        let new = self.hlo.select(&all_finite, &zero, &one);
        let new = self.hlo.select(is_finite, &new, &zero);
        let note = self.hlo.binary("maximum", &note, &new);
        self.store(QUEUE, &SliceMut::whole(shard.not_finite), &note);
    }
}
