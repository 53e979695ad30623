//! The passes of Adafactor over one shard, over all of its rows at once.
//!
//! A shard is a matrix of rows of equal length. The parameter of a row and the place of its state differ between ranks
//! and are given by tables ([`Places`]), which are arguments. Sums over the rows of each parameter are additions into a
//! small table with one row per parameter of the segment, which is the same on all ranks.

use fsdp_core::Queue;
use fsdp_core::layout::Segment;
use fsdp_core::memory::{Buffer, Slice, SliceMut};
use fsdp_core::model::ParamId;
use fsdp_core::update::{SegmentShard, StepScalars};
use fsdp_nn::update::{Adafactor, AdafactorFactors};

use super::elementwise::segment;
use super::places::{Places, widen};
use crate::buffer::XlaBuffer;
use crate::hlo::{Element, Value};
use crate::trace::Trace;

const QUEUE: Queue = Queue::Compute;

/// Indices of the state tensors, in the order of the rule.
pub(super) const ROWS: usize = 0;
pub(super) const COLUMNS: usize = 1;
pub(super) const FULL: usize = 2;
const AVERAGE: usize = 3;

/// One pass over a shard.
pub(super) struct Pass<'a, 's> {
    pub(super) trace: &'a mut Trace,
    pub(super) shard: &'a mut SegmentShard<'s, XlaBuffer>,
    pub(super) segment: &'s Segment,
    /// The parameters of the segment.
    pub(super) params: Vec<(ParamId, AdafactorFactors)>,
    pub(super) places: Places,
    /// The parameter of each row.
    pub(super) param: Value,
    /// The gradient as rows, scaled and clipped.
    pub(super) gradient: Value,
    is_finite: Value,
    /// Counts of non-finite elements that were written.
    non_finite: Vec<Value>,
}

impl<'a, 's> Pass<'a, 's> {
    pub(super) fn new(
        rule: &Adafactor,
        trace: &'a mut Trace,
        shard: &'a mut SegmentShard<'s, XlaBuffer>,
        scalars: &StepScalars<'_, XlaBuffer>,
    ) -> Self {
        widen(rule, shard);
        let segment = segment(shard);
        let padded_lens = [ROWS, COLUMNS, FULL].map(|index| shard.state[index].storage.padded_len());
        let of = |id| (id, rule.factors(id, scalars.step, scalars.lr));
        let params: Vec<_> = segment.params.iter().map(|place| of(place.param)).collect();
        let places = Places::new(segment, &params, shard.pieces, padded_lens);
        let (gradient, is_finite) = trace.scaled_gradient(shard, scalars);
        let gradient = trace.hlo.reshape(&gradient, &[segment.rows_per_rank, segment.row_len]);
        let param = trace.input_places(&places.param);
        Self { trace, shard, segment, params, places, param, gradient, is_finite, non_finite: Vec::new() }
    }

    /// Advances the row means and full second moments; computes the sums of phase 0.
    pub(super) fn moments(mut self, sums: &mut XlaBuffer) {
        let params = self.params();
        let squares = self.square_sums(&params);
        let squared = self.trace.hlo.multiply(&self.gradient, &self.gradient);
        let squared = self.trace.hlo.with("add", &squared, self.params[0].1.eps);
        self.advance_full(&squared);
        let mut terms = vec![squares];
        if self.has(ROWS) {
            let wide = self.trace.hlo.convert(&squared, Element::F64);
            terms.push(self.advance_rows(&wide));
            terms.push(wide);
        }
        let terms = self.trace.hlo.concatenate(&terms, 1);
        let table = self.by_param(&terms);
        let starts = self.starts(|factors| factors.start);
        let mut all = self.trace.load(QUEUE, Slice::whole(sums));
        for (number, ((_, factors), start)) in self.params.iter().zip(&starts).enumerate() {
            let (hlo, len) = (&mut self.trace.hlo, factors.cols.map_or(1, |cols| 2 + cols));
            let part = hlo.slice(&table, &[number..number + 1, 0..len]);
            let part = hlo.reshape(&part, &[len]);
            let old = hlo.dynamic_slice(&all, &[(0, start)], &[len]);
            let new = hlo.add(&old, &part);
            all = hlo.dynamic_update(&all, &new, &[(0, start)]);
        }
        self.trace.store(QUEUE, &SliceMut::whole(sums), &all);
        self.finish();
    }

    /// Advances the column means; computes the sums of phase 1.
    pub(super) fn norms(mut self, moments: &XlaBuffer, sums: &mut XlaBuffer) {
        if self.has(COLUMNS) {
            self.advance_columns(moments);
        }
        let direction = self.direction(moments);
        let squares = self.square_sums(&direction);
        let parts = self.by_param(&squares);
        let ids: Vec<usize> = self.params.iter().map(|(id, _)| id.0).collect();
        let ids = self.trace.input_places(&ids);
        let old = self.trace.load(QUEUE, Slice::whole(sums));
        let old = self.trace.hlo.reshape(&old, &[sums.len(), 1]);
        let new = self.trace.hlo.add_to_rows(&old, &ids, &parts);
        self.trace.store(QUEUE, &SliceMut::whole(sums), &new);
        self.finish();
    }

    /// Updates the parameters and the running mean of updates.
    pub(super) fn update(mut self, moments: &XlaBuffer, norms: &XlaBuffer) {
        let direction = self.direction(moments);
        let [rate, keep, clip] = self.steps(moments, norms).map(|of_param| self.of_rows(&of_param));
        let hlo = &mut self.trace.hlo;
        let update = hlo.divide(&direction, &clip);
        let mut update = hlo.multiply(&update, &rate);
        if let Some(beta1) = self.params[0].1.beta1 {
            let average = self.state(AVERAGE);
            let average = self.trace.hlo.reshape(&average, update.dims());
            let beta1 = self.trace.hlo.float(beta1, update.dims(), update.element());
            update = self.mean(&beta1, &average, &update);
            self.keep(AVERAGE, &update);
        }
        let params = self.params();
        let hlo = &mut self.trace.hlo;
        let kept = hlo.multiply(&params, &keep);
        let new = hlo.subtract(&kept, &update);
        let flat = hlo.reshape(&new, &[new.len()]);
        let exceeding = self.trace.exceeding(&flat, self.shard.largest_param());
        self.non_finite.push(exceeding);
        let kept = self.trace.hlo.select(&self.is_finite, &new, &params);
        self.trace.store(QUEUE, &SliceMut::whole(self.shard.params), &kept);
        self.finish();
    }

    fn finish(self) {
        self.trace.note(self.shard, &self.is_finite, &self.non_finite);
    }

    /// The parameters as rows.
    fn params(&mut self) -> Value {
        let params = self.trace.load(QUEUE, Slice::whole(self.shard.params));
        self.trace.hlo.reshape(&params, self.gradient.dims())
    }

    /// Whether any rank has this state tensor for the segment.
    pub(super) fn has(&self, tensor: usize) -> bool {
        self.shard.state[tensor].storage.padded_len() > 0
    }

    /// A state tensor, as long as on the rank with the most of it.
    pub(super) fn state(&mut self, tensor: usize) -> Value {
        self.trace.load_padded(QUEUE, &self.shard.state[tensor])
    }

    /// Replaces a state tensor, if the step is finite.
    fn keep(&mut self, tensor: usize, new: &Value) {
        let new = self.trace.hlo.reshape(new, &[new.len()]);
        let old = self.state(tensor);
        let exceeding = self.trace.exceeding(&new, self.shard.params.dtype().largest());
        self.non_finite.push(exceeding);
        let kept = self.trace.hlo.select(&self.is_finite, &new, &old);
        self.trace.store_padded(QUEUE, &mut self.shard.state[tensor], &kept);
    }

    /// `old * weight + (1 - weight) * new`.
    fn mean(&mut self, weight: &Value, old: &Value, new: &Value) -> Value {
        let hlo = &mut self.trace.hlo;
        let one = hlo.float(1.0, weight.dims(), weight.element());
        let rest = hlo.subtract(&one, weight);
        let (old, new) = (hlo.multiply(old, weight), hlo.multiply(&rest, new));
        hlo.add(&old, &new)
    }

    /// Advances a running mean of squares by one step.
    fn advanced(&mut self, old: &Value, new: &Value) -> Value {
        let beta2 = self.trace.input_floats(&[self.params[0].1.beta2], old.element());
        let beta2 = self.trace.hlo.fill(&beta2, old.dims());
        self.mean(&beta2, old, new)
    }

    /// The means of the shard's rows; unspecified for rows that have none.
    pub(super) fn means_of_rows(&mut self) -> Value {
        let (all, index) = (self.state(ROWS), self.trace.input_places(&self.places.mean));
        self.trace.hlo.gather(&all, &index)
    }

    /// Advances the row means; returns their contributions to the sum of each parameter.
    fn advance_rows(&mut self, squared: &Value) -> Value {
        let sums = self.trace.hlo.sum(squared, &[1]);
        let means = self.trace.hlo.with("divide", &sums, self.segment.row_len as f64);
        let means = self.trace.hlo.convert(&means, self.gradient.element());
        let old = self.means_of_rows();
        let new = self.advanced(&old, &means);
        let rows = self.trace.input_places(&self.places.row_of_mean);
        let state = self.trace.hlo.gather(&new, &rows);
        self.keep(ROWS, &state);
        let new = self.trace.hlo.convert(&new, Element::F64);
        self.trace.hlo.reshape(&new, &[new.len(), 1])
    }

    fn advance_full(&mut self, squared: &Value) {
        if !self.has(FULL) {
            return;
        }
        let (old, index) = (self.state(FULL), self.trace.input_places(&self.places.element_of_full));
        let flat = self.trace.hlo.reshape(squared, &[squared.len()]);
        let squared = self.trace.hlo.gather(&flat, &index);
        let new = self.advanced(&old, &squared);
        self.keep(FULL, &new);
    }

    fn advance_columns(&mut self, moments: &XlaBuffer) {
        let width = self.segment.row_len;
        // Those of a parameter that is not factored are not used.
        let starts = self.starts(|factors| factors.start + factors.cols.map_or(0, |_| 2));
        let all = self.trace.load(QUEUE, Slice::whole(moments));
        let hlo = &mut self.trace.hlo;
        let zeros = hlo.zeros(&[width], Element::F64);
        let sums = self.params.iter().zip(&starts).map(|((_, factors), start)| {
            let is_factored = factors.cols.is_some();
            let sums =
                if is_factored { hlo.dynamic_slice(&all, &[(0, start)], &[width]) } else { zeros.clone() };
            hlo.reshape(&sums, &[1, width])
        });
        let sums: Vec<Value> = sums.collect();
        let sums = hlo.concatenate(&sums, 0);
        let counts = self.numbers(|factors| factors.rows().unwrap_or(1) as f64);
        let hlo = &mut self.trace.hlo;
        let counts = hlo.broadcast(&counts, &[0], sums.dims());
        let means = hlo.divide(&sums, &counts);
        let means = hlo.convert(&means, self.gradient.element());
        let index = self.trace.input_places(&self.places.param_of_columns);
        let means = self.trace.hlo.gather_rows(&means, &index);
        let means = self.trace.hlo.reshape(&means, &[means.len()]);
        let old = self.state(COLUMNS);
        let new = self.advanced(&old, &means);
        self.keep(COLUMNS, &new);
    }
}

impl Trace {
    /// Adds indices as an argument.
    pub(super) fn input_places(&mut self, places: &[usize]) -> Value {
        self.input_ints(places.iter().map(|&place| u32::try_from(place).expect("shards have fewer elements")))
    }
}
