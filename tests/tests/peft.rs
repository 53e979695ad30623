//! Adapters compared with PEFT: losses, norms, gradients and three steps on the golden models, some with a base in NF4 by
//! bitsandbytes (tests/golden/*/lora and dora).

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use fsdp_ckpt::model_files::ModelReader;
use fsdp_config::Resolved;
use fsdp_core::model::ParamId;
use fsdp_nn::model::Architecture;
use fsdp_nn::{HostMemory, HostOptions};
use fsdp_train::Oracle;
use fsdp_train::train::Resume;
use serde_json::Value;

use crate::expert_adapters::part_of_stack;
use crate::lora::{difference, golden, pretrained, run, tensors};

/// Tolerance of tensors, as a fraction of their largest value.
pub(crate) const TENSORS: f64 = 1e-5;
/// Relative tolerance of losses and gradient norms.
const SCALARS: f64 = 1e-6;

/// Configures three steps from a PEFT adapter, with one golden sequence per micro-batch.
pub(crate) fn golden_config((case, kind): (&str, &str), dir: &Path, world: usize, table: &str) -> Resolved {
    let expected = ModelReader::open(golden(case).join("expected.safetensors")).unwrap();
    let mut bytes = vec![0; 4 * 13 * 8];
    expected.read_rows("ids", 0..4, &mut bytes).unwrap();
    let ids: Vec<u8> =
        bytes.as_chunks().0.iter().flat_map(|&id| (i64::from_le_bytes(id) as u16).to_le_bytes()).collect();
    for (row, ids) in ids.chunks(13 * 2).enumerate() {
        std::fs::write(dir.join(format!("{row}.bin")), ids).unwrap();
    }
    let class = match case {
        "gpt2" => "GPT2Block",
        "families/qwen3_moe" => "Qwen3MoeDecoderLayer",
        "families/gpt_oss" => "GptOssDecoderLayer",
        _ => "LlamaDecoderLayer",
    };
    let (path, adapter) = (dir.display(), golden(case).join(kind));
    let text = format!(
        r#"
        model = {{ path = "golden", init = "pretrained" }}
        run = {{ ranks = {world}, out_dir = "{path}/out" }}
        fsdp = {{ wrap = ["{class}"] }}
        [adapter]
        path = "{}"
        {table}
        [data]
        train = ["{path}"]
        format = "tokens-u16"
        packing = "documents"
        seq_len = 12
        shuffle = false
        [train]
        steps = 3
        micro_batch_size = 1
        global_batch_size = 4
        grad_clip = 1.0
        optimizer = {{ name = "adamw", lr = 1e-2, betas = [0.9, 0.95], eps = 1e-3, weight_decay = 0.1 }}
        "#,
        adapter.display()
    );
    Resolved::parse(&text, "golden", &[]).unwrap_or_else(|error| panic!("{error}")).config
}

pub(crate) const LLAMA_LORA: &str = r#"rank = 3
    alpha = 5
    target_modules = ["q_proj", "v_proj", "gate_proj", "down_proj"]
    modules_to_save = ["lm_head"]"#;
const GPT2_LORA: &str = "rank = 2\nalpha = 3\nrslora = true";
pub(crate) const LLAMA_DORA: &str = r#"dora = true
    rank = 3
    alpha = 5
    target_modules = ["q_proj", "v_proj", "gate_proj", "down_proj"]
    modules_to_save = ["lm_head"]"#;
const GPT2_DORA: &str = "dora = true\nrank = 2\nalpha = 3\nrslora = true";
pub(crate) const GOLDEN: [((&str, &str), &str); 4] = [
    (("llama-gqa", "lora"), LLAMA_LORA),
    (("gpt2", "lora"), GPT2_LORA),
    (("llama-gqa", "dora"), LLAMA_DORA),
    (("gpt2", "dora"), GPT2_DORA),
];
/// Adapters of experts, as PEFT has those of parameters.
pub(crate) const EXPERTS: [((&str, &str), &str); 2] = [
    (
        ("families/qwen3_moe", "lora"),
        r#"rank = 3
        alpha = 5
        target_modules = ["q_proj", "v_proj"]
        target_parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]"#,
    ),
    (
        ("families/gpt_oss", "lora"),
        r#"rank = 2
        alpha = 3
        rslora = true
        target_modules = []
        target_parameters = ["experts.gate_up_proj"]"#,
    ),
];
/// The base is in NF4, as bitsandbytes saves it.
pub(crate) const LLAMA_NF4: &str = r#"rank = 3
    alpha = 5
    target_modules = ["q_proj", "v_proj", "gate_proj", "down_proj"]
    quantize = "nf4""#;
const QUANTIZED: ((&str, &str), &str) = (("llama-nf4", "lora"), LLAMA_NF4);

#[test]
fn losses_norms_and_trained_adapters_match_peft() {
    for (of, table) in GOLDEN.into_iter().chain(EXPERTS).chain([QUANTIZED]) {
        let (case, kind) = of;
        let expected = tensors(&golden(case).join(kind).join("expected.safetensors"));
        for world in [1, 2, 4] {
            let dir = tempfile::tempdir().unwrap();
            let job = pretrained(&golden(case), golden_config(of, dir.path(), world, table)).unwrap();
            let summary = run(&job, Resume::Fresh).unwrap_or_else(|error| panic!("{error}"));
            assert_eq!(summary.model, dir.path().join("out/adapter"));
            let lines = std::fs::read_to_string(dir.path().join("out/metrics.jsonl")).unwrap();
            let steps: Vec<Value> =
                lines.lines().skip(1).map(|line| serde_json::from_str(line).unwrap()).collect();
            for (key, name) in [("loss", "losses"), ("grad_norm", "grad_norms")] {
                for (step, expected) in steps.iter().zip(&expected[name]) {
                    let off = (step[key].as_f64().unwrap() - expected).abs() / expected;
                    assert!(off <= SCALARS, "{of:?}, world {world}: {key} is off by {off:e}");
                }
            }
            let trained = tensors(&dir.path().join("out/adapter/adapter_model.safetensors"));
            let names = expected.keys().filter_map(|name| name.strip_prefix("adamw3."));
            assert_eq!(trained.keys().collect::<Vec<_>>(), names.collect::<Vec<_>>(), "{of:?}");
            for (name, values) in &trained {
                let off = difference(values, &expected[&format!("adamw3.{name}")]);
                assert!(off <= TENSORS, "{of:?}, world {world}: {name} is off by {off:e}");
            }
        }
    }
}

#[test]
fn adapter_and_saved_module_gradients_match_peft() {
    for (of, table) in GOLDEN.into_iter().chain(EXPERTS).chain([QUANTIZED]) {
        let (case, kind) = of;
        let expected = tensors(&golden(case).join(kind).join("expected.safetensors"));
        let dir = tempfile::tempdir().unwrap();
        let job = pretrained(&golden(case), golden_config(of, dir.path(), 1, table)).unwrap();
        let memory = Arc::new(HostMemory::new(HostOptions::default()).unwrap());
        let mut oracle = Oracle::new(&job, memory).unwrap();
        let targets = oracle.step(0, false).unwrap().targets as f64;
        let mut compared = BTreeSet::new();
        let experts = job.architecture.description().mixtures.values().next();
        for (id, param) in job.plan.spec.params.iter().enumerate() {
            let sum = oracle.gradient(ParamId(id)).unwrap();
            assert_eq!(sum.is_some(), param.trainable, "{}", param.fqn);
            let Some(sum) = sum else { continue };
            let mean: Vec<f64> = sum.iter().map(|value| value / targets).collect();
            let gradient = |name: &str| expected[&format!("grad.{name}")].clone();
            let (name, expected) = match param.expert {
                Some(_) => part_of_stack(param, *experts.unwrap(), case == "families/qwen3_moe", gradient),
                None => {
                    let name = format!("base_model.model.{}", param.fqn);
                    (name.clone(), gradient(&name))
                }
            };
            let off = difference(&mean, &expected);
            assert!(off <= TENSORS, "{of:?}: {} is off by {off:e}", param.fqn);
            compared.insert(name);
        }
        let gradients = expected.keys().filter_map(|name| name.strip_prefix("grad."));
        assert!(compared.iter().map(String::as_str).eq(gradients), "{of:?}: {compared:?}");
    }
}
