//! Mixtures whose experts are on several ranks, against the oracle, both on libtorch.

use fsdp_config::Ranks;
use fsdp_core::{Axis, Mesh};
use fsdp_cuda::torch::Kernels;
use fsdp_train::verify::{VerifyOptions, verify};

use crate::parity::differing;
use crate::ranks::threads;
use crate::support::{config, job};

/// A tiny Mixtral: four experts, two per token, with a balancing loss. Rows have multiples of 64 bytes in every dtype, so that
/// libtorch's products repeat their bits wherever the slots of an expert begin.
const MIXTRAL: &str = r#"{
    "model_type": "mixtral", "vocab_size": 61, "hidden_size": 32, "intermediate_size": 32,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_local_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 16, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "initializer_range": 0.2, "tie_word_embeddings": false, "hidden_act": "silu",
    "output_router_logits": true, "router_aux_loss_coef": 0.1
}"#;

/// A mesh with shard and expert axes of these sizes.
fn mesh([shard, expert]: [usize; 2]) -> Ranks {
    Ranks::On(Mesh::new([(Axis::Shard, shard)]).unwrap().with_expert(expert).unwrap())
}

fn check(kernels: Kernels, meshes: &[[usize; 2]], overrides: &[&str]) {
    let dir = tempfile::tempdir().unwrap();
    let wrap = ["fsdp.wrap=[\"MixtralDecoderLayer\"]"];
    let job = job(MIXTRAL, config(dir.path(), 61, &[&wrap, overrides].concat()));
    let worlds = meshes.iter().copied().map(mesh).collect();
    let options = VerifyOptions { worlds, ..VerifyOptions::new(&[], 3) };
    let report = verify(&job, &threads(kernels), &options).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(report.worlds.len(), meshes.len(), "{:?}", report.skipped);
    for (world, sizes) in report.worlds.iter().zip(meshes) {
        assert!(world.failures.is_empty(), "{sizes:?} with {kernels:?}: {:#?}", world.failures);
        assert_eq!(world.promise, "derived bounds");
        assert!(world.gradients.compared > 0);
        // On one thread, the bits of libtorch's operations repeat.
        assert_eq!((differing(world), world.norm_difference), (0, 0.0), "{sizes:?} with {kernels:?}");
    }
}

#[test]
fn ranks_with_some_experts_match_one_with_all() {
    for kernels in [Kernels::Fused, Kernels::Aten] {
        for (param, reduce) in [("f32", "f32"), ("bf16", "f32"), ("f64", "f64")] {
            let types = ["param", "reduce"].into_iter().zip([param, reduce]);
            let types: Vec<String> =
                types.map(|(of, dtype)| format!("fsdp.{of}_dtype=\"{dtype}\"")).collect();
            let overrides = [&types[0], &types[1], "fsdp.chunks={ expert = 2 }"];
            check(kernels, &[[1, 1], [2, 2], [4, 2]], &overrides);
        }
    }
}

#[test]
fn chunks_recomputed_or_offloaded_match_one_rank() {
    let chunks = "fsdp.chunks={ expert = 4 }";
    check(Kernels::Aten, &[[2, 1], [2, 2], [4, 4]], &[chunks]);
    for policy in ["fsdp.activation_checkpointing=\"full\"", "fsdp.offload=\"cpu\""] {
        check(Kernels::Aten, &[[4, 2]], &[chunks, policy]);
    }
}
