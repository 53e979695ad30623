//! Schedule-free AdamW, compared with its authors' code (tests/golden/schedule_free.py) and in whole runs.

use fsdp_core::memory::{Category, HostSlice, HostSliceMut, Memory, Slice, SliceMut};
use fsdp_core::model::ParamId;
use fsdp_core::scalars::GradientFactors;
use fsdp_core::update::{Piece, RuleState, SegmentShard, Stage, StepScalars, Updates};
use fsdp_core::{DType, Queue};
use fsdp_nn::update::{Groups, Rule, ScheduleFree};
use fsdp_nn::{HostBuffer, HostMemory, HostOptions};
use fsdp_train::verify::{VerifyOptions, verify};
use serde_json::Value;

use crate::golden_training::golden;
use crate::muon::{inputs, mlp};
use crate::support::{config, job_of, threads};

const LEN: usize = 60;
const STEPS: u64 = 6;

/// Returns parameters, average, iterate and second moment after some steps.
fn train(rule: &Rule, dtype: DType) -> [Vec<f64>; 4] {
    let memory = HostMemory::new(HostOptions::default()).unwrap();
    let pieces = [Piece { param: ParamId(0), offset: 0, len: LEN, param_offset: 0, row_len: 1 }];
    let buffer = |dtype, values: &[f64]| {
        let mut buffer: HostBuffer = memory.allocate(Category::Workspace, dtype, values.len()).unwrap();
        memory.write_numbers(Queue::Compute, values, SliceMut::whole(&mut buffer)).unwrap();
        buffer
    };
    let tensors = rule.state(&pieces, LEN, dtype);
    assert_eq!(tensors.iter().map(|tensor| tensor.name).collect::<Vec<_>>(), ["z", "exp_avg_sq", "ema"]);
    let mut state = [(); 3].map(|()| buffer(dtype, &[0.0; LEN]));
    let mut params = buffer(dtype, &inputs(0, LEN));
    let factors = buffer(DType::F64, &GradientFactors { scale: 1.0, clip: 1.0, finite: true }.to_array());
    let mut not_finite = memory.allocate(Category::Workspace, DType::I64, 1).unwrap();
    memory.write(Queue::Compute, HostSlice::I64(&[0]), SliceMut::whole(&mut not_finite)).unwrap();
    for step in 1..=STEPS {
        let gradient = buffer(dtype, &inputs(100 * step as u32, LEN));
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
        let scalars = StepScalars { step, lr: 0.02, factors: Slice::whole(&factors) };
        rule.run(&memory, Stage::Update { statistics: &[] }, &mut shard, &scalars).unwrap();
    }
    let read = |buffer: &HostBuffer| {
        let mut values = vec![0.0; LEN];
        memory.read(Queue::Compute, Slice::whole(buffer), HostSliceMut::F64(&mut values)).unwrap();
        values
    };
    let [iterate, square, average] = &state;
    [read(&params), read(average), read(iterate), read(square)]
}

/// Both compute some ten operations per step, with numbers up to 1, but in another order; theirs computes the average from
/// the others, which multiplies errors by up to 1 / 0.4.
#[test]
fn training_steps_match_reference() {
    let golden: Value =
        serde_json::from_str(&std::fs::read_to_string(golden("schedule_free.json")).unwrap()).unwrap();
    let rule = |betas, eps, warmup_steps, decay| {
        Rule::new(ScheduleFree { betas, eps, warmup_steps, groups: Groups::uniform(decay) })
    };
    for (case, rule) in [
        ("plain", rule((0.9, 0.999), 1e-8, 0, 0.0)),
        ("warmed_up", rule((0.9, 0.999), 1e-8, 3, 0.1)),
        ("low_betas", rule((0.4, 0.9), 1e-3, 0, 0.05)),
    ] {
        for (dtype, unit) in [(DType::F64, 2f64.powi(-53)), (DType::F32, 2f64.powi(-24))] {
            let bound = 2.5 * 12.0 * STEPS as f64 * unit;
            for (index, found) in train(&rule, dtype).iter().enumerate() {
                let expected = golden[case][index].as_array().unwrap();
                for (at, (found, expected)) in found.iter().zip(expected).enumerate() {
                    let expected = expected.as_f64().unwrap();
                    let distance = (found - expected).abs();
                    assert!(distance <= bound, "{case} {dtype}, {index}, {at}: {found} for {expected}");
                }
            }
        }
    }
}

fn overrides(more: &'static str) -> [&'static str; 3] {
    let rule =
        "train.optimizer={ name = \"schedule_free_adamw\", lr = 2e-2, warmup_steps = 2, weight_decay = 0.1 }";
    [rule, "fsdp.wrap=[\"MlpLayer\"]", more]
}

#[test]
fn sharded_runs_match_oracle_bitwise() {
    for more in ["fsdp.offload=\"cpu\"", "fsdp.param_dtype=\"bf16\"", "fsdp.mesh={ replicate = 2 }"] {
        let dir = tempfile::tempdir().unwrap();
        let job = job_of(mlp(), config(dir.path(), 17, &overrides(more)));
        let report = verify(&job, &threads(), &VerifyOptions::new(&[2, 4], 4)).unwrap();
        for world in &report.worlds {
            assert!(world.failures.is_empty(), "{more} on {}: {:#?}", world.world, world.failures);
            assert_eq!(world.promise, "equal bits (D2)");
        }
    }
}
