//! Adafactor's sums over parameters, and the step factors derived from them.

use fsdp_core::Queue;
use fsdp_core::memory::Slice;
use fsdp_core::model::ParamId;
use fsdp_nn::update::AdafactorFactors;

use super::factored::Pass;
use crate::buffer::XlaBuffer;
use crate::hlo::{Element, Value};

impl Pass<'_, '_> {
    /// For each parameter: the rate of its step, the fraction of it that is kept, and the divisor of its update.
    pub(super) fn steps(&mut self, moments: &XlaBuffer, norms: &XlaBuffer) -> [Value; 3] {
        let (squares, norms) =
            (self.sums(moments, |_, factors| factors.start), self.sums(norms, |id, _| id.0));
        let lens = self.numbers(|factors| factors.len as f64);
        let AdafactorFactors { least_rms, clip_threshold, .. } = self.params[0].1;
        let [rates, decays] = [|f: &AdafactorFactors| f.rate, |f: &AdafactorFactors| f.decay]
            .map(|of| self.params.iter().map(|(_, factors)| of(factors)).collect::<Vec<f64>>());
        let mut rate = self.trace.input_floats(&rates, Element::F64);
        let decay = self.trace.input_floats(&decays, Element::F64);
        let hlo = &mut self.trace.hlo;
        let [scale, rms] = [squares, norms].map(|sums| {
            let means = hlo.divide(&sums, &lens);
            hlo.unary("sqrt", &means)
        });
        if let Some(min) = least_rms {
            let scale = hlo.with("maximum", &scale, min);
            rate = hlo.multiply(&rate, &scale);
        }
        let lost = hlo.multiply(&decay, &rate);
        let one = hlo.float(1.0, lost.dims(), Element::F64);
        let keep = hlo.subtract(&one, &lost);
        let clip = hlo.with("divide", &rms, clip_threshold);
        let clip = hlo.binary("maximum", &clip, &one);
        [rate, keep, clip].map(|factor| hlo.convert(&factor, self.gradient.element()))
    }

    /// Broadcasts one number per parameter to its rows.
    pub(super) fn of_rows(&mut self, of_params: &Value) -> Value {
        let of_rows = self.trace.hlo.gather(of_params, &self.param);
        self.trace.in_columns(&of_rows, self.segment.row_len)
    }

    /// One number per parameter, constant over all steps.
    pub(super) fn numbers(&mut self, of: impl Fn(&AdafactorFactors) -> f64) -> Value {
        let numbers: Vec<f64> = self.params.iter().map(|(_, factors)| of(factors)).collect();
        self.trace.hlo.floats(&numbers, Element::F64)
    }

    /// One place per parameter, as scalars. They are arguments, so that the programs of layers are alike.
    pub(super) fn starts(&mut self, of: impl Fn(&AdafactorFactors) -> usize) -> Vec<Value> {
        let starts: Vec<usize> = self.params.iter().map(|(_, factors)| of(factors)).collect();
        let all = self.trace.input_places(&starts);
        let hlo = &mut self.trace.hlo;
        let start = |index| {
            let start = hlo.range(&all, index..index + 1);
            hlo.reshape(&start, &[])
        };
        (0..starts.len()).map(start).collect()
    }

    /// Looks up one sum per parameter.
    pub(super) fn sums(
        &mut self,
        sums: &XlaBuffer,
        at: impl Fn(ParamId, &AdafactorFactors) -> usize,
    ) -> Value {
        let places: Vec<usize> = self.params.iter().map(|(id, factors)| at(*id, factors)).collect();
        let (all, places) =
            (self.trace.load(Queue::Compute, Slice::whole(sums)), self.trace.input_places(&places));
        self.trace.hlo.gather(&all, &places)
    }

    /// The sums of the squares of rows, in double precision, as a column.
    pub(super) fn square_sums(&mut self, x: &Value) -> Value {
        let hlo = &mut self.trace.hlo;
        let x = hlo.convert(x, Element::F64);
        let squares = hlo.multiply(&x, &x);
        let sums = hlo.sum(&squares, &[1]);
        hlo.reshape(&sums, &[sums.len(), 1])
    }

    /// Sums rows by parameter.
    pub(super) fn by_param(&mut self, rows: &Value) -> Value {
        let table = self.trace.hlo.zeros(&[self.params.len(), rows.dims()[1]], rows.element());
        self.trace.hlo.add_to_rows(&table, &self.param, rows)
    }
}
