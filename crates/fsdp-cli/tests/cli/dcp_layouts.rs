//! The layouts of DCP that others read: names of tensors, and bits after resuming.

use crate::support::Sandbox;

#[test]
fn every_dcp_layout_resumes_bitwise() {
    let sandbox = Sandbox::new();
    let run = r#"train run.toml --set train.optimizer.no_decay=["norm"] --set train.steps=4"#;
    sandbox.succeed(&format!("{run} --set run.out_dir=whole --set checkpoint.every=2"));
    let weights = |dir: &str| std::fs::read(sandbox.path(dir).join("model/model.safetensors")).unwrap();
    for layout in ["torchtitan", "flat", "model-optimizer"] {
        let saved = "whole/checkpoints/step-00000002";
        let options = format!("--to dcp --world-size 2 --layout {layout} --no-sync");
        sandbox.succeed(&format!("ckpt convert {saved} dcp-{layout} {options}"));
        let ran = sandbox.succeed(&format!("{run} --set run.out_dir={layout} --resume-from dcp-{layout}"));
        assert!(!ran.stderr.contains("settings of the optimizer"), "{}", ran.stderr);
        assert!(!ran.stderr.contains("bits differ"), "{}", ran.stderr);
        assert!(weights("whole") == weights(layout), "{layout}: weights are equal in bits");
    }
}

/// The settings of a group of AdamW in PyTorch.
const SETTINGS: [&str; 9] = [
    "amsgrad",
    "betas",
    "decoupled_weight_decay",
    "eps",
    "foreach",
    "fused",
    "lr",
    "maximize",
    "weight_decay",
];

#[test]
fn dcp_layouts_use_expected_tensor_names() {
    let sandbox = Sandbox::new();
    sandbox.succeed(r#"train run.toml --set checkpoint.every=3 --set train.optimizer.no_decay=["norm"]"#);
    let names = |options: &str, dir: &str| {
        let saved = "out/checkpoints/step-00000003";
        sandbox.succeed(&format!("ckpt convert {saved} {dir} --to dcp --no-sync {options}"));
        let report = sandbox.json(&format!("ckpt inspect {dir} --tensors"));
        let tensors = report["tensors"].as_array().unwrap().iter();
        let tensors = tensors.map(|tensor| tensor["name"].as_str().unwrap().to_owned());
        let values = report["values"].as_object().unwrap().keys().cloned();
        let all = tensors.chain(values).filter(|name| {
            let of = |part: &str| name.contains(part);
            (of("model.norm.weight") || of("lm_head") || of("param_groups.1"))
                && !of("exp_avg_sq")
                && !of("able")
        });
        all.collect::<Vec<String>>()
    };
    let by_name = "param_groups.model.norm.weight";
    for (dir, options, weights, optimizer, group, lists) in [
        ("a", "--layout torchtitan", &["model.norm.weight"][..], "optimizer", by_name, &[][..]),
        ("b", "--layout flat --tied twice", &["lm_head.weight", "model.norm.weight"], "optim", by_name, &[]),
        (
            "c",
            "--layout model-optimizer --tied twice",
            &["model.lm_head.weight", "model.model.norm.weight"],
            "optimizer",
            "param_groups.1",
            &["params"],
        ),
        (
            "d",
            r"--rename ^optim\.=optimizer.",
            &["model.norm.weight"],
            "optimizer",
            "param_groups.1",
            &["params"],
        ),
    ] {
        let states = ["exp_avg", "step"].map(|state| format!("{optimizer}.state.model.norm.weight.{state}"));
        let mut settings: Vec<&str> = SETTINGS.into_iter().chain(lists.iter().copied()).collect();
        settings.sort_unstable();
        let settings = settings.into_iter().map(|setting| format!("{optimizer}.{group}.{setting}"));
        let weights = weights.iter().map(|&name| name.to_owned());
        let expected: Vec<String> = weights.chain(states).chain(settings).collect();
        assert_eq!(names(options, dir), expected, "{options}");
    }
}
