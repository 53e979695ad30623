//! Memory: what is predicted is what is counted, nothing is left behind, and no parameter is kept.

use fsdp_core::memory::{HostSlice, Memory};
use fsdp_core::model::ParamId;
use fsdp_core::program::{CallFootprint, Program};
use fsdp_core::{DType, Error};

use super::harness::{Subject, batch, gpt2, hf_models, host, llama, small};
use crate::HostMemory;
use crate::footprint::{RunShape, footprints, measure};
use crate::model::unsharded::{Pass, calls, run};
use crate::model::{Architecture, Gpt2, Llama, freeze};

const PASSES: [Pass; 3] = [Pass::Train, Pass::TrainRecomputing, Pass::Evaluate];

fn shape(dtype: DType) -> RunShape {
    RunShape { samples: 2, seq: 7, dtype, gradient_dtype: dtype.master() }
}

/// Compares prediction and counters for every call of every block.
fn check<A: Architecture + Clone>(architecture: &A, frozen: &[&str]) {
    let mut spec = architecture.description().spec.clone();
    freeze(&mut spec, &frozen.iter().map(|pattern| String::from(*pattern)).collect::<Vec<_>>()).unwrap();
    for dtype in [DType::F32, DType::F64, DType::Bf16] {
        for pass in PASSES {
            let (shape, calls) = (shape(dtype), calls(&spec, pass));
            let predicted = footprints(architecture, &spec, shape, &calls).unwrap();
            let counted =
                measure(&host(), HostMemory::reset_peaks, architecture, &spec, shape, &calls).unwrap();
            assert_eq!(predicted, counted);
            assert_eq!(predicted.data_bytes, 2 * 7 * 16);
        }
    }
}

#[test]
fn predicted_footprints_are_the_counted_ones() {
    for model in hf_models() {
        check(&model, &[]);
        check(&model, &["*.0.*"]);
        check(&model, &["*weight"]);
    }
    check(&small(), &[]);
    check(&small(), &["embed.weight"]);
}

#[test]
fn a_micro_batch_leaves_nothing_behind() {
    for model in hf_models() {
        let subject = Subject::new(model, DType::F32);
        let memory = host();
        let mut program = subject.program();
        program.set_batches(&memory, 0, vec![batch(2, 7, 13)]).unwrap();
        let mut params = subject.whole(&memory).params();
        let mut gradients = subject.open_gradients(&memory);
        let before = memory.usage().live_bytes;
        for pass in PASSES {
            run(&mut program, &memory, 0, pass, &mut params, &mut gradients).unwrap();
            assert_eq!(memory.usage().live_bytes, before, "{pass:?}");
        }
    }
}

#[test]
fn storage_is_reused_from_the_second_micro_batch_on() {
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
fn no_parameter_is_kept_between_calls() {
    for model in hf_models() {
        let subject = Subject::new(model, DType::F32);
        let memory = host();
        for pass in PASSES {
            let mut program = subject.program();
            program.set_batches(&memory, 0, vec![batch(2, 7, 13)]).unwrap();
            program.begin(&memory, 0).unwrap();
            let mut whole = subject.whole(&memory);
            let mut gradients = subject.open_gradients(&memory);
            for call in calls(&subject.spec, pass) {
                call.make(&mut program, &memory, &mut whole.params(), &mut gradients).unwrap();
                // Fails if a view of the buffer were left anywhere.
                whole.write(&memory, ParamId(0), HostSlice::F64(&subject.values[0])).unwrap();
            }
        }
    }
}

#[test]
fn frozen_layers_keep_nothing() {
    let llama = Llama::new(&crate::model::LlamaConfig { tie_word_embeddings: false, ..llama() }).unwrap();
    let mut spec = llama.description().spec.clone();
    freeze(&mut spec, &["model.embed*".into(), "model.layers.0.*".into()]).unwrap();
    let blocks = footprints(&llama, &spec, shape(DType::F32)).unwrap().blocks;
    // The output of one block replaces that of the one before.
    assert_eq!([blocks[1].record.activation_net, blocks[2].record.activation_net], [0, 0]);
    assert_eq!(blocks[2].recompute, CallFootprint::default());
    assert!(blocks[3].record.activation_net > 0);
}

#[test]
fn checkpointed_layers_keep_only_their_input() {
    let gpt2 = Gpt2::new(&gpt2()).unwrap();
    let blocks = footprints(&gpt2, &gpt2.description().spec, shape(DType::F32)).unwrap().blocks;
    let row_bytes = 2 * 7 * 12 * 4;
    assert_eq!([blocks[1].checkpoint.activation_net, blocks[2].checkpoint.activation_net], [row_bytes, 0]);
    assert!(blocks[1].record.activation_net > 3 * row_bytes);
}

#[test]
fn a_parameter_that_is_not_unsharded_is_an_error() {
    let subject = Subject::new(small(), DType::F32);
    let memory = host();
    let mut program = subject.program();
    program.set_batches(&memory, 0, vec![batch(2, 7, 13)]).unwrap();
    program.begin(&memory, 0).unwrap();
    let mut params = subject.whole(&memory).params();
    params.remove(ParamId(0));
    let mut gradients = subject.open_gradients(&memory);
    let first = calls(&subject.spec, Pass::Train)[0];
    let error = first.make(&mut program, &memory, &mut params, &mut gradients).unwrap_err();
    assert!(matches!(error, Error::Parameter { param, .. } if param == "embed.weight"));
}
