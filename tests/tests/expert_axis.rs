//! Expert parallelism: ranks that have some of the experts each give the bits of one rank that has all of them.

use std::sync::Arc;

use fsdp_comm::launch::Launcher;
use fsdp_config::Ranks;
use fsdp_core::{Axis, Mesh};
use fsdp_nn::HostMemory;
use fsdp_nn::hf::HfConfig;
use fsdp_train::verify::{VerifyOptions, VerifyReport, verify};
use fsdp_train::{InitSource, Job};

use crate::context::golden;
use crate::lora::job;
use crate::over_tcp::OverTcp;
use crate::resume::Case;
use crate::support::{LLAMA, config, threads};

/// A tiny model of a family, with eight experts or, if it has five, four.
pub(crate) fn model(case: &str) -> String {
    let mut text = golden(case).replace("\"vocab_size\": 31", "\"vocab_size\": 61");
    let mut changed = 0;
    for (given, divisible) in [("5", "4"), ("6", "8"), ("8", "8")] {
        for key in ["num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"] {
            let [given, divisible] = [given, divisible].map(|number| format!("\"{key}\": {number},"));
            changed += usize::from(text.contains(&given));
            text = text.replace(&given, &divisible);
        }
    }
    assert!(changed > 0, "{case}");
    text
}

/// A mesh of these sizes: replicate, shard, context, expert.
fn mesh([replicate, shard, context, expert]: [usize; 4]) -> Mesh {
    let axes = [(Axis::Replicate, replicate), (Axis::Shard, shard), (Axis::Context, context)];
    Mesh::new(axes).unwrap().with_expert(expert).unwrap()
}

fn check_on(
    launcher: &impl Launcher<Memory = HostMemory>,
    model: &str,
    meshes: &[[usize; 4]],
    overrides: &[&str],
) -> VerifyReport {
    let dir = tempfile::tempdir().unwrap();
    let vocab = HfConfig::parse(model).unwrap().summary().vocab as u32;
    let largest = |axis: usize| meshes.iter().map(|sizes| sizes[axis]).max().unwrap();
    let chunks = format!("fsdp.chunks={{ context = {}, expert = {} }}", largest(2), largest(3));
    let wrap = if overrides.iter().any(|key| key.contains("fsdp.wrap")) {
        None
    } else {
        Some("fsdp.min_num_params=500")
    };
    let overrides = [&["data.seq_len=8", &chunks], overrides, wrap.as_slice()].concat();
    let job = job(model, config(dir.path(), vocab, &overrides));
    let worlds = meshes.iter().map(|sizes| Ranks::On(mesh(*sizes))).collect();
    let options = VerifyOptions { worlds, ..VerifyOptions::new(&[], 3) };
    let report = verify(&job, launcher, &options).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(report.worlds.len(), meshes.len(), "{:?}", report.skipped);
    for (world, sizes) in report.worlds.iter().zip(meshes) {
        assert!(world.failures.is_empty(), "{sizes:?}: {:#?}", world.failures);
        assert_eq!(world.promise, "equal bits (D2)", "{sizes:?}");
        assert_eq!(world.losses, report.worlds[0].losses, "{sizes:?}");
    }
    report
}

pub(crate) fn check(model: &str, meshes: &[[usize; 4]], overrides: &[&str]) -> VerifyReport {
    check_on(&threads(), model, meshes, overrides)
}

#[test]
fn every_mesh_of_one_chunking_has_the_bits_of_the_oracle() {
    let meshes =
        [[1, 1, 1, 1], [1, 2, 1, 2], [1, 4, 1, 4], [1, 4, 1, 2], [2, 2, 1, 2], [2, 4, 1, 4], [1, 8, 1, 1]];
    for case in ["mixtral", "qwen3_moe", "deepseek_v3", "glm4_moe", "qwen2_moe", "gpt_oss", "granitemoe"] {
        check(&model(case), &meshes, &["fsdp.chunks={ expert = 4 }"]);
    }
    for case in ["qwen3_moe", "deepseek_v3", "glm4_moe"] {
        check(&model(case), &[[1, 8, 1, 8], [1, 4, 1, 4]], &["fsdp.chunks={ expert = 8 }"]);
    }
    let others = ["deepseek_v3-direct", "glm4_moe_lite", "minimax_m2", "olmoe", "ernie4_5_moe"];
    for case in others.into_iter().chain(["qwen3_5_moe_text", "qwen3_next"]) {
        check(&model(case), &meshes[..3], &["fsdp.chunks={ expert = 4 }"]);
    }
}

#[test]
fn expert_axis_is_carved_out_of_shards_and_chunks_of_samples() {
    let meshes = [
        [1, 1, 1, 1],
        [1, 1, 2, 2],
        [1, 2, 2, 2],
        [1, 2, 2, 4],
        [1, 2, 1, 2],
        [2, 1, 2, 2],
        [1, 4, 2, 4],
        [1, 4, 1, 1],
    ];
    let chunks = ["fsdp.chunks={ context = 2, expert = 4 }"];
    check(&model("qwen3_moe"), &meshes, &chunks);
    let terms = ["train.router_aux_loss_coef=0.3", "train.z_loss=0.01"];
    check(&model("mixtral-balanced"), &meshes, &[&chunks[..], &terms].concat());
}

#[test]
fn policies_change_no_bit_of_experts() {
    let policies: [&[&str]; 6] = [
        &["fsdp.activation_checkpointing=\"full\"", "fsdp.reshard_after_forward=false"],
        &["fsdp.activation_checkpointing=\"selective\"", "fsdp.offload=\"cpu\""],
        &["fsdp.reshard_after_forward=2", "fsdp.forward_prefetch=0"],
        &["fsdp.param_dtype=\"bf16\"", "train.z_loss=0.01"],
        &["fsdp.param_dtype=\"f16\"", "train.loss_scale={ init = 256 }"],
        &["fsdp.wrap=[\"MixtralDecoderLayer\"]", "train.global_batch_size=16", "fsdp.frozen=[\"embed\"]"],
    ];
    for policy in policies {
        check(&model("mixtral"), &[[1, 4, 1, 2], [1, 2, 1, 2], [2, 2, 1, 2]], policy);
    }
}

#[test]
fn optimizers_of_whole_matrices_update_experts_on_their_ranks() {
    let muon = ["train.optimizer={ name = \"muon\", lr = 0.01 }", "train.grad_clip=0.5"];
    check(&model("qwen3_moe"), &[[1, 1, 1, 1], [1, 4, 1, 2], [1, 4, 1, 4], [2, 2, 1, 2]], &muon);
    let eight_bits = ["train.optimizer={ name = \"adamw8bit\", lr = 0.01 }"];
    check(&model("qwen3_moe"), &[[1, 1, 1, 1], [1, 4, 1, 2], [1, 4, 1, 4]], &eight_bits);
}

#[test]
fn rows_of_experts_are_gathered_over_tcp() {
    let half = ["fsdp.param_dtype=\"bf16\""];
    check_on(&OverTcp { ranks_per_process: 2 }, &model("mixtral"), &[[1, 4, 1, 2]], &half);
    check_on(&OverTcp { ranks_per_process: 2 }, &model("mixtral"), &[[1, 2, 2, 4]], &half);
}

/// On larger axes, rows are sent in rounds: more of them, if many rows have experts on one rank.
#[test]
fn rows_are_sent_to_the_ranks_of_their_experts_however_uneven() {
    let dir = tempfile::tempdir().unwrap();
    let equal = dir.path().join("equal.bin");
    std::fs::write(&equal, [5u16.to_le_bytes(); 700].concat()).unwrap();
    let equal = format!("data.train=[\"{}\"]", equal.display());
    let rounds = |expert: usize, overrides: &[&str]| {
        let rows = ["data.seq_len=16", "train.micro_batch_size=4"];
        let report = check(&model("mixtral"), &[[1, 4, 1, expert]], &[&rows, overrides].concat());
        let mut lines = report.worlds[0].traffic.iter();
        lines.find(|line| line.collective == "all-to-all").map_or(0, |line| line.calls)
    };
    assert_eq!(rounds(2, &[]), 0, "to gather all moves fewer rows");
    // On every rank, for 3 steps and 2 layers: rows and their sums in forward, and their gradients in backward.
    let [even, uneven] =
        [rounds(4, &[]), rounds(4, &[&equal])].map(|rounds| rounds as f64 / (4 * 3 * 2 * 4) as f64);
    assert_eq!(uneven, 4.0, "two ranks get all rows, a quarter of them in each round");
    assert!((1.0..4.0).contains(&even), "{even}");
}

#[test]
fn run_resumes_on_other_meshes_of_its_chunks_with_the_same_bits() {
    let model: &'static str = Box::leak(model("qwen3_moe").into_boxed_str());
    let case = |before: &'static str, after: [&'static str; 2]| Case {
        model,
        settings: vec!["fsdp.min_num_params=500", "fsdp.chunks={ expert = 4 }"],
        before: vec!["run.ranks=4", before],
        after: after.to_vec(),
        cut: 2,
        steps: 4,
        is_stopped: false,
    };
    case("fsdp.mesh={ expert = 4 }", ["run.ranks=2", "fsdp.mesh={ expert = 2 }"]).check();
    case("fsdp.mesh={ replicate = 2 }", ["run.ranks=8", "fsdp.mesh={ expert = 2, replicate = 2 }"]).check();
}

/// Chunks of experts change the order of sums, and nothing else.
#[test]
fn losses_are_near_those_of_whole_mixtures() {
    let types = ["fsdp.param_dtype=\"f64\"", "fsdp.reduce_dtype=\"f64\"", "train.router_aux_loss_coef=0.3"];
    let losses = |expert: usize| {
        let report = check(
            &model("mixtral-balanced"),
            &[[1, 4, 1, expert]],
            &[&types[..], &["train.z_loss=0.01"]].concat(),
        );
        report.worlds[0].losses.clone()
    };
    let whole = losses(1);
    for expert in [2, 4] {
        for (got, want) in losses(expert).into_iter().zip(&whole) {
            assert!((got - want).abs() < 1e-11 * want, "{expert} ranks: {got}, not {want}");
        }
    }
}

#[test]
fn axes_that_do_not_fit_are_refused_by_key() {
    let refusal = |model: &str, overrides: &[&str]| {
        let dir = tempfile::tempdir().unwrap();
        let vocab = HfConfig::parse(model).unwrap().summary().vocab as u32;
        let config = config(dir.path(), vocab, &[&["fsdp.min_num_params=500"], overrides].concat());
        let architecture = HfConfig::parse(model).unwrap().build().unwrap();
        let init = Arc::new(architecture.description().init.clone());
        Job::new(config, architecture, InitSource::Random { seed: 0, init }).unwrap_err().to_string()
    };
    let dense = refusal(LLAMA, &["run.ranks=2", "fsdp.mesh={ expert = 2 }"]);
    assert!(dense.contains("mesh.expert") && dense.contains("no mixtures of experts"), "{dense}");
    let chunks = refusal(LLAMA, &["fsdp.chunks={ expert = 2 }"]);
    assert!(
        chunks.contains("fsdp.chunks.expert") && chunks.contains("no mixtures whose experts"),
        "{chunks}"
    );
    let odd = refusal(&golden("mixtral"), &["run.ranks=2", "fsdp.mesh={ expert = 2 }"]);
    assert!(odd.contains("mesh.expert = 2: must divide the number of experts of"), "{odd}");
    let odd = refusal(&golden("mixtral"), &["fsdp.chunks={ expert = 2 }"]);
    assert!(
        odd.contains("fsdp.chunks.expert")
            && odd.contains("2 does not divide the 5 experts of a mixture, but 1 does"),
        "{odd}"
    );
    let average = ["run.ranks=2", "fsdp.mesh={ expert = 2 }", "fsdp.reduce_op=\"average\""];
    let average = refusal(&model("mixtral"), &average);
    assert!(average.contains("reduce_op"), "{average}");
    let unlike = ["run.ranks=2", "fsdp.mesh={ expert = 2 }", "fsdp.frozen=[\"experts.0\"]"];
    let unlike = refusal(&model("mixtral"), &unlike);
    assert!(unlike.contains("must be alike"), "{unlike}");
}
