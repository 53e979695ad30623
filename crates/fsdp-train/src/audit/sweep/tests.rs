use std::sync::Arc;

use fsdp_comm::launch::Launcher;
use fsdp_core::model::ParamSpec;
use fsdp_nn::HostOptions;
use fsdp_nn::cuts::Cuts;
use fsdp_nn::hf::HfConfig;
use fsdp_sim::{ThreadOptions, Threads};
use proptest::prelude::*;

use super::*;
use crate::audit::moments::Moments;
use crate::audit::ranks::Ranks;
use crate::audit::state::{Held, State, WEIGHT};

const VOCAB: usize = 11;

fn config(is_tied: bool) -> HfConfig {
    let text = format!(
        r#"{{"model_type": "llama", "vocab_size": {VOCAB}, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32, "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0, "tie_word_embeddings": {is_tied}}}"#
    );
    HfConfig::parse(&text).unwrap()
}

/// Three micro-batches, of other lengths.
fn batches() -> Vec<MicroBatch> {
    let batch = |seq: usize, rows: usize| {
        let ids: Vec<u32> = (0..seq * rows).map(|at| ((at * at + seq) % VOCAB) as u32).collect();
        let targets =
            ids.iter().enumerate().map(|(at, id)| (at % 3 != 2).then_some((*id + 1) % VOCAB as u32));
        let is_text = vec![true; ids.len()];
        MicroBatch { targets: targets.collect(), ids, seq, positions: None, runs_on: false, is_text }
    };
    vec![batch(5, 2), batch(3, 1), batch(7, 2)]
}

/// The weights of a parameter.
fn values(index: usize, len: usize) -> Vec<f64> {
    (0..len).map(|at| if len == 8 { 1.0 } else { 0.3 * ((index * 31 + at) as f64).sin() }).collect()
}

/// The slow and obvious way: the gradient of one micro-batch, with the whole model in memory and nothing recomputed.
fn whole(config: &HfConfig, batch: &MicroBatch) -> Vec<Vec<f32>> {
    let architecture = config.build().unwrap();
    let spec = architecture.description().spec.clone();
    let memory = HostMemory::new(HostOptions::default()).unwrap();
    let options =
        ProgramOptions { dtype: DType::F64, seed: 0, terms: LossTerms::default(), cuts: Cuts::WHOLE };
    let mut program = ModelProgram::new(architecture, spec.clone(), options);
    let (batch, facts) = batch.to_batch(Documents::Given, false);
    program.set_row_facts(facts);
    program.set_batches(&memory, 0, vec![batch]).unwrap();
    let pass = Pass::Train(Checkpointing::None);
    program.begin(&memory, Round(0), pass).unwrap();
    let (mut params, mut gradients) = (Params::default(), Gradients::default());
    let buffer = |category, len| memory.allocate(category, DType::F64, len).unwrap();
    for (index, param) in spec.params.iter().enumerate() {
        let (id, len) = (ParamId(index), param.len());
        let mut weights = buffer(Category::Unsharded, len);
        let values = values(index, len);
        memory.write(Queue::Compute, HostSlice::F64(&values), SliceMut::whole(&mut weights)).unwrap();
        params.insert(id, View { buffer: weights, offset: 0, len });
        gradients.open(
            UnitId(index),
            vec![buffer(Category::GradientSlot, len)],
            [(id, SegmentId(0), 0, len)],
        );
    }
    for call in calls(&spec, pass) {
        make(&mut program, &memory, call, &mut params, &mut gradients).unwrap();
    }
    let read = |(index, param): (usize, &ParamSpec)| {
        let buffers = gradients.close(&memory, UnitId(index)).unwrap().unwrap();
        let mut values = vec![0.0; param.len()];
        memory.read(Queue::Compute, Slice::whole(&buffers[0]), HostSliceMut::F32(&mut values)).unwrap();
        values
    };
    spec.params.iter().enumerate().map(read).collect()
}

/// The gradient of a step, computed by some ranks. Returns that of each rank.
fn gradients(
    config: &HfConfig,
    weights: &[f64],
    (tied, dtype, world): (TiedShare, DType, usize),
) -> Result<Vec<Vec<Vec<f32>>>, TrainError> {
    let architecture = config.build().unwrap();
    let spec = &architecture.description().spec;
    let batches: Vec<(MicroBatch, f64)> = batches().into_iter().zip(weights.iter().copied()).collect();
    let what = Computation {
        architecture: &architecture,
        terms: LossTerms::default(),
        dtype,
        param_dtype: dtype,
        batches: &batches,
        documents: Documents::Given,
        hides_padding: false,
        seed: 0,
        tied,
    };
    let state = || {
        let params = spec.params.iter().enumerate();
        let held: Held =
            params.map(|(index, param)| ((ParamId(index), WEIGHT), values(index, param.len()))).collect();
        State::held(spec, held)
    };
    let stop = AtomicBool::new(false);
    let body = |seat: fsdp_comm::launch::Seat<HostMemory>| {
        let memory = HostMemory::new(HostOptions::default())?;
        let moments = Moments { first: None, decay: 1.0, gain: 1.0, is_coupled: false };
        let ones = vec![1.0; spec.params.len()];
        let ranks = Ranks::new(seat);
        let mut around = Around::open([state(), state()], ranks, moments, spec, [ones.clone(), ones], None)?;
        let mut found = vec![Vec::new(); spec.params.len()];
        let mut visit = |_: &mut Around<'_>, id: ParamId, _: Range<usize>, values: &[f32]| {
            found[id.0].extend_from_slice(values);
            Ok(())
        };
        Sweep { memory: &memory, stop: &stop, around: &mut around, is_after: false }
            .gradient(&what, &mut visit)?;
        Ok::<_, TrainError>(found)
    };
    let launcher =
        Threads::new(ThreadOptions::default(), |_, _| Ok(Arc::new(HostMemory::new(HostOptions::default())?)));
    Ok(launcher.launch(world, &body)?)
}

/// Asserts that a gradient is a sum of others, and that it has every element of every parameter.
#[track_caller]
fn assert_sum(config: &HfConfig, sum: &[Vec<f32>], parts: &[(f32, &Vec<Vec<f32>>)]) {
    let spec = config.build().unwrap().description().spec.clone();
    for (index, param) in spec.params.iter().enumerate() {
        assert_eq!(sum[index].len(), param.len(), "{}", param.fqn);
        let norm = sum[index].iter().map(|value| value * value).sum::<f32>().sqrt();
        assert!(norm > 1e-6, "{}: {norm}", param.fqn);
        for (at, value) in sum[index].iter().enumerate() {
            let expected: f32 =
                parts.iter().map(|(weight, part)| weight * part[index].get(at).unwrap_or(&0.0)).sum();
            assert!((value - expected).abs() <= 1e-5 * norm, "{} {at}: {value} {expected}", param.fqn);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn gradient_is_the_weighted_sum_of_micro_batches_on_any_ranks(
        weights in [-2.0f64..2.0, 0.5..2.0, 0.0..1.0],
        is_left_out: bool,
        is_tied: bool,
        // The fourth rank has no micro-batch.
        world in 1usize..=4,
    ) {
        let config = config(is_tied);
        let weights = [weights[0], weights[1], if is_left_out { 0.0 } else { weights[2] }];
        let all = gradients(&config, &weights, (TiedShare::Both, DType::F64, world)).unwrap();
        prop_assert!(all.iter().all(|of_rank| *of_rank == all[0]), "{} ranks", world);
        let single: Vec<Vec<Vec<f32>>> = batches().iter().map(|batch| whole(&config, batch)).collect();
        let parts: Vec<(f32, &Vec<Vec<f32>>)> =
            weights.iter().map(|weight| *weight as f32).zip(&single).collect();
        assert_sum(&config, &all[0], &parts);
    }
}

#[test]
fn shares_of_a_tied_weight_add_up_to_its_gradient() {
    let config = config(true);
    let of = |share| gradients(&config, &[1.0; 3], (share, DType::F32, 2)).unwrap().remove(0);
    let (both, mut head, embedding) = (of(TiedShare::Both), of(TiedShare::Head), of(TiedShare::Embedding));
    assert!(head[0] != both[0] && embedding[0] != both[0]);
    // All other parameters have their whole gradient in either.
    assert_eq!(head[1..], both[1..]);
    assert_eq!(embedding[1..], both[1..]);
    head[1..].iter_mut().flatten().for_each(|value| *value = 0.0);
    assert_sum(&config, &both, &[(1.0, &head), (1.0, &embedding)]);
}

#[test]
fn each_gradient_is_finished_in_one_stage() {
    for is_tied in [false, true] {
        let spec = config(is_tied).build().unwrap().description().spec.clone();
        let calls = calls(&spec, Pass::Train(Checkpointing::Full));
        let stages = stages(&spec, &calls);
        assert_eq!(stages.iter().map(|stage| stage.calls.len()).sum::<usize>(), calls.len());
        let times = |id| stages.iter().filter(|stage| stage.trained.contains(&ParamId(id))).count();
        let twice: Vec<usize> = (0..spec.params.len()).filter(|&id| times(id) != 1).collect();
        assert_eq!(twice, tied(&spec).iter().map(|id| id.0).collect::<Vec<_>>());
        assert_eq!(twice.len(), usize::from(is_tied));
    }
}
