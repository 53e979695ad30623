//! Weights that do not fit the model: exit code 2, before anything is written.

use crate::support::Sandbox;

impl Sandbox {
    /// Puts weights beside `config.json`, as an earlier run exports them.
    fn with_weights(self) -> Self {
        self.succeed("train run.toml --set train.steps=1 --set run.out_dir=earlier");
        let from = self.path("earlier/model/model.safetensors");
        std::fs::copy(from, self.path("model/model.safetensors")).unwrap();
        self.edit("run.toml", "path = \"model\"", "path = \"model\"\ninit = \"pretrained\"");
        self
    }

    /// Rewrites the header of the weights; data stay as they are.
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
fn weights_that_are_not_there() {
    insta::assert_snapshot!(Sandbox::new().refused_with("--set model.init=pretrained"), @r"
    error: model: it holds neither model.safetensors nor model.safetensors.index.json; save the model
    as safetensors, or name the file itself
    ");
}

#[test]
fn weights_of_torch_save_train_after_the_command_that_the_error_names() {
    let sandbox = Sandbox::new().with_weights();
    sandbox.succeed("train run.toml");
    std::fs::create_dir(sandbox.path("old")).unwrap();
    std::fs::rename(sandbox.path("model/config.json"), sandbox.path("old/config.json")).unwrap();
    sandbox.succeed("ckpt convert model/model.safetensors old/pytorch_model.bin --to torch --no-sync");
    sandbox.edit("run.toml", "path = \"model\"", "path = \"old\"");
    for sharded in [false, true] {
        if sharded {
            let report = sandbox.json("ckpt inspect old/pytorch_model.bin --tensors");
            let names = report["tensors"].as_array().unwrap().iter();
            let names = names.map(|tensor| (tensor["name"].as_str().unwrap(), "part.bin"));
            let map: std::collections::BTreeMap<&str, &str> = names.collect();
            let index = serde_json::json!({ "weight_map": map });
            sandbox.write("old/pytorch_model.bin.index.json", index.to_string());
            std::fs::rename(sandbox.path("old/pytorch_model.bin"), sandbox.path("old/part.bin")).unwrap();
            std::fs::remove_dir_all(sandbox.path("old-safetensors")).unwrap();
        }
        let refused = sandbox.fsdp("train run.toml --overwrite");
        assert_eq!(refused.code, Some(2), "{}", refused.stderr);
        let command = "ckpt convert old old-safetensors --to safetensors --config old/config.json";
        assert!(refused.stderr.contains(&format!("`fsdp {command}`")), "{}", refused.stderr);
        sandbox.succeed(command);
        let out = format!("of-{sharded}");
        sandbox.succeed(&format!("train run.toml --set model.path=old-safetensors --set run.out_dir={out}"));
        assert_eq!(sandbox.column(&out, "loss"), sandbox.column("out", "loss"));
    }
}

#[test]
fn truncated_weights() {
    let sandbox = Sandbox::new().with_weights();
    let bytes = std::fs::read(sandbox.path("model/model.safetensors")).unwrap();
    sandbox.write("model/model.safetensors", &bytes[..bytes.len() - 1000]);
    insta::assert_snapshot!(sandbox.refused_with(""), @r"
    error: model/model.safetensors: not a valid safetensors file: tensor
    `model.layers.1.mlp.down_proj.weight` ends at data byte 31872, but the file holds only 31064
    (truncated?); fetch or export the file again
    ");
    sandbox.write("model/model.safetensors", &bytes[..5]);
    insta::assert_snapshot!(sandbox.refused_with(""), @r"
    error: model/model.safetensors: not a valid safetensors file: it has 5 bytes, too few for the
    8-byte header length; fetch or export the file again
    ");
}

#[test]
fn a_tensor_that_is_missing() {
    let sandbox = Sandbox::new().with_weights();
    insta::assert_snapshot!(
        sandbox.refused_model("\"num_hidden_layers\": 2", "\"num_hidden_layers\": 3"), @r"
    error: the tensors in model/model.safetensors are not those of the model that was asked for: 9
    missing: `model.layers.2.self_attn.q_proj.weight`, `model.layers.2.self_attn.k_proj.weight`,
    `model.layers.2.self_attn.v_proj.weight`, `model.layers.2.self_attn.o_proj.weight`,
    `model.layers.2.mlp.gate_proj.weight`, `model.layers.2.mlp.up_proj.weight`,
    `model.layers.2.mlp.down_proj.weight`, `model.layers.2.input_layernorm.weight`,
    `model.layers.2.post_attention_layernorm.weight`; check that config and weights belong together
    ");
}

#[test]
fn a_tensor_that_is_too_many() {
    let sandbox = Sandbox::new().with_weights();
    insta::assert_snapshot!(
        sandbox.refused_model("\"num_hidden_layers\": 2", "\"num_hidden_layers\": 1"), @r"
    error: the tensors in model/model.safetensors are not those of the model that was asked for: 9 not
    expected: `model.layers.1.input_layernorm.weight`, `model.layers.1.mlp.down_proj.weight`,
    `model.layers.1.mlp.gate_proj.weight`, `model.layers.1.mlp.up_proj.weight`,
    `model.layers.1.post_attention_layernorm.weight`, `model.layers.1.self_attn.k_proj.weight`,
    `model.layers.1.self_attn.o_proj.weight`, `model.layers.1.self_attn.q_proj.weight`,
    `model.layers.1.self_attn.v_proj.weight`; check that config and weights belong together
    ");
}

#[test]
fn a_tensor_of_the_wrong_shape() {
    let sandbox = Sandbox::new().with_weights();
    insta::assert_snapshot!(
        sandbox.refused_model("\"intermediate_size\": 24", "\"intermediate_size\": 32"), @r"
    error: the tensors in model/model.safetensors are not those of the model that was asked for: 6 of
    the wrong shape: `model.layers.0.mlp.gate_proj.weight` (expected [32, 16], got [24, 16]),
    `model.layers.0.mlp.up_proj.weight` (expected [32, 16], got [24, 16]),
    `model.layers.0.mlp.down_proj.weight` (expected [16, 32], got [16, 24]),
    `model.layers.1.mlp.gate_proj.weight` (expected [32, 16], got [24, 16]),
    `model.layers.1.mlp.up_proj.weight` (expected [32, 16], got [24, 16]),
    `model.layers.1.mlp.down_proj.weight` (expected [16, 32], got [16, 24]); check that config and
    weights belong together
    ");
}

#[test]
fn a_tensor_that_is_no_float() {
    let sandbox = Sandbox::new().with_weights();
    sandbox.edit_header(|header| {
        header["model.embed_tokens.weight"]["dtype"] = "I32".into();
        Vec::new()
    });
    let message = sandbox.refused_with("");
    insta::assert_snapshot!(message, @r"
    error: the tensors in model/model.safetensors are not those of the model that was asked for: 1 of a
    type that is not F64, F32, BF16 or F16: `model.embed_tokens.weight` (I32); check that config and
    weights belong together
    ");
    assert_eq!(sandbox.refused("verify run.toml"), message);
}

#[test]
fn a_second_copy_of_a_tied_tensor_must_be_equal() {
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
    insta::assert_snapshot!(sandbox.refused_with(""), @r"
    error: model/model.safetensors: `model.embed_tokens.weight` and `lm_head.weight` differ, but the
    model ties them (tie_word_embeddings in config.json); remove one of the two, or set
    tie_word_embeddings to false
    ");
}
