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

fn no_effect(key: &'static str) -> Warning {
    let (_, why) = WITHOUT_EFFECT.into_iter().find(|(known, _)| *known == key).unwrap();
    Warning::NoEffect { file: "fsdp_config.json".to_owned(), key, why }
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
    // As an argument of accelerate's class.
    assert_eq!(one, read(r#"{"transformer_cls_names_to_wrap": ["LlamaDecoderLayer"]}"#));
    rejects(
        r#"{"transformer_layer_cls_to_wrap": "A", "transformer_cls_names_to_wrap": "A"}"#,
        &["`transformer_layer_cls_to_wrap` and `transformer_cls_names_to_wrap` exclude each other"],
    );
}

#[test]
fn class_names_are_split_at_commas() {
    let names = |value: &str| {
        let read = parse(&format!("{{\"transformer_layer_cls_to_wrap\": {value}}}"), "f")?;
        Ok::<_, ConfigError>(read.keys["wrap"].to_string())
    };
    assert_eq!(names(r#""A,B""#).unwrap(), r#"["A", "B"]"#);
    assert_eq!(names(r#"" A , B,C ""#).unwrap(), r#"["A", "B", "C"]"#);
    assert_eq!(names(r#"["A", "B,C"]"#).unwrap(), r#"["A", "B", "C"]"#);
    for wrong in [r#""A,""#, r#""""#, r#"["A", " "]"#, "[3]", "3"] {
        let message = names(wrong).unwrap_err().to_string();
        assert!(message.contains("it must be class names, as a list or separated by commas"), "{message}");
    }
}

/// A strategy by all of its spellings: under both keys, with and without the prefix, by name and by number.
#[test]
fn strategies_are_read_by_name_and_number() {
    let expected = [
        ("FULL_SHARD", "auto", None),
        ("SHARD_GRAD_OP", "false", None),
        ("NO_SHARD", "false", Some(Replicas::Ranks)),
        ("HYBRID_SHARD", "auto", Some(Replicas::Nodes)),
        ("HYBRID_SHARD_ZERO2", "false", Some(Replicas::Nodes)),
    ];
    for (index, (name, reshard, replicas)) in expected.into_iter().enumerate() {
        let number = index + 1;
        let spellings = [
            format!("\"{name}\""),
            format!("\"{}\"", name.to_lowercase()),
            format!("\"_{name}\""),
            format!("\"{number}\""),
            number.to_string(),
        ];
        let keys = ["sharding_strategy", "fsdp_sharding_strategy", "fsdp_reshard_after_forward"];
        for (key, value) in keys.iter().flat_map(|key| spellings.iter().map(move |value| (key, value))) {
            let text = format!("{{\"{key}\": {value}}}");
            let json = read(&text);
            let found = json.keys["reshard_after_forward"].to_string().replace('"', "");
            assert_eq!((found.as_str(), json.replicas), (reshard, replicas), "{text}");
            // As `reshard_after_forward`, 1 is also how accelerate writes true, and 0 false.
            let is_boolean = key.contains("reshard") && number == 1 && value.contains('1');
            assert_eq!(json.warnings.len(), usize::from(!is_boolean), "{text}");
            assert!(is_boolean || json.warnings[0].to_string().contains(&format!("= {name} is taken as")));
        }
    }
    for wrong in ["0", "6", "-1", "1.5", "true", "\"SHARD\"", "[]", "\"\""] {
        rejects(&format!("{{\"sharding_strategy\": {wrong}}}"), &["`sharding_strategy` is", "HYBRID_SHARD"]);
    }
}

#[test]
fn strategies_that_disagree_are_rejected() {
    let both = |strategy: &str, reshard: &str| {
        format!("{{\"sharding_strategy\": \"{strategy}\", \"reshard_after_forward\": {reshard}}}")
    };
    let [by_class, no_shard] =
        [both("FULL_SHARD", "true"), both("NO_SHARD", "\"no_shard\"")].map(|text| read(&text));
    assert_eq!((by_class.replicas, by_class.warnings.len()), (None, 1));
    assert_eq!(no_shard.replicas, Some(Replicas::Ranks));
    for text in [both("FULL_SHARD", "false"), both("HYBRID_SHARD", "\"FULL_SHARD\"")] {
        rejects(&text, &["`sharding_strategy` and `reshard_after_forward` exclude each other"]);
    }
}

#[test]
fn booleans_are_read_as_accelerate_reads_them() {
    let reshard = |value: &str| read(&format!("{{\"fsdp_reshard_after_forward\": {value}}}")).keys;
    for on in ["true", "\"true\"", "\"True\"", "\"yes\"", "\"on\"", "1", "\"1\""] {
        assert_eq!(reshard(on), keys("reshard_after_forward = 'auto'"), "{on}");
    }
    for off in ["false", "\"False\"", "\"n\"", "\"off\"", "0"] {
        assert_eq!(reshard(off), keys("reshard_after_forward = false"), "{off}");
    }
    assert_eq!(read(r#"{"offload_params": "false"}"#).keys, keys("offload = 'none'"));
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
    assert_eq!(json.warnings, [no_effect("version")]);
}

#[test]
fn offload_params_maps_to_cpu_offload() {
    assert_eq!(read(r#"{"fsdp_offload_params": true}"#).keys, keys("offload = 'cpu'"));
    assert_eq!(read(r#"{"offload_params": false}"#).keys, keys("offload = 'none'"));
    assert_eq!(read("{}").keys, keys(""));
    assert_eq!(read(r#"{"offload_params": true}"#).warnings, []);
    rejects(r#"{"offload_params": "cpu"}"#, &["`offload_params` is \"cpu\"", "true or false"]);
    // transformers calls it otherwise.
    assert_eq!(read(r#"{"cpu_offload": "true"}"#).keys, keys("offload = 'cpu'"));
    assert_eq!(
        read(r#"{"cpu_offload": false, "fsdp_offload_params": false}"#).keys,
        keys("offload = 'none'")
    );
    rejects(r#"{"cpu_offload": true, "offload_params": false}"#, &["`offload_params` and `cpu_offload`"]);
}

/// What units a file with both kinds of units asks for, under each policy.
#[test]
fn auto_wrap_policy_chooses_classes_or_size() {
    let by_class = "wrap = ['A']";
    let by_size = "min_num_params = 5";
    for (policy, units, expected, warned) in [
        ("TRANSFORMER_BASED_WRAP", "both", by_class, &["`min_num_params`"][..]),
        ("SIZE_BASED_WRAP", "both", by_size, &["`transformer_layer_cls_to_wrap`"]),
        ("NO_WRAP", "both", "", &["`transformer_layer_cls_to_wrap`", "`min_num_params`"]),
        ("transformer_based_wrap", "class", by_class, &[]),
        ("size_based_wrap", "size", by_size, &[]),
        ("no_wrap", "neither", "", &[]),
        ("TRANSFORMER_BASED_WRAP", "neither", "", &["`auto_wrap_policy`"]),
        ("TRANSFORMER_BASED_WRAP", "size", "", &["`auto_wrap_policy`", "`min_num_params`"]),
        ("SIZE_BASED_WRAP", "neither", "", &["`auto_wrap_policy`"]),
        ("SIZE_BASED_WRAP", "class", "", &["`auto_wrap_policy`", "`transformer_layer_cls_to_wrap`"]),
    ] {
        let class =
            if ["both", "class"].contains(&units) { r#""transformer_layer_cls_to_wrap": "A","# } else { "" };
        let size = if ["both", "size"].contains(&units) { r#""fsdp_min_num_params": 5,"# } else { "" };
        let json = read(&format!(r#"{{{class} {size} "fsdp_auto_wrap_policy": "{policy}"}}"#));
        assert_eq!(json.keys, keys(expected), "{policy} {units}");
        let warnings: Vec<String> = json.warnings.iter().map(Warning::to_string).collect();
        assert_eq!(warnings.len(), warned.len(), "{policy} {units}: {warnings:?}");
        for (warning, key) in warnings.iter().zip(warned) {
            assert!(warning.contains(&format!("{key} has no effect without")), "{policy} {units}: {warning}");
        }
    }
    rejects(r#"{"auto_wrap_policy": "LAYERS"}"#, &["`auto_wrap_policy` is \"LAYERS\"", "SIZE_BASED_WRAP"]);
}

#[test]
fn prefetching_is_taken_as_units_ahead() {
    let units = |value: &str| {
        let json = read(&format!(r#"{{"fsdp_backward_prefetch": {value}}}"#));
        assert_eq!(json.warnings, [], "{value}");
        json.keys["backward_prefetch"].as_integer().unwrap()
    };
    for one in ["\"BACKWARD_PRE\"", "\"backward_pre\"", "1", "\"1\""] {
        assert_eq!(units(one), 1, "{one}");
    }
    for none in ["\"BACKWARD_POST\"", "2", "\"NO_PREFETCH\"", "\"no_prefetch\""] {
        assert_eq!(units(none), 0, "{none}");
    }
    for wrong in ["0", "3", "true", "\"PRE\""] {
        rejects(
            &format!(r#"{{"backward_prefetch": {wrong}}}"#),
            &["`backward_prefetch` is", "BACKWARD_POST"],
        );
    }
    // FSDP2 drops it.
    let second = read(r#"{"fsdp_version": 2, "backward_prefetch": "NO_PREFETCH"}"#);
    assert_eq!((second.keys, second.warnings.len()), (keys(""), 2));
    assert_eq!(read(r#"{"forward_prefetch": true}"#).keys, keys("forward_prefetch = 1"));
    let implied = read(r#"{"forward_prefetch": "false"}"#);
    assert_eq!((implied.keys, implied.warnings.len()), (keys(""), 1));
}

/// Every key that transformers 5.17 or accelerate 1.15 read is applied, or named with what is made of it.
#[test]
fn keys_of_transformers_and_accelerate_are_known() {
    let mut text = r#"{"xla": false, "xla_fsdp_grad_ckpt": false, "xla_fsdp_settings": {}, "min_num_params": 0,
        "activation_checkpointing": false, "cpu_offload": false, "offload_params": false, "reshard_after_forward": true,
        "sharding_strategy": "FULL_SHARD", "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "forward_prefetch": true,
        "transformer_layer_cls_to_wrap": "A", "backward_prefetch": "BACKWARD_PRE""#
        .to_owned();
    for (key, _) in WITHOUT_EFFECT {
        text += &format!(r#", "fsdp_{key}": 1"#);
    }
    let json = read(&(text + "}"));
    let others = json.warnings.iter().filter(|warning| !matches!(warning, Warning::Strategy { .. }));
    assert_eq!(others.count(), WITHOUT_EFFECT.len());
    assert!(!json.warnings.iter().any(|warning| matches!(warning, Warning::Meaningless { .. })));
}

/// What is said of the dtypes names the keys that set them.
#[test]
fn mixed_precision_policies_name_run_file_keys() {
    for value in [r#""bf16""#, "null", r#"{"param_dtype": "bfloat16", "reduce_dtype": "float32"}"#] {
        let json = read(&format!(r#"{{"fsdp_mixed_precision_policy": {value}}}"#));
        let [warning] = &json.warnings[..] else { panic!("{value}: {:?}", json.warnings) };
        let expected = "`mixed_precision_policy` has no effect here: fsdp.param_dtype and fsdp.reduce_dtype set the dtypes";
        assert!(warning.to_string().ends_with(expected), "{warning}");
        assert_eq!(json.keys, keys(""));
    }
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

/// With version 2, accelerate's launcher takes the number of replicas as the size of a mesh.
#[test]
fn mesh_of_accelerate_sets_the_replicas() {
    let config = |sizes: &str| {
        format!(r#"{{"parallelism_config": {sizes}, "fsdp_config": {{"reshard_after_forward": true}}}}"#)
    };
    let sizes = r#"{"parallelism_config_dp_replicate_size": 2, "parallelism_config_dp_shard_size": 4,
                    "parallelism_config_tp_size": 1, "cp_size": 1}"#;
    let json = read(&config(sizes));
    assert_eq!(json.keys, keys("reshard_after_forward = 'auto'\nmesh = { replicate = 2 }"));
    assert_eq!(json.warnings, []);
    assert_eq!(read(&config("{}")).keys, read(&config(r#"{"dp_replicate_size": 1}"#)).keys);
    let strategy = read(&config(r#"{"parallelism_config_cp_comm_strategy": "allgather"}"#));
    assert_eq!(strategy.warnings, [meaningless("parallelism_config.cp_comm_strategy")]);
    rejects(
        &config(r#"{"parallelism_config_tp_size": 2}"#),
        &["`parallelism_config.tp_size` is 2", "it must be 1"],
    );
    let with = |strategy: &str| {
        format!(
            r#"{{"parallelism_config": {{"dp_replicate_size": 2}}, "fsdp_config": {{"sharding_strategy": "{strategy}"}}}}"#
        )
    };
    let hybrid = read(&with("HYBRID_SHARD"));
    assert_eq!((hybrid.replicas, &hybrid.keys["mesh"]), (None, &keys("mesh = { replicate = 2 }")["mesh"]));
    rejects(&with("NO_SHARD"), &["sharding_strategy", "dp_replicate_size", "every rank holds a replica"]);
    rejects(&config(r#"{"dp_replicate_size": 0}"#), &["`parallelism_config.dp_replicate_size` is 0"]);
}

#[test]
fn configuration_of_accelerate_is_read() {
    let json = read(
        r#"{"distributed_type": "FSDP", "mixed_precision": "bf16", "num_processes": 2,
            "fsdp_config": {"fsdp_transformer_layer_cls_to_wrap": "A,B", "fsdp_offload_params": true}}"#,
    );
    assert_eq!(json.keys, keys("wrap = ['A', 'B']\noffload = 'cpu'"));
    let expected = ["distributed_type", "mixed_precision", "num_processes"].map(no_effect);
    assert_eq!(json.warnings, expected);
    assert_eq!(read(r#"{"fsdp_config": "other.json"}"#).warnings, [meaningless("config")]);
}
