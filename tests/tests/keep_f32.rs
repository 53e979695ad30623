//! Parameters that are kept in f32 while the rest computes in 16 bits: the same bits at every world size and on every mesh, and
//! memory by the ledger.

use fsdp_core::DType;
use fsdp_core::model::ParamSpec;
use fsdp_train::verify::{VerifyOptions, verify};

use crate::context::golden;
use crate::expert_axis;
use crate::lora::{adapted, job};
use crate::qlora::BLOCKS;
use crate::support::{GPT2, LLAMA, config, threads};

const BF16: &str = "fsdp.param_dtype=\"bf16\"";
const NORMS: &str = "fsdp.keep_f32=['norm']";

fn check(model: &str, overrides: &[&str]) {
    let dir = tempfile::tempdir().unwrap();
    let job = job(model, config(dir.path(), 61, overrides));
    let is_kept = |param: &&ParamSpec| param.keep_f32 && param.quantized.is_none();
    let kept = job.plan.spec.params.iter().filter(is_kept).count();
    let segments = job.plan.layout.units.iter().flat_map(|unit| &unit.segments);
    let in_f32: usize =
        segments.filter(|segment| segment.dtype == DType::F32).map(|segment| segment.params.len()).sum();
    assert!(kept > 0 && in_f32 == kept, "{overrides:?}: {in_f32} of {kept}");
    let report = verify(&job, &threads(), &VerifyOptions::new(&[2, 4], 3)).unwrap();
    assert!(report.holds(), "{overrides:?}: {report:#?}");
    for world in &report.worlds {
        assert_eq!(world.promise, "equal bits (D2)", "{overrides:?}");
        assert!(
            world.memory.iter().all(|line| line.predicted_bytes == line.counted_bytes),
            "{overrides:?}: {:#?}",
            world.memory
        );
    }
}

#[test]
fn sharded_training_with_wider_norms_matches_the_oracle_and_predicted_memory() {
    let cases: [&[&str]; 9] = [
        &[BF16, NORMS],
        &[BF16, NORMS, "fsdp.activation_checkpointing=\"full\"", "fsdp.reshard_after_forward=2"],
        &[BF16, NORMS, "fsdp.activation_checkpointing=\"selective\"", "fsdp.offload=\"cpu\""],
        &[BF16, NORMS, "fsdp.mesh={ replicate = 2 }"],
        &["fsdp.param_dtype=\"f16\"", NORMS, "train.loss_scale={ init = 256 }"],
        &[BF16, "fsdp.keep_f32=['o_proj', 'gate_proj', 'up_proj']", "fsdp.accumulation=\"unsharded\""],
        &[BF16, NORMS, "fsdp.frozen=['layers.0']", "train.optimizer={ name = \"muon\", lr = 0.01 }"],
        &[BF16, "fsdp.keep_f32=['input_layernorm', 'o_proj']", "adapter.rank=2"],
        &[BF16, "fsdp.keep_f32=['o_proj']", "adapter.rank=2", "adapter.dora=true", "adapter.dropout=0.1"],
    ];
    for overrides in cases {
        let wrap = ["fsdp.wrap=[\"LlamaDecoderLayer\"]"];
        check(LLAMA, &[&wrap[..], overrides].concat());
    }
    let decay = "fsdp.keep_f32=['A_log', 'dt_bias']";
    check(&vocabulary("qwen3_next"), &[BF16, decay, "fsdp.activation_checkpointing=\"full\""]);
    check(&vocabulary("gpt_oss"), &[BF16]);
    let blocks = ["fsdp.wrap=[\"LlamaDecoderLayer\"]", "adapter.rank=2", "adapter.quantize=\"nf4\""];
    check(BLOCKS, &[&blocks[..], &[BF16, "fsdp.keep_f32=['norm', 'o_proj']"]].concat());
    check(&GPT2.replace("53", "61"), &[BF16, "fsdp.keep_f32=['ln_']"]);
}

#[test]
fn routers_in_f32_have_the_same_bits_on_every_mesh() {
    for case in ["deepseek_v3", "glm4_moe", "glm4_moe_lite", "ernie4_5_moe", "minimax_m2"] {
        let meshes = [[1, 1, 1, 1], [1, 2, 1, 2], [2, 2, 1, 1], [1, 1, 2, 2]];
        expert_axis::check(&expert_axis::model(case), &meshes, &[BF16]);
        check(&vocabulary(case), &[BF16, "fsdp.activation_checkpointing=\"full\""]);
    }
    check(&vocabulary("deepseek_v3"), &[BF16, "adapter.rank=2"]);
    let gate = "fsdp.keep_f32=['mlp.gate.weight']";
    let experts = "adapter.target_parameters=['experts.gate_up_proj', 'experts.down_proj']";
    check(&vocabulary("qwen3_moe"), &[BF16, gate, "adapter.rank=2", experts]);
    expert_axis::check(
        &expert_axis::model("qwen3_moe"),
        &[[1, 1, 1, 1], [1, 4, 1, 4]],
        &[BF16, gate, "train.router_aux_loss_coef=0.1"],
    );
}

/// A model of the golden files, with the vocabulary of the data.
fn vocabulary(case: &str) -> String {
    golden(case).replace("\"vocab_size\": 31", "\"vocab_size\": 61")
}

/// The run file's patterns replace those of the family.
#[test]
fn patterns_replace_the_parameters_that_the_family_keeps() {
    let dir = tempfile::tempdir().unwrap();
    let kept = |patterns: &[&str]| {
        let job = job(&vocabulary("deepseek_v3"), config(dir.path(), 61, &[&[BF16][..], patterns].concat()));
        let kept = job.plan.spec.params.iter().filter(|param| param.keep_f32);
        kept.map(|param: &ParamSpec| {
            param.fqn.rsplit_once("mlp.").map_or(&*param.fqn, |(_, end)| end).to_owned()
        })
        .collect::<std::collections::BTreeSet<_>>()
    };
    let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
    assert_eq!(kept(&[]), names(&["gate.weight", "gate.e_score_correction_bias"]));
    assert_eq!(kept(&["fsdp.keep_f32=\"family\""]), kept(&[]));
    assert_eq!(kept(&["fsdp.keep_f32=[]"]), names(&[]));
    assert_eq!(kept(&["fsdp.keep_f32=['^model.norm']"]), names(&["model.norm.weight"]));
}

#[test]
fn parameters_that_cannot_be_wider_are_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let refused = |model: &str, pattern: &str| {
        let keep = format!("fsdp.keep_f32=['{pattern}']");
        adapted(model, &config(dir.path(), 61, &[BF16, &keep])).map(drop).unwrap_err().to_string()
    };
    for (model, pattern, named) in [
        (LLAMA, "lm_head", "`lm_head.weight` is the weight of the output head"),
        (LLAMA, "nothing", "matches no parameter"),
        (LLAMA, "embed", "`model.embed_tokens.weight` is gathered in f32"),
        (LLAMA, "q_proj", "k_proj.weight` is gathered in bf16"),
        (&vocabulary("qwen3_moe"), "experts.0", "is gathered in f32"),
        (&vocabulary("deepseek_v3"), "correction", "gate.weight` is gathered in bf16"),
    ] {
        let message = refused(model, pattern);
        assert!(message.contains("fsdp.keep_f32") && message.contains(named), "{pattern}: {message}");
    }
}
