//! Tests that operands that do not fit an operation panic with a message that names both.

use std::panic::{AssertUnwindSafe, catch_unwind};

use fsdp_core::DType;

use crate::backend::{Backend, BatchFacts, Operands, Write};
use crate::conformance::host;
use crate::conformance::kit::Kit;
use crate::op::{
    Activation, Attention, AttentionDims, Function, Linear, LinearDims, Norm, Op, Orientation, Pass,
    Pointwise, Scores,
};

/// Returns the host's panic message for an operation on operands of these dtypes and lengths, or "done".
fn outcome(op: &Op, reads: &[(DType, usize)], writes: &[(DType, usize)], adds: bool, keys: &[u64]) -> String {
    let kit = Kit::new(host(), DType::F32);
    let operand = |&(dtype, len): &(DType, usize)| match dtype {
        DType::U32 => kit.ids(&vec![0; len]),
        dtype => kit.put_as(dtype, &vec![1.0; len]),
    };
    let reads: Vec<_> = reads.iter().map(operand).collect();
    let mut writes: Vec<_> = writes.iter().map(operand).collect();
    let reads: Vec<_> = reads.iter().map(|read| read.read()).collect();
    let mut writes: Vec<_> =
        writes.iter_mut().map(|to| Write { slice: to.write(), accumulate: adds }).collect();
    let operands = Operands { reads: &reads, writes: &mut writes, batch: BatchFacts::with_keys(keys) };
    match catch_unwind(AssertUnwindSafe(|| kit.memory.run(op, operands))) {
        Ok(ran) => ran.map_or_else(|error| error.to_string(), |()| "done".into()),
        Err(panic) => *panic.downcast::<String>().unwrap(),
    }
}

#[test]
fn mismatched_operands_are_named() {
    use DType::{Bf16, F32, F64, U32};
    let gelu = Op::Activation(Activation {
        function: Function::GeluTanh,
        gated: false,
        len: 4,
        pass: Pass::Forward,
    });
    assert_eq!(outcome(&gelu, &[(F32, 4)], &[(F32, 4)], false, &[]), "done");
    assert_eq!(
        outcome(&gelu, &[(F32, 4)], &[(F32, 3)], false, &[]),
        "y of gelu: 3 elements, but 4 are needed"
    );
    assert_eq!(
        outcome(&gelu, &[(F32, 4)], &[(F64, 4)], false, &[]),
        "y of gelu: f64, where the other operands need f32"
    );
    assert_eq!(
        outcome(&gelu, &[(U32, 4)], &[(U32, 4)], false, &[]),
        "x of gelu: this needs a float dtype, not u32"
    );
    assert_eq!(
        outcome(&gelu, &[(F32, 4)], &[(F32, 4)], true, &[]),
        "y of gelu: it is overwritten, and cannot be added to"
    );
    let orientation = Orientation::OutIn;
    let dims = LinearDims { rows: 2, inputs: 3, outputs: 5, y_stride: 8, orientation };
    let linear = Op::Linear(Linear::Forward { dims, bias: true });
    assert_eq!(
        outcome(&linear, &[(F32, 6), (F32, 15)], &[(F32, 13)], false, &[]),
        "operands that are read: 2, but 3 are needed"
    );
    let reads = [(F32, 6), (F32, 15), (F32, 5)];
    assert_eq!(outcome(&linear, &reads, &[(F32, 13)], false, &[]), "done");
    assert_eq!(
        outcome(&linear, &reads, &[(F32, 12)], false, &[]),
        "y of linear: 12 elements, but 13 are needed at least"
    );
    // Statistics have the master dtype of the values; gradients of parameters have any.
    let norm = Op::Norm(Norm::Rms { rows: 2, width: 3, eps: 1e-5, offset: 0.0 });
    assert_eq!(outcome(&norm, &[(Bf16, 6), (Bf16, 3)], &[(Bf16, 6), (F32, 2)], false, &[]), "done");
    assert_eq!(
        outcome(&norm, &[(Bf16, 6), (Bf16, 3)], &[(Bf16, 6), (Bf16, 2)], false, &[]),
        "rstd of rms_norm: bf16, where the other operands need f32"
    );
    let sums = Op::Linear(Linear::ColumnSums { rows: 2, columns: 3, stride: 3 });
    assert_eq!(outcome(&sums, &[(Bf16, 6)], &[(F64, 3)], true, &[]), "done");
}

#[test]
fn mismatched_dropout_keys_and_head_counts_are_named() {
    let f32s = |len| (DType::F32, len);
    let dropout = Op::Pointwise(Pointwise::Dropout { len: 6, samples: 2, p: 0.5 });
    assert_eq!(outcome(&dropout, &[], &[f32s(6)], false, &[1, 2]), "done");
    assert_eq!(outcome(&dropout, &[], &[f32s(6)], false, &[1]), "dropout keys: 1, but 2 are needed");
    let dims = AttentionDims { batch: 1, seq: 2, heads: 3, kv_heads: 2, head_dim: 2 };
    let attention = Op::Attention(Attention::Forward { dims, scores: Scores::default() });
    assert_eq!(
        outcome(&attention, &[f32s(28)], &[f32s(12), f32s(6)], false, &[]),
        "3 query heads do not share 2 key heads evenly"
    );
}
