//! Checks that update rules on a device and in pinned memory give the bits of the host's rules, where sums have the
//! same order.

use fsdp_core::memory::{Buffer, Category, HostSlice, Slice, SliceMut};
use fsdp_core::model::{BlockSpec, ModelSpec, ModuleSpec, ParamId, ParamSpec};
use fsdp_core::scalars::GradientFactors;
use fsdp_core::update::{Piece, RuleState, SegmentShard, Stage, StateTensor, StepScalars, Updates};
use fsdp_core::{DType, Error, Queue, Tallies};
use fsdp_nn::Backend;
use fsdp_nn::update::{
    Adafactor, AdafactorOptions, AdamW, AdamW8bit, Ema, GroupSettings, Groups, Lion, Part, Rule,
    ScheduleFree, Sgd,
};

use super::subject::subject;
use super::values::*;

pub(crate) const FACTORS: GradientFactors = GradientFactors { scale: 0.25, clip: 0.7, finite: true };

/// Rows and columns of each parameter; one row means a vector.
pub(crate) type Shapes = &'static [(usize, usize)];

/// Two adjacent matrices, a gap, then a vector and a matrix, which have their own settings.
pub(crate) const SHORT: Shapes = &[(40, 6), (30, 6), (1, 111), (7, 9)];

/// The second parameter has 8-bit moments, with two and a part of a block in each row.
const WIDE: Shapes = &[(30, 6), (8, 520), (1, 111), (7, 9)];

/// Parameters whose sums have many partial sums on the device.
const LONG: Shapes = &[(200, 33), (70, 300), (1, 70_000)];

fn groups(weight_decay: f64) -> Groups {
    let settings = GroupSettings { lr_scale: 0.5, weight_decay: 0.0, late: 0 };
    Groups::uniform(weight_decay).with([ParamId(2), ParamId(3)], settings)
}

pub(crate) fn pieces(shapes: Shapes) -> (Vec<Piece>, usize) {
    let mut pieces = Vec::new();
    let mut offset = 0;
    for (param, &(rows, cols)) in shapes.iter().enumerate() {
        let row_len = if rows == 1 { 1 } else { cols };
        let param = ParamId(param);
        pieces.push(Piece { param, offset, len: rows * cols, param_offset: 0, row_len });
        offset += rows * cols + if param.0 == 1 { 3 } else { 0 };
    }
    (pieces, offset + 5)
}

pub(crate) fn spec(shapes: Shapes) -> ModelSpec {
    let params = shapes.iter().enumerate().map(|(param, &(rows, cols))| ParamSpec {
        fqn: format!("p{param}"),
        aliases: Vec::new(),
        shape: if rows == 1 { vec![cols] } else { vec![rows, cols] },
        trainable: true,
        expert: None,
        quantized: None,
        keep_f32: false,
    });
    let ids: Vec<_> = (0..shapes.len()).map(ParamId).collect();
    let root = ModuleSpec { fqn: String::new(), class: "Root".into(), parent: None, params: ids.clone() };
    let blocks = vec![BlockSpec { name: "all".into(), params: ids, layer: None }];
    ModelSpec { params: params.collect(), modules: vec![root], blocks, tallies: Tallies::default() }
}

/// The memory that holds the shard.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Where {
    Device,
    Pinned,
}

/// Runs four steps, one with the `finite` flag unset, and returns parameters, their low-precision copy and state after
/// each.
fn train<M: Backend>(
    memory: &M,
    rule: &Rule,
    (master, gradients): (DType, DType),
    place: Where,
    shapes: Shapes,
) -> Vec<Vec<Vec<f64>>> {
    let (pieces, len) = pieces(shapes);
    let allocate = |category, dtype, len| match place {
        Where::Device => memory.allocate(category, dtype, len).unwrap(),
        Where::Pinned => memory.allocate_host(category, dtype, len).unwrap(),
    };
    let write = |buffer: &mut M::Buffer, values: &[f64]| {
        memory.write(Queue::Compute, HostSlice::F64(values), SliceMut::whole(buffer)).unwrap();
    };
    let mut params = allocate(Category::ParameterShard, master, len);
    write(&mut params, &normal(1, len));
    let mut gradient = allocate(Category::ShardedGradient, gradients, len);
    // 16-bit compute needs a low-precision copy of f32 master parameters: here f16 if the gradient is f16, else bf16.
    let copy = if gradients == DType::F16 { DType::F16 } else { DType::Bf16 };
    let mut low = (master == DType::F32).then(|| allocate(Category::ParameterShard, copy, len));
    if let Some(low) = &mut low {
        write(low, &normal(1, len));
    }
    let tensors = rule.state(&pieces, len, master);
    let mut state: Vec<_> =
        tensors.iter().map(|tensor| allocate(Category::OptimizerState, tensor.dtype, tensor.len)).collect();
    state.iter_mut().for_each(|buffer| memory.zero(Queue::Compute, SliceMut::whole(buffer)).unwrap());
    let mut factors = memory.allocate(Category::CommStaging, DType::F64, GradientFactors::LEN).unwrap();
    let mut not_finite = integers(memory, &[0]);
    let mut seen: Vec<Vec<Vec<f64>>> = Vec::new();
    for step in 1..=4 {
        write(&mut factors, &GradientFactors { finite: step != 2, ..FACTORS }.to_array());
        write(&mut gradient, &normal(10 + step, len));
        let scalars = StepScalars { step, lr: 0.03 / step as f64, factors: Slice::whole(&factors) };
        let mut shard = SegmentShard {
            params: &mut params,
            low: low.as_mut(),
            gradient: &gradient,
            state: &mut state,
            pieces: &pieces,
            segment: None,
            whole: None,
            not_finite: &mut not_finite,
        };
        run(rule, memory, &mut shard, &scalars).unwrap();
        let buffers = std::iter::once(&params).chain(&low).chain(&state);
        seen.push(buffers.map(|buffer| values(memory, buffer)).collect());
    }
    assert_bits(&seen[1].concat(), &seen[0].concat(), "a step whose flag is down");
    assert_ne!(seen[2], seen[1], "a step whose flag is up");
    assert_eq!(words(memory, &not_finite), [0], "all of it is finite");
    assert!(params.is_exclusive() && state.iter().all(Buffer::is_exclusive));
    seen
}

pub(crate) fn run<M: Backend>(
    rule: &Rule,
    memory: &M,
    shard: &mut SegmentShard<'_, M::Buffer>,
    scalars: &StepScalars<'_, M::Buffer>,
) -> Result<(), Error> {
    let mut statistics = Vec::new();
    for len in rule.phases() {
        let mut sums = filled(memory, DType::F64, &vec![0.0; len]);
        let stage = Stage::Statistics { earlier: &statistics, sums: &mut sums };
        rule.run(memory, stage, shard, scalars)?;
        statistics.push(sums);
    }
    rule.run(memory, Stage::Update { statistics: &statistics }, shard, scalars)
}

/// Compares a rule in device memory and in pinned memory to the host.
fn compare(rule: impl Into<Part>, shapes: Shapes, what: &str) {
    let rule = Rule::new(rule);
    let (cuda, host) = (&*subject(), &host());
    for master in [DType::F32, DType::F64] {
        for gradients in FLOATS {
            let expected = train(host, &rule, (master, gradients), Where::Device, shapes);
            for place in [Where::Device, Where::Pinned] {
                let got = train(cuda, &rule, (master, gradients), place, shapes);
                for (step, (got, expected)) in got.iter().zip(&expected).enumerate() {
                    let what =
                        format!("{what} of {master} by {gradients} on {place:?} after step {}", step + 1);
                    assert_bits(&got.concat(), &expected.concat(), &what);
                }
            }
        }
    }
}

#[test]
fn adamw_matches_host_bitwise() {
    compare(AdamW { groups: groups(0.1), ..AdamW::default() }, SHORT, "AdamW");
    compare(AdamW { betas: (0.4, 0.9), eps: 1e-3, ..AdamW::default() }, SHORT, "AdamW with a small beta1");
}

#[test]
fn adamw_with_8_bit_moments_matches_host_bitwise() {
    for betas in [(0.9, 0.999), (0.4, 0.9)] {
        let adamw = AdamW { betas, groups: groups(0.1), ..AdamW::default() };
        compare(AdamW8bit::new(adamw, &spec(WIDE)), WIDE, "AdamW with 8-bit moments");
    }
}

#[test]
fn schedule_free_adamw_matches_host_bitwise() {
    let rule = ScheduleFree { betas: (0.9, 0.99), eps: 1e-8, warmup_steps: 2, groups: groups(0.1) };
    compare(rule, SHORT, "schedule-free AdamW");
}

#[test]
fn lion_matches_host_bitwise() {
    compare(Lion { groups: groups(0.1), ..Lion::default() }, SHORT, "Lion");
}

/// Returns the averages after each of four steps, with different parameters in every step.
fn averages<M: Backend>(memory: &M, master: DType, place: Where) -> Vec<Vec<f64>> {
    let (pieces, len) = pieces(SHORT);
    let allocate = |dtype| match place {
        Where::Device => memory.allocate(Category::OptimizerState, dtype, len).unwrap(),
        Where::Pinned => memory.allocate_host(Category::OptimizerState, dtype, len).unwrap(),
    };
    let zeros = || {
        let mut buffer = allocate(master);
        let values = HostSlice::F64(&vec![0.0; len]);
        memory.write(Queue::Compute, values, SliceMut::whole(&mut buffer)).unwrap();
        buffer
    };
    let [mut params, gradient, average] = [zeros(), zeros(), zeros()];
    let rule = Rule::new(Ema { decay: 0.9 });
    let (mut state, mut not_finite) = ([average], integers(memory, &[0]));
    let update = |step: u64| {
        let values_of = HostSlice::F64(&normal(step, len));
        memory.write(Queue::Compute, values_of, SliceMut::whole(&mut params)).unwrap();
        let factors =
            filled(memory, DType::F64, &GradientFactors { finite: step != 2, ..FACTORS }.to_array());
        let scalars = StepScalars { step, lr: 0.0, factors: Slice::whole(&factors) };
        let mut shard = SegmentShard {
            params: &mut params,
            low: None,
            gradient: &gradient,
            state: &mut state,
            pieces: &pieces,
            segment: None,
            whole: None,
            not_finite: &mut not_finite,
        };
        rule.run(memory, Stage::Update { statistics: &[] }, &mut shard, &scalars).unwrap();
        let all = values(memory, &state[0]);
        pieces.iter().flat_map(|piece| all[piece.offset..piece.offset + piece.len].to_vec()).collect()
    };
    (1..=4).map(update).collect()
}

#[test]
fn parameter_averages_match_host_bitwise() {
    for master in [DType::F32, DType::F64] {
        let expected = averages(&host(), master, Where::Device);
        assert_eq!(expected[0], expected[1], "a step whose flag is down");
        assert_ne!(expected[1], expected[2], "a step whose flag is up");
        for place in [Where::Device, Where::Pinned] {
            let got = averages(&*subject(), master, place);
            assert_bits(&got.concat(), &expected.concat(), &format!("averages in {master} on {place:?}"));
        }
    }
}

#[test]
fn sgd_matches_host_bitwise() {
    compare(Sgd { groups: groups(0.1), ..Sgd::default() }, SHORT, "plain SGD");
    compare(Sgd { momentum: 0.9, dampening: 0.2, ..Sgd::default() }, SHORT, "SGD with momentum");
    let nesterov = Sgd { momentum: 0.9, nesterov: true, groups: groups(0.1), ..Sgd::default() };
    compare(nesterov, SHORT, "SGD of Nesterov");
}

#[test]
fn adafactor_matches_host_bitwise() {
    let decay = AdafactorOptions { groups: groups(0.1), ..AdafactorOptions::default() };
    let average = AdafactorOptions { beta1: Some(0.9), warmup_init: true, ..decay.clone() };
    let given = AdafactorOptions {
        relative_step: false,
        scale_parameter: false,
        clip_threshold: 0.3,
        eps: (1e-3, 1e-3),
        ..AdafactorOptions::default()
    };
    for (options, what) in [(decay, "Adafactor"), (average, "its average"), (given, "its given rate")] {
        compare(Adafactor::new(options, &spec(SHORT)), SHORT, what);
    }
}

/// The device adds the terms of long sums in a different order than the host. All terms are positive, so two sums of
/// `n` terms differ by a relative error of at most `n 2^-52`. An update depends on such sums only through roots and
/// quotients (means of rows and columns, root mean squares of parameter and update), which at most double that error,
/// and on fewer than 32 roundings after them. The update is smaller than one.
#[test]
fn adafactor_with_long_sums_matches_host_within_error_bound() {
    let options =
        AdafactorOptions { beta1: Some(0.9), groups: Groups::uniform(0.1), ..AdafactorOptions::default() };
    let rule = Rule::new(Adafactor::new(options, &spec(LONG)));
    for master in [DType::F32, DType::F64] {
        let types = (master, DType::F32);
        let expected = train(&host(), &rule, types, Where::Device, LONG);
        let got = train(&*subject(), &rule, types, Where::Device, LONG);
        let share = 2.0 * 70_000.0 * 2f64.powi(-52) + 32.0 * unit(master);
        for (step, (got, expected)) in got.iter().zip(&expected).enumerate() {
            for (buffer, (got, expected)) in got.iter().zip(expected).enumerate() {
                let is_copy = master == DType::F32 && buffer == 1;
                let share = share * (step + 1) as f64 + if is_copy { 2.0 * unit(DType::Bf16) } else { 0.0 };
                let bounds: Vec<f64> = expected.iter().map(|value| share * (value.abs() + 1.0)).collect();
                let what = format!("buffer {buffer} of {master} after step {}", step + 1);
                assert_within(got, expected, &bounds, &what);
            }
        }
        let again = train(&*subject(), &rule, types, Where::Device, LONG);
        assert_bits(&again[3].concat(), &got[3].concat(), "the same steps again");
    }
}

/// A value to place in a tensor of a shard; tensors are numbered parameters, gradient, state.
#[derive(Clone, Copy, Debug)]
struct Edge {
    tensor: usize,
    at: usize,
    value: f64,
}

/// Updates a shard once, with these values in it and NaN padding. Returns the word in which the rule notes non-finite
/// values, and whether a scan of all pieces finds one.
fn noted<M: Backend>(
    memory: &M,
    rule: &Rule,
    master: DType,
    place: Where,
    shapes: Shapes,
    (lr, edges): (f64, &[Edge]),
) -> (i64, bool) {
    let (pieces, len) = pieces(shapes);
    let buffer = |category, dtype, values: &[f64]| {
        let mut buffer = match place {
            Where::Device => memory.allocate(category, dtype, values.len()).unwrap(),
            Where::Pinned => memory.allocate_host(category, dtype, values.len()).unwrap(),
        };
        memory.write_numbers(Queue::Compute, values, SliceMut::whole(&mut buffer)).unwrap();
        buffer
    };
    let tensors = rule.state(&pieces, len, master);
    let padded = |key| {
        let mut numbers = vec![f64::NAN; len];
        for piece in &pieces {
            numbers[piece.offset..][..piece.len].copy_from_slice(&normal(key, len)[..piece.len]);
        }
        numbers
    };
    let mut contents = vec![padded(1), padded(2)];
    let fill = |tensor: &StateTensor| if tensor.dtype == DType::U8 { 200.0 } else { 0.01 };
    contents.extend(tensors.iter().map(|tensor| vec![fill(tensor); tensor.len]));
    for &Edge { tensor, at, value } in edges {
        let tensor = &mut contents[tensor];
        let last = tensor.len() - 1;
        tensor[at.min(last)] = value;
    }
    let mut params = buffer(Category::ParameterShard, master, &contents[0]);
    let mut low = (master == DType::F32).then(|| buffer(Category::ParameterShard, DType::Bf16, &contents[0]));
    let gradient = buffer(Category::ShardedGradient, DType::F32, &contents[1]);
    let mut state: Vec<_> = tensors
        .iter()
        .zip(&contents[2..])
        .map(|(tensor, values)| buffer(Category::OptimizerState, tensor.dtype, values))
        .collect();
    let factors =
        filled(memory, DType::F64, &GradientFactors { scale: 1.0, clip: 1.0, finite: true }.to_array());
    let mut not_finite = integers(memory, &[0]);
    let scalars = StepScalars { step: 3, lr, factors: Slice::whole(&factors) };
    let mut shard = SegmentShard {
        params: &mut params,
        low: low.as_mut(),
        gradient: &gradient,
        state: &mut state,
        pieces: &pieces,
        segment: None,
        whole: None,
        not_finite: &mut not_finite,
    };
    run(rule, memory, &mut shard, &scalars).unwrap();
    let found = |buffer: &M::Buffer, offset, len| {
        range(memory, buffer, offset, len).iter().any(|value| !value.is_finite())
    };
    let mut copies = std::iter::once(&params).chain(&low);
    let in_params = copies.any(|buffer| pieces.iter().any(|piece| found(buffer, piece.offset, piece.len)));
    let mut of_state = state.iter().zip(&tensors);
    let in_state = of_state
        .any(|(buffer, tensor)| tensor.pieces.iter().any(|piece| found(buffer, piece.offset, piece.len)));
    (words(memory, &not_finite)[0], in_params || in_state)
}

/// Compares a rule's note of non-finite values, in device and in pinned memory, to a scan of all values.
fn compare_notes(rule: impl Into<Part>, shapes: Shapes, what: &str) {
    let rule = Rule::new(rule);
    let bf16 = [f32::from_bits(0x7f7f_7fff), f32::from_bits(0xff7f_8000)].map(f64::from);
    let largest = [f64::from(f32::MAX), 0.0, 1e-45, 1e19, 1e25, f64::INFINITY, f64::NAN];
    let values: Vec<f64> = bf16.into_iter().chain(largest).collect();
    let tensors = rule.state(&pieces(shapes).0, 1, DType::F32);
    let floats = (0..2 + tensors.len()).filter(|&tensor| tensor < 2 || tensors[tensor - 2].dtype.is_float());
    let mut seen = [0, 0];
    let mut check = |lr, edges: &[Edge]| {
        for (master, place) in
            [(DType::F32, Where::Device), (DType::F64, Where::Device), (DType::F32, Where::Pinned)]
        {
            let (word, found) = noted(&*subject(), &rule, master, place, shapes, (lr, edges));
            assert_eq!(word, i64::from(found), "{what} of {master} on {place:?} by {lr} with {edges:?}");
            seen[usize::from(found)] += 1;
        }
    };
    for lr in [0.0, 1e-3, 1e39] {
        check(lr, &[]);
    }
    for (turn, &value) in values.iter().enumerate() {
        for tensor in floats.clone() {
            // In each run of pieces, both in vectorized parts and in the remainder.
            for at in [turn, 423 + turn, 588 + turn] {
                check(1e-3, &[Edge { tensor, at, value }]);
            }
        }
    }
    assert!(seen[0] > 30 && seen[1] > 30, "{what}: {seen:?}");
}

#[test]
fn adamw_records_non_finite_values() {
    compare_notes(AdamW { groups: groups(0.01), ..AdamW::default() }, SHORT, "AdamW");
}

#[test]
fn adamw_with_8_bit_moments_records_non_finite_values() {
    let adamw = AdamW { groups: groups(0.01), ..AdamW::default() };
    compare_notes(AdamW8bit::new(adamw, &spec(WIDE)), WIDE, "AdamW with 8-bit moments");
}

#[test]
fn schedule_free_records_non_finite_values() {
    let rule = ScheduleFree { betas: (0.9, 0.99), eps: 1e-8, warmup_steps: 0, groups: groups(0.01) };
    compare_notes(rule, SHORT, "schedule-free AdamW");
}

#[test]
fn lion_records_non_finite_values() {
    compare_notes(Lion { groups: groups(0.1), ..Lion::default() }, SHORT, "Lion");
}

#[test]
fn sgd_records_non_finite_values() {
    compare_notes(Sgd { groups: groups(0.1), ..Sgd::default() }, SHORT, "plain SGD");
    compare_notes(Sgd { momentum: 0.9, nesterov: true, ..Sgd::default() }, SHORT, "SGD of Nesterov");
}

#[test]
fn adafactor_records_non_finite_values() {
    let average = AdafactorOptions { beta1: Some(0.9), ..AdafactorOptions::default() };
    for (options, what) in [(AdafactorOptions::default(), "Adafactor"), (average, "its average")] {
        compare_notes(Adafactor::new(options, &spec(SHORT)), SHORT, what);
    }
}
