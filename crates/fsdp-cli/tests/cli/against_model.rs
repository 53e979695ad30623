//! `fsdp ckpt verify --model`: weights that a trainer left out, or never moved, are named.

use serde_json::{Value, json};

use crate::support::Sandbox;

/// The header of a safetensors file, and its data.
fn parts(file: &[u8]) -> (Value, Vec<u8>) {
    let end = 8 + u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    (serde_json::from_slice(&file[8..end]).unwrap(), file[end..].to_vec())
}

impl Sandbox {
    /// Edits a safetensors file.
    fn edit_tensors(&self, name: &str, edit: impl FnOnce(&mut Value, &mut Vec<u8>)) {
        let (mut header, mut data) = parts(&std::fs::read(self.path(name)).unwrap());
        edit(&mut header, &mut data);
        let header = serde_json::to_vec(&header).unwrap();
        let len = (header.len() as u64).to_le_bytes();
        self.write(name, [&len[..], &header, &data].concat());
    }

    /// What the comparison with a model finds, and the exit code.
    fn against(&self, checkpoint: &str, model: &str) -> (Value, Option<i32>) {
        let ran = self.fsdp(&format!("ckpt verify {checkpoint} --model {model} --json"));
        let report: Value =
            serde_json::from_str(&ran.stdout).unwrap_or_else(|e| panic!("{e}: {}", ran.stderr));
        assert_eq!(report["sound"], json!(ran.code == Some(0)));
        (report["model"].clone(), ran.code)
    }
}

/// The bytes of a tensor, as `start..end` of the data.
fn place(header: &Value, name: &str) -> std::ops::Range<usize> {
    let offsets = header[name]["data_offsets"].as_array().unwrap();
    let [start, end] = [0, 1].map(|index| offsets[index].as_u64().unwrap() as usize);
    start..end
}

#[test]
fn trained_checkpoints_of_every_kind_fit_their_model() {
    let kinds = ["fsdp2", "deepspeed", "verl", "lightning", "torchtitan", "trainer", "fused_experts"];
    let sandbox = Sandbox::with_fixtures(&kinds);
    let none = json!({"problems": [], "doubts": []});
    for checkpoint in ["fsdp2/dcp", "fsdp2/dcp_flat", "deepspeed/zero0", "lightning", "torchtitan"] {
        assert_eq!(sandbox.against(checkpoint, "fsdp2"), (none.clone(), Some(0)), "{checkpoint}");
    }
    assert_eq!(sandbox.against("verl/actor", "verl/actor/huggingface"), (none.clone(), Some(0)));
    let trainer = "trainer/single/checkpoint-10";
    assert_eq!(sandbox.against(trainer, trainer), (none.clone(), Some(0)));
    let stacked = "fused_experts/qwen3_moe/checkpoint-3";
    assert_eq!(sandbox.against(stacked, stacked), (none, Some(0)));
}

#[test]
fn absent_and_broken_weights_are_named() {
    let sandbox = Sandbox::with_fixtures(&["fsdp2"]);
    let file = "fsdp2/model.safetensors";
    let [norm, query, key] =
        ["norm.weight", "layers.0.self_attn.q_proj.weight", "layers.0.self_attn.k_proj.weight"]
            .map(|name| format!("model.{name}"));
    sandbox.edit_tensors(file, |header, data| {
        data[place(header, &query)].fill(0);
        let start = place(header, &key).start;
        data[start + 4..start + 8].copy_from_slice(&f32::NAN.to_le_bytes());
    });
    let (found, code) = sandbox.against(file, "fsdp2");
    let expected = [
        format!("`{query}` is zero in every element"),
        format!("`{key}` is not finite in 1 element, first in element 1"),
    ];
    assert_eq!((&found["problems"], code), (&json!(expected), Some(1)));

    sandbox.edit_tensors(file, |header, _| {
        let header = header.as_object_mut().unwrap();
        let tensor = header.remove(&norm).unwrap();
        header.insert("model.other".to_owned(), tensor);
    });
    let (found, code) = sandbox.against(file, "fsdp2");
    let problem = found["problems"][0].as_str().unwrap();
    assert!(problem.contains(&format!("1 missing: `{norm}`; 1 not expected: `model.other`")), "{problem}");
    assert_eq!(code, Some(1));
}

#[test]
fn weights_without_updates_are_named() {
    let sandbox = Sandbox::new();
    sandbox.succeed(
        "train run.toml --set train.steps=2 --set checkpoint.every=2 --set fsdp.frozen=[\"lm_head\"]",
    );
    let (found, code) = sandbox.against("out/checkpoints/step-00000002", "model");
    assert_eq!(
        (&found["problems"], code),
        (&json!(["`model.embed_tokens.weight` was never updated, but others were"]), Some(1))
    );

    // A model that was only initialized: nothing says whether it was meant to be.
    sandbox
        .succeed("train run.toml --set train.steps=1 --set train.optimizer.lr=1e-12 --set run.out_dir=new");
    let (found, code) = sandbox.against("new/model/model.safetensors", "model");
    let doubts = found["doubts"].as_array().unwrap();
    assert!(
        doubts.iter().all(|doubt| doubt.as_str().unwrap().ends_with("is distributed as at initialization"))
    );
    assert_eq!((doubts.is_empty(), code), (false, Some(0)), "{found}");
}

#[test]
fn folder_without_a_model_is_a_usage_error() {
    let sandbox = Sandbox::with_fixtures(&["fsdp2"]);
    let ran = sandbox.fsdp("ckpt verify fsdp2/dcp --model fsdp2/dcp");
    assert_eq!(ran.code, Some(2), "{}", ran.stderr);
    assert!(ran.stderr.contains("config.json"), "{}", ran.stderr);
}
