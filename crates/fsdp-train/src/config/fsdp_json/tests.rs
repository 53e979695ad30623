use super::*;

fn read(text: &str) -> FsdpJson {
    parse(text, "fsdp_config.json").unwrap()
}

/// Parses keys of `[fsdp]`.
fn keys(text: &str) -> Table {
    toml::from_str(text).unwrap()
}

fn meaningless(key: &str) -> Warning {
    Warning::Meaningless { file: "fsdp_config.json".to_owned(), key: key.to_owned() }
}

#[track_caller]
fn rejects(text: &str, fragments: &[&str]) {
    let message = parse(text, "fsdp_config.json").unwrap_err().to_string();
    for fragment in fragments {
        assert!(message.contains(fragment), "`{fragment}` is not in `{message}`");
    }
}

#[test]
fn config_from_xla_guide_is_parsed() {
    let json = read(
        r#"{"fsdp_transformer_layer_cls_to_wrap": ["GPT2Block"], "xla": true, "xla_fsdp_grad_ckpt": true,
            "xla_fsdp_settings": {"compute_dtype": "bfloat16", "shard_param_on_dim_0": true,
                                  "pin_layout_in_collective_ops": true}}"#,
    );
    let expected = "wrap = ['GPT2Block']\nparam_dtype = 'bf16'\nreduce_dtype = 'bf16'\nactivation_checkpointing = 'full'";
    assert_eq!(json.keys, keys(expected));
    let ignored =
        ["xla_fsdp_settings.shard_param_on_dim_0", "xla_fsdp_settings.pin_layout_in_collective_ops"];
    assert_eq!(json.warnings, ignored.map(meaningless));
}

#[test]
fn prefix_is_optional_and_single_class_needs_no_list() {
    let one = read(r#"{"transformer_layer_cls_to_wrap": "LlamaDecoderLayer"}"#);
    assert_eq!(one, read(r#"{"fsdp_transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}"#));
}

#[test]
fn zero_min_num_params_is_no_policy_and_floats_are_accepted() {
    assert_eq!(read(r#"{"fsdp_min_num_params": 0}"#), FsdpJson::default());
    assert_eq!(read(r#"{"min_num_params": 1e8}"#).keys, keys("min_num_params = 100_000_000"));
}

#[test]
fn reshard_after_forward_excludes_root_by_default() {
    let reshard = |settings: &str| read(&format!(r#"{{"xla": true, "xla_fsdp_settings": {settings}}}"#)).keys;
    assert_eq!(reshard(r#"{"reshard_after_forward": true}"#), keys("reshard_after_forward = 'auto'"));
    assert_eq!(reshard(r#"{"disable_reshard_on_root": false}"#), keys("reshard_after_forward = true"));
    assert_eq!(reshard(r#"{"reshard_after_forward": false}"#), keys("reshard_after_forward = false"));
    assert_eq!(reshard("{}"), keys(""));
}

#[test]
fn fp32_reduce_scatter_sets_f32_reduce_dtype() {
    let settings = r#"{"compute_dtype": "bfloat16", "fp32_reduce_scatter": true}"#;
    let json = read(&format!(r#"{{"xla": true, "xla_fsdp_settings": {settings}}}"#));
    assert_eq!(json.keys, keys("param_dtype = 'bf16'\nreduce_dtype = 'f32'"));
}

#[test]
fn version_2_keys_with_counterpart_are_applied() {
    let json =
        read(r#"{"fsdp_version": 2, "reshard_after_forward": false, "activation_checkpointing": true}"#);
    assert_eq!(json.keys, keys("reshard_after_forward = false\nactivation_checkpointing = 'full'"));
    assert_eq!(json.warnings, [meaningless("version")]);
}

#[test]
fn offload_params_maps_to_cpu_offload() {
    assert_eq!(read(r#"{"fsdp_offload_params": true}"#).keys, keys("offload = 'cpu'"));
    assert_eq!(read(r#"{"offload_params": false}"#).keys, keys("offload = 'none'"));
    assert_eq!(read("{}").keys, keys(""));
    assert_eq!(read(r#"{"offload_params": true}"#).warnings, []);
    rejects(r#"{"offload_params": "cpu"}"#, &["`offload_params` is \"cpu\"", "true or false"]);
}

#[test]
fn keys_without_effect_cause_warnings() {
    let json = read(r#"{"xla_fsdp_grad_ckpt": true, "xla_fsdp_settings": {"compute_dtype": "bfloat16"}}"#);
    assert_eq!(json.keys, keys(""));
    let warnings: Vec<String> = json.warnings.iter().map(Warning::to_string).collect();
    assert_eq!(warnings[0], "fsdp_config.json: `xla_fsdp_grad_ckpt` has no effect without `xla`: true");
    assert!(warnings[1].contains("`xla_fsdp_settings` has no effect"));
    let unwrapped = read(r#"{"xla": true, "xla_fsdp_grad_ckpt": true}"#);
    assert!(unwrapped.warnings[0].to_string().contains("without a wrap policy"));
    assert_eq!(read(r#"{"forward_prefect": true}"#).warnings, [meaningless("forward_prefect")]);
}

#[test]
fn rejects_invalid_hugging_face_configs() {
    rejects(
        r#"{"fsdp_min_num_params": 5, "transformer_layer_cls_to_wrap": ["A"]}"#,
        &["`transformer_layer_cls_to_wrap` and `min_num_params` exclude each other"],
    );
    let settings = |text: &str| format!(r#"{{"xla": true, "xla_fsdp_settings": {{{text}}}}}"#);
    rejects(&settings(r#""compute_type": "float32""#), &["did you mean `xla_fsdp_settings.compute_dtype`?"]);
    rejects(&settings(r#""compute_dtype": "float64""#), &["is \"float64\"", "\"float32\" or \"bfloat16\""]);
    rejects(&settings(r#""reshard_after_forward": 2"#), &["is 2", "true or false"]);
    rejects(r#"{"fsdp_min_num_params": 1.5}"#, &["`min_num_params` is 1.5"]);
    rejects(r#"{"xla": true, "fsdp_xla": false}"#, &["`xla` and `fsdp_xla` exclude each other"]);
    rejects("[]", &["fsdp_config.json: not valid JSON"]);
}
