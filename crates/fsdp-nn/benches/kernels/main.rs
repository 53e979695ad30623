//! Kernels at the sizes of the 5.9M-parameter Llama of bench/, each beside its bound.
//!
//! `cargo bench -p fsdp-nn --features bench` measures with criterion; before each group the best of 15 runs is printed next
//! to the time that a big product (or a big copy) of the same work takes on this machine.

mod bounds;

use std::ops::Range;

use bounds::{Bounds, Work, filled};
use criterion::{Criterion, criterion_group, criterion_main};
use fsdp_core::memory::{Category, HostSlice, Memory, Slice, SliceMut};
use fsdp_core::model::{ModelSpec, ParamId, ParamSpec};
use fsdp_core::program::GradientTarget;
use fsdp_core::scalars::GradientFactors;
use fsdp_core::update::{Piece, RuleState, SegmentShard, Stage, StepScalars, Updates};
use fsdp_core::{DType, Queue, Tallies};
use fsdp_nn::backend::{AttentionDims, BatchFacts, HeadDims, LinearDims, Orientation};
use fsdp_nn::conformance::Calls;
use fsdp_nn::op::Scores;
use fsdp_nn::update::{Adafactor, AdafactorOptions, AdamW, Rule, Sgd};
use fsdp_nn::{HostBuffer, HostMemory, HostOptions};

const ROWS: usize = 2048;
const HIDDEN: usize = 256;
const FFN: usize = 1024;
const VOCAB: usize = 4096;

/// Memories with one and two threads, and their bounds.
fn memories() -> Vec<(usize, HostMemory, Bounds)> {
    let memory =
        |threads| HostMemory::new(HostOptions { threads, ..HostOptions::default() }).expect("threads");
    [1, 2]
        .map(|threads| {
            let memory = memory(threads);
            let bounds = Bounds::measure(&memory);
            bounds.print(threads);
            (threads, memory, bounds)
        })
        .into()
}

fn run(c: &mut Criterion, bounds: Bounds, name: &str, work: Work, mut call: impl FnMut()) {
    bounds.report(name, work, &mut call);
    c.bench_function(name, |bencher| bencher.iter(&mut call));
}

fn read(buffer: &HostBuffer) -> Slice<'_, HostBuffer> {
    Slice::whole(buffer)
}

fn write(buffer: &mut HostBuffer) -> SliceMut<'_, HostBuffer> {
    SliceMut::whole(buffer)
}

fn gradient(buffer: &mut HostBuffer) -> GradientTarget<'_, HostBuffer> {
    GradientTarget { slice: SliceMut::whole(buffer), accumulate: false }
}

fn gemm(c: &mut Criterion) {
    for (threads, memory, bounds) in memories() {
        let orientation = Orientation::OutIn;
        let dims = LinearDims { rows: ROWS, inputs: HIDDEN, outputs: FFN, y_stride: FFN, orientation };
        let (x, w) = (filled(&memory, ROWS * HIDDEN), filled(&memory, HIDDEN * FFN));
        let (mut y, mut dx, mut dw) =
            (filled(&memory, ROWS * FFN), filled(&memory, ROWS * HIDDEN), filled(&memory, HIDDEN * FFN));
        let dy = filled(&memory, ROWS * FFN);
        let flops = Work::Flops(2.0 * (ROWS * HIDDEN * FFN) as f64);
        run(c, bounds, &format!("gemm/forward/{threads}"), flops, || {
            memory.linear(dims, read(&x), read(&w), None, write(&mut y)).expect("fits");
        });
        run(c, bounds, &format!("gemm/input/{threads}"), flops, || {
            memory.linear_backward_input(dims, read(&dy), read(&w), write(&mut dx), false).expect("fits");
        });
        run(c, bounds, &format!("gemm/weight/{threads}"), flops, || {
            memory.linear_backward_weight(dims, read(&x), read(&dy), gradient(&mut dw)).expect("fits");
        });
    }
}

/// Samples of the model, and one sample of as many positions: as one document, and as 16 packed ones.
fn attention(c: &mut Criterion) {
    let dims = AttentionDims { batch: 8, seq: 256, heads: 8, kv_heads: 2, head_dim: 32 };
    attention_over(c, "attention", dims, None);
    let dims = AttentionDims { batch: 1, seq: ROWS, ..dims };
    attention_over(c, "attention_1x2048", dims, Some(ROWS));
    attention_over(c, "attention_16x128", dims, Some(128));
}

/// Attention over samples, or over packed documents of a length.
fn attention_over(c: &mut Criterion, name: &str, dims: AttentionDims, len: Option<usize>) {
    let documents: Vec<Range<usize>> =
        len.map_or_else(Vec::new, |len| (0..ROWS).step_by(len).map(|start| start..start + len).collect());
    let scores = Scores { packed: len.is_some(), ..Scores::default() };
    let facts = (scores, BatchFacts { documents: &documents, ..BatchFacts::default() });
    for (threads, memory, bounds) in memories() {
        let qkv = filled(&memory, dims.rows() * dims.packed());
        let (mut y, mut lse) = (filled(&memory, ROWS * HIDDEN), filled(&memory, ROWS * dims.heads));
        let (dy, mut dqkv) = (filled(&memory, ROWS * HIDDEN), filled(&memory, dims.rows() * dims.packed()));
        // The causal half of each product.
        let product = (ROWS * len.unwrap_or(dims.seq) * dims.heads * dims.head_dim) as f64;
        run(c, bounds, &format!("{name}/forward/{threads}"), Work::Flops(2.0 * product), || {
            memory.attention(dims, facts, read(&qkv), write(&mut y), write(&mut lse)).expect("fits");
        });
        run(c, bounds, &format!("{name}/backward/{threads}"), Work::Flops(5.0 * product), || {
            let (qkv, y, lse, dy) = (read(&qkv), read(&y), read(&lse), read(&dy));
            memory.attention_backward(dims, facts, qkv, y, lse, dy, write(&mut dqkv)).expect("fits");
        });
    }
}

fn cross_entropy(c: &mut Criterion) {
    let dims = HeadDims::new([ROWS, HIDDEN, VOCAB], 256);
    for (threads, memory, bounds) in memories() {
        let (x, w) = (filled(&memory, ROWS * HIDDEN), filled(&memory, VOCAB * HIDDEN));
        let (mut dx, mut dw) = (filled(&memory, ROWS * HIDDEN), filled(&memory, VOCAB * HIDDEN));
        let mut logits = filled(&memory, dims.chunk_rows * VOCAB);
        let mut losses = memory.allocate(Category::Activation, DType::F64, ROWS).expect("no limit");
        let mut targets = memory.allocate(Category::Activation, DType::U32, ROWS).expect("no limit");
        let ids: Vec<u32> = (0..ROWS as u32).map(|i| i * 2 % VOCAB as u32).collect();
        memory.write(Queue::Compute, HostSlice::U32(&ids), write(&mut targets)).expect("fits");
        let product = 2.0 * (ROWS * HIDDEN * VOCAB) as f64;
        run(c, bounds, &format!("cross_entropy/forward/{threads}"), Work::Flops(product), || {
            let (losses, logits) = (write(&mut losses), write(&mut logits));
            memory.head_loss(dims, read(&x), read(&w), read(&targets), (losses, None), logits).expect("fits");
        });
        run(c, bounds, &format!("cross_entropy/backward/{threads}"), Work::Flops(3.0 * product), || {
            let (losses, logits, dweight) = (write(&mut losses), write(&mut logits), Some(gradient(&mut dw)));
            let (x, w, targets) = (read(&x), read(&w), read(&targets));
            memory
                .head_loss_backward(
                    dims,
                    x,
                    w,
                    targets,
                    (losses, None),
                    logits,
                    None,
                    write(&mut dx),
                    dweight,
                )
                .expect("fits");
        });
    }
}

fn pointwise(c: &mut Criterion) {
    for (threads, memory, bounds) in memories() {
        let len = ROWS * FFN;
        let (gate, up, dy) = (filled(&memory, len), filled(&memory, len), filled(&memory, len));
        let (mut y, mut dgate, mut dup) = (filled(&memory, len), filled(&memory, len), filled(&memory, len));
        let bytes = |tensors: usize, len: usize| Work::Bytes((4 * tensors * len) as f64);
        run(c, bounds, &format!("swiglu/forward/{threads}"), bytes(3, len), || {
            memory.swiglu(read(&gate), read(&up), write(&mut y)).expect("fits");
        });
        run(c, bounds, &format!("swiglu/backward/{threads}"), bytes(5, len), || {
            let (gate, up, dy) = (read(&gate), read(&up), read(&dy));
            memory.swiglu_backward(gate, up, dy, write(&mut dgate), write(&mut dup)).expect("fits");
        });
        run(c, bounds, &format!("gelu/forward/{threads}"), bytes(2, len), || {
            memory.gelu(read(&gate), write(&mut y)).expect("fits");
        });
        let (weight, mut rstd) = (filled(&memory, HIDDEN), filled(&memory, len / HIDDEN));
        run(c, bounds, &format!("rms_norm/forward/{threads}"), bytes(2, len), || {
            let (x, weight) = (read(&gate), read(&weight));
            memory.rms_norm(HIDDEN, [1e-5, 0.0], x, weight, write(&mut y), write(&mut rstd)).expect("fits");
        });
        let mut dweight = filled(&memory, HIDDEN);
        run(c, bounds, &format!("rms_norm/backward/{threads}"), bytes(3, len), || {
            let (x, weight, rstd, dy) = (read(&gate), read(&weight), read(&rstd), read(&dy));
            let target = Some(gradient(&mut dweight));
            memory
                .rms_norm_backward((HIDDEN, 0.0), x, weight, rstd, dy, write(&mut y), false, target)
                .expect("fits");
        });
    }
}

fn optimizers(c: &mut Criterion) {
    let len = 4 << 20;
    let piece = Piece { param: ParamId(0), offset: 0, len, param_offset: 0, row_len: HIDDEN };
    let factors = GradientFactors { scale: 1e-3, clip: 0.5, finite: true }.to_array();
    for (threads, memory, bounds) in memories() {
        let gradient = filled(&memory, len);
        let mut on_device =
            memory.allocate(Category::CommStaging, DType::F64, GradientFactors::LEN).expect("no limit");
        memory.write(Queue::Compute, HostSlice::F64(&factors), write(&mut on_device)).expect("fits");
        let mut not_finite = memory.allocate(Category::CommStaging, DType::I64, 1).expect("no limit");
        let scalars = StepScalars { step: 3, lr: 1e-3, factors: Slice::whole(&on_device) };
        // Adafactor's passes read the gradient thrice, and the parameters once more than they update them.
        let rules = [
            ("adamw", 7, Rule::new(AdamW::default())),
            ("sgd", 3, Rule::new(Sgd::default())),
            ("adafactor", 6, Rule::new(Adafactor::new(AdafactorOptions::default(), &one_param(len)))),
        ];
        for (name, tensors, rule) in rules {
            let mut params = filled(&memory, len);
            let mut state = Vec::new();
            for tensor in rule.state(&[piece], len, DType::F32) {
                let mut buffer =
                    memory.allocate(Category::OptimizerState, tensor.dtype, tensor.len).expect("no limit");
                memory.zero(Queue::Compute, write(&mut buffer)).expect("fits");
                state.push(buffer);
            }
            let bytes = Work::Bytes((4 * tensors * len) as f64);
            run(c, bounds, &format!("{name}/{threads}"), bytes, || {
                let mut shard = SegmentShard {
                    low: None,
                    params: &mut params,
                    gradient: &gradient,
                    state: &mut state,
                    pieces: &[piece],
                    segment: None,
                    whole: None,
                    not_finite: &mut not_finite,
                };
                let mut sums: Vec<HostBuffer> = Vec::new();
                for count in rule.phases() {
                    let found = memory.allocate(Category::CommStaging, DType::F64, count);
                    let mut found = found.expect("no limit");
                    memory.zero(Queue::Compute, write(&mut found)).expect("fits");
                    let stage = Stage::Statistics { earlier: &sums, sums: &mut found };
                    rule.run(&memory, stage, &mut shard, &scalars).expect("fits");
                    sums.push(found);
                }
                let stage = Stage::Update { statistics: &sums };
                rule.run(&memory, stage, &mut shard, &scalars).expect("fits");
            });
        }
    }
}

/// A model of one matrix.
fn one_param(len: usize) -> ModelSpec {
    let (fqn, shape) = ("weight".to_owned(), vec![len / HIDDEN, HIDDEN]);
    let param = ParamSpec {
        fqn,
        aliases: Vec::new(),
        shape,
        trainable: true,
        expert: None,
        quantized: None,
        keep_f32: false,
    };
    ModelSpec { params: vec![param], modules: Vec::new(), blocks: Vec::new(), tallies: Tallies::default() }
}

criterion_group! {
    name = kernels;
    config = Criterion::default()
        .sample_size(10)
        .warm_up_time(std::time::Duration::from_millis(200))
        .measurement_time(std::time::Duration::from_millis(700));
    targets = gemm, attention, cross_entropy, pointwise, optimizers
}
criterion_main!(kernels);
