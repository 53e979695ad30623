//! Tests of memory: predictions equal measurements, nothing is left behind, and no parameter is kept.

use fsdp_core::memory::{Category, HostSlice, Memory};
use fsdp_core::model::{BlockId, ModelSpec, ParamId};
use fsdp_core::program::{BlockCall, CallFootprint, ForwardMode, Params, Pass, Program, calls};
use fsdp_core::schedule::{Checkpointing, Round};
use fsdp_core::{DType, Error};

use super::harness::{Subject, batch, freeze, gpt2, hf_models, host, llama, packed_batch, small};
use crate::backend::HeadChunks;
use crate::conformance::decoders::delta;
use crate::cuts::Cuts;
use crate::footprint::{Footprints, RunShape, difference, footprints};
use crate::model::unsharded::{Whole, make, run};
use crate::model::{Architecture, Decoder, Gpt2, ModelProgram, ProgramOptions};
use crate::op::{CHUNK, LossTerms};

const PASSES: [Pass; 4] = [
    Pass::Train(Checkpointing::None),
    Pass::Train(Checkpointing::Full),
    Pass::Train(Checkpointing::Selective),
    Pass::Evaluate,
];

fn shape(dtype: DType) -> RunShape {
    RunShape {
        samples: 2,
        seq: 7,
        dtype,
        gradient_dtype: dtype.master(),
        head_chunks: HeadChunks::Small,
        terms: LossTerms::default(),
        packed: false,
        cuts: Cuts::WHOLE,
    }
}

/// Measures what the calls of one micro-batch allocate on the host.
fn measure<A: Architecture + Clone>(
    architecture: &A,
    spec: &ModelSpec,
    shape: RunShape,
    pass: Pass,
) -> Footprints {
    let memory = host();
    let options = ProgramOptions { dtype: shape.dtype, seed: 0, terms: shape.terms, cuts: Cuts::WHOLE };
    let mut program = ModelProgram::new(architecture.clone(), spec.clone(), options);
    let batch = if shape.packed { packed_batch } else { batch };
    program.set_batches(&memory, 0, vec![batch(shape.samples, shape.seq, 13)]).unwrap();
    let data_bytes = memory.usage().live(Category::Activation);
    let mut params = Whole::new(&memory, spec, Category::Unsharded, shape.dtype).unwrap();
    params.zero(&memory).unwrap();
    let mut params = params.params();
    let gradients = Whole::new(&memory, spec, Category::GradientSlot, shape.gradient_dtype).unwrap();
    let mut gradients = gradients.into_gradients(spec);
    program.begin(&memory, Round(0), pass).unwrap();
    let footprint = |call: BlockCall| {
        memory.reset_peaks();
        let before = memory.usage();
        make(&mut program, &memory, call, &mut params, &mut gradients).unwrap();
        difference(before, memory.usage())
    };
    Footprints { calls: calls(spec, pass).into_iter().map(footprint).collect(), data_bytes }
}

/// Compares prediction and measurement for every call of every block.
fn check<A: Architecture + Clone>(architecture: &A, frozen: &[&str]) {
    let mut spec = architecture.description().spec.clone();
    freeze(&mut spec, frozen);
    for dtype in [DType::F32, DType::F64, DType::Bf16, DType::F16] {
        for (pass, packed) in PASSES.into_iter().flat_map(|pass| [(pass, false), (pass, true)]) {
            let shape = RunShape { packed, ..shape(dtype) };
            let predicted = footprints(architecture, &spec, shape, pass).unwrap();
            let counted = measure(architecture, &spec, shape, pass);
            assert_eq!(predicted, counted);
            assert_eq!(predicted.data_bytes, 2 * 7 * if packed { 20 } else { 16 });
        }
    }
}

#[test]
fn predicted_footprints_match_measured() {
    for model in hf_models() {
        check(&model, &[]);
        check(&model, &[".0."]);
        check(&model, &["weight"]);
    }
    check(&small(), &[]);
    check(&small(), &["embed.weight"]);
}

/// With several chunks per sample, whether one document or many.
#[test]
fn predictions_include_states_of_linear_attention() {
    let model = Decoder::new(&delta()).unwrap();
    let spec = model.description().spec.clone();
    for (pass, packed) in PASSES.into_iter().flat_map(|pass| [(pass, false), (pass, true)]) {
        let shape = RunShape { seq: 2 * CHUNK + 1, packed, ..shape(DType::Bf16) };
        let predicted = footprints(&model, &spec, shape, pass).unwrap();
        assert_eq!(predicted, measure(&model, &spec, shape, pass), "{pass:?}");
    }
}

#[test]
fn large_chunk_logit_gradient_adds_low_precision_workspace() {
    let model = small();
    let spec = model.description().spec.clone();
    let last = |dtype, head_chunks| {
        let shape = RunShape { head_chunks, ..shape(dtype) };
        let footprints = footprints(&model, &spec, shape, Pass::Train(Checkpointing::None)).unwrap();
        footprints.calls.iter().map(|call| call.workspace_peak).max().unwrap()
    };
    // All rows form one chunk in both cases: their logits in f32, and in bf16.
    let logits = 2 * 7 * 13;
    assert_eq!(last(DType::F32, HeadChunks::Large), last(DType::F32, HeadChunks::Small));
    assert_eq!(last(DType::Bf16, HeadChunks::Large), last(DType::Bf16, HeadChunks::Small) + 2 * logits);
}

#[test]
fn micro_batch_leaves_no_memory_allocated() {
    for model in hf_models() {
        let subject = Subject::new(model, DType::F32);
        let memory = host();
        let mut program = subject.program();
        program.set_batches(&memory, 0, vec![batch(2, 7, 13)]).unwrap();
        let mut params = subject.whole(&memory).params();
        let mut gradients = subject.open_gradients(&memory);
        let before = memory.usage().device.live_bytes;
        for pass in PASSES {
            run(&mut program, &memory, 0, pass, &mut params, &mut gradients).unwrap();
            assert_eq!(memory.usage().device.live_bytes, before, "{pass:?}");
        }
    }
}

#[test]
fn storage_is_reused_after_first_micro_batch() {
    for model in hf_models() {
        let subject = Subject::new(model, DType::F32);
        let memory = host();
        let mut program = subject.program();
        let mut params = subject.whole(&memory).params();
        let mut gradients = subject.open_gradients(&memory);
        let mut step = |pass| {
            program.set_batches(&memory, 0, vec![batch(2, 7, 13)]).unwrap();
            run(&mut program, &memory, 0, pass, &mut params, &mut gradients).unwrap();
            memory.usage().allocations
        };
        for pass in PASSES {
            assert_eq!(step(pass), step(pass), "{pass:?}");
        }
    }
}

#[test]
fn parameters_are_not_retained_between_calls() {
    for model in hf_models() {
        let subject = Subject::new(model, DType::F32);
        let memory = host();
        for pass in PASSES {
            let mut program = subject.program();
            program.set_batches(&memory, 0, vec![batch(2, 7, 13)]).unwrap();
            program.begin(&memory, Round(0), pass).unwrap();
            let mut whole = subject.whole(&memory);
            let mut gradients = subject.open_gradients(&memory);
            for call in calls(&subject.spec, pass) {
                make(&mut program, &memory, call, &mut whole.params(), &mut gradients).unwrap();
                // Fails if a view of the buffer is still alive.
                whole.write(&memory, ParamId(0), HostSlice::F64(&subject.values[0])).unwrap();
            }
        }
    }
}

/// Returns the footprint of one call of a pass.
fn footprint<A: Architecture + Clone>(
    architecture: &A,
    spec: &ModelSpec,
    dtype: DType,
    pass: Pass,
    call: BlockCall,
) -> CallFootprint {
    let index = calls(spec, pass).iter().position(|&other| other == call).unwrap();
    footprints(architecture, spec, shape(dtype), pass).unwrap().calls[index]
}

#[test]
fn frozen_layers_keep_no_activations() {
    let llama = Decoder::new(&crate::model::DecoderConfig { tie_word_embeddings: false, ..llama() }).unwrap();
    let mut spec = llama.description().spec.clone();
    freeze(&mut spec, &["model.embed", "model.layers.0."]);
    for pass in [
        Pass::Train(Checkpointing::None),
        Pass::Train(Checkpointing::Full),
        Pass::Train(Checkpointing::Selective),
    ] {
        // The output of a block replaces that of the previous one.
        for block in [1, 2] {
            let call = BlockCall::Forward(BlockId(block), ForwardMode::Record);
            assert_eq!(footprint(&llama, &spec, DType::F32, pass, call).activation_net, 0);
        }
        let first_trained = calls(&spec, pass).into_iter().find(|call| call.block() == BlockId(3)).unwrap();
        assert!(footprint(&llama, &spec, DType::F32, pass, first_trained).activation_net > 0);
    }
}

#[test]
fn checkpointed_layers_keep_only_their_input() {
    let gpt2 = Gpt2::new(&gpt2()).unwrap();
    let net = |pass, mode, block| {
        let (spec, call) = (&gpt2.description().spec, BlockCall::Forward(BlockId(block), mode));
        footprint(&gpt2, spec, DType::F32, pass, call).activation_net
    };
    let row_bytes = 2 * 7 * 12 * 4;
    assert_eq!(
        [1, 2].map(|i| net(Pass::Train(Checkpointing::Full), ForwardMode::Checkpoint, i)),
        [row_bytes, 0]
    );
    assert!(net(Pass::Train(Checkpointing::None), ForwardMode::Record, 1) > 3 * row_bytes);
}

/// Checks the table in the documentation of graphs, in bytes.
#[test]
fn llama_block_activations_match_documentation() {
    let model = Decoder::new(&llama()).unwrap();
    let of = |pass, call| footprint(&model, &model.description().spec, DType::Bf16, pass, call);
    let (hidden, inner, heads) = (12, 10, 4);
    let packed = (4 + 2 * 2) * 6;
    let rows = 2 * 7;
    let attention = rows * (2 * (packed + heads * 6) + 4 * (1 + heads));
    let mlp = rows * (2 * 2 * inner + 4);
    let output = rows * 2 * hidden;
    let (attention_block, mlp_block) = (BlockId(1), BlockId(2));
    for (block, kept, recomputed) in
        [(attention_block, attention + output, attention + output), (mlp_block, mlp + output, mlp)]
    {
        let record = of(Pass::Train(Checkpointing::None), BlockCall::Forward(block, ForwardMode::Record));
        assert_eq!(record.activation_net, kept);
        // The output of the last block of a layer is not recomputed.
        let recompute =
            of(Pass::Train(Checkpointing::Full), BlockCall::Forward(block, ForwardMode::Recompute));
        assert_eq!(recompute.activation_net, recomputed);
        // In backward, a gradient replaces the activation, in place all the way down.
        for pass in [Pass::Train(Checkpointing::None), Pass::Train(Checkpointing::Full)] {
            let backward = of(pass, BlockCall::Backward(block));
            assert_eq!((backward.activation_net, backward.activation_peak), (-kept, 0));
        }
    }
}

#[test]
fn parameter_not_unsharded_is_rejected() {
    let subject = Subject::new(small(), DType::F32);
    let memory = host();
    let mut program = subject.program();
    program.set_batches(&memory, 0, vec![batch(2, 7, 13)]).unwrap();
    let pass = Pass::Train(Checkpointing::None);
    program.begin(&memory, Round(0), pass).unwrap();
    let mut params = Params::default();
    let mut gradients = subject.open_gradients(&memory);
    let first = calls(&subject.spec, pass)[0];
    let error = make(&mut program, &memory, first, &mut params, &mut gradients).unwrap_err();
    assert!(matches!(error, Error::Parameter { param, .. } if param == "embed.weight"));
}
