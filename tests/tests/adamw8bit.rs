//! AdamW with 8-bit moments, compared with bitsandbytes and torchao (tests/golden/adamw_8bit.py) and in whole runs.

use fsdp_core::memory::{Buffer, Category, HostSlice, Memory, Slice, SliceMut};
use fsdp_core::model::{BlockSpec, ModelSpec, ModuleSpec, ParamId, ParamSpec};
use fsdp_core::scalars::GradientFactors;
use fsdp_core::update::{Piece, RuleState, SegmentShard, Stage, StepScalars, Updates};
use fsdp_core::{DType, Queue, Tallies};
use fsdp_nn::model::{Mlp, MlpConfig};
use fsdp_nn::quantized::CodeBook;
use fsdp_nn::update::{AdamW, AdamW8bit, Groups, Rule};
use fsdp_nn::{HostBuffer, HostMemory, HostOptions};
use fsdp_train::verify::{VerifyOptions, verify};
use serde_json::Value;

use crate::golden_training::golden;
use crate::support::{config, job_of, threads};

const ROWS: usize = 20;
const COLS: usize = 256;
const STEPS: u64 = 5;

/// Returns the same inputs as the script.
fn inputs(key: u32) -> Vec<f64> {
    let number = |i: u32| {
        let mut bits = (i + 1).wrapping_mul(2_654_435_761).wrapping_add(key * 40_503);
        bits ^= bits >> 15;
        bits = bits.wrapping_mul(2_246_822_519);
        bits ^= bits >> 13;
        let sign = if bits & 1 == 1 { 1.0 } else { -1.0 };
        sign * (1.0 + f64::from((bits >> 8) % 65_536) / 65_536.0) / f64::from(2 << (bits % 5))
    };
    (0..(ROWS * COLS) as u32).map(number).collect()
}

fn spec() -> ModelSpec {
    let params = vec![ParamSpec {
        fqn: "p".into(),
        aliases: Vec::new(),
        shape: vec![ROWS, COLS],
        trainable: true,
        expert: None,
        quantized: None,
        keep_f32: false,
    }];
    let ids = vec![ParamId(0)];
    let root = ModuleSpec { fqn: String::new(), class: "Root".into(), parent: None, params: ids.clone() };
    let blocks = vec![BlockSpec { name: "all".into(), params: ids, layer: None }];
    ModelSpec { params, modules: vec![root], blocks, tallies: Tallies::default() }
}

/// Returns the parameters and the state after [`STEPS`] steps.
fn train() -> Vec<Vec<f64>> {
    let memory = HostMemory::new(HostOptions::default()).unwrap();
    let adamw = AdamW { betas: (0.9, 0.99), eps: 1e-8, groups: Groups::uniform(0.1) };
    let rule = Rule::new(AdamW8bit::new(adamw, &spec()));
    let len = ROWS * COLS;
    let piece = [Piece { param: ParamId(0), offset: 0, len, param_offset: 0, row_len: COLS }];
    let zeros = |dtype, len| {
        let mut buffer: HostBuffer = memory.allocate(Category::Workspace, dtype, len).unwrap();
        memory.zero(Queue::Compute, SliceMut::whole(&mut buffer)).unwrap();
        buffer
    };
    let [mut params, mut gradient] = [0; 2].map(|_| zeros(DType::F32, len));
    let tensors = rule.state(&piece, len, DType::F32);
    let mut state: Vec<_> = tensors.iter().map(|tensor| zeros(tensor.dtype, tensor.len)).collect();
    let (mut factors, mut not_finite) = (zeros(DType::F64, GradientFactors::LEN), zeros(DType::I64, 1));
    let write = |buffer: &mut HostBuffer, values: &[f64]| {
        memory.write(Queue::Compute, HostSlice::F64(values), SliceMut::whole(buffer)).unwrap();
    };
    write(&mut factors, &GradientFactors { scale: 1.0, clip: 1.0, finite: true }.to_array());
    write(&mut params, &inputs(0));
    for step in 1..=STEPS {
        write(&mut gradient, &inputs(step as u32));
        let mut shard = SegmentShard {
            params: &mut params,
            low: None,
            gradient: &gradient,
            state: &mut state,
            pieces: &piece,
            segment: None,
            whole: None,
            not_finite: &mut not_finite,
        };
        let scalars = StepScalars { step, lr: 0.01, factors: Slice::whole(&factors) };
        rule.run(&memory, Stage::Update { statistics: &[] }, &mut shard, &scalars).unwrap();
    }
    let read = |buffer: &HostBuffer| {
        let mut values = vec![0.0; buffer.len()];
        memory.read_numbers(Queue::Compute, Slice::whole(buffer), &mut values).unwrap();
        values
    };
    std::iter::once(&params).chain(&state).map(read).collect()
}

fn numbers(golden: &Value, key: &str) -> Vec<f64> {
    golden[key].as_array().unwrap().iter().map(|number| number.as_f64().unwrap()).collect()
}

fn codes(golden: &Value, key: &str) -> Vec<f64> {
    let digits = golden[key].as_str().unwrap().as_bytes().chunks(2);
    digits.map(|two| f64::from(u8::from_str_radix(std::str::from_utf8(two).unwrap(), 16).unwrap())).collect()
}

/// Returns the largest difference, relative to the expected value or to 1 if that is larger.
fn apart(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs() / b.abs().max(1.0)).fold(0.0, f64::max)
}

fn read_golden() -> Value {
    serde_json::from_str(&std::fs::read_to_string(golden("adamw_8bit.json")).unwrap()).unwrap()
}

#[test]
fn code_books_match_bitsandbytes() {
    let golden = read_golden();
    for (book, key) in [(CodeBook::signed(), "signed"), (CodeBook::unsigned(), "unsigned")] {
        assert_eq!(book.values.map(f64::from).to_vec(), numbers(&golden, key));
    }
}

/// torchao rounds AdamW's arithmetic at other places, which changes results by units in the last place. A value that
/// close to the midpoint of two codes could get the other code; none of these values is.
#[test]
fn training_steps_match_torchao() {
    let golden = read_golden();
    let found = train();
    let [param, _, _, mean_codes, square_codes, mean_largest, square_largest] = &found[..] else {
        panic!("parameters and six tensors of state");
    };
    assert_eq!(mean_codes, &codes(&golden, "exp_avg_codes"));
    assert_eq!(square_codes, &codes(&golden, "exp_avg_sq_codes"));
    assert!(apart(mean_largest, &numbers(&golden, "exp_avg_absmax")) < 1e-6);
    assert!(apart(square_largest, &numbers(&golden, "exp_avg_sq_absmax")) < 1e-6);
    let seventh: Vec<f64> = param.iter().step_by(7).copied().collect();
    assert!(apart(&seventh, &numbers(&golden, "param")) < 1e-6);
    // A different code changes a moment by less than a seventh of its magnitude, in few elements.
    assert!(apart(&seventh, &numbers(&golden, "bitsandbytes")) < 2e-3);
}

/// Layers large enough for 8-bit moments, with rows of a part of a block, of a block and a part, and of several.
fn mlp() -> Mlp {
    let sizes = MlpConfig { vocab: 17, widths: vec![64, 72, 300, 20], bias: true, tied: false, std: 0.2 };
    Mlp::new(&sizes).unwrap()
}

#[test]
fn optimizer_state_bytes_match_documented_formula() {
    let (vocab, width) = (32, 300);
    let sizes = MlpConfig { vocab, widths: vec![width; 3], bias: false, tied: false, std: 0.2 };
    let dir = tempfile::tempdir().unwrap();
    let job = job_of(Mlp::new(&sizes).unwrap(), config(dir.path(), vocab as u32, &[RULE]));
    let report = verify(&job, &threads(), &VerifyOptions::new(&[1, 2, 4], 2)).unwrap();
    let rows = 2 * vocab + 2 * width;
    for world in &report.worlds {
        let mut lines = world.memory.iter().filter(|line| line.place == "device");
        let line = lines.find(|line| line.category == "optimizer state").unwrap();
        let bytes = 2 * rows * (width + 4 * width.div_ceil(256)) / world.world;
        assert_eq!((line.predicted_bytes, line.counted_bytes), (bytes, bytes), "on {} ranks", world.world);
    }
}

const RULE: &str = "train.optimizer={ name = \"adamw8bit\", lr = 1e-2, weight_decay = 0.1 }";

#[test]
fn sharded_runs_match_oracle_bitwise() {
    let policies: [&[&str]; 5] = [
        &[],
        &["train.global_batch_size=8", "fsdp.accumulation=\"unsharded\"", "train.grad_clip=0.05"],
        &["fsdp.mesh={ replicate = 2 }", "train.ema_decay=0.9"],
        &["fsdp.offload=\"cpu\"", "fsdp.frozen=[\"layers.0\"]"],
        &["fsdp.param_dtype=\"bf16\"", "fsdp.reduce_dtype=\"f32\""],
    ];
    for policy in policies {
        let dir = tempfile::tempdir().unwrap();
        let overrides = [&[RULE, "fsdp.wrap=[\"MlpLayer\"]"], policy].concat();
        let worlds: &[usize] =
            if policy.iter().any(|one| one.contains("mesh")) { &[2, 4] } else { &[1, 2, 4] };
        let job = job_of(mlp(), config(dir.path(), 17, &overrides));
        let report = verify(&job, &threads(), &VerifyOptions::new(worlds, 3)).unwrap();
        assert_eq!(report.worlds.len(), worlds.len());
        for world in &report.worlds {
            assert!(world.failures.is_empty(), "{policy:?} on {}: {:#?}", world.world, world.failures);
            assert_eq!(world.promise, "equal bits (D2)");
        }
    }
}
