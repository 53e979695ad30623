//! Checkpoints of other trainers are read, bit for bit, to the state that was saved (`scripts/make_fixtures`).

use std::collections::BTreeMap;

use fsdp_ckpt::{
    checkpoint::{Checkpoint, Role},
    formats,
    safetensors::SafetensorsReader,
};

use crate::{bytes_of, fixture};

/// Checks that a checkpoint holds exactly the model and the optimizer state of an expected file.
fn assert_holds(checkpoint: &str, expected: &str, (model, optimizer): (&str, &str)) {
    assert_part(checkpoint, expected, (Role::Model, model));
    assert_part(checkpoint, expected, (Role::Optimizer, optimizer));
    let found = formats::open(fixture(checkpoint)).unwrap();
    assert!(found.tensors.values().all(|tensor| tensor.role != Role::Other), "{checkpoint}");
}

/// Checks that the tensors of a role, whose names start with `ours`, equal those of an expected file.
fn assert_part(checkpoint: &str, expected: &str, (role, ours): (Role, &str)) {
    let found = formats::open(fixture(checkpoint)).unwrap();
    found.check_coverage().unwrap();
    let expected = SafetensorsReader::open(fixture(expected)).unwrap();
    let theirs = if role == Role::Model { "model." } else { "optim." };
    let renamed = |name: &str| name.strip_prefix(theirs).map(|rest| format!("{ours}{rest}"));
    let names: BTreeMap<String, &str> =
        expected.names().filter_map(|name| Some((renamed(name)?, name))).collect();
    let part = found.tensors.iter().filter(|(_, tensor)| tensor.role == role).map(|(name, _)| name);
    assert!(part.eq(names.keys()), "{checkpoint}: {:?}", found.tensors.keys());
    for (name, theirs) in names {
        let entry = expected.entry(theirs).unwrap();
        let tensor = &found.tensors[&name];
        let shape: Vec<u64> = entry.shape().iter().map(|&dim| dim as u64).collect();
        assert_eq!((tensor.dtype, &tensor.shape), (entry.dtype(), &shape), "{checkpoint}: {name}");
        let mut bytes = vec![0; entry.len_bytes() as usize];
        expected.read_rows(theirs, 0..entry.row_count(), &mut bytes).unwrap();
        assert_eq!(bytes_of(&found, &name), bytes, "{checkpoint}: {name}");
    }
}

#[test]
fn fsdp2_nested_and_flat_optimizer_states_are_read() {
    for layout in ["fsdp2/dcp", "fsdp2/dcp_flat"] {
        assert_holds(layout, "fsdp2/expected.safetensors", ("model.", "optim."));
    }
}

#[test]
fn torchtitan_training_state_is_read() {
    assert_holds("torchtitan/step-10", "torchtitan/expected.safetensors", ("", "optimizer."));
}

#[test]
fn torch_xla_training_state_with_two_groups_is_read() {
    assert_holds("xla_fsdp", "fsdp2/expected.safetensors", ("", "optim."));
    let found = formats::open(fixture("xla_fsdp")).unwrap();
    assert!(found.notes.is_empty(), "{:?}", found.notes);
}

#[test]
fn deepspeed_zero1_to_3_with_tied_and_frozen_params_are_read() {
    for (stage, rest) in (1..4).flat_map(|stage| [(stage, ""), (stage, "_bf16_tied_frozen")]) {
        let kind = format!("zero{stage}{rest}");
        let expected = format!("deepspeed/{kind}.expected.safetensors");
        assert_holds(&format!("deepspeed/{kind}"), &expected, ("", "optim."));
    }
}

#[test]
fn hsdp_and_tp_fsdp2_on_2x2_mesh_are_read() {
    for mesh in ["hsdp", "tp_fsdp2"] {
        assert_holds(&format!("torch_files/{mesh}"), "torch_files/expected.safetensors", ("model.", ""));
        let safetensors = format!("torch_files/{mesh}_safetensors");
        assert_holds(&safetensors, "torch_files/expected.safetensors", ("", ""));
    }
}

#[test]
fn fsdp1_dtensor_rank_files_are_read() {
    for path in ["torch_files/fsdp1_dtensors", "torch_files/fsdp1_dtensors/model_rank_1.pt"] {
        assert_holds(path, "torch_files/expected.safetensors", ("", ""));
    }
}

#[test]
fn bare_and_nested_models_are_read() {
    assert_holds("torch_files/pickles/bare.pt", "torch_files/expected.safetensors", ("", ""));
    assert_holds("torch_files/pickles/under_model.pt", "torch_files/expected.safetensors", ("model.", ""));
}

#[test]
fn peft_adapter_is_read() {
    assert_holds("lora/adapter", "lora/expected.safetensors", ("", ""));
}

#[test]
fn accelerate_folder_parts_are_read() {
    let sharded = "accelerate/fsdp2_sharded.expected.safetensors";
    assert_part("accelerate/fsdp2_sharded/pytorch_model_fsdp_0", sharded, (Role::Model, "model."));
    assert_part("accelerate/fsdp2_sharded/optimizer_0", sharded, (Role::Optimizer, "optimizer."));
    let full = "accelerate/fsdp2_full.expected.safetensors";
    assert_part("accelerate/fsdp2_full/pytorch_model_fsdp.bin", full, (Role::Model, ""));
    assert_part("accelerate/fsdp2_full/optimizer.bin", full, (Role::Optimizer, ""));
    assert_part("accelerate/ddp/model.safetensors", "accelerate/ddp.expected.safetensors", (Role::Model, ""));
}

#[test]
fn transformers_folder_parts_are_read() {
    let single = "trainer/single/checkpoint-10/model.safetensors";
    assert_part(single, "trainer/single.expected.safetensors", (Role::Model, ""));
    let expected = "trainer/fsdp2.expected.safetensors";
    let model = "trainer/fsdp2/checkpoint-10/pytorch_model_fsdp_0";
    assert_part(model, expected, (Role::Model, "model."));
    let optimizer = "trainer/fsdp2/checkpoint-10/optimizer_0";
    assert_part(optimizer, expected, (Role::Optimizer, "optimizer."));
}

#[test]
fn verl_model_is_read() {
    let file = "verl/actor/model_world_size_2_rank_0.pt";
    assert_part(file, "verl/expected.safetensors", (Role::Model, ""));
}

#[test]
fn deepspeed_zero0_model_and_optimizer_are_read() {
    assert_part("deepspeed/zero0", "deepspeed/zero0.expected.safetensors", (Role::Model, ""));
    let found = formats::open(fixture("deepspeed/zero0")).unwrap();
    let optimizer = found.tensors.iter().filter(|(_, tensor)| tensor.role == Role::Optimizer);
    assert!(
        optimizer.clone().count() > 30 && optimizer.clone().all(|(name, _)| name.starts_with("optimizer."))
    );
    // In bfloat16, the optimizer holds the 32-bit copies, by number.
    let bf16 = formats::open(fixture("deepspeed/zero0_bf16")).unwrap();
    bf16.check_coverage().unwrap();
    let expected = formats::open(fixture("deepspeed/zero0_bf16.expected.safetensors")).unwrap();
    let model: Vec<_> = bf16.tensors.iter().filter(|(_, tensor)| tensor.role == Role::Model).collect();
    assert_eq!(model.len(), 12);
    for (name, _) in model {
        let wide = bytes_of(&expected, &format!("model.{name}"));
        assert_eq!(bytes_of(&bf16, name), rounded_to_bf16(&wide), "{name}");
    }
    let sorted = |of: &Checkpoint, is_meant: &dyn Fn(&str) -> bool| {
        let names = of.tensors.keys().filter(|name| is_meant(name));
        let mut all: Vec<Vec<u8>> = names.map(|name| bytes_of(of, name)).collect();
        all.sort();
        all
    };
    let masters = sorted(&bf16, &|name| name.contains("fp32_groups"));
    assert!(masters == sorted(&expected, &|name| name.starts_with("model.")) && masters.len() == 12);
    for moment in [".exp_avg", ".exp_avg_sq"] {
        let of_kind = |name: &str| name.ends_with(moment);
        assert!(sorted(&bf16, &of_kind) == sorted(&expected, &of_kind), "{moment}");
    }
}

/// Rounds 32-bit floats to bfloat16, to nearest, ties to even.
fn rounded_to_bf16(wide: &[u8]) -> Vec<u8> {
    let round = |bytes: &[u8]| {
        let bits = u32::from_le_bytes(bytes.try_into().unwrap());
        (bits + 0x7fff + (bits >> 16 & 1)) >> 16
    };
    wide.chunks(4).flat_map(|bytes| (round(bytes) as u16).to_le_bytes()).collect()
}

#[test]
fn unsupported_tensor_kinds_are_listed_and_plain_ones_read() {
    let path = fixture("torch_files/pickles/other_tensors.pt");
    let found = formats::open(&path).unwrap();
    found.check_coverage().unwrap();
    assert_part(
        "torch_files/pickles/other_tensors.pt",
        "torch_files/expected.safetensors",
        (Role::Model, "model."),
    );
    let opaque: Vec<String> = found.opaque_texts();
    let expected = [
        "`other.conjugated` (torch.conj)",
        "`other.negated` (torch.neg)",
        "`other.nested` (torch._utils._rebuild_nested_tensor)",
        "`other.no_data` (torch._utils._rebuild_meta_tensor_no_storage)",
        "`other.quantized` (torch._utils._rebuild_qtensor)",
        "`other.sparse` (torch._utils._rebuild_sparse_tensor)",
        "`other.sparse_rows` (torch._utils._rebuild_sparse_tensor)",
        "`other.wide_complex` (torch.ComplexDoubleStorage)",
    ];
    assert_eq!(opaque, expected);
    // The parts of sparse tensors are read: values 1, 2, 3.
    let values = bytes_of(&found, "other.sparse.1.1");
    assert_eq!(values, [1.0_f32, 2.0, 3.0].map(f32::to_le_bytes).concat());
    assert!(found.refuse_opaque().unwrap_err().to_string().contains("torch.conj"));
}

#[test]
fn step_numbered_files_are_separate_checkpoints() {
    let folder = fixture("torch_files/steps_of_one_rank");
    let bias = |step: usize| {
        let found = formats::open(folder.join(format!("step_{step}.pt"))).unwrap();
        found.check_coverage().unwrap();
        assert_eq!(found.sources.len(), 1);
        let bytes = bytes_of(&found, "up.bias");
        f32::from_le_bytes(bytes[..4].try_into().unwrap())
    };
    assert!((bias(2) - bias(1) - 1.0).abs() < 1e-6, "{} {}", bias(1), bias(2));
    let message = formats::open(&folder).unwrap_err().to_string();
    assert!(message.contains("name one of them: step_1.pt, step_2.pt"), "{message}");
}

#[test]
fn two_accelerate_optimizers_get_distinct_names() {
    let found = formats::open(fixture("accelerate/two_optimizers")).unwrap();
    found.check_coverage().unwrap();
    let of = |name: &str| found.tensors.get(name).map(|tensor| tensor.role);
    assert_eq!(of("optimizer.state.0.exp_avg"), Some(Role::Optimizer));
    assert_eq!(of("optimizer_1.state.0.momentum_buffer"), Some(Role::Optimizer));
    assert!(found.format.contains("optimizer.bin, optimizer_1.bin"), "{}", found.format);
}

#[test]
fn deepspeed_pipeline_and_experts_are_rejected_naming_file() {
    for (kind, file) in
        [("pipeline", "layer_00-model_states.pt"), ("experts", "expp_rank_0_mp_rank_00_optim_states.pt")]
    {
        let folder = fixture(&format!("deepspeed_parallel/{kind}"));
        for path in [folder.clone(), folder.join("global_step2")] {
            let message = formats::open(&path).unwrap_err().to_string();
            let way_out = "tensor or pipeline parallelism, and DeepSpeed's own expert layers, are not supported; gather the model first";
            assert!(message.contains(way_out), "{}: {message}", path.display());
        }
        let message = formats::open(&folder).unwrap_err().to_string();
        assert!(message.contains(&format!("{file} holds another part of the model")), "{message}");
    }
}
