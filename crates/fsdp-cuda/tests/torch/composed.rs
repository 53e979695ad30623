//! Checks that operations with the bits of the host's kernels are indeed composed of libtorch's operations, in blocks.

use std::panic::{AssertUnwindSafe, catch_unwind};

use fsdp_core::memory::{Arithmetic, Buffer, HostSlice, Memory, Rows, Slice, SliceMut};
use fsdp_core::model::ParamId;
use fsdp_core::scalars::GradientFactors;
use fsdp_core::update::{Piece, SegmentShard, Stage, StepScalars, Updates};
use fsdp_core::{DType, ExactSum, Queue};
use fsdp_nn::Backend;
use fsdp_nn::backend::{BatchFacts, Operands, Write};
use fsdp_nn::op::{Lookup, Op};
use fsdp_nn::update::{AdamW, Rule, Sgd};

use crate::subject::subject;
use crate::values::*;

const Q: Queue = Queue::Compute;

/// More elements than a composition processes in one block.
const MANY: usize = (1 << 22) + 1001;

#[test]
fn failed_operation_is_an_error_that_names_it() {
    let memory = &*subject();
    let table = filled(memory, DType::F32, &[1.0; 6]);
    let (mut ids, mut y) = (room(memory, DType::U32, 1), room(memory, DType::F32, 3));
    memory.write(Q, HostSlice::U32(&[9]), SliceMut::whole(&mut ids)).unwrap();
    let op = Op::Lookup(Lookup::Embedding { rows: 1, width: 3, table_rows: 2, padding: None });
    let reads = &[Slice::whole(&ids), Slice::whole(&table)];
    let writes = &mut [Write::over(SliceMut::whole(&mut y))];
    let failed = memory.run(&op, Operands { reads, writes, batch: BatchFacts::default() }).unwrap_err();
    assert!(failed.to_string().contains("libtorch, in embedding"), "{failed}");
}

#[test]
fn updates_without_state_panic() {
    let memory = &*subject();
    for rule in [Rule::new(AdamW::default()), Rule::new(Sgd { momentum: 0.9, ..Sgd::default() })] {
        let mut params = filled(memory, DType::F32, &[1.0; 6]);
        let updated = catch_unwind(AssertUnwindSafe(|| update(memory, &rule, &mut params, &mut [])));
        let panic = updated.expect_err("it has no state");
        let message = panic.downcast_ref::<String>().cloned().unwrap_or_default();
        assert!(message.contains("0 state tensors"), "{message}");
    }
}

/// libtorch drops the payload of a NaN; the host's kernels keep its upper bits.
#[test]
fn copies_sums_and_scaling_run_in_libtorch() {
    let odd = f64::from_bits(f64::NAN.to_bits() | 3 << 46);
    fn results<M: Memory>(memory: &M, odd: f64) -> Vec<u64> {
        let src = filled(memory, DType::F32, &[odd]);
        let mut copied = room(memory, DType::Bf16, 1);
        memory.copy(Q, Slice::whole(&src), SliceMut::whole(&mut copied)).unwrap();
        let one = filled(memory, DType::Bf16, &[1.0]);
        let mut summed = filled(memory, DType::Bf16, &[odd]);
        memory.compute(Q, Arithmetic::Accumulate(Slice::whole(&one)), SliceMut::whole(&mut summed)).unwrap();
        let mut scaled = filled(memory, DType::Bf16, &[odd]);
        memory.compute(Q, Arithmetic::Scale(0.5), SliceMut::whole(&mut scaled)).unwrap();
        [copied, summed, scaled].iter().map(|buffer| values(memory, buffer)[0].to_bits()).collect()
    }
    let (composed, host) = (results(&*subject(), odd), results(&host(), odd));
    for (operation, (composed, host)) in composed.iter().zip(&host).enumerate() {
        assert_ne!(composed, host, "operation {operation}");
    }
}

#[test]
fn blockwise_sums_match_host_bitwise() {
    fn results<M: Memory>(memory: &M, numbers: &[f64]) -> (Vec<i64>, Vec<i64>) {
        let mut sums = [(); 2].map(|()| integers(memory, &[0; ExactSum::WORDS]));
        let src = filled(memory, DType::F32, numbers);
        let row_len = if numbers.len().is_multiple_of(1001) { 1001 } else { 1 };
        let rows = [Rows { offset: 0, len: numbers.len(), row_len }];
        let squares = Arithmetic::SquareSum(Slice::whole(&src), &rows);
        memory.compute(Q, squares, SliceMut::whole(&mut sums[0])).unwrap();
        let src = filled(memory, DType::F64, numbers);
        memory.compute(Q, Arithmetic::ExactSum(Slice::whole(&src)), SliceMut::whole(&mut sums[1])).unwrap();
        let [squares, exact] = sums.map(|sum| ExactSum::from_words(&words(memory, &sum)).to_words().into());
        (squares, exact)
    }
    for len in [MANY, MANY.next_multiple_of(1001)] {
        let numbers = normal(1, len);
        assert!(results(&*subject(), &numbers) == results(&host(), &numbers), "sums of {len}");
    }
}

#[test]
fn blockwise_updates_match_host_bitwise() {
    let (memory, host) = (&*subject(), &host());
    let numbers = normal(1, MANY);
    let mut params = filled(memory, DType::F32, &numbers);
    let mut expected = filled(host, DType::F32, &numbers);
    let rule = Rule::new(Sgd::default());
    update(memory, &rule, &mut params, &mut []).unwrap();
    update(host, &rule, &mut expected, &mut []).unwrap();
    assert_bits(&values(memory, &params), &values(host, &expected), "parameters");
}

/// Performs one update step with a random gradient for every element.
fn update<M: Backend>(
    memory: &M,
    rule: &Rule,
    params: &mut M::Buffer,
    state: &mut [M::Buffer],
) -> Result<(), String> {
    let len = params.len();
    let gradient = filled(memory, DType::F32, &normal(2, len));
    let piece = Piece { param: ParamId(0), offset: 0, len, param_offset: 0, row_len: 1 };
    let factors = filled(memory, DType::F64, &[0.25, 0.7, 1.0]);
    assert_eq!(factors.len(), GradientFactors::LEN);
    let scalars = StepScalars { step: 1, lr: 0.1, factors: Slice::whole(&factors) };
    let mut not_finite = integers(memory, &[0]);
    let mut shard = SegmentShard {
        params,
        low: None,
        gradient: &gradient,
        state,
        pieces: &[piece],
        segment: None,
        whole: None,
        not_finite: &mut not_finite,
    };
    rule.run(memory, Stage::Update { statistics: &[] }, &mut shard, &scalars)
        .map_err(|error| error.to_string())
}
