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
        all.collect::<Vec<_>>().join("\n")
    };
    insta::assert_snapshot!(names("--layout torchtitan", "a"), @r#"
    model.norm.weight
    optimizer.state.model.norm.weight.exp_avg
    optimizer.state.model.norm.weight.step
    optimizer.param_groups.model.norm.weight.amsgrad
    optimizer.param_groups.model.norm.weight.betas
    optimizer.param_groups.model.norm.weight.decoupled_weight_decay
    optimizer.param_groups.model.norm.weight.eps
    optimizer.param_groups.model.norm.weight.foreach
    optimizer.param_groups.model.norm.weight.fused
    optimizer.param_groups.model.norm.weight.lr
    optimizer.param_groups.model.norm.weight.maximize
    optimizer.param_groups.model.norm.weight.weight_decay
    "#);
    insta::assert_snapshot!(names("--layout flat --tied twice", "b"), @r#"
    lm_head.weight
    model.norm.weight
    optim.state.model.norm.weight.exp_avg
    optim.state.model.norm.weight.step
    optim.param_groups.model.norm.weight.amsgrad
    optim.param_groups.model.norm.weight.betas
    optim.param_groups.model.norm.weight.decoupled_weight_decay
    optim.param_groups.model.norm.weight.eps
    optim.param_groups.model.norm.weight.foreach
    optim.param_groups.model.norm.weight.fused
    optim.param_groups.model.norm.weight.lr
    optim.param_groups.model.norm.weight.maximize
    optim.param_groups.model.norm.weight.weight_decay
    "#);
    insta::assert_snapshot!(names("--layout model-optimizer --tied twice", "c"), @r#"
    model.lm_head.weight
    model.model.norm.weight
    optimizer.state.model.norm.weight.exp_avg
    optimizer.state.model.norm.weight.step
    optimizer.param_groups.1.amsgrad
    optimizer.param_groups.1.betas
    optimizer.param_groups.1.decoupled_weight_decay
    optimizer.param_groups.1.eps
    optimizer.param_groups.1.foreach
    optimizer.param_groups.1.fused
    optimizer.param_groups.1.lr
    optimizer.param_groups.1.maximize
    optimizer.param_groups.1.params
    optimizer.param_groups.1.weight_decay
    "#);
    insta::assert_snapshot!(names(r"--rename ^optim\.=optimizer.", "d"), @r#"
    model.norm.weight
    optimizer.state.model.norm.weight.exp_avg
    optimizer.state.model.norm.weight.step
    optimizer.param_groups.1.amsgrad
    optimizer.param_groups.1.betas
    optimizer.param_groups.1.decoupled_weight_decay
    optimizer.param_groups.1.eps
    optimizer.param_groups.1.foreach
    optimizer.param_groups.1.fused
    optimizer.param_groups.1.lr
    optimizer.param_groups.1.maximize
    optimizer.param_groups.1.params
    optimizer.param_groups.1.weight_decay
    "#);
}
