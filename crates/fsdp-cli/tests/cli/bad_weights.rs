//! Weights that do not fit the model: exit code 2, before anything is written.

use crate::support::{Ran, Sandbox};

impl Sandbox {
    /// Puts weights exported by an earlier run next to `config.json`.
    fn with_weights(self) -> Self {
        self.succeed("train run.toml --set train.steps=1 --set run.out_dir=earlier");
        let from = self.path("earlier/model/model.safetensors");
        std::fs::copy(from, self.path("model/model.safetensors")).unwrap();
        self.edit("run.toml", "path = \"model\"", "path = \"model\"\ninit = \"pretrained\"");
        self
    }

    /// Rewrites the header of the weights and leaves the data as it is; the bytes that `change` returns are appended.
    fn edit_header(&self, change: impl FnOnce(&mut serde_json::Map<String, serde_json::Value>) -> Vec<u8>) {
        let file = self.path("model/model.safetensors");
        let bytes = std::fs::read(&file).unwrap();
        let len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let mut header = serde_json::from_slice(&bytes[8..8 + len]).unwrap();
        let more = change(&mut header);
        let header = serde_json::to_vec(&header).unwrap();
        let mut changed = (header.len() as u64).to_le_bytes().to_vec();
        changed.extend(header);
        changed.extend(&bytes[8 + len..]);
        changed.extend(more);
        std::fs::write(file, changed).unwrap();
    }
}

#[test]
fn missing_weights_are_rejected() {
    insta::assert_snapshot!(Sandbox::new().input_error_with("--set model.init=pretrained"), @r"
    error: model: it holds neither model.safetensors nor model.safetensors.index.json; fetch the
    weights as well
    ");
}

#[test]
fn torch_weights_train_bitwise_like_safetensors() {
    let sandbox = Sandbox::with_fixtures(&["fsdp2", "torch_files"]);
    let run = r#"train fsdp2/run.toml --set data.train=["fsdp2/tokens.bin"] --set train.steps=5"#;
    let trained = |model: &str, out: &str, ranks: usize| {
        let settings = format!("--set model.path={model} --set run.out_dir={out} --set run.ranks={ranks}");
        sandbox.succeed(&format!("{run} {settings}"));
        let file = std::fs::read(sandbox.path(out).join("model/model.safetensors")).unwrap();
        let header = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
        (sandbox.column(out, "loss"), file[8 + header..].to_vec())
    };
    let expected = trained("fsdp2", "expected", 2);
    for (model, ranks) in [("single", 1), ("single", 2), ("sharded", 1), ("sharded", 2)] {
        let found = trained(&format!("torch_files/old_hub/{model}"), &format!("{model}-{ranks}"), ranks);
        assert!(found == expected, "{model} on {ranks} ranks");
    }
}

#[test]
fn ambiguous_torch_weights_in_dir_are_rejected() {
    let sandbox = Sandbox::with_fixtures(&["fsdp2", "torch_files"]);
    let hub = |name: &str| sandbox.path("torch_files/old_hub").join(name);
    std::fs::copy(hub("sharded/pytorch_model.bin.index.json"), hub("single/pytorch_model.bin.index.json"))
        .unwrap();
    let run = r#"train fsdp2/run.toml --set data.train=["fsdp2/tokens.bin"]"#;
    let rejected = sandbox.fsdp(&format!("{run} --set model.path=torch_files/old_hub/single"));
    assert_eq!(rejected.code, Some(2), "{}", rejected.stderr);
    assert!(rejected.stderr.contains("it would be ambiguous beside"), "{}", rejected.stderr);
}

#[test]
fn other_weight_format_suggests_convert_command() {
    let sandbox = Sandbox::with_fixtures(&["fsdp2"]);
    std::fs::rename(sandbox.path("fsdp2/dcp"), sandbox.path("a model")).unwrap();
    std::fs::copy(sandbox.path("fsdp2/config.json"), sandbox.path("a model/config.json")).unwrap();
    let mut command = sandbox.command();
    command.args(["train", "fsdp2/run.toml", "--set", r#"model.path="a model""#]);
    let rejected = Ran::of(command.output().unwrap());
    assert_eq!(rejected.code, Some(2), "{}", rejected.stderr);
    let named =
        "`fsdp ckpt convert 'a model' 'a model-safetensors' --to safetensors --config 'a model/config.json'`";
    assert!(rejected.stderr.contains(named), "{}", rejected.stderr);
}

#[test]
fn corrupt_torch_weights_fail_checksum() {
    let sandbox = Sandbox::with_fixtures(&["fsdp2", "torch_files"]);
    let file = sandbox.path("torch_files/old_hub/single/pytorch_model.bin");
    let mut bytes = std::fs::read(&file).unwrap();
    // Flip a bit of the first tensor. It follows the local header of its record, which ends with the name and extra
    // field.
    let name = b"pytorch_model/data/0";
    let name_at = bytes.windows(name.len()).position(|found| found == name).unwrap();
    let extra = usize::from(u16::from_le_bytes([bytes[name_at - 2], bytes[name_at - 1]]));
    bytes[name_at + name.len() + extra] ^= 1;
    std::fs::write(file, bytes).unwrap();
    let run = r#"train fsdp2/run.toml --set data.train=["fsdp2/tokens.bin"] --set run.out_dir=out"#;
    let rejected = sandbox.fsdp(&format!("{run} --set model.path=torch_files/old_hub/single"));
    assert_eq!(rejected.code, Some(2), "{}", rejected.stderr);
    let message = rejected.stderr;
    assert!(message.contains("old_hub/single/pytorch_model.bin: bytes "), "{message}");
    assert!(message.contains("their checksum is"), "{message}");
    assert!(!sandbox.path("out").exists());
}

#[test]
fn truncated_weights_are_rejected() {
    let sandbox = Sandbox::new().with_weights();
    let bytes = std::fs::read(sandbox.path("model/model.safetensors")).unwrap();
    sandbox.write("model/model.safetensors", &bytes[..bytes.len() - 1000]);
    insta::assert_snapshot!(sandbox.input_error_with(""), @r"
    error: model/model.safetensors: not a valid safetensors file: tensor
    `model.layers.1.self_attn.q_proj.weight` ends at data byte 31488, but the file holds only 31064
    (truncated?); fetch or export the file again
    ");
    sandbox.write("model/model.safetensors", &bytes[..5]);
    insta::assert_snapshot!(sandbox.input_error_with(""), @r"
    error: model/model.safetensors: not a valid safetensors file: it has 5 bytes, too few for the
    8-byte header length; fetch or export the file again
    ");
}

#[test]
fn missing_tensors_are_rejected() {
    let sandbox = Sandbox::new().with_weights();
    insta::assert_snapshot!(
        sandbox.model_error("\"num_hidden_layers\": 2", "\"num_hidden_layers\": 3"), @r"
    error: the tensors in model/model.safetensors do not match the requested model: 9 missing:
    `model.layers.2.self_attn.q_proj.weight`, `model.layers.2.self_attn.k_proj.weight`,
    `model.layers.2.self_attn.v_proj.weight`, `model.layers.2.self_attn.o_proj.weight`,
    `model.layers.2.mlp.gate_proj.weight`, `model.layers.2.mlp.up_proj.weight`,
    `model.layers.2.mlp.down_proj.weight`, `model.layers.2.input_layernorm.weight`,
    `model.layers.2.post_attention_layernorm.weight`; check that config and weights belong together
    ");
}

#[test]
fn unexpected_tensors_are_rejected() {
    let sandbox = Sandbox::new().with_weights();
    insta::assert_snapshot!(
        sandbox.model_error("\"num_hidden_layers\": 2", "\"num_hidden_layers\": 1"), @r"
    error: the tensors in model/model.safetensors do not match the requested model: 9 not expected:
    `model.layers.1.input_layernorm.weight`, `model.layers.1.mlp.down_proj.weight`,
    `model.layers.1.mlp.gate_proj.weight`, `model.layers.1.mlp.up_proj.weight`,
    `model.layers.1.post_attention_layernorm.weight`, `model.layers.1.self_attn.k_proj.weight`,
    `model.layers.1.self_attn.o_proj.weight`, `model.layers.1.self_attn.q_proj.weight`,
    `model.layers.1.self_attn.v_proj.weight`; check that config and weights belong together
    ");
}

#[test]
fn wrong_tensor_shapes_are_rejected() {
    let sandbox = Sandbox::new().with_weights();
    insta::assert_snapshot!(
        sandbox.model_error("\"intermediate_size\": 24", "\"intermediate_size\": 32"), @r"
    error: the tensors in model/model.safetensors do not match the requested model: 6 of the wrong
    shape: `model.layers.0.mlp.gate_proj.weight` (expected [32, 16], got [24, 16]),
    `model.layers.0.mlp.up_proj.weight` (expected [32, 16], got [24, 16]),
    `model.layers.0.mlp.down_proj.weight` (expected [16, 32], got [16, 24]),
    `model.layers.1.mlp.gate_proj.weight` (expected [32, 16], got [24, 16]),
    `model.layers.1.mlp.up_proj.weight` (expected [32, 16], got [24, 16]),
    `model.layers.1.mlp.down_proj.weight` (expected [16, 32], got [16, 24]); check that config and
    weights belong together
    ");
}

#[test]
fn non_float_tensor_is_rejected() {
    let sandbox = Sandbox::new().with_weights();
    sandbox.edit_header(|header| {
        header["model.embed_tokens.weight"]["dtype"] = "I32".into();
        Vec::new()
    });
    let message = sandbox.input_error_with("");
    insta::assert_snapshot!(message, @r"
    error: the tensors in model/model.safetensors do not match the requested model: 1 of a type that is
    not F64, F32, BF16 or F16: `model.embed_tokens.weight` (I32); check that config and weights belong
    together
    ");
    assert_eq!(sandbox.input_error("verify run.toml"), message);
}

#[test]
fn tied_tensor_copies_must_be_equal() {
    let sandbox = Sandbox::new().with_weights();
    let bytes = std::fs::read(sandbox.path("model/model.safetensors")).unwrap();
    let len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let data = bytes[8 + len..].to_vec();
    let copy = |header: &mut serde_json::Map<String, serde_json::Value>| {
        let entry = header["model.embed_tokens.weight"].clone();
        let at = |index: usize| entry["data_offsets"][index].as_u64().unwrap() as usize;
        let mut head = entry.clone();
        head["data_offsets"] = serde_json::json!([data.len(), data.len() + at(1) - at(0)]);
        header.insert("lm_head.weight".into(), head);
        data[at(0)..at(1)].to_vec()
    };
    sandbox.edit_header(copy);
    sandbox.succeed("train run.toml --set run.out_dir=equal");
    let file = sandbox.path("model/model.safetensors");
    let mut bytes = std::fs::read(&file).unwrap();
    *bytes.last_mut().unwrap() ^= 0x40;
    std::fs::write(file, bytes).unwrap();
    insta::assert_snapshot!(sandbox.input_error_with(""), @r"
    error: model/model.safetensors: `model.embed_tokens.weight` and `lm_head.weight` differ, but the
    model ties them (tie_word_embeddings in config.json); remove one of the two, or set
    tie_word_embeddings to false
    ");
}
