//! Adapters of a base in 4 bits: the same bits at every world size and under every policy; memory and traffic by its bytes; exports and checkpoints.

use std::path::Path;

use fsdp_config::Ranks;
use fsdp_core::memory::Category;
use fsdp_core::{Axis, DType, Mesh, Rank};
use fsdp_nn::HostMemory;
use fsdp_nn::quantized::{Format, Packed, Scales};
use fsdp_train::train::Resume;
use fsdp_train::verify::{VerifyOptions, verify};

use crate::lora::{adapted, difference, golden, job, pretrained, run, tensor, tensors};
use crate::peft::{LLAMA_NF4, TENSORS, golden_config};
use crate::support::{LLAMA, config, threads};

/// A tiny Llama whose linear maps have whole blocks of elements; blocks of scales end inside rows.
pub(crate) const BLOCKS: &str = r#"{
    "model_type": "llama", "vocab_size": 61, "hidden_size": 128, "intermediate_size": 192,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "initializer_range": 0.1, "tie_word_embeddings": false
}"#;

/// The same for GPT-2, whose weights are stored inputs x outputs, some of them square; and mixtures: with weights outputs x inputs,
/// and as gpt-oss has them.
pub(crate) const GPT2_BLOCKS: &str = r#"{
    "model_type": "gpt2", "vocab_size": 61, "n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 32,
    "initializer_range": 0.2, "embd_pdrop": 0.1, "attn_pdrop": 0.1, "resid_pdrop": 0.1
}"#;
pub(crate) const MIXTURE: &str = r#"{
    "model_type": "qwen3_moe", "vocab_size": 61, "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 4,
    "num_experts_per_tok": 2, "norm_topk_prob": true, "max_position_embeddings": 64, "initializer_range": 0.2,
    "tie_word_embeddings": false
}"#;
pub(crate) const GPT_OSS: &str = r#"{
    "model_type": "gpt_oss", "vocab_size": 61, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 4,
    "num_experts_per_tok": 2, "max_position_embeddings": 64, "initializer_range": 0.2, "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention"]
}"#;

/// Linear attention, and attention with gates.
const QWEN: &str = r#"{
    "model_type": "qwen3_5_text", "vocab_size": 61, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"], "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 16, "max_position_embeddings": 64, "initializer_range": 0.2, "tie_word_embeddings": false
}"#;

const WRAP: &str = "fsdp.wrap=[\"LlamaDecoderLayer\"]";

/// With and without double quantization, policies and meshes of all kinds.
#[test]
fn sharded_quantized_bases_match_the_oracle_and_predicted_memory() {
    let gpt2 = "fsdp.wrap=[\"GPT2Block\"]";
    let experts = "fsdp.min_num_params=500";
    let (full, bf16) = ("fsdp.activation_checkpointing=\"full\"", "fsdp.param_dtype=\"bf16\"");
    let cases: [(&str, &str, &[&str]); 15] = [
        (BLOCKS, "nf4", &[WRAP]),
        (BLOCKS, "nf4-single", &[WRAP, "fsdp.mesh={ replicate = 2 }"]),
        (BLOCKS, "nf4", &[WRAP, full]),
        (BLOCKS, "nf4", &[WRAP, "fsdp.activation_checkpointing=\"selective\"", bf16]),
        (BLOCKS, "nf4", &[WRAP, bf16, "fsdp.offload=\"cpu\""]),
        (BLOCKS, "nf4", &[WRAP, "fsdp.param_dtype=\"f16\"", "fsdp.reshard_after_forward=2"]),
        (
            BLOCKS,
            "nf4-single",
            &[
                WRAP,
                "fsdp.accumulation=\"unsharded\"",
                "adapter.modules_to_save=['layers.1.mlp.up_proj']",
                "adapter.target_modules=['q_proj', 'down_proj']",
            ],
        ),
        (BLOCKS, "nf4", &[WRAP, "fsdp.reshard_after_forward=false", "adapter.target_modules=['q_proj']"]),
        (GPT2_BLOCKS, "nf4", &[gpt2]),
        (MIXTURE, "nf4", &[experts]),
        (MIXTURE, "mxfp4", &[experts, full, bf16]),
        (MIXTURE, "nf4-single", &[experts, "fsdp.mesh={ expert = 2 }"]),
        (GPT_OSS, "mxfp4", &[experts, "fsdp.mesh={ expert = 2 }"]),
        (GPT_OSS, "nf4", &["fsdp.wrap=[\"GptOssDecoderLayer\"]"]),
        (QWEN, "nf4", &["fsdp.wrap=[\"Qwen3_5DecoderLayer\"]", full, bf16]),
    ];
    for (model, quantize, others) in cases {
        let dir = tempfile::tempdir().unwrap();
        let quantize = format!("adapter.quantize=\"{quantize}\"");
        let own = [quantize.as_str(), "adapter.rank=3", "adapter.dropout=0.1"];
        let overrides = [&own, others].concat();
        let job = job(model, config(dir.path(), 61, &overrides));
        let report = verify(&job, &threads(), &VerifyOptions::new(&[2, 4], 2)).unwrap();
        assert!(report.holds(), "{overrides:?}: {report:#?}");
        for world in &report.worlds {
            assert_eq!(world.promise, "equal bits (D2)", "{overrides:?}");
            assert!(
                world.memory.iter().all(|line| line.predicted_bytes == line.counted_bytes),
                "{overrides:?}"
            );
        }
    }
}

#[test]
fn quantized_bases_have_the_same_bits_on_a_context_axis() {
    let dir = tempfile::tempdir().unwrap();
    let overrides =
        [WRAP, "data.seq_len=8", "fsdp.chunks={ context = 2 }", "adapter.rank=2", "adapter.quantize=\"nf4\""];
    let job = job(BLOCKS, config(dir.path(), 61, &overrides));
    let mesh =
        |shard, context| Ranks::On(Mesh::new([(Axis::Shard, shard), (Axis::Context, context)]).unwrap());
    let worlds = vec![mesh(1, 1), mesh(1, 2), mesh(2, 2)];
    let report = verify(&job, &threads(), &VerifyOptions { worlds, ..VerifyOptions::new(&[], 2) }).unwrap();
    assert!(report.holds(), "{report:#?}");
    assert!(report.worlds.iter().all(|world| world.losses == report.worlds[0].losses));
}

/// A row of 192 elements has 96 bytes of codes and 3 scales.
#[test]
fn quantized_bases_take_their_bytes_on_each_rank_and_in_each_gather() {
    let dir = tempfile::tempdir().unwrap();
    let overrides = [WRAP, "adapter.rank=2", "adapter.quantize=\"nf4-single\"", "fsdp.param_dtype=\"bf16\""];
    let job = job(BLOCKS, config(dir.path(), 61, &overrides));
    let spec = &job.plan.spec;
    let of_codes: usize = spec.params.iter().filter(|param| param.quantized.is_some()).map(|p| p.len()).sum();
    let of_floats: usize =
        spec.params.iter().filter(|p| !p.trainable && p.quantized.is_none()).map(|p| p.len()).sum();
    let trained: usize = spec.params.iter().filter(|p| p.trainable).map(|p| p.len()).sum();
    let expected = of_codes / 2 + of_codes / 64 * 4 + 2 * of_floats + (4 + 2) * trained;
    let shards: usize = (0..4)
        .map(|rank| job.predict::<HostMemory>(Rank(rank)).unwrap().device.live(Category::ParameterShard))
        .sum();
    // Segments are padded to whole rows on each rank, and parts to 16 bytes.
    assert!((expected..expected + expected / 10).contains(&shards), "{shards} bytes, {expected} expected");
    let layer = spec.params.iter().filter(|p| p.fqn.contains("layers.0."));
    let bytes: usize = layer.filter_map(|param| param.quantized.map(|q| q.rows * q.row_bytes)).sum();
    let segments = job.plan.layout.units.iter().flat_map(|unit| &unit.segments);
    let of_bytes: Vec<_> = segments.filter(|segment| segment.dtype == DType::U8).collect();
    let gathered: usize = of_bytes.iter().map(|segment| segment.unsharded_bytes()).sum();
    assert!((2 * bytes..2 * bytes + bytes / 20).contains(&gathered), "{gathered} bytes, {bytes} in a layer");
}

/// What ranks compute from floats is what bitsandbytes computes, and what it saved is kept.
#[test]
fn a_base_is_quantized_as_bitsandbytes_quantizes_it() {
    let saved = golden("llama-nf4");
    let expected = tensor(
        &fsdp_ckpt::model_files::ModelReader::open(saved.join("expected.safetensors")).unwrap(),
        "model.layers.0.mlp.down_proj.weight",
    );
    let read = fsdp_ckpt::training::ModelWeights::open(saved.join("model.safetensors")).unwrap();
    let mut values = vec![0.0; expected.len()];
    read.read_rows_f64("model.layers.0.mlp.down_proj.weight", 0..128, &mut values).unwrap();
    assert_eq!(values, expected);
    // Elements that were decoded from NF4 are encoded to the same codes.
    let floats: Vec<f32> = values.iter().map(|&value| value as f32).collect();
    let matrix = Packed { rows: 128, columns: 192, format: Format::Nf4Single };
    let scales = Scales::new(matrix.format, matrix.format.magnitudes(&floats).collect());
    let (mut bytes, mut decoded) = (Vec::new(), vec![0.0; 192]);
    for (row, elements) in floats.chunks(192).enumerate() {
        bytes.clear();
        matrix.encode(&scales, row, elements, &mut bytes);
        matrix.decode(row, &bytes, &mut decoded);
        assert_eq!(decoded, elements, "row {row}");
    }
}

#[test]
fn a_run_resumes_on_other_ranks_with_the_same_bits() {
    let dir = tempfile::tempdir().unwrap();
    let config = |out: &str, ranks: usize, steps: u64| {
        let [out, ranks, steps] = [
            format!("run.out_dir=\"{}\"", dir.path().join(out).display()),
            format!("run.ranks={ranks}"),
            format!("train.steps={steps}"),
        ];
        let overrides =
            [WRAP, "adapter.rank=2", "adapter.quantize=\"nf4\"", "checkpoint.every=2", &out, &ranks, &steps];
        config(dir.path(), 61, &overrides)
    };
    run(&job(BLOCKS, config("whole", 4, 4)), Resume::Fresh).unwrap_or_else(|error| panic!("{error}"));
    run(&job(BLOCKS, config("parts", 1, 2)), Resume::Fresh).unwrap_or_else(|error| panic!("{error}"));
    std::fs::remove_dir_all(dir.path().join("parts/adapter")).unwrap();
    let rest =
        run(&job(BLOCKS, config("parts", 2, 4)), Resume::Newest).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(rest.resumed_from, Some(2));
    let adapter = |out: &str| tensors(&dir.path().join(out).join("adapter/adapter_model.safetensors"));
    assert_eq!(adapter("whole"), adapter("parts"));
}

/// The merged model is the one that was trained: the decoded base and the products of the adapters.
#[test]
fn merged_model_is_the_decoded_base_with_products_of_adapters() {
    let dir = tempfile::tempdir().unwrap();
    let table = format!("merge = true\n{LLAMA_NF4}");
    let base = golden("llama-nf4");
    let job = pretrained(&base, golden_config(("llama-nf4", "lora"), dir.path(), 2, &table)).unwrap();
    run(&job, Resume::Fresh).unwrap_or_else(|error| panic!("{error}"));
    let merged = tensors(&dir.path().join("out/model"));
    let adapter = tensors(&dir.path().join("out/adapter/adapter_model.safetensors"));
    let expected = tensor(
        &fsdp_ckpt::model_files::ModelReader::open(base.join("expected.safetensors")).unwrap(),
        "model.layers.0.mlp.down_proj.weight",
    );
    let name = "base_model.model.model.layers.0.mlp.down_proj.lora";
    let [a, b] = ["A", "B"].map(|half| &adapter[&format!("{name}_{half}.weight")]);
    for (at, merged) in merged["model.layers.0.mlp.down_proj.weight"].iter().enumerate() {
        let (row, column) = (at / 192, at % 192);
        let product: f64 = (0..3).map(|k| b[row * 3 + k] * a[k * 192 + column]).sum();
        assert_eq!(*merged, f64::from((expected[at] + 5.0 / 3.0 * product) as f32), "{row}, {column}");
    }
    // Another run that starts from it has the losses of the adapted model.
    let text = std::fs::read_to_string(dir.path().join("out/model/config.json")).unwrap();
    assert!(!text.contains("quantization_config"), "{text}");
}

#[test]
fn bases_that_cannot_be_quantized_are_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let overrides = ["adapter.rank=2", "adapter.quantize=\"nf4\""];
    let refused = |model: &str| {
        adapted(model, &config(dir.path(), 53, &overrides)).map(|_| ()).unwrap_err().to_string()
    };
    let error = refused(&BLOCKS.replace("192", "200"));
    assert!(error.contains("down_proj") && error.contains("200 inputs"), "{error}");
    let mxfp4 = config(dir.path(), 61, &["adapter.rank=2", "adapter.quantize=\"mxfp4\""]);
    let error = adapted(LLAMA, &mxfp4).map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("MXFP4 is for experts"), "{error}");
    let single =
        golden_config(("llama-nf4", "lora"), dir.path(), 1, &LLAMA_NF4.replace("\"nf4\"", "\"nf4-single\""));
    let job = pretrained(&golden("llama-nf4"), single).unwrap();
    let error = run(&job, Resume::Fresh).unwrap_err().to_string();
    assert!(error.contains("double quantization") && error.contains("set it to \"nf4\""), "{error}");
}

/// gpt-oss as it is published: the bytes of the files give what their floats give, and the merged model has them.
#[test]
fn experts_of_files_in_mxfp4_stay_as_they_are() {
    let files = Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates/fsdp-ckpt/tests/fixtures/mxfp4");
    let experts = tensors(&files.join("expected.safetensors"));
    let train = |quantize: &str, ranks: &str| {
        let dir = tempfile::tempdir().unwrap();
        let quantize = format!("adapter.quantize=\"{quantize}\"");
        let overrides = [
            "fsdp.min_num_params=500",
            "adapter.rank=2",
            "adapter.merge=true",
            "model.init=\"pretrained\"",
            "train.steps=2",
            ranks,
            &quantize,
        ];
        let job = pretrained(&files, config(dir.path(), 31, &overrides)).unwrap();
        run(&job, Resume::Fresh).unwrap_or_else(|error| panic!("{error}"));
        let merged = tensors(&dir.path().join("out/model"));
        for (name, stack) in &experts {
            assert!(merged[name] == *stack, "{name}");
        }
        tensors(&dir.path().join("out/adapter/adapter_model.safetensors"))
    };
    let floats = train("none", "run.ranks=1");
    let bytes = train("mxfp4", "run.ranks=1");
    assert_eq!(bytes, train("mxfp4", "run.ranks=4"));
    for (name, values) in &bytes {
        let off = difference(values, &floats[name]);
        assert!(off <= TENSORS, "{name} is off by {off:e}");
    }
}

/// bitsandbytes has one size of blocks of scales; a file that has another is not read as if it were that.
#[test]
fn other_blocks_of_scales_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let base = golden("llama-nf4");
    std::fs::copy(base.join("config.json"), dir.path().join("config.json")).unwrap();
    let mut bytes = std::fs::read(base.join("model.safetensors")).unwrap();
    let given = b"\"shape\": [64, 128], \"nested_blocksize\": 256";
    let at = bytes.windows(given.len()).position(|window| window == given).unwrap();
    bytes[at + given.len() - 3..at + given.len()].copy_from_slice(b"128");
    std::fs::write(dir.path().join("model.safetensors"), bytes).unwrap();
    let job = pretrained(dir.path(), golden_config(("llama-nf4", "lora"), dir.path(), 1, LLAMA_NF4)).unwrap();
    let error = run(&job, Resume::Fresh).unwrap_err().to_string();
    assert!(error.contains("other codes or blocks") && error.contains("set it to \"none\""), "{error}");
}
