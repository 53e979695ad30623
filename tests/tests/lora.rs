//! Adapters of a frozen model: sharded compared with unsharded training under dropout, memory with the ledger; small checkpoints that any world size resumes from; exports.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use fsdp_ckpt::model_files::ModelReader;
use fsdp_ckpt::training::ModelWeights;
use fsdp_config::Resolved;
use fsdp_nn::HostMemory;
use fsdp_nn::hf::{HfConfig, HfModel};
use fsdp_nn::model::{Adapted, Architecture};
use fsdp_train::train::{Resume, RunOptions, Summary, train};
use fsdp_train::verify::{VerifyOptions, verify};
use fsdp_train::{InitSource, Job, TrainError, adapter};
use fsdp_xla::ProgramOptions;
use serde_json::Value;

use crate::expert_axis;
use crate::peft::{GOLDEN, LLAMA_DORA, LLAMA_LORA, golden_config};
use crate::support::{GPT2, LLAMA, config, run_options, threads};
use crate::xla;

pub(crate) fn golden(case: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("golden").join(case)
}

/// Builds a model with the adapters of a configuration.
pub(crate) fn adapted(model: &str, config: &Resolved) -> Result<Adapted<HfModel>, TrainError> {
    adapter::adapt(config, HfConfig::parse(model).unwrap().build().unwrap())
}

/// Creates a job with random weights.
pub(crate) fn job(model: &str, config: Resolved) -> Job<Adapted<HfModel>> {
    let model = adapted(model, &config).unwrap_or_else(|error| panic!("{error}"));
    let init = Arc::new(model.description().init.clone());
    let base = InitSource::Random { seed: config.model.seed, init };
    let init = base.adapted(&config, model.description(), None).unwrap();
    Job::new(config, model, init).unwrap_or_else(|error| panic!("{error}"))
}

/// Creates a job whose base weights are read from a folder.
pub(crate) fn pretrained(folder: &Path, config: Resolved) -> Result<Job<Adapted<HfModel>>, TrainError> {
    let text = std::fs::read_to_string(folder.join("config.json")).unwrap();
    let model = adapted(&text, &config)?;
    let base = InitSource::Pretrained(Arc::new(ModelWeights::open(folder).unwrap()));
    let init = base.adapted(&config, model.description(), None)?;
    Job::new(config, model, init)
}

pub(crate) fn run<A: Architecture + Clone>(job: &Job<A>, resume: Resume) -> Result<Summary, TrainError> {
    let options = RunOptions { config_json: Some("{}".to_owned()), ..run_options(resume) };
    train(job, &threads(), &options)
}

pub(crate) fn tensor(reader: &ModelReader, name: &str) -> Vec<f64> {
    let entry = reader.entry(name).unwrap_or_else(|error| panic!("{error}"));
    let mut values = vec![0.0; entry.row_count() * entry.row_len() as usize];
    reader.read_rows_f64(name, 0..entry.row_count(), &mut values).unwrap();
    values
}

pub(crate) fn tensors(path: &Path) -> BTreeMap<String, Vec<f64>> {
    let reader = ModelReader::open(path).unwrap_or_else(|error| panic!("{error}"));
    reader.names().map(|name| (name.to_owned(), tensor(&reader, name))).collect()
}

/// Returns the largest difference, as a fraction of the largest value.
pub(crate) fn difference(got: &[f64], expected: &[f64]) -> f64 {
    assert_eq!(got.len(), expected.len());
    let largest = expected.iter().fold(0.0f64, |most, value| most.max(value.abs()));
    got.iter().zip(expected).fold(0.0f64, |most, (a, b)| most.max((a - b).abs())) / largest
}

#[test]
fn sharded_adapters_match_oracle_and_predicted_memory() {
    let all = ["adapter.rank=2", "adapter.alpha=6", "adapter.dropout=0.2"];
    let some = [
        "adapter.rank=3",
        "adapter.dropout=0.1",
        "adapter.target_modules=['q_proj', 'v_proj', 'up_proj', 'down_proj']",
        "adapter.modules_to_save=['model.norm', 'layers.1.mlp.gate_proj']",
    ];
    let tied = [
        "adapter.rank=2",
        "adapter.dropout=0.1",
        "adapter.modules_to_save=['wte']",
        "adapter.target_modules=['c_attn', 'c_proj']",
    ];
    let llama = "fsdp.wrap=[\"LlamaDecoderLayer\"]";
    let gpt2 = "fsdp.wrap=[\"GPT2Block\"]";
    let mixture = expert_axis::model("qwen3_moe");
    let latent = expert_axis::model("deepseek_v3");
    let cases: [(&str, u32, &[&str], &[&str]); 11] = [
        (LLAMA, 61, &all, &[llama]),
        (LLAMA, 61, &some, &[llama, "fsdp.mesh={ replicate = 2 }"]),
        (LLAMA, 61, &all, &[llama, "fsdp.activation_checkpointing=\"full\""]),
        (LLAMA, 61, &some, &[llama, "fsdp.activation_checkpointing=\"selective\""]),
        (LLAMA, 61, &some, &[llama, "fsdp.param_dtype=\"bf16\"", "fsdp.reshard_after_forward=2"]),
        (LLAMA, 61, &all, &[llama, "fsdp.param_dtype=\"bf16\"", "fsdp.offload=\"cpu\""]),
        (GPT2, 53, &tied, &[gpt2]),
        (GPT2, 53, &all, &[gpt2, "fsdp.accumulation=\"unsharded\""]),
        // Experts are frozen, as are their units.
        (&mixture, 61, &all, &["fsdp.min_num_params=500", "fsdp.mesh={ expert = 2 }"]),
        // Latent attention and shared experts have linear maps, too.
        (&latent, 61, &all, &["fsdp.min_num_params=500", "fsdp.mesh={ expert = 2 }"]),
        (
            &latent,
            61,
            &all,
            &["fsdp.wrap=[\"DeepseekV3DecoderLayer\"]", "fsdp.activation_checkpointing=\"full\""],
        ),
    ];
    for (model, vocab, adapter, others) in cases {
        let dir = tempfile::tempdir().unwrap();
        let overrides = [adapter, others].concat();
        let job = job(model, config(dir.path(), vocab, &overrides));
        let report = verify(&job, &threads(), &VerifyOptions::new(&[2, 4], 2)).unwrap();
        assert!(report.holds(), "{overrides:?}: {report:#?}");
        for world in &report.worlds {
            assert!(
                world.memory.iter().all(|line| line.predicted_bytes == line.counted_bytes),
                "{overrides:?}"
            );
        }
    }
}

/// PEFT names adapters after the modules of the model: so it does in latent attention, and beside experts.
#[test]
fn adapters_of_latent_attention_and_shared_experts_are_exported_by_module() {
    let dir = tempfile::tempdir().unwrap();
    let overrides = ["adapter.rank=2", "train.steps=1", "fsdp.min_num_params=500"];
    let job = job(&expert_axis::model("deepseek_v3"), config(dir.path(), 61, &overrides));
    run(&job, Resume::Fresh).unwrap_or_else(|error| panic!("{error}"));
    let names: Vec<String> =
        tensors(&dir.path().join("out/adapter/adapter_model.safetensors")).into_keys().collect();
    let attention = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"];
    let attention =
        [0, 1].into_iter().flat_map(|layer| attention.map(|map| format!("{layer}.self_attn.{map}")));
    let mlps = ["0.mlp", "1.mlp.shared_experts"].into_iter();
    let mlps = mlps.flat_map(|mlp| ["gate_proj", "up_proj", "down_proj"].map(|map| format!("{mlp}.{map}")));
    let mut expected: Vec<String> = attention
        .chain(mlps)
        .flat_map(|module| {
            ["A", "B"].map(|half| format!("base_model.model.model.layers.{module}.lora_{half}.weight"))
        })
        .collect();
    expected.sort();
    assert_eq!(names, expected);
}

#[test]
fn xla_adapter_training_matches_oracle() {
    let Some(plugin) = xla::plugin() else { return };
    let overrides = [
        "adapter.rank=3",
        "adapter.dropout=0.1",
        "adapter.target_modules=['q_proj', 'v_proj', 'up_proj', 'down_proj']",
        "adapter.modules_to_save=['model.norm', 'layers.1.mlp.gate_proj']",
        xla::LAYERS,
        "fsdp.activation_checkpointing=\"full\"",
        "run.device=\"xla\"",
    ];
    let dir = tempfile::tempdir().unwrap();
    let job = job(LLAMA, config(dir.path(), 61, &overrides));
    xla::check_job(&plugin, &job, &[1, 2, 4], ProgramOptions::default());
}

#[test]
fn muon_adapters_match_oracle_bitwise() {
    let muon = "train.optimizer={ name = \"muon\", lr = 2e-2, adamw_lr = 1e-2 }";
    let dir = tempfile::tempdir().unwrap();
    let overrides = [
        muon,
        "adapter.kind=\"lora\"",
        "adapter.rank=4",
        "adapter.target_modules=\"all-linear\"",
        "adapter.dropout=0.1",
        "fsdp.wrap=[\"LlamaDecoderLayer\"]",
    ];
    let job = job(LLAMA, config(dir.path(), 61, &overrides));
    let report = verify(&job, &threads(), &VerifyOptions::new(&[1, 2, 4], 2)).unwrap();
    assert!(report.holds(), "{report:#?}");
    for world in &report.worlds {
        assert_eq!(world.promise, "equal bits (D2)", "world {}", world.world);
        assert!(world.memory.iter().all(|line| line.predicted_bytes == line.counted_bytes));
    }
    // Muon keeps one value per element, AdamW two: less state shows that the adapters are orthogonalized.
    let state = |optimizer: &str| {
        let dir = tempfile::tempdir().unwrap();
        let job = self::job(LLAMA, config(dir.path(), 61, &[&[optimizer], &overrides[1..]].concat()));
        let report = verify(&job, &threads(), &VerifyOptions::new(&[1], 1)).unwrap();
        let lines = report.worlds[0].memory.iter();
        lines.filter(|line| line.category == "optimizer state").map(|line| line.counted_bytes).sum::<usize>()
    };
    let (of_muon, of_adamw) = (state(muon), state("train.optimizer={ name = \"adamw\" }"));
    assert!(of_muon > 0 && of_muon < of_adamw * 3 / 5, "{of_muon} bytes, {of_adamw} of AdamW");
}

#[test]
fn frozen_base_has_no_master_copy_gradient_or_optimizer_state() {
    let dir = tempfile::tempdir().unwrap();
    let overrides = ["fsdp.param_dtype=\"bf16\"", "adapter.rank=2", "run.ranks=1"];
    let job = job(LLAMA, config(dir.path(), 61, &overrides));
    let count = |trainable: bool| -> usize {
        job.plan
            .spec
            .params
            .iter()
            .filter(|param| param.trainable == trainable)
            .map(|param| param.len())
            .sum()
    };
    let (frozen, trained) = (count(false), count(true));
    assert!(trained > 0 && trained < frozen / 3);
    let usage = job.predict::<HostMemory>(fsdp_core::Rank(0)).unwrap();
    let live = |category| usage.device.live(category);
    use fsdp_core::memory::Category::{OptimizerState, ParameterShard, ShardedGradient};
    // Segments are padded to whole rows, and parameters to 16 bytes.
    let about =
        |got: usize, expected: usize| assert!((expected..expected + 1024).contains(&got), "{got} {expected}");
    about(live(ParameterShard), 2 * frozen + (4 + 2) * trained);
    about(live(ShardedGradient), 4 * trained);
    about(live(OptimizerState), 8 * trained);
}

#[test]
fn adapter_only_checkpoint_resumes_at_other_world_size() {
    check_resuming("lora", LLAMA_LORA);
    check_resuming("dora", LLAMA_DORA);
}

fn check_resuming(kind: &str, table: &str) {
    let dir = tempfile::tempdir().unwrap();
    let table = format!("dropout = 0.3\n{table}");
    let config = |world: usize, out: &str, overrides: &[(&str, &str)]| {
        let mut config = golden_config(("llama-gqa", kind), dir.path(), world, &table);
        config.run.out_dir = dir.path().join(out).display().to_string();
        config.data.train =
            (0..4).map(|row| dir.path().join(format!("{row}.bin")).display().to_string()).collect();
        config.train.steps = 4;
        config.checkpoint.every = 2;
        for (key, value) in overrides {
            match *key {
                "steps" => config.train.steps = value.parse().unwrap(),
                other => panic!("{other}"),
            }
        }
        config
    };
    let whole = pretrained(&golden("llama-gqa"), config(4, "whole", &[])).unwrap();
    run(&whole, Resume::Fresh).unwrap();
    let begun = pretrained(&golden("llama-gqa"), config(2, "parts", &[("steps", "2")])).unwrap();
    run(&begun, Resume::Fresh).unwrap();
    std::fs::remove_dir_all(dir.path().join("parts/adapter")).unwrap();
    let rest = pretrained(&golden("llama-gqa"), config(4, "parts", &[])).unwrap();
    let summary = run(&rest, Resume::Newest).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(summary.resumed_from, Some(2));
    let adapter = |out: &str| tensors(&dir.path().join(out).join("adapter/adapter_model.safetensors"));
    assert_eq!(adapter("whole"), adapter("parts"));
    // Only trained parameters and their state are saved.
    let checkpoint = dir.path().join("parts/checkpoints/step-00000004");
    let saved = fsdp_ckpt::formats::native::open(&checkpoint).unwrap();
    let frozen: Vec<_> =
        saved.tensors.keys().filter(|name| name.contains("o_proj") && !name.contains("lora")).collect();
    assert!(frozen.is_empty(), "{frozen:?}");
    // A run with another base is refused.
    let other = dir.path().join("other");
    std::fs::create_dir(&other).unwrap();
    std::fs::copy(golden("llama-gqa").join("config.json"), other.join("config.json")).unwrap();
    let mut weights = std::fs::read(golden("llama-gqa").join("model.safetensors")).unwrap();
    let last = weights.len() - 3;
    weights[last] ^= 1;
    std::fs::write(other.join("model.safetensors"), weights).unwrap();
    let mut longer = config(2, "parts", &[]);
    longer.train.steps = 5;
    let error = run(&pretrained(&other, longer).unwrap(), Resume::Newest).unwrap_err().to_string();
    assert!(error.contains("weights of the base in model.path"), "{error}");
}

#[test]
fn merged_model_equals_base_plus_adapter_products() {
    for (of, table) in GOLDEN {
        let (case, _) = of;
        let dir = tempfile::tempdir().unwrap();
        let table = format!("merge = true\n{table}");
        let job = pretrained(&golden(case), golden_config(of, dir.path(), 2, &table)).unwrap();
        let summary = run(&job, Resume::Fresh).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(summary.model, dir.path().join("out/model"));
        let base = tensors(&golden(case).join("model.safetensors"));
        let adapter = tensors(&dir.path().join("out/adapter/adapter_model.safetensors"));
        let merged = tensors(&dir.path().join("out/model"));
        assert_eq!(merged.keys().collect::<Vec<_>>(), base.keys().collect::<Vec<_>>());
        let scale = if case == "gpt2" { 3.0 / 2f64.sqrt() } else { 5.0 / 3.0 };
        let mut changed = 0;
        for (name, values) in &merged {
            let name_of = |part: &str| {
                format!("base_model.model.{}{part}", name.strip_suffix("weight").unwrap_or(name))
            };
            let expected =
                match (adapter.get(&name_of("lora_A.weight")), adapter.get(&name_of("lora_B.weight"))) {
                    (Some(a), Some(b)) => {
                        changed += 1;
                        let sum = with_product(&base[name], a, b, scale, case == "gpt2");
                        match adapter.get(name_of("lora_magnitude_vector").as_str()) {
                            Some(magnitude) => with_lengths(&sum, magnitude, case == "gpt2"),
                            None => sum,
                        }
                    }
                    _ => adapter.get(&name_of("weight")).unwrap_or(&base[name]).clone(),
                };
            let rounded: Vec<f64> = expected.iter().map(|&value| f64::from(value as f32)).collect();
            assert!(difference(values, &rounded) < 1e-7, "{case}: {name}");
        }
        assert_eq!(changed, job.architecture.description().adapters.len());
    }
}

/// Computes `W + scale * B A` element by element, or its transpose.
fn with_product(base: &[f64], a: &[f64], b: &[f64], scale: f64, is_transposed: bool) -> Vec<f64> {
    let rank = if is_transposed { 2 } else { 3 };
    let (inputs, outputs) = (a.len() / rank, b.len() / rank);
    let product = |output: usize, input: usize| -> f64 {
        scale * (0..rank).map(|r| b[output * rank + r] * a[r * inputs + input]).sum::<f64>()
    };
    let add = |(index, value): (usize, &f64)| {
        let (row, column) =
            if is_transposed { (index % outputs, index / outputs) } else { (index / inputs, index % inputs) };
        value + product(row, column)
    };
    base.iter().enumerate().map(add).collect()
}

/// Gives the weights of every output a length.
fn with_lengths(weight: &[f64], lengths: &[f64], is_transposed: bool) -> Vec<f64> {
    let (inputs, outputs) = (weight.len() / lengths.len(), lengths.len());
    let output = |index: usize| if is_transposed { index % outputs } else { index / inputs };
    let norm = |of: usize| {
        let squares = weight.iter().enumerate().filter(|(index, _)| output(*index) == of);
        squares.map(|(_, value)| value * value).sum::<f64>().sqrt()
    };
    let norms: Vec<f64> = (0..outputs).map(norm).collect();
    let stretched = |(index, value): (usize, &f64)| value * lengths[output(index)] / norms[output(index)];
    weight.iter().enumerate().map(stretched).collect()
}

#[test]
fn invalid_adapter_settings_are_rejected_with_reason() {
    let error_for = |overrides: &[&str]| {
        let dir = tempfile::tempdir().unwrap();
        let config = config(dir.path(), 61, overrides);
        adapted(LLAMA, &config).map(drop).unwrap_err().to_string()
    };
    assert_eq!(
        error_for(&["adapter.target_modules=['q_prj']"]),
        "adapter.target_modules: `q_prj` is not a module of the model; did you mean `q_proj`?"
    );
    assert_eq!(
        error_for(&["adapter.target_modules=['lm_head']"]),
        "adapter.target_modules: `lm_head` is not a linear map inside the model; there are down_proj, \
         gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"
    );
    assert_eq!(
        error_for(&["adapter.rank=25"]),
        "adapter.rank: 25 is more than 24, all that the widest target `model.layers.0.self_attn.q_proj` (24 to 24) can \
         use; choose a lower one"
    );
    let error = error_for(&["adapter.target_modules=['q_proj']", "adapter.modules_to_save=['self_attn']"]);
    assert!(
        error.starts_with("adapter.modules_to_save: `model.layers.0.self_attn.q_proj` is one of"),
        "{error}"
    );
    let error =
        error_for(&["adapter.target_modules=['q_proj']", "adapter.modules_to_save=['mlp', 'up_proj']"]);
    assert!(error.contains("`up_proj` shares parameters with another"), "{error}");
}

#[test]
fn unsupported_or_mismatched_adapter_file_is_rejected() {
    let error_for = |change: &dyn Fn(&mut serde_json::Map<String, Value>)| {
        let dir = tempfile::tempdir().unwrap();
        let lora = golden("llama-gqa").join("lora");
        let text = std::fs::read_to_string(lora.join("adapter_config.json")).unwrap();
        let mut fields: serde_json::Map<String, Value> = serde_json::from_str(&text).unwrap();
        change(&mut fields);
        std::fs::write(dir.path().join("adapter_config.json"), serde_json::to_string(&fields).unwrap())
            .unwrap();
        std::fs::copy(lora.join("adapter_model.safetensors"), dir.path().join("adapter_model.safetensors"))
            .unwrap();
        let mut config = golden_config(("llama-gqa", "lora"), dir.path(), 1, LLAMA_LORA);
        config.adapter.as_mut().unwrap().path = Some(dir.path().display().to_string());
        let error = pretrained(&golden("llama-gqa"), config).map(drop).unwrap_err().to_string();
        error.rsplit_once("adapter_config.json: ").expect("the file is named").1.to_owned()
    };
    let set = |key: &'static str, value: Value| {
        error_for(&move |fields: &mut serde_json::Map<String, Value>| {
            drop(fields.insert(key.into(), value.clone()))
        })
    };
    let error = set("use_dora", true.into());
    assert_eq!(error, "`use_dora` is true, but adapter.dora of the run file is false; set that to true");
    assert_eq!(
        set("bias", "all".into()),
        "`bias` is \"all\", which is not supported: only plain LoRA and DoRA are"
    );
    let error = set("init_lora_weights", "pissa".into());
    assert_eq!(
        error,
        "`init_lora_weights` is \"pissa\", which is not supported: only plain LoRA and DoRA are"
    );
    let error = set("peft_type", "LOHA".into());
    assert_eq!(error, "peft_type is \"LOHA\", but only \"LORA\" is supported");
    let error = set("r", 4.into());
    assert_eq!(error, "`r` is 4, but adapter.rank of the run file is 3; set that to 4");
}
