//! Tests that rules record a non-finite value exactly if a scan of everything they wrote finds one.

use super::*;
use crate::host::workers::TASK_ELEMS;

const UNSCALED: GradientFactors = GradientFactors { scale: 1.0, clip: 1.0, finite: true };

/// Edge cases: zeros, subnormal numbers, the largest numbers of f32 and of bf16 and the next ones, numbers whose
/// squares overflow, and non-finite values.
const EDGES: [f64; 14] = [
    0.0,
    -0.0,
    1e-45,
    -1e-40,
    1.0,
    -1e15,
    1e19,
    2e25,
    -3.3e38,
    f32::MAX as f64,
    f32::from_bits(0x7f7f_7fff) as f64,
    f32::from_bits(0xff7f_8000) as f64,
    f64::NEG_INFINITY,
    f64::NAN,
];

fn rules() -> [Rule; 8] {
    let average = AdafactorOptions { beta1: Some(0.9), groups: groups(0.1), ..AdafactorOptions::default() };
    [
        Rule::new(AdamW { groups: groups(0.01), ..AdamW::default() }),
        Rule::new(Sgd { groups: groups(0.1), ..Sgd::default() }),
        Rule::new(Lion { groups: groups(0.1), ..Lion::default() }),
        Rule::new(Sgd { momentum: 0.9, nesterov: true, ..Sgd::default() }),
        Rule::new(AdamW8bit::new(AdamW { groups: groups(0.01), ..AdamW::default() }, &spec())),
        Rule::new(ScheduleFree { betas: (0.9, 0.999), eps: 1e-8, warmup_steps: 2, groups: groups(0.01) }),
        Rule::new(Adafactor::new(AdafactorOptions::default(), &spec())),
        Rule::new(Adafactor::new(average, &spec())),
    ]
}

impl Shard {
    fn noted(&self) -> i64 {
        let mut word = [0];
        let slice = Slice::whole(&self.not_finite);
        self.memory.read(Queue::Compute, slice, HostSliceMut::I64(&mut word)).unwrap();
        word[0]
    }

    /// The slow oracle: for the parameters, their copy and every state tensor, whether some value of a piece is not
    /// finite.
    fn broken(&self, rule: &Rule) -> Vec<bool> {
        let any = |buffer: &HostBuffer, ranges: Vec<(usize, usize)>| {
            ranges.into_iter().any(|(offset, len)| {
                let mut values = vec![0.0; len];
                let slice = Slice::new(buffer, offset, len);
                self.memory.read_numbers(Queue::Compute, slice, &mut values).unwrap();
                values.iter().any(|value| !value.is_finite())
            })
        };
        let pieces: Vec<_> = self.pieces.iter().map(|piece| (piece.offset, piece.len)).collect();
        let mut found = vec![any(&self.params, pieces.clone())];
        found.extend(self.low.as_ref().map(|low| any(low, pieces)));
        let tensors = rule.state(&self.pieces, self.params.len(), self.params.dtype());
        for (buffer, tensor) in self.state.iter().zip(&tensors) {
            found.push(any(buffer, tensor.pieces.iter().map(|piece| (piece.offset, piece.len)).collect()));
        }
        found
    }

    fn fill(buffer: &mut HostBuffer, memory: &HostMemory, value: f64) {
        let values = vec![value; buffer.len()];
        memory.write_numbers(Queue::Compute, &values, SliceMut::whole(buffer)).unwrap();
    }

    fn put(buffer: &mut HostBuffer, memory: &HostMemory, at: usize, value: f64) {
        memory.write_numbers(Queue::Compute, &[value], SliceMut::new(buffer, at, 1)).unwrap();
    }

    /// Runs one step with the current gradients.
    fn update(&mut self, rule: &Rule, number: u64, lr: f64) {
        let mut statistics = Vec::new();
        for len in rule.phases() {
            let mut sums = self.memory.allocate(Category::CommStaging, DType::F64, len).unwrap();
            self.memory.zero(Queue::Compute, SliceMut::whole(&mut sums)).unwrap();
            let (memory, mut view, scalars) = self.view(number);
            let scalars = StepScalars { lr, ..scalars };
            let stage = Stage::Statistics { earlier: &statistics, sums: &mut sums };
            rule.run(memory, stage, &mut view, &scalars).unwrap();
            statistics.push(sums);
        }
        let (memory, mut view, scalars) = self.view(number);
        let stage = Stage::Update { statistics: &statistics };
        rule.run(memory, stage, &mut view, &StepScalars { lr, ..scalars }).unwrap();
    }
}

/// Returns a shard of everything on one rank, with these parameters and gradients, and zero state.
fn shard(rule: &Rule, dtype: DType, param: f64, gradient: f64) -> Shard {
    let mut shard = Shard::new(rule, dtype, 0, 1, 1);
    shard.set_factors(UNSCALED);
    let Shard { memory, params, gradient: gradients, .. } = &mut shard;
    Shard::fill(params, memory, param);
    Shard::fill(gradients, memory, gradient);
    shard
}

/// Runs a step; returns which tensors contain non-finite values according to the oracle, and checks that the rule
/// recorded them.
fn broken(rule: &Rule, shard: &mut Shard, lr: f64) -> Vec<bool> {
    shard.update(rule, 1, lr);
    let broken = shard.broken(rule);
    assert_eq!(shard.noted(), i64::from(broken.contains(&true)), "{broken:?}");
    broken
}

#[test]
fn overflow_of_second_moment_alone_is_detected() {
    let [adamw, .., adafactor, _] = rules();
    let mut all = shard(&adamw, DType::F32, 1.0, 1e-3);
    Shard::put(&mut all.gradient, &all.memory, 1, 1e25);
    assert_eq!(broken(&adamw, &mut all, 1e-3), [false, false, false, true], "params, copy, mean, square");
    // The second parameter is a vector, with a full second moment.
    let mut all = shard(&adafactor, DType::F32, 1.0, 1e-3);
    let at = all.pieces[1].offset;
    Shard::put(&mut all.gradient, &all.memory, at, 1e25);
    let expected = [false, false, false, false, true];
    assert_eq!(broken(&adafactor, &mut all, 1e-3), expected, "params, copy, rows, columns, whole");
}

#[test]
fn non_finite_column_mean_alone_is_detected() {
    let [.., adafactor, _] = rules();
    let mut all = shard(&adafactor, DType::F32, 1.0, 0.0);
    Shard::put(&mut all.state[1], &all.memory, 0, f64::INFINITY);
    // In step 1, earlier means have weight zero.
    all.update(&adafactor, 5, 1e-3);
    assert_eq!(all.broken(&adafactor), [false, false, false, true, false]);
    assert_eq!(all.noted(), 1);
}

#[test]
fn overflow_of_row_and_column_means_is_detected() {
    let [.., adafactor, _] = rules();
    let mut all = shard(&adafactor, DType::F32, 1.0, 1e-3);
    Shard::put(&mut all.gradient, &all.memory, 1, 1e25);
    let broken = broken(&adafactor, &mut all, 1e-3);
    assert_eq!(broken[2..], [true, true, false], "rows, columns, whole");
}

#[test]
fn overflow_of_parameter_alone_is_detected() {
    for rule in &rules()[..3] {
        let mut all = shard(rule, DType::F32, 1.0, 1e-3);
        let broken = broken(rule, &mut all, 1e39);
        assert!(broken[0] && !broken[2..].contains(&true), "{broken:?}");
    }
}

#[test]
fn overflow_of_low_precision_copy_alone_is_detected() {
    let copied = [f32::from_bits(0x7f7f_7fff), f32::from_bits(0x7f7f_8000)].map(f64::from);
    for (value, overflows) in copied.into_iter().zip([false, true]) {
        for value in [value, -value] {
            let rule = Rule::new(Sgd::default());
            let mut all = shard(&rule, DType::F32, value, 0.0);
            assert_eq!(broken(&rule, &mut all, 1.0), [false, overflows], "{value}");
            // Without a copy, it is a finite number like any other.
            let mut all = shard(&rule, DType::F32, value, 0.0);
            all.low = None;
            assert_eq!(broken(&rule, &mut all, 1.0), [false]);
        }
    }
}

#[test]
fn zero_subnormal_and_largest_numbers_are_finite() {
    let smallest = [0.0, -0.0, 1e-45, -1e-40, f64::from(f32::MIN_POSITIVE)];
    for rule in &rules() {
        for value in smallest {
            let mut all = shard(rule, DType::F32, value, 0.0);
            assert!(!broken(rule, &mut all, 0.0).contains(&true), "{value}");
        }
    }
    // The other rules multiply the learning rate by the parameter.
    for rule in &rules()[..3] {
        for (dtype, value) in [(DType::F32, f64::from(f32::MAX)), (DType::F64, f64::MAX)] {
            for value in [value, -value] {
                let mut all = shard(rule, dtype, value, 0.0);
                all.low = None;
                assert!(!broken(rule, &mut all, 0.0).contains(&true), "{value}");
            }
        }
    }
    let rule = Rule::new(AdamW { groups: Groups::uniform(0.0), ..AdamW::default() });
    let mut all = shard(&rule, DType::F32, 1.0, 0.0);
    let Shard { memory, state, .. } = &mut all;
    Shard::fill(&mut state[1], memory, f64::from(f32::MAX));
    assert!(!broken(&rule, &mut all, 1e-3).contains(&true));
}

#[test]
fn non_finite_padding_is_ignored() {
    for rule in &rules() {
        let mut all = shard(rule, DType::F32, f64::NAN, f64::NAN);
        let Shard { memory, gradient, params, pieces, .. } = &mut all;
        for piece in pieces {
            let ones = vec![1.0; piece.len];
            for buffer in [&mut *params, &mut *gradient] {
                let slice = SliceMut::new(buffer, piece.offset, piece.len);
                memory.write(Queue::Compute, HostSlice::F64(&ones), slice).unwrap();
            }
        }
        assert!(!broken(rule, &mut all, 1e-3).contains(&true));
    }
}

#[test]
fn recorded_non_finite_persists_and_skipped_steps_record_none() {
    for rule in &rules() {
        let mut all = shard(rule, DType::F32, f64::NAN, 1.0);
        all.set_factors(GradientFactors { finite: false, ..UNSCALED });
        all.update(rule, 1, 1e-3);
        assert_eq!(all.noted(), 0);
        all.set_factors(UNSCALED);
        all.update(rule, 2, 1e-3);
        assert_eq!(all.noted(), 1);
        let Shard { memory, params, state, .. } = &mut all;
        [params].into_iter().chain(state).for_each(|buffer| Shard::fill(buffer, memory, 1.0));
        all.update(rule, 3, 1e-3);
        assert!(!all.broken(rule).contains(&true));
        assert_eq!(all.noted(), 1);
    }
}

/// One value in a piece that is split into tasks and blocks.
#[test]
fn non_finite_value_is_detected_at_any_position() {
    let len = 2 * TASK_ELEMS + 1029;
    for at in [0, 1, 15, 16, 1023, 1024, TASK_ELEMS - 1, TASK_ELEMS, 2 * TASK_ELEMS + 1024, len - 1] {
        for (dtype, threads) in [(DType::F32, 1), (DType::F32, 2), (DType::F64, 1)] {
            for rule in &rules()[..3] {
                let mut all = Shard::new(rule, dtype, 0, 1, threads);
                let whole = Piece { param: ParamId(0), offset: 1, len, param_offset: 0, row_len: 1 };
                let buffer = |category, dtype| {
                    let mut buffer = all.memory.allocate(category, dtype, len + 2).unwrap();
                    all.memory.zero(Queue::Compute, SliceMut::whole(&mut buffer)).unwrap();
                    buffer
                };
                all.pieces = vec![whole];
                all.low = Some(buffer(Category::ParameterShard, DType::Bf16));
                all.params = buffer(Category::ParameterShard, dtype);
                all.gradient = buffer(Category::ShardedGradient, DType::F32);
                let tensors = rule.state(&all.pieces, len + 2, dtype);
                all.state = tensors.iter().map(|_| buffer(Category::OptimizerState, dtype)).collect();
                assert!(!broken(rule, &mut all, 1e-3).contains(&true));
                Shard::put(&mut all.params, &all.memory, 1 + at, f64::NAN);
                assert!(broken(rule, &mut all, 1e-3)[0], "{dtype} at {at}");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Replaces some values of parameters, gradients and state by edge cases. A step must record a non-finite value
    /// exactly if there is one afterwards, separately on each rank.
    #[test]
    fn flag_is_set_exactly_when_some_value_is_non_finite(
        kind in 0usize..8,
        double in any::<bool>(),
        copied in any::<bool>(),
        number in 1u64..6,
        world in 1usize..4,
        lr in prop::sample::select(vec![0.0, 1e-3, 1e10, 1e39]),
        edges in prop::collection::vec((0usize..6, any::<prop::sample::Index>(), 0usize..EDGES.len()), 0..5),
    ) {
        let rule = rules().into_iter().nth(kind).unwrap();
        let dtype = if double { DType::F64 } else { DType::F32 };
        for rank in 0..world {
            let mut shard = Shard::new(&rule, dtype, rank, world, 1);
            shard.scatter(&numbers(7, total()), false);
            if !copied || double {
                shard.low = None;
            }
            let Shard { memory, params, gradient, state, .. } = &mut shard;
            let mut buffers: Vec<_> = [params, gradient].into_iter().chain(state).collect();
            let count = buffers.len();
            for (buffer, at, edge) in &edges {
                let buffer = &mut buffers[buffer % count];
                if buffer.len() > 0 {
                    let at = at.index(buffer.len());
                    Shard::put(buffer, memory, at, EDGES[*edge]);
                }
            }
            shard.update(&rule, number, lr);
            let broken = shard.broken(&rule);
            prop_assert_eq!(shard.noted(), i64::from(broken.contains(&true)), "{:?}", broken);
        }
    }
}
