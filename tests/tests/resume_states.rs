//! Optimizer state and loss scale survive a resume, on any number of ranks.

use crate::half_precision::OVERFLOWING;
use crate::resume::Case;
use crate::support::{GPT2, LLAMA};

/// Adafactor's sums depend on the mesh, so bits are equal only on the same mesh.
#[test]
fn adafactor_resumes_with_factored_state() {
    let mesh = vec!["run.ranks=4"];
    Case {
        model: GPT2,
        settings: vec!["train.optimizer={name='adafactor', relative_step=false, lr=1e-2, beta1=0.9}"],
        before: mesh.clone(),
        after: mesh,
        cut: 2,
        steps: 4,
        is_stopped: false,
    }
    .check();
}

/// A scale that was not saved would have to shrink again, with skipped steps.
#[test]
fn f16_run_resumes_with_loss_scale_at_any_world_size() {
    for after in [vec!["run.ranks=2"], vec!["run.ranks=4", "fsdp.offload=\"cpu\"", "checkpoint.async=false"]]
    {
        let case = Case {
            model: LLAMA,
            settings: vec!["fsdp.param_dtype=f16", "train.optimizer={name='adamw', lr=3e-3}", OVERFLOWING],
            before: vec!["run.ranks=4"],
            after,
            cut: 9,
            steps: 14,
            is_stopped: false,
        };
        case.check();
    }
}

/// A Llama whose matrices are large enough for 8-bit moments, with rows of less than a block and of more than one.
const WIDE: &str = r#"{
    "model_type": "llama", "vocab_size": 65, "hidden_size": 64, "intermediate_size": 300,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "initializer_range": 0.2, "tie_word_embeddings": false, "hidden_act": "silu"
}"#;

#[test]
fn eight_bit_moments_resume_at_any_world_size() {
    for after in [
        vec!["run.ranks=1"],
        vec!["run.ranks=2", "fsdp.offload=\"cpu\"", "checkpoint.async=false"],
        vec!["run.ranks=8", "fsdp.mesh.replicate=2"],
    ] {
        Case {
            model: WIDE,
            settings: vec!["train.optimizer={name='adamw8bit', lr=1e-2}"],
            before: vec!["run.ranks=4"],
            after,
            cut: 2,
            steps: 4,
            is_stopped: false,
        }
        .check();
    }
}

#[test]
fn muon_momentum_resumes_at_any_world_size() {
    for after in [
        vec!["run.ranks=1"],
        vec!["run.ranks=2", "fsdp.wrap=[]", "checkpoint.async=false"],
        vec!["run.ranks=8", "fsdp.mesh.replicate=2"],
    ] {
        Case {
            model: WIDE,
            settings: vec!["train.optimizer={name='muon', lr=1e-2, adamw_lr=1e-2}"],
            before: vec!["run.ranks=4"],
            after,
            cut: 2,
            steps: 4,
            is_stopped: false,
        }
        .check();
    }
}
