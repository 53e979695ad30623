//! Adapters of experts: sharded equals unsharded training, on the expert axis too, with memory as predicted; exports stacked as in PEFT;
//! merged models. (Golden files are in `peft.rs`.)

use std::collections::BTreeMap;

use fsdp_config::{Ranks, Resolved};
use fsdp_core::model::ParamSpec;
use fsdp_core::{Axis, Mesh};
use fsdp_train::train::Resume;
use fsdp_train::verify::{VerifyOptions, verify};

use crate::expert_axis::model;
use crate::lora::{adapted, difference, golden, job, pretrained, run, tensors};
use crate::peft::{EXPERTS, golden_config};
use crate::qlora::{GPT_OSS, MIXTURE};
use crate::support::{LLAMA, config, threads};

const BOTH: &str = "adapter.target_parameters=['experts.gate_up_proj', 'experts.down_proj']";
const DOWN: &str = "adapter.target_parameters=['mlp.experts.down_proj']";
const UNITS: &str = "fsdp.min_num_params=500";

/// The part of PEFT's stack that a matrix of an expert is, and the name of the stack: `einsum("o r e, e r i -> e o i")` of `B` as
/// `outputs x rank x experts` and `A` as `experts x rank x inputs`.
pub(crate) fn part_of_stack(
    param: &ParamSpec,
    experts: usize,
    is_inner: bool,
    stacks: impl Fn(&str) -> Vec<f64>,
) -> (String, Vec<f64>) {
    let (module, rest) = param.fqn.split_once(".experts.").unwrap();
    let [expert, map, half] = rest.splitn(3, '.').collect::<Vec<_>>().try_into().unwrap();
    let expert: usize = expert.parse().unwrap();
    let inner = if is_inner && map != "down_proj" { ".base_layer" } else { "" };
    let name = format!("base_model.model.{module}.experts{inner}.{half}");
    let (stack, [rows, columns]) = (stacks(&name), [param.shape[0], param.shape[1]]);
    let begin = if map == "up_proj" { rows } else { 0 };
    let of_stack = |row: usize, column: usize| match half {
        "lora_A.weight" => stack[(expert * rows + row) * columns + column],
        _ => stack[((begin + row) * columns + column) * experts + expert],
    };
    let all = (0..rows).flat_map(|row| (0..columns).map(move |column| (row, column)));
    (name, all.map(|(row, column)| of_stack(row, column)).collect())
}

fn check(model: &str, worlds: Option<Vec<Ranks>>, overrides: &[&str]) {
    let dir = tempfile::tempdir().unwrap();
    let job = job(model, config(dir.path(), 61, &[&["adapter.rank=2"], overrides].concat()));
    let options = VerifyOptions::new(&[1, 2, 4], 2);
    let options = match worlds {
        Some(worlds) => VerifyOptions { worlds, ..options },
        None => options,
    };
    let report = verify(&job, &threads(), &options).unwrap_or_else(|error| panic!("{overrides:?}: {error}"));
    assert!(report.holds(), "{overrides:?}: {report:#?}");
    for world in &report.worlds {
        assert_eq!(world.promise, "equal bits (D2)", "{overrides:?}");
        assert_eq!(world.losses, report.worlds[0].losses, "{overrides:?}");
        assert!(world.memory.iter().all(|line| line.predicted_bytes == line.counted_bytes), "{overrides:?}");
    }
}

#[test]
fn sharded_adapters_of_experts_match_oracle_and_predicted_memory() {
    let full = "fsdp.activation_checkpointing=\"full\"";
    let selective = "fsdp.activation_checkpointing=\"selective\"";
    check(&model("qwen3_moe"), None, &[UNITS, BOTH, "adapter.rslora=true"]);
    check(&model("mixtral"), None, &["fsdp.wrap=[\"MixtralDecoderLayer\"]", BOTH, full]);
    check(&model("gpt_oss"), None, &["fsdp.wrap=[\"GptOssDecoderLayer\"]", BOTH, selective]);
    check(&model("deepseek_v3"), None, &[UNITS, DOWN, "adapter.target_modules=[]", selective]);
    check(&model("granitemoe"), None, &[UNITS, BOTH, "fsdp.param_dtype=\"bf16\"", "fsdp.offload=\"cpu\""]);
    check(&model("qwen3_moe"), None, &[UNITS, BOTH, "fsdp.accumulation=\"unsharded\""]);
    check(&model("glm4_moe"), None, &[UNITS, BOTH, "train.optimizer={ name = \"muon\" }"]);
}

#[test]
fn adapters_of_experts_have_the_same_bits_on_an_expert_axis() {
    let mesh = |shard, expert| {
        let mesh = Mesh::new([(Axis::Shard, shard)]).unwrap();
        Ranks::On(mesh.with_expert(expert).unwrap())
    };
    let meshes = || Some(vec![mesh(1, 1), mesh(2, 2), mesh(4, 2), mesh(4, 4)]);
    let chunks = "fsdp.chunks={ expert = 4 }";
    check(&model("qwen3_moe"), meshes(), &[UNITS, chunks, BOTH]);
    check(&model("gpt_oss"), meshes(), &[UNITS, chunks, BOTH, "fsdp.activation_checkpointing=\"full\""]);
    check(&model("deepseek_v3"), meshes(), &[UNITS, chunks, DOWN, "adapter.target_modules=[]"]);
    check(MIXTURE, meshes(), &[UNITS, chunks, BOTH, "adapter.quantize=\"nf4\""]);
}

#[test]
fn adapters_of_quantized_experts_match_oracle_and_predicted_memory() {
    check(MIXTURE, None, &[UNITS, BOTH, "adapter.quantize=\"nf4\""]);
    check(GPT_OSS, None, &[UNITS, BOTH, "adapter.quantize=\"mxfp4\"", "fsdp.param_dtype=\"bf16\""]);
}

/// The settings of a run from a golden adapter.
fn golden_run(which: usize, dir: &std::path::Path, world: usize, more: &str) -> Resolved {
    let (of, table) = EXPERTS[which];
    golden_config(of, dir, world, &format!("{more}\n{table}"))
}

#[test]
fn merged_experts_equal_base_plus_adapter_products() {
    for (which, scale) in [(0, 5.0 / 3.0), (1, 3.0 / 2f64.sqrt())] {
        let dir = tempfile::tempdir().unwrap();
        let folder = golden(EXPERTS[which].0.0);
        let job = pretrained(&folder, golden_run(which, dir.path(), 2, "merge = true")).unwrap();
        run(&job, Resume::Fresh).unwrap_or_else(|error| panic!("{error}"));
        let [base, adapter, merged] = [
            folder.join("model.safetensors"),
            dir.path().join("out/adapter/adapter_model.safetensors"),
            dir.path().join("out/model"),
        ]
        .map(|path| tensors(&path));
        assert_eq!(merged.keys().collect::<Vec<_>>(), base.keys().collect::<Vec<_>>());
        let left: Vec<_> = std::fs::read_dir(dir.path().join("out/adapter")).unwrap().collect();
        assert_eq!(left.len(), 2, "{left:?}");
        let changed = match which {
            0 => merged_qwen(&base, &adapter, &merged, scale),
            _ => merged_gpt_oss(&base, &adapter, &merged, scale),
        };
        let others =
            base.iter().filter(|(name, _)| !changed.contains(name) && !name.contains("_proj.weight"));
        others.for_each(|(name, values)| assert!(*values == merged[name], "{name}"));
    }
}

type Tensors = BTreeMap<String, Vec<f64>>;

/// Six experts of 8 between 16, of rank 3: weights are outputs x inputs.
fn merged_qwen(base: &Tensors, adapter: &Tensors, merged: &Tensors, scale: f64) -> Vec<String> {
    let (experts, rank) = (6, 3);
    let experts_of = |map: &'static str| (0..experts).map(move |expert| (expert, map));
    let of_expert = |(expert, map): (usize, &str)| {
        let (inner, [inputs, outputs], begin) = match map {
            "gate_proj" => (".base_layer", [16, 8], 0),
            "up_proj" => (".base_layer", [16, 8], 8),
            _ => ("", [8, 16], 0),
        };
        let [a, b] = ["A", "B"].map(|half| {
            &adapter[&format!("base_model.model.model.layers.1.mlp.experts{inner}.lora_{half}.weight")]
        });
        let name = format!("model.layers.1.mlp.experts.{expert}.{map}.weight");
        let product = |row: usize, column: usize| -> f64 {
            let term = |k| {
                b[((begin + row) * rank + k) * experts + expert] * a[(expert * rank + k) * inputs + column]
            };
            scale * (0..rank).map(term).sum::<f64>()
        };
        let sum = |at: usize| f64::from((base[&name][at] + product(at / inputs, at % inputs)) as f32);
        let expected: Vec<f64> = (0..inputs * outputs).map(sum).collect();
        assert!(difference(&merged[&name], &expected) < 1e-7, "{name}");
        assert!(merged[&name] != base[&name], "{name}");
        name
    };
    ["gate_proj", "up_proj", "down_proj"].into_iter().flat_map(experts_of).map(of_expert).collect()
}

/// Five experts of 20 between 16, of rank 2: stacks are experts x inputs x outputs.
fn merged_gpt_oss(base: &Tensors, adapter: &Tensors, merged: &Tensors, scale: f64) -> Vec<String> {
    let (experts, rank, [inputs, outputs]) = (5, 2, [16, 40]);
    let of_layer = |layer: usize| {
        let [a, b] = ["A", "B"].map(|half| {
            &adapter[&format!("base_model.model.model.layers.{layer}.mlp.experts.lora_{half}.weight")]
        });
        let name = format!("model.layers.{layer}.mlp.experts.gate_up_proj");
        let sum = |at: usize| {
            let (expert, row, column) = (at / (inputs * outputs), at / outputs % inputs, at % outputs);
            let term = |k| a[(expert * rank + k) * inputs + row] * b[(column * rank + k) * experts + expert];
            f64::from((base[&name][at] + scale * (0..rank).map(term).sum::<f64>()) as f32)
        };
        let expected: Vec<f64> = (0..experts * inputs * outputs).map(sum).collect();
        assert!(difference(&merged[&name], &expected) < 1e-7, "{name}");
        assert!(merged[&name] != base[&name], "{name}");
        name
    };
    [0, 1].map(of_layer).to_vec()
}

/// Files hold stacks, checkpoints the matrices of each expert.
#[test]
fn adapters_of_experts_resume_and_start_again_at_other_world_sizes() {
    let dir = tempfile::tempdir().unwrap();
    let config = |world: usize, out: &str, steps: u64| {
        let mut config = golden_run(0, dir.path(), world, "");
        config.run.out_dir = dir.path().join(out).display().to_string();
        config.data.train =
            (0..4).map(|row| dir.path().join(format!("{row}.bin")).display().to_string()).collect();
        (config.train.steps, config.checkpoint.every) = (steps, 2);
        config
    };
    let folder = golden(EXPERTS[0].0.0);
    let start = |config| pretrained(&folder, config).unwrap();
    run(&start(config(4, "whole", 4)), Resume::Fresh).unwrap();
    run(&start(config(2, "parts", 2)), Resume::Fresh).unwrap();
    let adapter = |out: &str| dir.path().join(out).join("adapter");
    let mut second = config(1, "again", 1);
    second.adapter.as_mut().unwrap().path = Some(adapter("parts").display().to_string());
    let again = start(second);
    let begun = tensors(&adapter("parts").join("adapter_model.safetensors"));
    for (id, param) in again.plan.spec.params.iter().enumerate() {
        if param.expert.is_some() && param.trainable {
            let (_, expected) = part_of_stack(param, 6, true, |name| begun[name].clone());
            let row_len = param.shape[1];
            let (param, len) = (fsdp_core::model::ParamId(id), expected.len());
            let piece = fsdp_core::update::Piece { param, offset: 0, len, param_offset: 0, row_len };
            let mut values = vec![0.0; len];
            again.init.fill(&again.plan.spec, &piece, &mut values).unwrap();
            assert_eq!(values, expected);
        }
    }
    std::fs::remove_dir_all(adapter("parts")).unwrap();
    let rest = run(&start(config(1, "parts", 4)), Resume::Newest).unwrap();
    assert_eq!(rest.resumed_from, Some(2));
    let read = |out: &str| tensors(&adapter(out).join("adapter_model.safetensors"));
    assert_eq!(read("whole"), read("parts"));
}

#[test]
fn unsupported_adapters_of_experts_are_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let refused = |model: &str, overrides: &[&str]| {
        adapted(model, &config(dir.path(), 61, overrides)).map(drop).unwrap_err().to_string()
    };
    let mixture = model("qwen3_moe");
    assert_eq!(
        refused(&mixture, &["adapter.target_parameters=['mlp.experts.up_proj']"]),
        "adapter.target_parameters: `mlp.experts.up_proj` is not a stack of the weights of a model's experts; did you \
         mean `gate_up_proj`?"
    );
    assert_eq!(
        refused(LLAMA, &[DOWN]),
        "adapter.target_parameters: `mlp.experts.down_proj` is not a stack of the weights of a model's experts; this model \
         has none"
    );
    let error = refused(&mixture, &[DOWN, "adapter.target_modules=[]", "adapter.modules_to_save=['mlp']"]);
    assert!(
        error.contains("`model.layers.1.mlp.experts.down_proj` is one of adapter.target_parameters"),
        "{error}"
    );
    let error = refused(&mixture, &[DOWN, "adapter.target_modules=[]", "adapter.rank=9"]);
    assert!(
        error.contains("9 is more than 8, all that the widest target `model.layers.1.mlp.experts.down_proj`"),
        "{error}"
    );
}
