//! Context parallelism: ranks that share samples give the bits of one rank that computes all chunks of each.

use std::path::Path;
use std::sync::Arc;

use fsdp_comm::launch::Launcher;
use fsdp_nn::HostMemory;
use fsdp_nn::hf::HfConfig;
use fsdp_train::verify::{VerifyOptions, VerifyReport, verify};
use fsdp_train::{InitSource, Job};

use crate::over_tcp::OverTcp;
use crate::resume::Case;
use crate::support::{GPT2, LLAMA, config, job, threads};

/// A tiny Llama with four key heads and a tied head, so that one parameter has gradients from two blocks.
const TIED: &str = r#"{
    "model_type": "llama", "vocab_size": 61, "hidden_size": 24, "intermediate_size": 20,
    "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "initializer_range": 0.2, "tie_word_embeddings": true, "hidden_act": "silu"
}"#;

/// The configuration of a golden model.
pub(crate) fn golden(case: &str) -> String {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("golden/families").join(case);
    std::fs::read_to_string(folder.join("config.json")).unwrap()
}

fn check(model: &str, worlds: &[usize], overrides: &[&str]) -> VerifyReport {
    check_on(&threads(), model, worlds, overrides)
}

fn check_on(
    launcher: &impl Launcher<Memory = HostMemory>,
    model: &str,
    worlds: &[usize],
    overrides: &[&str],
) -> VerifyReport {
    let dir = tempfile::tempdir().unwrap();
    let vocab = HfConfig::parse(model).unwrap().summary().vocab as u32;
    let wrap = match model {
        _ if model.contains("\"llama\"") => "fsdp.wrap=[\"LlamaDecoderLayer\"]",
        GPT2 => "fsdp.wrap=[\"GPT2Block\"]",
        _ => "fsdp.min_num_params=500",
    };
    let overrides = [&["data.seq_len=8", wrap], overrides].concat();
    let job = job(model, config(dir.path(), vocab, &overrides));
    let report = verify(&job, launcher, &VerifyOptions::new(worlds, 3)).unwrap_or_else(|e| panic!("{e}"));
    for world in &report.worlds {
        assert!(world.failures.is_empty(), "world {}: {:#?}", world.world, world.failures);
        assert_eq!(world.promise, "equal bits (D2)", "world {}", world.world);
        let exchanges = world.traffic.iter().find(|line| line.collective == "all-to-all");
        let redistributes = exchanges.is_some_and(|line| line.calls > 0);
        assert_eq!(redistributes, world.context > 1, "world {}", world.world);
    }
    report
}

#[test]
fn ranks_that_share_samples_are_bitwise_equal_to_all_chunks_on_one_rank() {
    let report = check(LLAMA, &[2, 4, 8], &["fsdp.mesh={ context = 2 }"]);
    assert_eq!(report.worlds.len(), 3);
    check(TIED, &[4, 8], &["fsdp.mesh={ context = 4 }", "train.micro_batch_size=1"]);
    check(TIED, &[4, 8], &["fsdp.mesh={ context = 2, replicate = 2 }"]);
}

/// States of linear attention would have to travel from rank to rank.
#[test]
fn linear_attention_is_refused_on_a_context_axis() {
    let model = golden("qwen3_5_text");
    for overrides in [&["run.ranks=2", "fsdp.mesh={ context = 2 }"][..], &["fsdp.chunks={ context = 2 }"]] {
        let dir = tempfile::tempdir().unwrap();
        let config =
            config(dir.path(), 31, &[&["data.seq_len=8", "fsdp.min_num_params=500"], overrides].concat());
        let architecture = HfConfig::parse(&model).unwrap().build().unwrap();
        let init = Arc::new(architecture.description().init.clone());
        let error = Job::new(config, architecture, InitSource::Random { seed: 0, init }).unwrap_err();
        let reason = "linear attention carries a state from token to token";
        assert!(error.to_string().contains(reason) && error.to_string().contains("context"), "{error}");
    }
}

/// The number of chunks determines the bits, and not the ranks that share them.
#[test]
fn every_mesh_of_one_chunking_has_the_bits_of_the_oracle() {
    let chunks = "fsdp.chunks={ context = 4 }";
    for context in [1, 2, 4] {
        let mesh = format!("fsdp.mesh={{ context = {context} }}");
        let report = check(TIED, &[1, 2, 4, 8], &[chunks, &mesh]);
        assert_eq!(report.worlds.iter().map(|world| world.context).max(), Some(context));
    }
    check(TIED, &[4, 8], &[chunks, "fsdp.mesh={ context = 2, replicate = 2 }"]);
    check(TIED, &[2], &[chunks, "fsdp.accumulation=\"unsharded\""]);
}

/// With more chunks than key heads, several have the same ones: down to a single key head.
#[test]
fn chunks_of_one_key_head_have_the_bits_of_the_oracle() {
    let one = TIED.replace("\"num_key_value_heads\": 4", "\"num_key_value_heads\": 1");
    let two = TIED.replace("\"num_key_value_heads\": 4", "\"num_key_value_heads\": 2");
    for model in [&one, &two] {
        for context in [1, 2, 4, 8] {
            let mesh = format!("fsdp.mesh={{ context = {context} }}");
            let ranks = format!("run.ranks={context}");
            let report = check(model, &[context], &["fsdp.chunks={ context = 8 }", &mesh, &ranks]);
            assert_eq!(report.worlds.len(), 1);
        }
    }
    check(&one, &[4], &["fsdp.mesh={ context = 2 }", "fsdp.param_dtype=\"bf16\""]);
    check(&one, &[4], &["fsdp.mesh={ context = 4 }", "fsdp.activation_checkpointing=\"selective\""]);
}

#[test]
fn run_resumes_on_other_meshes_of_its_chunks_with_the_same_bits() {
    let case = |before: &'static str, after: [&'static str; 2]| Case {
        model: LLAMA,
        settings: vec!["data.seq_len=8", "fsdp.chunks={ context = 2 }"],
        before: vec!["run.ranks=4", before],
        after: after.to_vec(),
        cut: 2,
        steps: 4,
        is_stopped: false,
    };
    case("fsdp.mesh={ context = 2 }", ["run.ranks=2", "fsdp.mesh={ context = 1 }"]).check();
    case("fsdp.mesh={ replicate = 2 }", ["run.ranks=8", "fsdp.mesh={ context = 2, replicate = 2 }"]).check();
}

/// Every chunk has a mask, whichever rank computes it.
#[test]
fn dropout_is_the_same_on_every_mesh_of_its_chunks() {
    for context in ["1", "2"] {
        let mesh = format!("fsdp.mesh={{ context = {context} }}");
        let selective = "fsdp.activation_checkpointing=\"selective\"";
        check(GPT2, &[2, 4], &["fsdp.chunks={ context = 2 }", &mesh, selective]);
    }
}

/// Loads of routers are sums over all chunks, and the balancing loss of a micro-batch counts once.
#[test]
fn mixtures_of_experts_have_the_bits_of_the_oracle_on_every_mesh_of_their_chunks() {
    for case in ["mixtral-balanced", "qwen3_moe", "deepseek_v3", "qwen2_moe", "gpt_oss"] {
        let model = golden(case);
        let losses = |mesh: &str, worlds: &[usize]| {
            let terms =
                ["fsdp.chunks={ context = 2 }", "train.router_aux_loss_coef=0.3", "train.z_loss=0.01"];
            let report = check(&model, worlds, &[&terms[..], &[mesh]].concat());
            report.worlds.into_iter().map(|world| world.losses).collect::<Vec<_>>()
        };
        let alone = losses("fsdp.mesh={ context = 1 }", &[1, 2, 4]);
        let shared = losses("fsdp.mesh={ context = 2 }", &[2, 4, 8]);
        assert!(alone.iter().chain(&shared).all(|losses| *losses == alone[0]), "{case}");
    }
}

#[test]
fn policies_change_no_bit_of_chunks() {
    let policies: [&[&str]; 4] = [
        &["fsdp.activation_checkpointing=\"full\"", "fsdp.reshard_after_forward=false"],
        &["fsdp.activation_checkpointing=\"selective\"", "fsdp.offload=\"cpu\""],
        &["fsdp.reshard_after_forward=2", "fsdp.forward_prefetch=0"],
        &["fsdp.param_dtype=\"bf16\"", "train.z_loss=0.01"],
    ];
    for policy in policies {
        for chunks in ["fsdp.chunks={ context = 2 }", "fsdp.chunks={ context = 4 }"] {
            check(TIED, &[4], &[&["fsdp.mesh={ context = 2 }", chunks], policy].concat());
        }
    }
}

#[test]
fn chunks_are_exchanged_over_tcp() {
    let mesh = ["fsdp.mesh={ context = 4 }", "fsdp.param_dtype=\"bf16\""];
    check_on(&OverTcp { ranks_per_process: 2 }, TIED, &[4], &mesh);
}

#[test]
fn packed_documents_stay_apart_in_chunks() {
    let dir = tempfile::tempdir().unwrap();
    let documents = dir.path().join("documents");
    std::fs::create_dir(&documents).unwrap();
    for document in 0..90_u16 {
        let ids = (0..1 + document * 7 % 9).map(|i| (i * i + document) % 61);
        let bytes: Vec<u8> = ids.flat_map(u16::to_le_bytes).collect();
        std::fs::write(documents.join(format!("{document}.bin")), bytes).unwrap();
    }
    let train = format!("data.train=[\"{}\"]", documents.display());
    let packed: [&str; 4] =
        [&train, "data.packing=\"packed\"", "data.eos=2", "fsdp.activation_checkpointing=\"selective\""];
    check(TIED, &[2, 4], &[&["fsdp.mesh={ context = 2 }"], &packed[..]].concat());
}

/// Chunks change the order of sums, and nothing else. A balancing loss that counted once per chunk, or only the routes of
/// one, would be far from that of whole samples.
#[test]
fn losses_are_near_those_of_whole_samples() {
    let cases = [(TIED.to_owned(), &["2", "4", "8"][..]), (golden("mixtral-balanced"), &["2", "4"])];
    for (model, contexts) in cases {
        let losses = |context: &str| {
            let dir = tempfile::tempdir().unwrap();
            let mesh = format!("fsdp.mesh={{ context = {context} }}");
            let types = ["fsdp.param_dtype=\"f64\"", "fsdp.reduce_dtype=\"f64\""];
            let overrides =
                [&types[..], &["data.seq_len=8", "train.z_loss=0.01", "run.ranks=8", &mesh]].concat();
            let vocab = HfConfig::parse(&model).unwrap().summary().vocab as u32;
            let job = job(&model, config(dir.path(), vocab, &overrides));
            let report = verify(&job, &threads(), &VerifyOptions::new(&[8], 3)).unwrap();
            report.worlds[0].losses.clone()
        };
        let whole = losses("1");
        for context in contexts {
            for (got, want) in losses(context).into_iter().zip(&whole) {
                assert!((got - want).abs() < 1e-11 * want, "{context} chunks: {got}, not {want}");
            }
        }
    }
}

#[test]
fn models_that_cannot_be_cut_are_refused_by_key() {
    let refusal = |model: &str, vocab: u32, context: usize| {
        let dir = tempfile::tempdir().unwrap();
        let mesh = format!("fsdp.mesh={{ context = {context} }}");
        let config = config(dir.path(), vocab, &["data.seq_len=8", "run.ranks=8", &mesh]);
        let architecture = HfConfig::parse(model).unwrap().build().unwrap();
        let init = Arc::new(architecture.description().init.clone());
        let error = Job::new(config, architecture, InitSource::Random { seed: 0, init }).unwrap_err();
        error.to_string()
    };
    let few_heads = refusal(LLAMA, 61, 8);
    assert!(few_heads.contains("fsdp.mesh.context"), "{few_heads}");
    assert!(few_heads.contains("4 query heads and 2 key heads cannot be shared among 8"), "{few_heads}");
}
