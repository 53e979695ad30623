use std::path::PathBuf;

use fsdp_ckpt::checkpoint::{Global, Tensor};
use fsdp_ckpt::safetensors::TensorType;

use super::*;

/// A checkpoint with one tensor of the optimizer.
fn state(path: &[&str]) -> Checkpoint {
    let steps: Vec<Key> = path.iter().map(|step| Key::Name((*step).to_owned())).collect();
    let tensor = Tensor {
        path: steps,
        role: Role::Optimizer,
        dtype: TensorType::U8,
        shape: vec![256],
        chunks: Vec::new(),
    };
    let tensors = [(path.join("."), tensor)].into();
    Checkpoint { path: PathBuf::from("a"), tensors, ..Checkpoint::default() }
}

#[test]
fn moments_of_8_bits_are_found_in_states() {
    assert_eq!(rounded_by(&state(&["optimizer", "state", "0", "exp_avg"])), None);
    let theirs = state(&["optimizer", "state", "0", "qmap1"]);
    assert_eq!(rounded_by(&theirs), Some(("bitsandbytes", "optimizer.state.0.qmap1".to_owned())));
    let mut other = state(&["optimizer", "state", "0", "exp_avg", "codes"]);
    let class = |module: &str, name: &str| Global { module: module.to_owned(), name: name.to_owned() };
    other.opaque.insert("a".to_owned(), class("torchao.tensor", "OtherTensor"));
    assert_eq!(rounded_by(&other), None);
    other.opaque.insert("b".to_owned(), class("torchao.optim.subclass_4bit", "OptimState4bit"));
    assert_eq!(rounded_by(&other), Some(("torchao", "b".to_owned())));
}
