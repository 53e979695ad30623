//! What is written beside an exported model, and in which dtype.

use serde_json::Value;

use crate::support::Sandbox;

#[test]
fn exported_model_includes_tokenizer_files() {
    let sandbox = Sandbox::new();
    for (name, content) in [
        ("tokenizer.json", "{}"),
        ("tokenizer_config.json", "{\"a\": 1}"),
        ("chat_template.jinja", "{{ x }}"),
        ("generation_config.json", "{\"b\": 2}"),
        ("README.md", "not copied"),
    ] {
        sandbox.write(&format!("model/{name}"), content);
    }
    sandbox.succeed("train run.toml");
    let files = sandbox.files("out/model");
    let names: Vec<String> =
        files.keys().map(|path| path.file_name().unwrap().to_string_lossy().into_owned()).collect();
    let expected = [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ];
    assert_eq!(names, expected);
    assert_eq!(sandbox.read("out/model/tokenizer_config.json"), "{\"a\": 1}");
}

#[test]
fn exported_dtype_follows_base_model_or_override() {
    let sandbox = Sandbox::new();
    let dtypes = |dir: &str| {
        let report = sandbox.json(&format!("ckpt inspect {dir}/model/model.safetensors"));
        let groups = report["groups"].as_array().unwrap().iter();
        let types: Vec<String> = groups.map(|group| group["dtype"].as_str().unwrap().to_owned()).collect();
        let config: Value = serde_json::from_str(&sandbox.read(&format!("{dir}/model/config.json"))).unwrap();
        (types.join(" "), config["dtype"].as_str().unwrap().to_owned())
    };
    let of = |dtype: &str, name: &str| (dtype.to_owned(), name.to_owned());
    sandbox.succeed("train run.toml --set run.export_dtype=bf16 --set run.out_dir=base");
    assert_eq!(dtypes("base"), of("BF16", "bfloat16"));
    let from_base = "train run.toml --set model.init=pretrained --set model.path=base/model";
    sandbox.succeed(&format!("{from_base} --set run.out_dir=same"));
    assert_eq!(dtypes("same"), of("BF16", "bfloat16"));
    sandbox.succeed(&format!("{from_base} --set run.out_dir=wider --set run.export_dtype=f32"));
    assert_eq!(dtypes("wider"), of("F32", "float32"));
    sandbox.succeed("train run.toml --set run.out_dir=random");
    assert_eq!(dtypes("random"), of("F32", "float32"));
}

#[test]
fn outputs_record_fsdp_version_and_run_hash() {
    let sandbox = Sandbox::new();
    sandbox.succeed("train run.toml --set checkpoint.every=3");
    let version = env!("CARGO_PKG_VERSION");
    assert!(sandbox.read("out/resolved.toml").starts_with(&format!("# Written by fsdp {version}.\n")));
    assert_eq!(sandbox.starts("out")[0]["version"], version);
    let state = sandbox.json("ckpt inspect out/checkpoints/step-00000003")["run_state"].clone();
    assert_eq!(state["version"], version);
    // The run hash identifies the computation: it depends on the seed, not on the number of ranks or the folder.
    let metadata = |dir: &str| {
        let bytes = std::fs::read(sandbox.path(dir).join("model/model.safetensors")).unwrap();
        let len = usize::try_from(u64::from_le_bytes(bytes[..8].try_into().unwrap())).unwrap();
        let header: Value = serde_json::from_slice(&bytes[8..8 + len]).unwrap();
        header["__metadata__"].clone()
    };
    assert_eq!(metadata("out")["fsdp_version"], version);
    sandbox.succeed("train run.toml --set run.out_dir=same --set run.ranks=1");
    sandbox.succeed("train run.toml --set run.out_dir=other --set model.seed=99");
    assert_eq!(metadata("same"), metadata("out"));
    assert_ne!(metadata("other")["fsdp_run"], metadata("out")["fsdp_run"]);
}
