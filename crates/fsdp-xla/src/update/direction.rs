//! The denominator of Adafactor's update.

use super::factored::{COLUMNS, FULL, Pass, ROWS};
use crate::buffer::XlaBuffer;
use crate::hlo::{Element, Value};

impl Pass<'_, '_> {
    /// The gradient divided by the root of the second moment, as rows; zero where there is no parameter.
    pub(super) fn direction(&mut self, moments: &XlaBuffer) -> Value {
        let direction = if self.has(ROWS) {
            self.factored_direction(moments)
        } else {
            self.trace.hlo.zeros(self.gradient.dims(), self.gradient.element())
        };
        if !self.has(FULL) {
            return direction;
        }
        let (full, index) = (self.state(FULL), self.trace.input_places(&self.places.element_of_full));
        let hlo = &mut self.trace.hlo;
        let gradient = hlo.reshape(&self.gradient, &[direction.len()]);
        let gradient = hlo.gather(&gradient, &index);
        let roots = hlo.unary("sqrt", &full);
        let elements = hlo.divide(&gradient, &roots);
        let elements = hlo.reshape(&elements, &[elements.len(), 1]);
        // These elements are still zero.
        let all = hlo.reshape(&direction, &[direction.len(), 1]);
        let all = hlo.add_to_rows(&all, &index, &elements);
        hlo.reshape(&all, direction.dims())
    }

    /// The direction of factored parameters; zero elsewhere.
    fn factored_direction(&mut self, moments: &XlaBuffer) -> Value {
        let (rows, width) = (self.segment.rows_per_rank, self.segment.row_len);
        let sums = self.sums(moments, |_, factors| factors.start + usize::from(factors.cols.is_some()));
        let counts = self.numbers(|factors| factors.rows().unwrap_or(1) as f64);
        let means = self.trace.hlo.divide(&sums, &counts);
        let means = self.trace.hlo.convert(&means, self.gradient.element());
        let means = self.trace.hlo.gather(&means, &self.param);
        let row_means = self.means_of_rows();
        let row_means = self.trace.hlo.divide(&row_means, &means);
        let row = self.reciprocal_roots(&row_means);
        let columns = self.state(COLUMNS);
        let columns = self.reciprocal_roots(&columns);
        let index = self.trace.input_places(&self.places.columns);
        let has_mean = self.trace.input_places(&self.places.mean);
        let hlo = &mut self.trace.hlo;
        let columns = hlo.reshape(&columns, &[columns.len() / width, width]);
        let columns = hlo.gather_rows(&columns, &index);
        let mean_count = hlo.int(self.shard.state[ROWS].storage.padded_len() as i64, &[rows], Element::U32);
        let is_factored = hlo.compare("LT", &has_mean, &mean_count);
        let is_factored = hlo.broadcast(&is_factored, &[0], &[rows, width]);
        let row = self.trace.in_columns(&row, width);
        let hlo = &mut self.trace.hlo;
        let factor = hlo.multiply(&row, &columns);
        let direction = hlo.multiply(&self.gradient, &factor);
        let zeros = hlo.zeros(direction.dims(), direction.element());
        hlo.select(&is_factored, &direction, &zeros)
    }

    fn reciprocal_roots(&mut self, x: &Value) -> Value {
        let hlo = &mut self.trace.hlo;
        let (one, roots) = (hlo.float(1.0, x.dims(), x.element()), hlo.unary("sqrt", x));
        hlo.divide(&one, &roots)
    }
}
