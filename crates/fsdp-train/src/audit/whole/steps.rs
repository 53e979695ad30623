//! Does steps as they should be done, with weights and moments in memory.

use std::collections::BTreeMap;
use std::ops::Range;

use fsdp_ckpt::safetensors::TensorType;
use fsdp_config::OptimizerConfig;
use fsdp_core::DType;
use fsdp_core::model::{ModelSpec, ParamId};
use fsdp_nn::model::Architecture;
use fsdp_nn::update::GroupSettings;
use fsdp_nn::{HostMemory, HostOptions};

use super::{Whole, dtype_of, read};
use crate::audit::gradient::{OTHER_KERNELS, wider};
use crate::audit::moments::Moments;
use crate::audit::state::{Held, State, WEIGHT, blocks};
use crate::audit::sums::{Around, clip};
use crate::audit::sweep::Sweep;
use crate::audit::trial;
use crate::audit::update::{Direction, Element, SECOND, direction};
use crate::error::TrainError;

/// The values of each trained parameter, by its index; those of frozen ones are empty.
type Gradient = Vec<Vec<f32>>;

impl<A: Architecture + Clone> Whole<'_, A> {
    /// Does all steps, and returns the states after them: in the dtype of the run, rounded to the dtypes of the checkpoint after
    /// each step, with a sample of the errors of other kernels, and in a wider one.
    pub(super) fn run(&self, around: &mut Around<'_>, sample: usize) -> Result<[Held; 2], TrainError> {
        let mut own = Held::new();
        for id in self.settings.keys().copied() {
            for state in self.states() {
                own.insert((id, state), whole(&mut around.before, &self.job.plan.spec, id, state)?);
            }
        }
        let (mut exact, mut own_steps) = (own.clone(), self.own_before.clone());
        let dtype = self.job.config.fsdp.param_dtype;
        for index in 0..self.steps.len() {
            (self.progress)(&format!("doing step {} of {}", index + 1, self.steps.len()));
            let mut of_own = self.gradient(around, &mut own, index, dtype)?;
            let of_exact = self.gradient(around, &mut exact, index, wider(dtype))?;
            perturb(&mut of_own, &of_exact, sample);
            let numbers = self.numbers(around, &of_exact, &mut own_steps);
            self.advance(&mut own, &of_own, (index, &numbers), Some((&exact, &of_exact)));
            self.advance(&mut exact, &of_exact, (index, &numbers), None);
            for ((id, state), values) in &mut own {
                let dtype = dtype_of(&around.before, *id, state);
                values.iter_mut().for_each(|value| *value = rounded(*value, dtype));
            }
        }
        Ok([own, exact])
    }

    /// The gradient of a step, with held weights.
    fn gradient(
        &self,
        around: &mut Around<'_>,
        held: &mut Held,
        index: usize,
        dtype: DType,
    ) -> Result<Gradient, TrainError> {
        let (architecture, config) = (&self.job.architecture, &self.job.config);
        let terms = config.train.loss_terms(architecture.description());
        let trial = trial::sound(architecture.clone(), terms, &self.steps[index]);
        let memory = HostMemory::new(HostOptions { threads: self.threads, ..HostOptions::default() })?;
        let mut gradient: Gradient = vec![Vec::new(); around.spec.params.len()];
        let mut visit = |_: &mut Around<'_>, id: ParamId, _: Range<usize>, values: &[f32]| {
            gradient[id.0].extend_from_slice(values);
            Ok(())
        };
        std::mem::swap(&mut around.before.held, held);
        let mut sweep = Sweep { memory: &memory, stop: self.stop, around: &mut *around, is_after: false };
        let computed = sweep.gradient(&trial.computation(dtype, config.fsdp.param_dtype), &mut visit);
        std::mem::swap(&mut around.before.held, held);
        computed.map(|()| gradient)
    }

    /// The number of the next step among those of each parameter that it updates, given those done. PyTorch passes over a
    /// parameter without a gradient, as that of an expert without tokens: the state counts fewer steps for it, or has not changed.
    fn numbers(
        &self,
        around: &Around<'_>,
        exact: &Gradient,
        done: &mut BTreeMap<ParamId, u64>,
    ) -> BTreeMap<ParamId, u64> {
        let mut numbers = BTreeMap::new();
        for (id, done) in done {
            let counted = self.own_steps[id].saturating_sub(self.own_before[id]);
            let may_lack = around.skipped.contains(id) || counted < self.steps.len() as u64;
            if may_lack && exact[id.0].iter().all(|value| *value == 0.0) {
                continue;
            }
            *done += 1;
            numbers.insert(*id, *done);
        }
        numbers
    }

    /// Updates weights and moments with the gradient of a step. Where the difference from another gradient and state would
    /// decide on the sign of a direction, the opposite is taken, so that what may come of it is seen.
    fn advance(
        &self,
        held: &mut Held,
        gradient: &Gradient,
        (index, numbers): (usize, &BTreeMap<ParamId, u64>),
        other: Option<(&Held, &Gradient)>,
    ) {
        let rule = self.rule(gradient, index);
        for (id, own_step) in numbers {
            let settings = &self.settings[id];
            let names = [Some(WEIGHT), rule.moments.first, Some(SECOND)];
            let mut values =
                names.map(|name| name.and_then(|name| held.remove(&(*id, name))).unwrap_or_default());
            let other = other.map(|(held, gradient)| {
                let first = rule.moments.first.map_or(&[][..], |name| &held[&(*id, name)]);
                (first, &gradient[id.0][..])
            });
            let errors = rule.errors(&gradient[id.0], &values[1], other);
            for (at, gradient) in gradient[id.0].iter().enumerate() {
                let element = values.each_mut().map(|values| values.get_mut(at));
                let error = errors.get(at).copied().unwrap_or(0.0);
                rule.update(element, [f64::from(*gradient), error], settings, *own_step);
            }
            let values = names.into_iter().zip(values).filter(|(_, values)| !values.is_empty());
            held.extend(values.filter_map(|(name, values)| Some(((*id, name?), values))));
        }
    }

    fn rule(&self, gradient: &Gradient, index: usize) -> Rule {
        let (train, step) = (&self.job.config.train, self.first + index as u64);
        let squares = gradient.iter().flatten().map(|value| f64::from(*value).powi(2));
        Rule {
            moments: Moments::of(&train.optimizer, step).expect("the rule was looked for before"),
            beta2: match &train.optimizer {
                OptimizerConfig::Adamw(config) => config.betas[1],
                _ => 0.0,
            },
            direction: direction(&train.optimizer).expect("the rule was looked for before"),
            lr: self.job.schedule.lr(step),
            clip: clip(train.grad_clip, squares.sum::<f64>().sqrt()),
        }
    }
}

/// The rule of one step.
struct Rule {
    moments: Moments,
    beta2: f64,
    direction: Direction,
    /// The learning rate, before factors of groups.
    lr: f64,
    /// The coefficient of clipping.
    clip: f64,
}

impl Rule {
    /// What other kernels may change of each element of a gradient, from the difference to another one and its first moment.
    fn errors(&self, gradient: &[f32], first: &[f64], other: Option<(&[f64], &[f32])>) -> Vec<f64> {
        let Some((other_first, other)) = other.filter(|_| !first.is_empty()) else { return Vec::new() };
        let differences: Vec<f64> =
            gradient.iter().zip(other).map(|(a, b)| (f64::from(*a) - f64::from(*b)).abs()).collect();
        let mean2 = differences.iter().map(|difference| difference * difference).sum::<f64>();
        let mean = (mean2 / differences.len().max(1) as f64).sqrt();
        let error = |(difference, (a, b)): (f64, (&f64, &f64))| {
            OTHER_KERNELS * (self.clip * difference.max(mean) + (a - b).abs() / self.moments.gain)
        };
        differences.into_iter().zip(first.iter().zip(other_first)).map(error).collect()
    }

    /// Updates the weight and the moments of an element, of which a rule may have none, with a gradient and its error.
    fn update(
        &self,
        [p, m, v]: [Option<&mut f64>; 3],
        [gradient, error]: [f64; 2],
        settings: &GroupSettings,
        own_step: u64,
    ) {
        let (p, (mut unkept, mut none)) = (p.expect("a gradient has the elements of its weight"), (0.0, 0.0));
        let (m, v) = (m.unwrap_or(&mut unkept), v.unwrap_or(&mut none));
        let decay = settings.weight_decay;
        let [coupled, decoupled] = if self.moments.is_coupled { [decay, 0.0] } else { [0.0, decay] };
        let g = self.clip * gradient + coupled * *p;
        let first_before = *m;
        *m = match self.moments.first {
            Some(_) => self.moments.decay * *m + self.moments.gain * g,
            None => g,
        };
        *v = self.beta2 * *v + (1.0 - self.beta2) * g * g;
        let element = Element { first: *m, first_before, second: *v, gradient: g, ..Element::default() };
        let direction = (self.direction)(&Element { error, ..element }, own_step);
        let opposite = || (self.direction)(&element, own_step).map_or(0.0, |direction| -direction);
        *p -= self.lr * settings.lr_scale * (direction.unwrap_or_else(opposite) + decoupled * *p);
    }
}

fn whole(
    state: &mut State<'_>,
    spec: &ModelSpec,
    id: ParamId,
    name: &'static str,
) -> Result<Vec<f64>, TrainError> {
    let mut values = Vec::with_capacity(spec.param(id).len());
    for rows in blocks(spec, id) {
        values.extend(read(state, id, name, rows)?);
    }
    Ok(values)
}

/// Changes each element by what other kernels may leave of a gradient that is zero but for rounding, relative to the whole
/// gradient. Elements that are zero beside others, as in the rows of tokens that do not occur, are so everywhere.
fn perturb(gradient: &mut Gradient, exact: &Gradient, sample: usize) {
    let square = |values: &Vec<f32>| values.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>();
    let (square, elements) =
        exact.iter().fold((0.0, 0), |all, values| (all.0 + square(values), all.1 + values.len()));
    let size = (f64::from(f32::EPSILON) / 2.0 * (square / elements.max(1) as f64).sqrt()) as f32;
    for (values, exact) in gradient.iter_mut().zip(exact) {
        let is_zero = values.iter().chain(exact).all(|value| *value == 0.0);
        for (index, (value, exact)) in values.iter_mut().zip(exact).enumerate() {
            if is_zero || *value != 0.0 || *exact != 0.0 {
                // Another pattern of signs for each sample.
                *value += if (index >> sample).is_multiple_of(2) { size } else { -size };
            }
        }
    }
}

/// A value as a checkpoint holds it.
fn rounded(value: f64, dtype: TensorType) -> f64 {
    match dtype {
        TensorType::F64 => value,
        TensorType::Bf16 => {
            // To the nearest, and of two the even one.
            let bits = (value as f32).to_bits();
            let even = bits.wrapping_add(0x7fff + ((bits >> 16) & 1));
            f64::from(f32::from_bits(even & 0xffff_0000))
        }
        _ => f64::from(value as f32),
    }
}
