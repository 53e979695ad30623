//! Activations.

use std::f64::consts::{FRAC_1_SQRT_2, PI};

use fsdp_nn::op::{Activation, CLAMP, Function, Pass, SWISH_SCALE};

use super::Call;
use crate::hlo::Value;
use crate::trace::Trace;

impl Trace {
    pub(super) fn activation(&mut self, op: Activation, mut operands: Call<'_, '_>) {
        let reads: Vec<Value> = operands.reads.iter().map(|&read| self.read_master(read)).collect();
        let x = &reads[0];
        let [value, slope] = self.function(op.function, x);
        let writes = operands.reborrow().writes;
        let forward = |trace: &mut Trace| match op.gated {
            true => trace.hlo.multiply(&value, &reads[1]),
            false => value.clone(),
        };
        if op.pass == Pass::Forward {
            let y = forward(self);
            return self.write(&writes[0], &y);
        }
        let (dy, slopes) = match op.pass {
            Pass::BackwardRecompute => (self.read_master(writes[0].slice.as_slice()), 1),
            _ => (reads[if op.gated { 2 } else { 1 }].clone(), 0),
        };
        let mut dx = self.hlo.multiply(&dy, &slope);
        if op.gated {
            dx = self.hlo.multiply(&dx, &reads[1]);
            let dup = self.hlo.multiply(&dy, &value);
            self.write(&writes[slopes + 1], &dup);
        }
        self.write(&writes[slopes], &dx);
        if op.pass == Pass::BackwardRecompute {
            let y = forward(self);
            self.write(&writes[0], &y);
        }
    }

    /// The value of a function and its slope. The compiler drops the one that is not used.
    fn function(&mut self, function: Function, x: &Value) -> [Value; 2] {
        match function {
            Function::Silu => {
                let logistic = self.hlo.unary("logistic", x);
                let value = self.hlo.multiply(x, &logistic);
                let one = self.hlo.float(1.0, x.dims(), x.element());
                let rest = self.hlo.subtract(&one, &logistic);
                let slope_term = self.hlo.multiply(x, &rest);
                let slope_term = self.hlo.with("add", &slope_term, 1.0);
                [value, self.hlo.multiply(&slope_term, &logistic)]
            }
            Function::Logistic => {
                let value = self.hlo.unary("logistic", x);
                let one = self.hlo.float(1.0, x.dims(), x.element());
                let rest = self.hlo.subtract(&one, &value);
                let slope = self.hlo.multiply(&value, &rest);
                [value, slope]
            }
            Function::GeluTanh => self.gelu_tanh(x),
            Function::Relu => {
                let [zero, one] = [0.0, 1.0].map(|number| self.hlo.float(number, x.dims(), x.element()));
                let is_above = self.hlo.compare("GT", x, &zero);
                [self.hlo.binary("maximum", x, &zero), self.hlo.select(&is_above, &one, &zero)]
            }
            Function::ClampedSwish => {
                let [one, zero, limit] =
                    [1.0, 0.0, CLAMP].map(|number| self.hlo.float(number, x.dims(), x.element()));
                let z = self.hlo.binary("minimum", x, &limit);
                let scaled = self.hlo.with("multiply", &z, SWISH_SCALE);
                let logistic = self.hlo.unary("logistic", &scaled);
                let rest = self.hlo.subtract(&one, &logistic);
                let slope = self.hlo.multiply(&scaled, &rest);
                let slope = self.hlo.with("add", &slope, 1.0);
                let slope = self.hlo.multiply(&slope, &logistic);
                let is_above = self.hlo.compare("GT", x, &limit);
                [self.hlo.multiply(&z, &logistic), self.hlo.select(&is_above, &zero, &slope)]
            }
            Function::ClampedPlusOne => {
                let [one, zero, low, high] =
                    [1.0, 0.0, -CLAMP, CLAMP].map(|number| self.hlo.float(number, x.dims(), x.element()));
                let z = self.hlo.binary("minimum", x, &high);
                let z = self.hlo.binary("maximum", &z, &low);
                let is_inside = self.hlo.compare("EQ", &z, x);
                [self.hlo.with("add", &z, 1.0), self.hlo.select(&is_inside, &one, &zero)]
            }
            Function::Gelu => {
                // `erfc` loses no precision where the distribution function is near 0.
                let scaled = self.hlo.with("multiply", x, -FRAC_1_SQRT_2);
                let normal = self.hlo.erfc(&scaled);
                let normal = self.hlo.with("multiply", &normal, 0.5);
                let value = self.hlo.multiply(x, &normal);
                let square = self.hlo.multiply(x, x);
                let square = self.hlo.with("multiply", &square, -0.5);
                let density = self.hlo.unary("exponential", &square);
                let density = self.hlo.with("multiply", &density, 1.0 / (2.0 * PI).sqrt());
                let slope_term = self.hlo.multiply(x, &density);
                [value, self.hlo.add(&normal, &slope_term)]
            }
        }
    }

    fn gelu_tanh(&mut self, x: &Value) -> [Value; 2] {
        let (factor, cubic) = ((2.0 / PI).sqrt(), 0.044_715);
        let square = self.hlo.multiply(x, x);
        let inner = self.hlo.with("multiply", &square, cubic);
        let inner = self.hlo.with("add", &inner, 1.0);
        let inner = self.hlo.multiply(&inner, x);
        let inner = self.hlo.with("multiply", &inner, factor);
        // `(1 + tanh(u)) / 2` is the logistic function of `2 u`, which loses no precision near 0.
        let inner = self.hlo.with("multiply", &inner, 2.0);
        let half = self.hlo.unary("logistic", &inner);
        let value = self.hlo.multiply(x, &half);
        let slope = self.hlo.with("multiply", &square, 3.0 * cubic);
        let slope = self.hlo.with("add", &slope, 1.0);
        let slope = self.hlo.with("multiply", &slope, 2.0 * factor);
        let one = self.hlo.float(1.0, x.dims(), x.element());
        let rest = self.hlo.subtract(&one, &half);
        let slope_term = self.hlo.multiply(&half, &rest);
        let slope_term = self.hlo.multiply(&slope_term, &slope);
        let slope_term = self.hlo.multiply(&slope_term, x);
        [value, self.hlo.add(&half, &slope_term)]
    }
}
