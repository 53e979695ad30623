//! Update rules on a device and in pinned memory: the bits of the host's rules.

use std::collections::BTreeSet;

use fsdp_core::memory::{Buffer, Category, HostSlice, Memory, Slice, SliceMut};
use fsdp_core::model::{BlockSpec, ModelSpec, ModuleSpec, ParamId, ParamSpec};
use fsdp_core::scalars::GradientFactors;
use fsdp_core::update::{Piece, SegmentShard, StepScalars, UpdateRule};
use fsdp_core::{DType, Error, Queue};
use fsdp_cuda::CudaMemory;
use fsdp_nn::HostMemory;
use fsdp_nn::update::{Adafactor, AdafactorOptions, AdamW, Sgd};

use crate::values::*;

const FACTORS: GradientFactors = GradientFactors { scale: 0.25, clip: 0.7, finite: true };

/// Two matrices that touch, a gap, a vector, another matrix without decay.
const SHAPES: [(usize, usize); 4] = [(40, 6), (30, 6), (1, 111), (7, 9)];

fn no_decay() -> BTreeSet<ParamId> {
    [ParamId(2), ParamId(3)].into()
}

fn pieces() -> (Vec<Piece>, usize) {
    let mut pieces = Vec::new();
    let mut offset = 0;
    for (param, (rows, cols)) in SHAPES.into_iter().enumerate() {
        let row_len = if rows == 1 { 1 } else { cols };
        let param = ParamId(param);
        pieces.push(Piece { param, offset, len: rows * cols, param_offset: 0, row_len });
        offset += rows * cols + if param.0 == 1 { 3 } else { 0 };
    }
    (pieces, offset + 5)
}

fn spec() -> ModelSpec {
    let params = SHAPES.into_iter().enumerate().map(|(param, (rows, cols))| ParamSpec {
        fqn: format!("p{param}"),
        aliases: Vec::new(),
        shape: if rows == 1 { vec![cols] } else { vec![rows, cols] },
        trainable: true,
    });
    let ids: Vec<_> = (0..SHAPES.len()).map(ParamId).collect();
    let root = ModuleSpec { fqn: String::new(), class: "Root".into(), parent: None, params: ids.clone() };
    let blocks = vec![BlockSpec { name: "all".into(), params: ids, layer: None }];
    ModelSpec { params: params.collect(), modules: vec![root], blocks }
}

/// Where the shard of a device lies.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Where {
    Device,
    Pinned,
}

/// Three steps, one of them with the flag down, and what parameters and state are after each.
fn train<M: Memory, R: UpdateRule<M>>(
    memory: &M,
    rule: &mut R,
    (master, gradients): (DType, DType),
    place: Where,
) -> Vec<Vec<f64>> {
    let (pieces, len) = pieces();
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
    // What computes in bf16 has a copy of its master parameters.
    let mut low = (master == DType::F32).then(|| allocate(Category::ParameterShard, DType::Bf16, len));
    if let Some(low) = &mut low {
        write(low, &normal(1, len));
    }
    let tensors = rule.state(&pieces, len, master);
    let mut state: Vec<_> =
        tensors.iter().map(|tensor| allocate(Category::OptimizerState, tensor.dtype, tensor.len)).collect();
    state.iter_mut().for_each(|buffer| memory.zero(Queue::Compute, SliceMut::whole(buffer)).unwrap());
    let mut factors = memory.allocate(Category::CommStaging, DType::F64, GradientFactors::LEN).unwrap();
    let mut seen: Vec<Vec<f64>> = Vec::new();
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
        };
        run(rule, memory, &mut shard, &scalars).unwrap();
        let after: Vec<f64> = std::iter::once(&params)
            .chain(&low)
            .chain(&state)
            .flat_map(|buffer| values(memory, buffer))
            .collect();
        seen.push(after);
    }
    assert_bits(&seen[1], &seen[0], "a step whose flag is down");
    assert_ne!(seen[2], seen[1], "a step whose flag is up");
    assert!(params.is_exclusive() && state.iter().all(Buffer::is_exclusive));
    seen
}

fn run<M: Memory, R: UpdateRule<M>>(
    rule: &mut R,
    memory: &M,
    shard: &mut SegmentShard<'_, M::Buffer>,
    scalars: &StepScalars<'_, M::Buffer>,
) -> Result<(), Error> {
    let mut statistics = Vec::new();
    for (phase, len) in rule.phases().into_iter().enumerate() {
        let mut sums = vec![0.0; len];
        rule.statistics(memory, phase, shard, scalars, &statistics, &mut sums)?;
        statistics.push(sums);
    }
    rule.update(memory, shard, scalars, &statistics)
}

/// Compares a rule in both places of a device with the host.
fn compare<R: UpdateRule<HostMemory> + UpdateRule<CudaMemory>>(mut rule: R, what: &str) {
    let (cuda, host) = (&*cuda(), &host());
    for master in [DType::F32, DType::F64] {
        for gradients in FLOATS {
            let expected = train(host, &mut rule, (master, gradients), Where::Device);
            for place in [Where::Device, Where::Pinned] {
                let got = train(cuda, &mut rule, (master, gradients), place);
                for (step, (got, expected)) in got.iter().zip(&expected).enumerate() {
                    let what =
                        format!("{what} of {master} by {gradients} on {place:?} after step {}", step + 1);
                    assert_bits(got, expected, &what);
                }
            }
        }
    }
}

#[test]
fn adamw_has_the_bits_of_the_host() {
    compare(AdamW { no_decay: no_decay(), weight_decay: 0.1, ..AdamW::default() }, "AdamW");
    compare(AdamW { betas: (0.4, 0.9), eps: 1e-3, ..AdamW::default() }, "AdamW with a small beta1");
}

#[test]
fn sgd_has_the_bits_of_the_host() {
    compare(Sgd { weight_decay: 0.1, no_decay: no_decay(), ..Sgd::default() }, "plain SGD");
    compare(Sgd { momentum: 0.9, dampening: 0.2, ..Sgd::default() }, "SGD with momentum");
    let nesterov =
        Sgd { momentum: 0.9, nesterov: true, weight_decay: 0.1, no_decay: no_decay(), ..Sgd::default() };
    compare(nesterov, "SGD of Nesterov");
}

#[test]
fn adafactor_has_the_bits_of_the_host() {
    let options = AdafactorOptions {
        beta1: Some(0.9),
        weight_decay: 0.1,
        no_decay: no_decay(),
        ..AdafactorOptions::default()
    };
    compare(Adafactor::new(options, &spec()), "Adafactor");
}

#[test]
fn rules_do_not_wait_for_the_device() {
    let device = crate::fake_cuda::device();
    let memory = &cuda_on(device);
    let (pieces, len) = pieces();
    let mut params = filled(memory, DType::F32, &normal(1, len));
    let mut low = filled(memory, DType::Bf16, &normal(1, len));
    let gradient = filled(memory, DType::F32, &normal(2, len));
    let mut state =
        [filled(memory, DType::F32, &vec![0.0; len]), filled(memory, DType::F32, &vec![0.0; len])];
    let factors = filled(memory, DType::F64, &FACTORS.to_array());
    let scalars = StepScalars { step: 1, lr: 0.1, factors: Slice::whole(&factors) };
    let waits =
        || ["cuStreamSynchronize", "cuEventSynchronize", "cuCtxSynchronize"].map(|call| device.calls(call));
    let before = waits();
    let mut shard = SegmentShard {
        params: &mut params,
        low: Some(&mut low),
        gradient: &gradient,
        state: &mut state,
        pieces: &pieces,
    };
    run(&mut AdamW::default(), memory, &mut shard, &scalars).unwrap();
    assert_eq!(waits(), before);
    assert_eq!(device.calls("cuLaunchKernel"), 2, "one for every run of pieces");
}
