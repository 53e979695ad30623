//! DoRA: sharded equals unsharded training with every policy, magnitudes begin as the lengths of the base's rows, and new
//! adapters change nothing. (Golden files, exports and resumption are in `lora.rs`, for both kinds of adapters.)

use fsdp_core::model::ParamId;
use fsdp_core::update::Piece;
use fsdp_nn::hf::HfModel;
use fsdp_nn::model::{Adapted, Architecture};
use fsdp_train::Job;
use fsdp_train::train::Resume;
use fsdp_train::verify::{VerifyOptions, verify};
use fsdp_xla::ProgramOptions;
use serde_json::Value;

use crate::expert_axis;
use crate::lora::{golden, job, pretrained, run};
use crate::peft::golden_config;
use crate::qlora::{BLOCKS, GPT2_BLOCKS};
use crate::support::{GPT2, LLAMA, config, threads};
use crate::xla;

const DORA: &str = "adapter.dora=true";
const ALL: [&str; 3] = [DORA, "adapter.rank=2", "adapter.alpha=6"];
const SOME: [&str; 4] = [
    DORA,
    "adapter.rank=3",
    "adapter.target_modules=['q_proj', 'v_proj', 'up_proj', 'down_proj']",
    "adapter.modules_to_save=['model.norm', 'layers.1.mlp.gate_proj']",
];
const DROPOUT: &str = "adapter.dropout=0.2";

fn check(model: &str, vocab: u32, overrides: &[&str]) {
    let dir = tempfile::tempdir().unwrap();
    let job = job(model, config(dir.path(), vocab, overrides));
    let report = verify(&job, &threads(), &VerifyOptions::new(&[2, 4], 2)).unwrap();
    assert!(report.holds(), "{overrides:?}: {report:#?}");
    for world in &report.worlds {
        assert_eq!(world.promise, "equal bits (D2)", "{overrides:?}");
        assert!(world.memory.iter().all(|line| line.predicted_bytes == line.counted_bytes), "{overrides:?}");
    }
}

#[test]
fn sharded_magnitudes_match_oracle_and_predicted_memory() {
    let wrap = "fsdp.wrap=[\"LlamaDecoderLayer\"]";
    let llama = |adapter: &[&str], others: &[&str]| check(LLAMA, 61, &[adapter, &[wrap], others].concat());
    llama(&ALL, &[]);
    llama(&ALL, &[DROPOUT]);
    llama(&SOME, &["fsdp.mesh={ replicate = 2 }"]);
    llama(&SOME, &[DROPOUT, "fsdp.activation_checkpointing=\"full\""]);
    llama(&ALL, &["fsdp.activation_checkpointing=\"selective\""]);
    llama(&ALL, &[DROPOUT, "fsdp.activation_checkpointing=\"selective\""]);
    llama(&SOME, &["fsdp.param_dtype=\"bf16\"", "fsdp.reshard_after_forward=2"]);
    llama(&ALL, &[DROPOUT, "fsdp.param_dtype=\"bf16\"", "fsdp.offload=\"cpu\""]);
    llama(&ALL, &["data.seq_len=8", "fsdp.mesh={ context = 2 }"]);
    llama(&SOME, &["data.seq_len=8", "fsdp.chunks={ context = 4 }", "fsdp.mesh={ context = 2 }"]);
    llama(&ALL, &["train.optimizer={ name = \"muon\", lr = 2e-2, adamw_lr = 1e-2 }"]);
}

#[test]
fn magnitudes_of_other_models_match_oracle_and_predicted_memory() {
    let gpt2 = "fsdp.wrap=[\"GPT2Block\"]";
    check(GPT2, 53, &[&ALL[..], &[gpt2, DROPOUT]].concat());
    check(GPT2, 53, &[&ALL[..], &[gpt2, "fsdp.accumulation=\"unsharded\""]].concat());
    let latent = expert_axis::model("deepseek_v3");
    check(&latent, 61, &[&ALL[..], &["fsdp.min_num_params=500", "fsdp.mesh={ expert = 2 }"]].concat());
    let quantized = [&ALL[..], &["adapter.quantize=\"nf4\"", "fsdp.wrap=[\"LlamaDecoderLayer\"]"]].concat();
    check(BLOCKS, 61, &quantized);
    check(BLOCKS, 61, &[&quantized[..], &[DROPOUT, "fsdp.activation_checkpointing=\"full\""]].concat());
    check(BLOCKS, 61, &[&quantized[..], &["fsdp.param_dtype=\"bf16\""]].concat());
    check(GPT2_BLOCKS, 61, &[&ALL[..], &[gpt2, "adapter.quantize=\"nf4\""]].concat());
}

#[test]
fn xla_magnitudes_match_oracle() {
    let Some(plugin) = xla::plugin() else { return };
    let others = [xla::LAYERS, DROPOUT, "fsdp.activation_checkpointing=\"full\"", "run.device=\"xla\""];
    let dir = tempfile::tempdir().unwrap();
    let job = job(LLAMA, config(dir.path(), 61, &[&SOME[..], &others].concat()));
    xla::check_job(&plugin, &job, &[1, 2, 4], ProgramOptions::default());
}

/// The initial values of a part of a parameter.
fn initial(job: &Job<Adapted<HfModel>>, param: ParamId, first: usize, len: usize) -> Vec<f64> {
    let row_len = job.plan.spec.param(param).row_len().unwrap_or(1);
    let piece = Piece { param, offset: 0, len, param_offset: first, row_len };
    let mut values = vec![0.0; len];
    job.init.fill(&job.plan.spec, &piece, &mut values).unwrap();
    values
}

#[test]
fn magnitudes_begin_as_the_lengths_of_rows_whoever_reads_them() {
    let dir = tempfile::tempdir().unwrap();
    let jobs = [
        job(LLAMA, config(dir.path(), 61, &ALL)),
        job(GPT2, config(dir.path(), 53, &ALL)),
        pretrained(&golden("gpt2"), {
            let mut config = golden_config(("gpt2", "dora"), dir.path(), 1, "dora = true\nrank = 2");
            config.adapter.as_mut().unwrap().path = None;
            config
        })
        .unwrap(),
    ];
    for job in jobs {
        let description = job.architecture.description();
        for (_, linear) in &description.linears {
            let magnitude = description.adapters[&linear.weight].magnitude.expect("it is DoRA");
            let (inputs, outputs) = (linear.inputs, linear.outputs);
            let weight = initial(&job, linear.weight, 0, inputs * outputs);
            let is_transposed = job.plan.spec.param(linear.weight).shape == [inputs, outputs]
                && inputs != outputs
                || job.plan.spec.params[0].fqn.starts_with("transformer");
            let entry = |output: usize, input: usize| match is_transposed {
                true => weight[input * outputs + output],
                false => weight[output * inputs + input],
            };
            let length = |output| (0..inputs).map(|input| entry(output, input).powi(2)).sum::<f64>().sqrt();
            let expected: Vec<f64> = (0..outputs).map(length).collect();
            assert_eq!(initial(&job, magnitude, 0, outputs), expected);
            for (first, len) in [(0, 1), (1, outputs - 1), (outputs / 2, 3)] {
                assert_eq!(initial(&job, magnitude, first, len), expected[first..first + len]);
            }
        }
    }
}

/// The losses of a run's steps.
fn losses(model: &str, overrides: &[&str]) -> Vec<f64> {
    let dir = tempfile::tempdir().unwrap();
    run(&job(model, config(dir.path(), 61, overrides)), Resume::Fresh).unwrap();
    let lines = std::fs::read_to_string(dir.path().join("out/metrics.jsonl")).unwrap();
    let lines = lines.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    lines.filter_map(|line| line["loss"].as_f64()).collect()
}

#[test]
fn new_adapters_change_nothing_and_learn_otherwise_than_without_magnitudes() {
    let quantized = &["adapter.quantize=\"nf4\""];
    // Weights of GPT-2 are stored inputs x outputs, and packed by outputs.
    let gpt2 = GPT2_BLOCKS.replace("pdrop\": 0.1", "pdrop\": 0.0");
    let cases = [
        (BLOCKS, &[][..]),
        (BLOCKS, quantized),
        (BLOCKS, &["fsdp.param_dtype=\"bf16\""]),
        (&gpt2, &[]),
        (&gpt2, quantized),
    ];
    for (model, others) in cases {
        let with = |first: &[&str]| losses(model, &[first, &["adapter.rank=2"], others].concat());
        let (lora, dora) = (with(&[]), with(&[DORA]));
        let off = |step: usize| (lora[step] - dora[step]).abs() / lora[step];
        // In bf16, one rounding of every output more.
        let tolerance = if others.concat().contains("bf16") { 1e-3 } else { 1e-6 };
        assert!(off(0) < tolerance, "{others:?}: {} not {}", dora[0], lora[0]);
        assert!(off(3) > 1e-5, "{others:?}");
    }
}
