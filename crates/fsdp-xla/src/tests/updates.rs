//! Compares update rules in programs with those of the host, with the same gradients.

use fsdp_core::layout::{Layout, Segment};
use fsdp_core::memory::{Buffer, Category, HostSlice, HostSliceMut, Memory, Slice, SliceMut};
use fsdp_core::model::{BlockSpec, ModelSpec, ModuleSpec, ParamId, ParamSpec};
use fsdp_core::scalars::GradientFactors;
use fsdp_core::update::{Piece, RuleState, SegmentShard, Stage, StepScalars, Updates};
use fsdp_core::wrap::Unit;
use fsdp_core::{DType, Queue, Tallies};
use fsdp_nn::random::normal;
use fsdp_nn::update::{
    Adafactor, AdafactorOptions, AdamW, Ema, GroupSettings, Groups, Lion, Part, Rule, ScheduleFree, Sgd,
};
use fsdp_nn::{Backend, HostMemory, HostOptions};

use super::with_memory;

const QUEUE: Queue = Queue::Compute;
const STEPS: u64 = 4;

/// Matrices of two row lengths, one of a single row; vectors with and without a partial row; three dimensions. Ranks
/// hold different numbers of each, and the last of eight holds none of the shorter rows.
const SHAPES: [&[usize]; 8] = [&[7, 12], &[12], &[31, 12], &[1, 12], &[30], &[9, 5], &[2, 3, 4], &[5]];

fn spec() -> ModelSpec {
    let param = |(number, shape): (usize, &&[usize])| ParamSpec {
        fqn: format!("p{number}"),
        aliases: Vec::new(),
        shape: shape.to_vec(),
        trainable: true,
        expert: None,
        quantized: None,
        keep_f32: false,
    };
    let params: Vec<ParamId> = (0..SHAPES.len()).map(ParamId).collect();
    let root = ModuleSpec { fqn: String::new(), class: "Root".into(), parent: None, params: params.clone() };
    ModelSpec {
        params: SHAPES.iter().enumerate().map(param).collect(),
        modules: vec![root],
        blocks: vec![BlockSpec { name: "all".into(), params, layer: None }],
        tallies: Tallies::default(),
    }
}

/// The setup of a training run.
#[derive(Clone, Copy)]
struct Case {
    /// The dtypes of parameters and gradients.
    dtypes: [DType; 2],
    shards: usize,
    /// Replaces an element of the third parameter's gradient in the last step.
    planted: Option<f64>,
}

/// A shard of a segment in a memory.
struct ShardState<'a, B> {
    segment: &'a Segment,
    pieces: Vec<Piece>,
    params: B,
    low: B,
    gradient: B,
    state: Vec<B>,
    not_finite: B,
}

fn buffer<M: Memory>(memory: &M, dtype: DType, values: &[f64]) -> M::Buffer {
    let mut buffer = memory.allocate(Category::Workspace, dtype, values.len()).unwrap();
    write(memory, &mut buffer, values);
    buffer
}

fn write<M: Memory>(memory: &M, buffer: &mut M::Buffer, values: &[f64]) {
    memory.write(QUEUE, HostSlice::F64(values), SliceMut::whole(buffer)).unwrap();
}

fn read<M: Memory>(memory: &M, buffer: &M::Buffer) -> Vec<f64> {
    let mut values = vec![0.0; buffer.len()];
    memory.read(QUEUE, Slice::whole(buffer), HostSliceMut::F64(&mut values)).unwrap();
    values
}

impl<'a, B: Buffer> ShardState<'a, B> {
    fn new<M: Memory<Buffer = B>>(
        memory: &M,
        rule: &impl RuleState,
        case: &Case,
        segment: &'a Segment,
        shard: usize,
    ) -> Self {
        let (pieces, len) = (segment.pieces(shard), segment.shard_len());
        let [dtype, reduced] = case.dtypes;
        let mut shard_state = Self {
            segment,
            params: buffer(memory, dtype, &vec![0.0; len]),
            low: buffer(memory, DType::Bf16, &vec![0.0; len]),
            gradient: buffer(memory, reduced, &vec![0.0; len]),
            state: rule
                .state(&pieces, len, dtype)
                .iter()
                .map(|tensor| buffer(memory, tensor.dtype, &vec![0.0; tensor.len]))
                .collect(),
            not_finite: memory.allocate(Category::CommStaging, DType::I64, 1).unwrap(),
            pieces,
        };
        memory.write(QUEUE, HostSlice::I64(&[0]), SliceMut::whole(&mut shard_state.not_finite)).unwrap();
        let initial = shard_state.values(1);
        write(memory, &mut shard_state.params, &initial);
        shard_state
    }

    /// Values of every parameter, independent of its placement.
    fn values(&self, key: u64) -> Vec<f64> {
        let mut values = vec![0.0; self.segment.shard_len()];
        for piece in &self.pieces {
            for (index, value) in values[piece.offset..][..piece.len].iter_mut().enumerate() {
                let key = 100 * key + piece.param.0 as u64;
                *value = f64::from(normal(key, (piece.param_offset + index) as u64) as f32);
            }
        }
        values
    }

    fn set_gradient<M: Memory<Buffer = B>>(&mut self, memory: &M, step: u64, planted: Option<f64>) {
        let mut values = self.values(1 + step);
        let piece = self.pieces.iter().find(|piece| piece.param == ParamId(2) && piece.param_offset == 0);
        if let (Some(planted), Some(piece)) = (planted, piece) {
            values[piece.offset] = planted;
        }
        write(memory, &mut self.gradient, &values);
    }

    /// Checks that the low-precision copy is the rounded parameters.
    fn assert_copied<M: Memory<Buffer = B>>(&self, memory: &M) {
        for (low, param) in read(memory, &self.low).into_iter().zip(read(memory, &self.params)) {
            assert!((low - param).abs() <= 2f64.powi(-8) * param.abs(), "{low} is a copy of {param}");
        }
    }

    fn view(&mut self) -> SegmentShard<'_, B> {
        SegmentShard {
            params: &mut self.params,
            low: Some(&mut self.low),
            gradient: &self.gradient,
            state: &mut self.state,
            pieces: &self.pieces,
            segment: Some(self.segment),
            whole: None,
            not_finite: &mut self.not_finite,
        }
    }
}

/// Runs a few steps; returns the parameters and state of each shard, and whether anything was noted.
fn train<M: Backend>(memory: &M, rule: &Rule, case: &Case) -> (Vec<Vec<Vec<f64>>>, bool) {
    let spec = spec();
    let unit = Unit {
        name: "all".into(),
        is_root: true,
        params: (0..SHAPES.len()).map(ParamId).collect(),
        origin: 0,
        blocks: 1,
    };
    let layout = Layout::new(&spec, &[unit], case.shards, case.dtypes[0]);
    let segments = &layout.units[0].segments;
    let places = (0..case.shards).flat_map(|shard| segments.iter().map(move |segment| (segment, shard)));
    let mut held: Vec<_> =
        places.map(|(segment, shard)| ShardState::new(memory, rule, case, segment, shard)).collect();
    for step in 1..=STEPS {
        let planted = case.planted.filter(|_| step == STEPS);
        held.iter_mut().for_each(|held| held.set_gradient(memory, step, planted));
        // One of the steps must change nothing.
        let factors = GradientFactors { scale: 0.25, clip: 0.7, finite: step != 2 };
        let factors = buffer(memory, DType::F64, &factors.to_array());
        let scalars = StepScalars { step, lr: 0.03 / step as f64, factors: Slice::whole(&factors) };
        memory.begin_schedule();
        let mut statistics = Vec::new();
        for len in RuleState::phases(rule) {
            let mut sums = memory.allocate(Category::CommStaging, DType::F64, len).unwrap();
            memory.zero(QUEUE, SliceMut::whole(&mut sums)).unwrap();
            for held in &mut held {
                let stage = Stage::Statistics { earlier: &statistics, sums: &mut sums };
                rule.run(memory, stage, &mut held.view(), &scalars).unwrap();
            }
            statistics.push(sums);
        }
        for held in &mut held {
            let stage = Stage::Update { statistics: &statistics };
            rule.run(memory, stage, &mut held.view(), &scalars).unwrap();
        }
        drop(statistics);
        memory.end_schedule().unwrap();
    }
    let is_noted = held.iter().any(|held| {
        let mut note = [0];
        memory.read(QUEUE, Slice::whole(&held.not_finite), HostSliceMut::I64(&mut note)).unwrap();
        note != [0]
    });
    let contents = held.iter().map(|held| {
        std::iter::once(&held.params).chain(&held.state).map(|buffer| read(memory, buffer)).collect()
    });
    if case.planted.is_none() {
        held.iter().for_each(|held| held.assert_copied(memory));
    }
    (contents.collect(), is_noted)
}

/// The allowed error of an element, in rounding errors of the largest number of its tensor. An element of an update is
/// the result of at most 20 operations in the type of arithmetic (factors, square, two running means, roots and
/// quotients, products, clipping, rate), each of which programs may round differently: they contract operations, and
/// turn quotients of roots into products with reciprocal roots. A running mean has at most the error of its inputs, and
/// 4 of its own in each of the 3 steps; parameters have 2 in each, since updates are a hundredth of them.
const ROUNDINGS: f64 = 32.0;

/// Number of terms of the longest sum in double precision: two orders of summation differ by twice as many roundings.
const TERMS: f64 = 31.0 * 12.0;

fn check(rule: impl Into<Part>, case: Case) {
    check_rule(&Rule::new(rule), case);
}

fn check_rule(rule: &Rule, case: Case) {
    with_memory("this test", |memory| {
        let host = HostMemory::new(HostOptions { poison: true, ..HostOptions::default() }).unwrap();
        let (expected, _) = train(&host, rule, &case);
        let (found, is_noted) = train(&**memory, rule, &case);
        assert!(!is_noted, "all of it is finite");
        let unit = if case.dtypes[0] == DType::F64 { 2f64.powi(-53) } else { 2f64.powi(-24) };
        let mut max_error = 0f64;
        for (shard, (found, expected)) in found.iter().zip(&expected).enumerate() {
            for (tensor, (found, expected)) in found.iter().zip(expected).enumerate() {
                let largest = expected.iter().fold(0f64, |largest, value| largest.max(value.abs()));
                let bound = (ROUNDINGS * unit + 2.0 * TERMS * 2f64.powi(-53)) * largest;
                assert_eq!(found.len(), expected.len());
                for (index, (found, expected)) in found.iter().zip(expected).enumerate() {
                    let distance = (found - expected).abs();
                    max_error = max_error.max(distance / (unit * largest).max(f64::MIN_POSITIVE));
                    assert!(distance <= bound, "{shard}, {tensor}, {index}: {found} for {expected}");
                }
            }
        }
        println!("at most {max_error:.1} rounding errors");
    });
}

/// A case with `shards` shards, with parameters and gradients in f32.
fn shards(shards: usize) -> Case {
    Case { dtypes: [DType::F32, DType::F32], shards, planted: None }
}

fn groups() -> Groups {
    let own = GroupSettings { lr_scale: 0.5, weight_decay: 0.0, late: 0 };
    Groups::uniform(0.1).with([ParamId(1), ParamId(4)], own)
}

fn options() -> AdafactorOptions {
    AdafactorOptions { groups: groups(), ..AdafactorOptions::default() }
}

fn adafactor(options: &AdafactorOptions) -> Adafactor {
    Adafactor::new(options.clone(), &spec())
}

#[test]
fn elementwise_update_rules_match_host() {
    let adamw = AdamW { groups: groups(), ..AdamW::default() };
    check(adamw.clone(), shards(3));
    check_rule(&Rule::new(adamw.clone()).then(Ema { decay: 0.9 }), shards(2));
    check(AdamW { betas: (0.4, 0.95), eps: 1e-3, groups: Groups::uniform(0.0) }, shards(1));
    check(adamw.clone(), Case { dtypes: [DType::F64, DType::F64], ..shards(2) });
    check(adamw, Case { dtypes: [DType::F32, DType::Bf16], ..shards(8) });
    check(Sgd { groups: groups(), ..Sgd::default() }, shards(3));
    check(Sgd { momentum: 0.9, dampening: 0.1, groups: groups(), ..Sgd::default() }, shards(2));
    check(Sgd { momentum: 0.9, nesterov: true, ..Sgd::default() }, shards(1));
    check(Lion { groups: groups(), ..Lion::default() }, shards(3));
    check(ScheduleFree { betas: (0.9, 0.99), eps: 1e-3, warmup_steps: 2, groups: groups() }, shards(2));
}

#[test]
fn adafactor_matches_host_for_every_shard_count() {
    [1, 2, 3, 8].into_iter().for_each(|count| check(adafactor(&options()), shards(count)));
}

#[test]
fn adafactor_options_match_host() {
    let averaged = AdafactorOptions { beta1: Some(0.9), warmup_init: true, ..options() };
    let plain = AdafactorOptions {
        relative_step: false,
        scale_parameter: false,
        clip_threshold: 0.3,
        ..AdafactorOptions::default()
    };
    check(adafactor(&averaged), shards(3));
    check(adafactor(&plain), shards(2));
    check(adafactor(&averaged), Case { dtypes: [DType::F64, DType::F64], ..shards(4) });
    check(adafactor(&plain), Case { dtypes: [DType::F32, DType::Bf16], ..shards(1) });
}

#[test]
fn adafactor_detects_non_finite_gradients() {
    with_memory("this test", |memory| {
        let host = HostMemory::new(HostOptions::default()).unwrap();
        // A square that overflows, one that does not, and NaN.
        for (planted, is_noted) in [(1e25, true), (1e15, false), (f64::NAN, true)] {
            let case = Case { planted: Some(planted), ..shards(3) };
            let rule = Rule::new(adafactor(&options()));
            let noted = [train(&host, &rule, &case).1, train(&**memory, &rule, &case).1];
            assert_eq!(noted, [is_noted; 2], "{planted}");
        }
    });
}
