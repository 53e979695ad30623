//! The elementwise rules, with the same operations as on the host.

use fsdp_core::Error;
use fsdp_core::model::ParamId;
use fsdp_core::update::{SegmentShard, StepScalars};
use fsdp_nn::update::{AdamW, AdamWFactors, Ema, Lion, LionFactors, Sgd};

use super::elementwise::{After, Before, Factors, each_element};
use crate::buffer::XlaBuffer;
use crate::hlo::{Builder, Value};
use crate::memory::XlaMemory;

/// A rule that can be traced within a schedule.
pub(super) trait Traced {
    fn update(
        &self,
        memory: &XlaMemory,
        shard: &mut SegmentShard<'_, XlaBuffer>,
        scalars: &StepScalars<'_, XlaBuffer>,
    ) -> Result<(), Error>;
}

/// `a x + b y` with constants `a` and `b`.
fn weighted(hlo: &mut Builder, (a, x): (f64, &Value), (b, y): (f64, &Value)) -> Value {
    let (x, y) = (hlo.with("multiply", x, a), hlo.with("multiply", y, b));
    hlo.add(&x, &y)
}

impl Traced for AdamW {
    fn update(
        &self,
        memory: &XlaMemory,
        shard: &mut SegmentShard<'_, XlaBuffer>,
        scalars: &StepScalars<'_, XlaBuffer>,
    ) -> Result<(), Error> {
        let of = |param| {
            let AdamWFactors { keep, root_correction, step_size, .. } =
                self.factors(param, scalars.step, scalars.lr);
            [keep, root_correction, step_size]
        };
        let factors = Factors { of: &of, is_uniform: self.groups.is_uniform() };
        // These factors are the same in all steps.
        let AdamWFactors { weight, by_end, beta2, square, eps, .. } = self.factors(ParamId(0), 1, 0.0);
        each_element(memory, shard, scalars, &factors, |hlo, before| {
            let Before { gradient, params, state, factors: [keep, root_correction, step_size] } = before;
            let difference = hlo.subtract(&gradient, &state[0]);
            let mean = if by_end {
                let difference = hlo.with("multiply", &difference, 1.0 - weight);
                hlo.subtract(&gradient, &difference)
            } else {
                let difference = hlo.with("multiply", &difference, weight);
                hlo.add(&state[0], &difference)
            };
            let squares = hlo.with("multiply", &gradient, square);
            let squares = hlo.multiply(&squares, &gradient);
            let variance = hlo.with("multiply", &state[1], beta2);
            let variance = hlo.add(&variance, &squares);
            let roots = hlo.unary("sqrt", &variance);
            let roots = hlo.divide(&roots, &root_correction);
            let divisor = hlo.with("add", &roots, eps);
            let change = hlo.multiply(&step_size, &mean);
            let change = hlo.divide(&change, &divisor);
            let kept = hlo.multiply(&params, &keep);
            After { params: Some(hlo.add(&kept, &change)), state: vec![mean, variance] }
        })
    }
}

impl Traced for Sgd {
    fn update(
        &self,
        memory: &XlaMemory,
        shard: &mut SegmentShard<'_, XlaBuffer>,
        scalars: &StepScalars<'_, XlaBuffer>,
    ) -> Result<(), Error> {
        let of = |param| {
            let group = self.groups.of(param);
            // In the first step the momentum is the gradient.
            let is_first = group.own_step(scalars.step) == 1;
            let [old, new] = if is_first { [0.0, 1.0] } else { [self.momentum, 1.0 - self.dampening] };
            [-scalars.lr * group.lr_scale, group.weight_decay, old, new]
        };
        let factors = Factors { of: &of, is_uniform: self.groups.is_uniform() };
        each_element(memory, shard, scalars, &factors, |hlo, before| {
            let Before { gradient, params, state, factors: [step_size, decay, old, new] } = before;
            let decayed = hlo.multiply(&params, &decay);
            let gradient = hlo.add(&gradient, &decayed);
            let (mut direction, mut kept) = (gradient.clone(), Vec::new());
            if let Some(momentum) = state.first() {
                let (momentum, fresh) = (hlo.multiply(momentum, &old), hlo.multiply(&gradient, &new));
                direction = hlo.add(&momentum, &fresh);
                kept.push(direction.clone());
                if self.nesterov {
                    direction = weighted(hlo, (1.0, &gradient), (self.momentum, &direction));
                }
            }
            let change = hlo.multiply(&step_size, &direction);
            After { params: Some(hlo.add(&params, &change)), state: kept }
        })
    }
}

impl Traced for Lion {
    fn update(
        &self,
        memory: &XlaMemory,
        shard: &mut SegmentShard<'_, XlaBuffer>,
        scalars: &StepScalars<'_, XlaBuffer>,
    ) -> Result<(), Error> {
        let of = |param| {
            let LionFactors { keep, step_size, .. } = self.factors(param, scalars.lr);
            [keep, step_size]
        };
        let factors = Factors { of: &of, is_uniform: self.groups.is_uniform() };
        let LionFactors { direction: [old, new], average: [kept, added], .. } = self.factors(ParamId(0), 0.0);
        each_element(memory, shard, scalars, &factors, |hlo, before| {
            let Before { gradient, params, state, factors: [keep, step_size] } = before;
            let direction = weighted(hlo, (old, &state[0]), (new, &gradient));
            let sign = hlo.unary("sign", &direction);
            let change = hlo.multiply(&sign, &step_size);
            let params = hlo.multiply(&params, &keep);
            let average = weighted(hlo, (kept, &state[0]), (added, &gradient));
            After { params: Some(hlo.add(&params, &change)), state: vec![average] }
        })
    }
}

impl Traced for Ema {
    fn update(
        &self,
        memory: &XlaMemory,
        shard: &mut SegmentShard<'_, XlaBuffer>,
        scalars: &StepScalars<'_, XlaBuffer>,
    ) -> Result<(), Error> {
        let weight = self.weight(scalars.step);
        let factors = Factors { of: &|_| [weight, 1.0 - weight], is_uniform: true };
        each_element(memory, shard, scalars, &factors, |hlo, before| {
            let Before { params, state, factors: [weight, rest], .. } = before;
            // As in PyTorch's `lerp`: from the end for weights of at least one half.
            let difference = hlo.subtract(&params, &state[0]);
            let near = hlo.multiply(&difference, &weight);
            let near = hlo.add(&state[0], &near);
            let far = hlo.multiply(&difference, &rest);
            let far = hlo.subtract(&params, &far);
            let is_by_end = hlo.compare("GE", &weight, &rest);
            After { params: None, state: vec![hlo.select(&is_by_end, &far, &near)] }
        })
    }
}
