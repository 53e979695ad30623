//! Tests update rules against slow scalar references, with various shardings.

use std::collections::BTreeMap;

use fsdp_core::memory::{Buffer, Category, HostSlice, HostSliceMut, Memory, Slice, SliceMut};
use fsdp_core::model::{BlockSpec, ModelSpec, ModuleSpec, ParamId, ParamSpec};
use fsdp_core::scalars::GradientFactors;
use fsdp_core::update::{Piece, RuleState, SegmentShard, Stage, StateAxis, StepScalars, Updates};
use fsdp_core::{DType, Queue, Tallies};
use proptest::prelude::*;

use super::{
    Adafactor, AdafactorOptions, AdamW, AdamW8bit, ElementwiseRule, Ema, GroupSettings, Groups, Lion, Part,
    Rule, ScheduleFree, Sgd,
};
use crate::random;
use crate::{HostBuffer, HostMemory, HostOptions};

/// Shapes of the parameters of the segment under test. The last one is large enough for 8-bit moments.
const SHAPES: [&[usize]; 5] = [&[7, 5], &[13], &[31, 3], &[1, 6], &[16, 300]];
const STEPS: u64 = 4;

mod adafactor;
mod adamw8bit;
mod formula;
mod muon;
mod not_finite;

fn row_len(shape: &[usize]) -> usize {
    shape[1..].iter().product()
}

fn total() -> usize {
    SHAPES.iter().map(|shape| shape.iter().product::<usize>()).sum()
}

fn numbers(key: u64, len: usize) -> Vec<f64> {
    (0..len as u64).map(|i| f64::from(random::normal(key, i) as f32)).collect()
}

/// Groups in which one parameter has its own learning rate scale, and no decay.
fn groups(weight_decay: f64) -> Groups {
    let settings = GroupSettings { lr_scale: 0.5, weight_decay: 0.0, late: 0 };
    Groups::uniform(weight_decay).with([ParamId(1)], settings)
}

const FACTORS: GradientFactors = GradientFactors { scale: 0.25, clip: 0.7, finite: true };

fn lr(step: u64) -> f64 {
    0.03 / step as f64
}

/// Returns the gradients of a step, scaled as the rule must scale them.
fn scaled(step: u64) -> Vec<f64> {
    numbers(100 + step, total()).iter().map(|g| g * FACTORS.scale * FACTORS.clip).collect()
}

/// Returns the parameter of every element.
fn owners() -> Vec<usize> {
    let len = |param: usize| SHAPES[param].iter().product();
    (0..SHAPES.len()).flat_map(|param| vec![param; len(param)]).collect()
}

struct Shard {
    memory: HostMemory,
    params: HostBuffer,
    /// The low-precision copy of the parameters.
    low: Option<HostBuffer>,
    gradient: HostBuffer,
    state: Vec<HostBuffer>,
    factors: HostBuffer,
    not_finite: HostBuffer,
    pieces: Vec<Piece>,
    /// For every piece, the offset of its elements in the unsharded segment.
    places: Vec<usize>,
}

/// Returns the pieces of rank `rank` of `world`: an even share of whole rows of every parameter.
fn pieces(rank: usize, world: usize) -> (Vec<Piece>, Vec<usize>) {
    let (mut pieces, mut places, mut offset, mut start) = (Vec::new(), Vec::new(), 1, 0);
    for (param, shape) in SHAPES.iter().enumerate() {
        let width = row_len(shape);
        let (from, to) = (shape[0] * rank / world, shape[0] * (rank + 1) / world);
        let len = (to - from) * width;
        if len > 0 {
            let param_offset = from * width;
            pieces.push(Piece { param: ParamId(param), offset, len, param_offset, row_len: width });
            places.push(start + param_offset);
            // Leaves padding between pieces.
            offset += len + 1;
        }
        start += shape.iter().product::<usize>();
    }
    (pieces, places)
}

impl Shard {
    fn new(rule: &Rule, dtype: DType, rank: usize, world: usize, threads: usize) -> Self {
        let memory = HostMemory::new(HostOptions { threads, ..HostOptions::default() }).unwrap();
        let (pieces, places) = pieces(rank, world);
        let len = pieces.last().map_or(0, |piece| piece.offset + piece.len) + 2;
        let buffer = |category, dtype, len| {
            let mut buffer = memory.allocate(category, dtype, len).unwrap();
            memory.zero(Queue::Compute, SliceMut::whole(&mut buffer)).unwrap();
            buffer
        };
        let state = rule.state(&pieces, len, dtype);
        let state =
            state.iter().map(|tensor| buffer(Category::OptimizerState, tensor.dtype, tensor.len)).collect();
        let params = buffer(Category::ParameterShard, dtype, len);
        let low = Some(buffer(Category::ParameterShard, DType::Bf16, len));
        let gradient = buffer(Category::ShardedGradient, DType::F32, len);
        let factors = buffer(Category::CommStaging, DType::F64, GradientFactors::LEN);
        let not_finite = buffer(Category::CommStaging, DType::I64, 1);
        let mut shard = Self { params, low, gradient, state, factors, not_finite, pieces, places, memory };
        let initial = numbers(1, total());
        shard.scatter(&initial, true);
        shard.set_factors(FACTORS);
        shard
    }

    fn set_factors(&mut self, factors: GradientFactors) {
        let values = factors.to_array();
        let factors = SliceMut::whole(&mut self.factors);
        self.memory.write(Queue::Compute, HostSlice::F64(&values), factors).unwrap();
    }

    fn scatter(&mut self, segment: &[f64], into_params: bool) {
        let buffer = if into_params { &mut self.params } else { &mut self.gradient };
        for (piece, &place) in self.pieces.iter().zip(&self.places) {
            let values = HostSlice::F64(&segment[place..place + piece.len]);
            self.memory
                .write(Queue::Compute, values, SliceMut::new(buffer, piece.offset, piece.len))
                .unwrap();
        }
    }

    fn gather(&self, segment: &mut [f64]) {
        for (piece, &place) in self.pieces.iter().zip(&self.places) {
            let values = HostSliceMut::F64(&mut segment[place..place + piece.len]);
            self.memory
                .read(Queue::Compute, Slice::new(&self.params, piece.offset, piece.len), values)
                .unwrap();
        }
    }

    /// Checks that the copy equals the rounded parameters.
    fn assert_copied(&self) {
        let mut rounded = self.memory.allocate(Category::Workspace, DType::Bf16, self.params.len()).unwrap();
        let to = SliceMut::whole(&mut rounded);
        self.memory.copy(Queue::Compute, Slice::whole(&self.params), to).unwrap();
        let [expected, copied] = [&rounded, self.low.as_ref().unwrap()].map(|buffer| {
            let mut values = vec![0.0; buffer.len()];
            self.memory.read(Queue::Compute, Slice::whole(buffer), HostSliceMut::F64(&mut values)).unwrap();
            values
        });
        assert_eq!(copied, expected);
    }

    /// Returns parameters and state.
    fn contents(&self) -> Vec<Vec<f64>> {
        let read = |buffer: &HostBuffer| {
            let mut values = vec![0.0; buffer.len()];
            self.memory.read_numbers(Queue::Compute, Slice::whole(buffer), &mut values).unwrap();
            values
        };
        std::iter::once(&self.params).chain(&self.state).map(read).collect()
    }

    /// Returns the arguments that a rule gets in a step.
    fn view(
        &mut self,
        step: u64,
    ) -> (&HostMemory, SegmentShard<'_, HostBuffer>, StepScalars<'_, HostBuffer>) {
        let Self { memory, params, low, gradient, state, factors, not_finite, pieces, .. } = self;
        let scalars = StepScalars { step, lr: lr(step), factors: Slice::whole(factors) };
        let low = low.as_mut();
        let shard =
            SegmentShard { params, low, gradient, state, pieces, segment: None, whole: None, not_finite };
        (memory, shard, scalars)
    }
}

/// Runs one step of a rule on all shards.
fn step(rule: &Rule, shards: &mut [Shard], step: u64) {
    let gradient = numbers(100 + step, total());
    shards.iter_mut().for_each(|shard| shard.scatter(&gradient, false));
    let mut statistics = Vec::new();
    for len in rule.phases() {
        let memory = &shards[0].memory;
        let mut sums = memory.allocate(Category::CommStaging, DType::F64, len).unwrap();
        memory.zero(Queue::Compute, SliceMut::whole(&mut sums)).unwrap();
        for shard in shards.iter_mut() {
            let (memory, mut view, scalars) = shard.view(step);
            let stage = Stage::Statistics { earlier: &statistics, sums: &mut sums };
            rule.run(memory, stage, &mut view, &scalars).unwrap();
        }
        statistics.push(sums);
    }
    for shard in shards {
        let (memory, mut view, scalars) = shard.view(step);
        rule.run(memory, Stage::Update { statistics: &statistics }, &mut view, &scalars).unwrap();
    }
}

/// Trains for `STEPS` steps on `world` ranks and returns the parameters.
fn train(rule: impl Into<Part>, dtype: DType, world: usize, threads: usize) -> Vec<f64> {
    let rule = &Rule::new(rule);
    let mut shards: Vec<_> = (0..world).map(|rank| Shard::new(rule, dtype, rank, world, threads)).collect();
    (1..=STEPS).for_each(|number| step(rule, &mut shards, number));
    shards.iter().for_each(Shard::assert_copied);
    let mut params = vec![f64::NAN; total()];
    shards.iter().for_each(|shard| shard.gather(&mut params));
    params
}

fn assert_close(got: &[f64], expected: &[f64], tolerance: f64) {
    for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
        assert!((got - expected).abs() <= tolerance * (1.0 + expected.abs()), "{i}: {got} for {expected}");
    }
}

#[test]
fn delayed_parameters_count_their_own_steps() {
    let (late, param, spec) = (5, ParamId(1), spec());
    let (on_time, delayed) = (groups(0.1), groups(0.1).delayed(param, late));
    assert_eq!(delayed.of(param), GroupSettings { late, ..on_time.of(param) });
    assert_eq!(delayed.of(ParamId(0)), on_time.of(ParamId(0)));
    let adamw = |groups: &Groups| AdamW { groups: groups.clone(), ..AdamW::default() };
    let free = |groups: &Groups| ScheduleFree {
        betas: (0.9, 0.99),
        eps: 1e-8,
        warmup_steps: 2,
        groups: groups.clone(),
    };
    let adafactor = |groups: &Groups| {
        let options =
            AdafactorOptions { groups: groups.clone(), relative_step: true, ..AdafactorOptions::default() };
        Adafactor::new(options, &spec)
    };
    for step in 1..8 {
        let (ours, theirs) = (adamw(&delayed), adamw(&on_time));
        assert_eq!(ours.factors_of(param, step + late, 0.1), theirs.factors_of(param, step, 0.1));
        assert_eq!(ours.factors_of(ParamId(0), step, 0.1), theirs.factors_of(ParamId(0), step, 0.1));
        let (ours, theirs) = (free(&delayed), free(&on_time));
        assert_eq!(ours.factors_of(param, step + late, 0.1), theirs.factors_of(param, step, 0.1));
        let (ours, theirs) = (adafactor(&delayed), adafactor(&on_time));
        assert_eq!(ours.factors(param, step + late, 0.1), theirs.factors(param, step, 0.1));
    }
}

/// In its first own step, the momentum of a parameter is its gradient, without dampening.
#[test]
fn momentum_of_delayed_parameter_begins_with_gradient() {
    let momentum_after = |late: u64, number: u64| {
        let groups = Groups::uniform(0.0).delayed(ParamId(0), late);
        let rule = Rule::new(Sgd { momentum: 0.9, dampening: 0.5, groups, ..Sgd::default() });
        let mut shards = vec![Shard::new(&rule, DType::F32, 0, 1, 1)];
        step(&rule, &mut shards, number);
        (shards[0].contents()[1].clone(), shards[0].pieces.clone())
    };
    let ((fresh, pieces), (old, _)) = (momentum_after(6, 7), momentum_after(0, 7));
    for piece in pieces {
        let factor = if piece.param == ParamId(0) { 2.0 } else { 1.0 };
        let elements = piece.offset..piece.offset + piece.len;
        let expected: Vec<f64> = old[elements.clone()].iter().map(|value| factor * value).collect();
        assert_close(&fresh[elements], &expected, 1e-6);
    }
}

/// AdamW of `torch.optim`, one element at a time.
fn adamw_reference(rule: &AdamW) -> Vec<f64> {
    let (mut p, mut m, mut v) = (numbers(1, total()), vec![0.0; total()], vec![0.0; total()]);
    for step in 1..=STEPS {
        let (gradient, lr) = (scaled(step), lr(step));
        for i in 0..total() {
            let GroupSettings { lr_scale, weight_decay, .. } = rule.groups.of(ParamId(owners()[i]));
            let lr = lr * lr_scale;
            p[i] *= 1.0 - lr * weight_decay;
            m[i] = rule.betas.0 * m[i] + (1.0 - rule.betas.0) * gradient[i];
            v[i] = rule.betas.1 * v[i] + (1.0 - rule.betas.1) * gradient[i] * gradient[i];
            let correction = |beta: f64| 1.0 - beta.powi(step as i32);
            let denominator = v[i].sqrt() / correction(rule.betas.1).sqrt() + rule.eps;
            p[i] -= lr / correction(rule.betas.0) * m[i] / denominator;
        }
    }
    p
}

/// `lion_pytorch.py` of the authors, one element at a time.
fn lion_reference(rule: &Lion) -> Vec<f64> {
    let (mut p, mut average) = (numbers(1, total()), vec![0.0; total()]);
    for step in 1..=STEPS {
        let gradient = scaled(step);
        for i in 0..total() {
            let GroupSettings { lr_scale, weight_decay, .. } = rule.groups.of(ParamId(owners()[i]));
            let lr = lr(step) * lr_scale;
            p[i] *= 1.0 - lr * weight_decay;
            let direction: f64 = rule.betas.0 * average[i] + (1.0 - rule.betas.0) * gradient[i];
            p[i] -= if direction == 0.0 { 0.0 } else { lr * direction.signum() };
            average[i] = rule.betas.1 * average[i] + (1.0 - rule.betas.1) * gradient[i];
        }
    }
    p
}

/// SGD of `torch.optim`, one element at a time.
fn sgd_reference(rule: &Sgd) -> Vec<f64> {
    let (mut p, mut buffer) = (numbers(1, total()), vec![0.0; total()]);
    for step in 1..=STEPS {
        let gradient = scaled(step);
        for i in 0..total() {
            let GroupSettings { lr_scale, weight_decay, .. } = rule.groups.of(ParamId(owners()[i]));
            let mut g = gradient[i] + weight_decay * p[i];
            if rule.momentum != 0.0 {
                let first = step == 1;
                buffer[i] = if first { g } else { rule.momentum * buffer[i] + (1.0 - rule.dampening) * g };
                g = if rule.nesterov { g + rule.momentum * buffer[i] } else { buffer[i] };
            }
            p[i] -= lr(step) * lr_scale * g;
        }
    }
    p
}

fn spec() -> ModelSpec {
    let param = |(i, shape): (usize, &&[usize])| ParamSpec {
        fqn: format!("p{i}"),
        aliases: Vec::new(),
        shape: shape.to_vec(),
        trainable: true,
        expert: None,
        quantized: None,
        keep_f32: false,
    };
    let ids: Vec<_> = (0..SHAPES.len()).map(ParamId).collect();
    ModelSpec {
        params: SHAPES.iter().enumerate().map(param).collect(),
        modules: vec![ModuleSpec {
            fqn: String::new(),
            class: "Root".into(),
            parent: None,
            params: ids.clone(),
        }],
        blocks: vec![BlockSpec { name: "all".into(), params: ids, layer: None }],
        tallies: Tallies::default(),
    }
}

#[test]
fn adamw_matches_torch() {
    for betas in [(0.9, 0.95), (0.3, 0.999)] {
        let rule = AdamW { betas, eps: 1e-3, groups: groups(0.1) };
        let expected = adamw_reference(&rule);
        assert_close(&train(rule.clone(), DType::F64, 1, 1), &expected, 1e-13);
        assert_close(&train(rule.clone(), DType::F32, 1, 1), &expected, 2e-6);
    }
}

#[test]
fn lion_matches_published_reference() {
    let rule = Lion { betas: (0.9, 0.98), groups: groups(0.1) };
    let expected = lion_reference(&rule);
    assert_close(&train(rule.clone(), DType::F64, 1, 1), &expected, 1e-13);
    assert_close(&train(rule.clone(), DType::F32, 1, 1), &expected, 2e-6);
}

#[test]
fn lion_does_not_move_at_zero_gradient_and_momentum() {
    let rule = Rule::new(Lion::default());
    let mut shards = [Shard::new(&rule, DType::F32, 0, 1, 1)];
    let before = shards[0].contents();
    shards[0].scatter(&vec![0.0; total()], false);
    let (memory, mut view, scalars) = shards[0].view(1);
    rule.run(memory, Stage::Update { statistics: &[] }, &mut view, &scalars).unwrap();
    assert_eq!(shards[0].contents(), before);
}

/// The average of `torch.optim.swa_utils.AveragedModel`: the parameters after the first step, then `lerp`.
#[test]
fn ema_starts_at_parameters_and_follows_them() {
    for decay in [0.3, 0.9, 0.999] {
        let plain = Sgd { momentum: 0.9, groups: groups(0.1), ..Sgd::default() };
        let rule = Rule::new(plain).then(Ema { decay });
        let mut shards = [Shard::new(&rule, DType::F64, 0, 1, 1)];
        let mut expected: Option<Vec<f64>> = None;
        for number in 1..=STEPS {
            step(&rule, &mut shards, number);
            let contents = shards[0].contents();
            let [params, _, average] = &contents[..] else { panic!("parameters, momentum and average") };
            let followed = match expected {
                None => params.clone(),
                Some(before) => {
                    before.iter().zip(params).map(|(e, p)| decay * e + (1.0 - decay) * p).collect()
                }
            };
            assert_close(average, &followed, 1e-15);
            expected = Some(followed);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn sgd_matches_torch(momentum in 0.0f64..0.99, dampening in 0.0f64..0.5, decay in 0.0f64..0.2, kind in 0usize..3) {
        let (momentum, dampening) = [(0.0, 0.0), (momentum, dampening), (momentum, 0.0)][kind];
        let rule = Sgd { momentum, dampening, nesterov: kind == 2, groups: groups(decay) };
        let expected = sgd_reference(&rule);
        assert_close(&train(rule.clone(), DType::F64, 1, 1), &expected, 1e-13);
        assert_close(&train(rule.clone(), DType::F32, 1, 1), &expected, 2e-6);
    }

    #[test]
    fn elementwise_rules_match_bitwise_for_any_sharding(world in 1usize..9, threads in 1usize..4) {
        for dtype in [DType::F32, DType::F64] {
            let adamw = AdamW { groups: groups(0.1), ..AdamW::default() };
            let sgd = Sgd { momentum: 0.9, groups: groups(0.1), ..Sgd::default() };
            prop_assert_eq!(train(adamw.clone(), dtype, 1, 1), train(adamw.clone(), dtype, world, threads));
            prop_assert_eq!(train(sgd.clone(), dtype, 1, 1), train(sgd.clone(), dtype, world, threads));
            let lion = Lion { groups: groups(0.1), ..Lion::default() };
            prop_assert_eq!(train(lion.clone(), dtype, 1, 1), train(lion.clone(), dtype, world, threads));
            let betas = (0.9, 0.99);
            let free = ScheduleFree { betas, eps: 1e-8, warmup_steps: 2, groups: groups(0.1) };
            prop_assert_eq!(train(free.clone(), dtype, 1, 1), train(free.clone(), dtype, world, threads));
            let coded = AdamW8bit::new(adamw, &spec());
            prop_assert_eq!(train(coded.clone(), dtype, 1, 1), train(coded.clone(), dtype, world, threads));
        }
    }
}

/// Checks that every value of every state tensor is on exactly one rank; the column means are complete on every rank
/// that holds rows.
#[test]
fn state_pieces_cover_state_of_every_parameter() {
    let options = AdafactorOptions { beta1: Some(0.9), ..AdafactorOptions::default() };
    let adafactor = Adafactor::new(options, &spec());
    let sgd = Sgd { momentum: 0.9, ..Sgd::default() };
    let adamw = AdamW::default();
    let lion = Rule::new(Lion::default()).then(Ema { decay: 0.9 });
    let coded = AdamW8bit::new(adamw.clone(), &spec());
    let free =
        Rule::new(ScheduleFree { betas: (0.9, 0.99), eps: 1e-8, warmup_steps: 2, groups: groups(0.1) });
    let rules = [Rule::new(adafactor), Rule::new(sgd), Rule::new(adamw), lion, free, Rule::new(coded)];
    for (rule, world) in rules.iter().flat_map(|rule| (1..9).map(move |world| (rule, world))) {
        let mut held: BTreeMap<(&str, usize), Vec<usize>> = BTreeMap::new();
        for rank in 0..world {
            let (pieces, _) = pieces(rank, world);
            let shard_len = pieces.last().map_or(1, |piece| piece.offset + piece.len + 1);
            for tensor in rule.state(&pieces, shard_len, DType::F32) {
                assert!(tensor.pieces.is_sorted_by(|a, b| a.offset + a.len <= b.offset));
                assert!(tensor.pieces.iter().all(|piece| piece.offset + piece.len <= tensor.len));
                for piece in &tensor.pieces {
                    let values = held.entry((tensor.name, piece.param.0)).or_default();
                    if piece.axis == StateAxis::Columns {
                        assert_eq!((piece.first, piece.len), (0, row_len(SHAPES[piece.param.0])));
                        values.clear();
                    }
                    values.extend(piece.first..piece.first + piece.len);
                }
            }
        }
        for ((name, param), values) in held {
            let shape = SHAPES[param];
            let count = match name {
                "exp_avg_sq_row" => shape[0],
                "exp_avg_sq_col" => shape[1],
                "exp_avg_absmax" | "exp_avg_sq_absmax" => shape[0] * shape[1].div_ceil(AdamW8bit::BLOCK),
                _ => shape.iter().product(),
            };
            assert_eq!(
                values,
                (0..count).collect::<Vec<_>>(),
                "{name} of parameter {param} on {world} ranks"
            );
        }
    }
}

#[test]
fn non_finite_step_changes_no_state() {
    let options = AdafactorOptions { beta1: Some(0.9), ..AdafactorOptions::default() };
    let lion = Rule::new(Lion::default()).then(Ema { decay: 0.9 });
    let rules = [
        lion,
        Rule::new(ScheduleFree { betas: (0.9, 0.99), eps: 1e-8, warmup_steps: 2, groups: groups(0.1) }),
        Rule::new(AdamW8bit::new(AdamW::default(), &spec())),
        Rule::new(AdamW::default()),
        Rule::new(Sgd { momentum: 0.9, ..Sgd::default() }),
        Rule::new(Adafactor::new(options, &spec())),
    ];
    for rule in &rules {
        let mut shards = [Shard::new(rule, DType::F32, 0, 1, 1)];
        step(rule, &mut shards, 1);
        let before = shards[0].contents();
        shards[0].set_factors(GradientFactors { finite: false, ..FACTORS });
        step(rule, &mut shards, 2);
        assert_eq!(shards[0].contents(), before);
        shards[0].set_factors(FACTORS);
        step(rule, &mut shards, 3);
        assert_ne!(shards[0].contents(), before);
    }
}
