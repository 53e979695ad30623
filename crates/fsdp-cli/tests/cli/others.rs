//! Resuming from checkpoints of other trainers, and saving checkpoints that they can resume from.

use serde_json::Value;

use crate::support::{Sandbox, folded};

/// The PyTorch run that `fsdp2/expected.json` records, in the folder of a sandbox.
const RUN: &str = r#"train fsdp2/run.toml --set model.path=fsdp2 --set data.train=["fsdp2/tokens.bin"]"#;

/// Returns the losses of the PyTorch run after step 10, at which it was saved.
fn expected(sandbox: &Sandbox) -> Vec<f64> {
    let expected: Value = serde_json::from_str(&sandbox.read("fsdp2/expected.json")).unwrap();
    assert_eq!(expected["saved_after"], 10);
    expected["losses"].as_array().unwrap()[10..].iter().map(|loss| loss.as_f64().unwrap()).collect()
}

#[test]
fn resumed_fsdp2_run_matches_pytorch() {
    let sandbox = Sandbox::with_fixtures(&["fsdp2"]);
    let expected = expected(&sandbox);
    assert_eq!(expected.len(), 20);
    for (layout, ranks) in [("dcp", 2), ("dcp_flat", 1)] {
        let run = format!("{RUN} --set run.out_dir={layout} --set run.ranks={ranks}");
        sandbox.succeed(&format!("{run} --resume-from fsdp2/{layout}"));
        assert_eq!(sandbox.column(layout, "step"), (11..=30).map(f64::from).collect::<Vec<_>>());
        for (ours, theirs) in sandbox.column(layout, "loss").iter().zip(&expected) {
            assert!((ours - theirs).abs() <= 1e-6, "{layout}: {ours} and {theirs}");
        }
        let end = format!("{layout}-end.safetensors");
        let convert = format!("ckpt convert fsdp2/expected_end.safetensors {end} --to safetensors");
        sandbox.succeed(&format!("{convert} --strip-prefix model. --no-sync"));
        sandbox.succeed(&format!("ckpt diff {layout}/model {end} --atol 1e-5"));
    }
}

#[test]
fn checkpoints_of_other_trainers_resume_like_pytorch() {
    let sandbox = Sandbox::with_fixtures(&[
        "fsdp2",
        "accelerate",
        "trainer",
        "torchtitan",
        "deepspeed",
        "deepspeed_universal",
        "verl",
        "lightning",
        "xla_fsdp",
    ]);
    let expected = expected(&sandbox);
    // All were trained on the same data from the same weights.
    for (number, path) in [
        "accelerate/fsdp2_sharded",
        "accelerate/fsdp2_full",
        "accelerate/ddp",
        "trainer/single/checkpoint-10",
        "trainer/fsdp2/checkpoint-10",
        "torchtitan/step-10",
        "deepspeed/zero0",
        "deepspeed/zero1",
        "deepspeed/zero2",
        "deepspeed/zero3",
        "deepspeed_universal/zero1",
        "verl/actor",
        "verl/actor/model_world_size_2_rank_0.pt",
        "lightning/checkpoints/step=10.ckpt",
        "xla_fsdp",
    ]
    .into_iter()
    .enumerate()
    {
        let ran = sandbox.succeed(&format!("{RUN} --set run.out_dir=out-{number} --resume-from {path}"));
        assert!(ran.stderr.contains("12 parameters; exp_avg, exp_avg_sq of 12; step 10"), "{}", ran.stderr);
        for (ours, theirs) in sandbox.column(&format!("out-{number}"), "loss").iter().zip(&expected) {
            assert!((ours - theirs).abs() <= 1e-6, "{path}: {ours} and {theirs}");
        }
    }
}

#[test]
fn converted_checkpoint_resumes_like_its_source() {
    let sandbox = Sandbox::with_fixtures(&["fsdp2"]);
    sandbox.succeed(&format!("{RUN} --set run.out_dir=source --resume-from fsdp2/dcp"));
    for (format, path) in [("torch", "all.pth"), ("native", "all"), ("dcp --world-size 3", "three")] {
        sandbox.succeed(&format!("ckpt convert fsdp2/dcp {path} --to {format} --no-sync"));
        sandbox.succeed(&format!("{RUN} --set run.out_dir=of-{path} --resume-from {path}"));
        assert_eq!(sandbox.column(&format!("of-{path}"), "loss"), sandbox.column("source", "loss"), "{path}");
    }
}

#[test]
fn converted_megatron_state_resumes_like_the_same_state_of_pytorch() {
    let sandbox = Sandbox::with_fixtures(&["fsdp2", "megatron"]);
    for (name, parameters, class) in [("single", 21, "Llama"), ("single_qwen2", 26, "Qwen2")] {
        std::fs::create_dir(sandbox.path(name)).unwrap();
        std::fs::copy(
            sandbox.path(&format!("megatron/expected_{name}.json")),
            sandbox.path(&format!("{name}/config.json")),
        )
        .unwrap();
        let from = format!("ckpt convert megatron/{name}/iter_0000001 {name}-state");
        sandbox.succeed(&format!("{from} --to native --config {name}/config.json --no-sync"));
        let refused = sandbox
            .fsdp(&format!("{RUN} --set run.out_dir=refused --resume-from megatron/{name}/iter_0000001"));
        assert!(refused.stderr.contains("convert it first"), "{}", refused.stderr);
        let run = format!(
            r#"{RUN} --set model.path={name} --set model.init=random --set fsdp.wrap=["{class}DecoderLayer"]"#
        );
        let ran = sandbox.succeed(&format!("{run} --set run.out_dir={name}-out --resume-from {name}-state"));
        let taken = format!("{parameters} parameters; exp_avg, exp_avg_sq of {parameters}; step 1");
        assert!(ran.stderr.contains(&taken), "{}", ran.stderr);
        let held = format!("--resume-from megatron/expected_{name}.safetensors --at-step 1");
        sandbox.succeed(&format!("{run} --set run.out_dir={name}-held {held}"));
        assert_eq!(
            sandbox.column(&format!("{name}-out"), "loss"),
            sandbox.column(&format!("{name}-held"), "loss")
        );
    }
}

#[test]
fn deepspeed_bf16_tied_frozen_resume_matches_in_memory_state() {
    let sandbox = Sandbox::with_fixtures(&["fsdp2", "deepspeed", "deepspeed_universal"]);
    let mut config: Value = serde_json::from_str(&sandbox.read("fsdp2/config.json")).unwrap();
    config["tie_word_embeddings"] = true.into();
    std::fs::create_dir(sandbox.path("tied")).unwrap();
    sandbox.write("tied/config.json", config.to_string());
    let tied = r#"--set model.path=tied --set model.init=random --set fsdp.frozen=["k_proj"]"#;
    for (kind, options, taken) in [
        // Its optimizer first makes an empty step, to create its states.
        ("zero0_bf16", "", "12 parameters; exp_avg, exp_avg_sq of 12; step 11"),
        ("zero1_bf16_tied_frozen", tied, "11 parameters; exp_avg, exp_avg_sq of 10; step 10"),
        ("zero2_bf16_tied_frozen", tied, "11 parameters; exp_avg, exp_avg_sq of 10; step 10"),
        ("zero3_bf16_tied_frozen", tied, "11 parameters; exp_avg, exp_avg_sq of 10; step 10"),
    ] {
        let run = format!("{RUN} {options}");
        let ran = sandbox.succeed(&format!("{run} --set run.out_dir={kind} --resume-from deepspeed/{kind}"));
        assert!(ran.stderr.contains(taken), "{kind}: {}", ran.stderr);
        let held =
            format!("--set run.out_dir={kind}-held --resume-from deepspeed/{kind}.expected.safetensors");
        sandbox.succeed(&format!("{run} {held}"));
        assert_eq!(sandbox.column(kind, "loss"), sandbox.column(&format!("{kind}-held"), "loss"), "{kind}");
        if ["zero2_bf16_tied_frozen", "zero3_bf16_tied_frozen"].contains(&kind) {
            let universal =
                format!("--set run.out_dir={kind}-universal --resume-from deepspeed_universal/{kind}");
            let ran = sandbox.succeed(&format!("{run} {universal}"));
            assert!(ran.stderr.contains(taken), "{kind}: {}", ran.stderr);
            let column = |out: &str| sandbox.column(out, "loss");
            assert_eq!(column(&format!("{kind}-universal")), column(&format!("{kind}-held")), "{kind}");
        }
    }
}

/// Runs in which the optimizer had updated some parameters in fewer steps, or never, continue as PyTorch did, and from
/// their own checkpoints without a difference.
#[test]
fn parameters_with_fewer_steps_resume_like_pytorch() {
    let sandbox = Sandbox::with_fixtures(&["fsdp2", "late_states"]);
    let sgd = "{name=\"sgd\",lr=0.01,momentum=0.9,dampening=0.5,weight_decay=0.1,no_decay=[\"norm\"]}";
    let sgd = format!(" --set train.optimizer={sgd} --at-step 10");
    for (optimizer, settings) in [("adamw", ""), ("sgd", &sgd[..])] {
        let folder = format!("late_states/{optimizer}");
        let end = format!("{optimizer}-end.safetensors");
        let convert = format!("ckpt convert {folder}/expected_end.safetensors {end} --to safetensors");
        sandbox.succeed(&format!("{convert} --strip-prefix model. --no-sync"));
        for (layout, ranks) in [("dcp", 2), ("numbered.pt", 1)] {
            let out = format!("{optimizer}-{layout}");
            let run = format!(
                "{RUN} --set train.steps=15 --set checkpoint.every=2 --set checkpoint.keep_last=0 --set run.ranks={ranks}"
            );
            let from = format!("--set run.out_dir={out}{settings} --resume-from {folder}/{layout}");
            let ran = sandbox.succeed(&format!("{run} {from}"));
            let warned = folded(&ran.stderr).replace('\n', " ");
            assert!(warned.contains("no state of 2 parameters"), "{out}: {warned}");
            let fewer = "fewer steps of 3 parameters: lm_head.weight (1), model.layers.0.mlp.down_proj.weight (0), \
                         model.layers.0.mlp.up_proj.weight (6)";
            assert_eq!(warned.contains(fewer), optimizer == "adamw", "{out}: {warned}");
            sandbox.succeed(&format!("ckpt diff {out}/model {end} --atol 1e-5"));
            let settings = settings.replace(" --at-step 10", "");
            let again = format!(
                "--set run.out_dir={out}-again{settings} --resume-from {out}/checkpoints/step-00000012"
            );
            sandbox.succeed(&format!("{run} {again}"));
            sandbox.succeed(&format!("ckpt diff {out}/model {out}-again/model"));
            sandbox.succeed(&format!(
                "ckpt diff {out}/checkpoints/step-00000014 {out}-again/checkpoints/step-00000014 --only optimizer"
            ));
        }
    }
}

/// SGD counts no steps, and begins its momentum with the first one: momenta at step 0 would be dropped.
#[test]
fn momenta_of_sgd_need_a_step() {
    let sandbox = Sandbox::with_fixtures(&["fsdp2", "late_states"]);
    let sgd = "{name=\"sgd\",lr=0.01,momentum=0.9,dampening=0.5,weight_decay=0.1,no_decay=[\"norm\"]}";
    for layout in ["dcp", "numbered.pt"] {
        let ran = sandbox.fsdp(&format!(
            "{RUN} --set train.optimizer={sgd} --set run.out_dir=out --at-step 0 --resume-from late_states/sgd/{layout}"
        ));
        assert_eq!(ran.code, Some(2), "{layout}: {}", ran.stderr);
        assert!(
            folded(&ran.stderr).replace('\n', " ").contains("its optimizer has momenta; pass --at-step N"),
            "{}",
            ran.stderr
        );
    }
}

/// Models whose experts transformers stacks in memory: read as initial weights, continued from a state of FSDP2's
/// layout, and converted both ways.
#[test]
fn stacked_experts_train_and_convert_like_transformers() {
    let sandbox = Sandbox::with_fixtures(&["fsdp2", "fused_experts"]);
    for (kind, class) in [("mixtral", "Mixtral"), ("qwen3_moe", "Qwen3Moe")] {
        let folder = format!("fused_experts/{kind}");
        let run = format!(r#"{RUN} --set model.path={folder}/model --set fsdp.wrap=["{class}DecoderLayer"]"#);
        // Both forms of the weights begin the same run.
        for form in ["model", "fused"] {
            sandbox.succeed(&format!(
                "{run} --set model.path={folder}/{form} --set train.steps=2 --set run.out_dir={kind}-{form}"
            ));
        }
        sandbox.succeed(&format!("ckpt diff {kind}-model/model {kind}-fused/model"));
        let end = format!("{kind}-end.safetensors");
        sandbox.succeed(&format!(
            "ckpt convert {folder}/expected_end.safetensors {end} --to safetensors --strip-prefix model. --no-sync"
        ));
        for ranks in [1, 2] {
            let out = format!("{kind}-{ranks}");
            let more = format!("--set train.steps=6 --set run.ranks={ranks} --set checkpoint.every=6");
            sandbox.succeed(&format!("{run} {more} --set run.out_dir={out} --resume-from {folder}/dcp"));
            let fused = format!("{out}-fused.safetensors");
            sandbox.succeed(&format!(
                "ckpt convert {out}/model {fused} --to safetensors --experts fused --no-sync"
            ));
            sandbox.succeed(&format!("ckpt diff {fused} {end} --atol 1e-5"));
        }
        // A whole state, with moments and groups, there and back.
        let (stacked, single) = (format!("{kind}-stacked"), format!("{kind}-single"));
        let state = format!("{kind}-2/checkpoints/step-00000006");
        sandbox.succeed(&format!("ckpt convert {state} {stacked} --to dcp --experts fused --no-sync"));
        std::fs::create_dir(sandbox.path("beside")).ok();
        let inside = format!("beside/{kind}");
        sandbox.succeed(&format!("ckpt convert {stacked} {inside} --to dcp --world-size 2 --no-sync"));
        std::fs::copy(
            sandbox.path(&format!("{folder}/model/config.json")),
            sandbox.path(&format!("{inside}/config.json")),
        )
        .unwrap();
        sandbox.succeed(&format!("ckpt convert {inside} {single} --to dcp --experts separate --no-sync"));
        sandbox.succeed(&format!("ckpt diff {single} {state} --only model"));
        // The list of a group is in another order, but the same when stacked again.
        let twice = format!("{kind}-twice");
        sandbox.succeed(&format!("ckpt convert {single} {twice} --to dcp --experts fused --no-sync"));
        sandbox.succeed(&format!("ckpt diff {twice} {stacked}"));
        let again = sandbox.fsdp(&format!("ckpt convert {state} again --to dcp --experts separate"));
        assert_eq!(again.code, Some(2), "{}", again.stderr);
        assert!(folded(&again.stderr).contains("or put it into the directory SRC"), "{}", again.stderr);
        convert_with_family(&sandbox, &folder, (&stacked, &single));
        let again = sandbox.fsdp(&format!("ckpt convert {stacked} again --to dcp --experts fused"));
        assert!(again.stderr.contains("it has no experts in the other form"), "{}", again.stderr);
    }
}

/// The family of the model follows from `--config` for every format and both forms of the experts.
fn convert_with_family(sandbox: &Sandbox, folder: &str, (stacked, single): (&str, &str)) {
    for (to, end) in
        [("dcp", ""), ("native", ""), ("torch", ".pt"), ("safetensors", ".safetensors"), ("safetensors", "")]
    {
        for (form, from, expected) in [("fused", single, stacked), ("separate", stacked, single)] {
            let out = format!("{single}-{form}-{to}{end}");
            sandbox.succeed(&format!(
                "ckpt convert {from} {out} --to {to} --experts {form} --config {folder}/model/config.json --no-sync"
            ));
            sandbox.succeed(&format!("ckpt diff {out} {expected} --only model"));
            let has_config = sandbox.path(&format!("{out}/config.json")).exists();
            assert_eq!(has_config, to == "safetensors" && end.is_empty(), "{out}");
        }
    }
}

/// The same models under DeepSpeed, whose flat groups hold stacks; in stage 0, the moments have numbers.
#[test]
fn stacked_experts_of_deepspeed_resume_and_convert() {
    let sandbox = Sandbox::with_fixtures(&["fsdp2", "fused_experts", "deepspeed_experts"]);
    for (kind, class) in [("mixtral", "Mixtral"), ("qwen3_moe", "Qwen3Moe")] {
        let model = format!("fused_experts/{kind}/model");
        let run = format!(
            r#"{RUN} --set model.path={model} --set fsdp.wrap=["{class}DecoderLayer"] --set train.steps=6"#
        );
        for (stage, ranks) in [(0, 1), (2, 2), (3, 2)] {
            let (out, from) = (format!("{kind}-{stage}"), format!("deepspeed_experts/{kind}_zero{stage}"));
            let settings = format!("--set run.ranks={ranks} --set run.out_dir={out}");
            let ran = sandbox.succeed(&format!("{run} {settings} --resume-from {from}"));
            assert!(ran.stderr.contains("step 3 (opt"), "{}", ran.stderr);
            let (end, fused) = (format!("{out}-end.safetensors"), format!("{out}-fused.safetensors"));
            sandbox.succeed(&format!(
                "ckpt convert {from}/expected_end.safetensors {end} --to safetensors --strip-prefix model. --no-sync"
            ));
            sandbox.succeed(&format!(
                "ckpt convert {out}/model {fused} --to safetensors --experts fused --no-sync"
            ));
            sandbox.succeed(&format!("ckpt diff {fused} {end} --atol 1e-5"));
            let only = if stage == 0 { "--only model" } else { "--only all" };
            let separate = format!("--experts separate --config {model}/config.json --no-sync {only}");
            sandbox.succeed(&format!("ckpt convert {from} {out}-separate --to dcp {separate}"));
            sandbox.succeed(&format!(
                "ckpt convert {out}-separate {out}-again --to dcp --experts fused --no-sync"
            ));
            sandbox.succeed(&format!("ckpt diff {out}-again {from} {only}").replace(" --only all", ""));
        }
    }
}

/// The state of the same experts by number: stacked as transformers 5 holds them, with weights in either form, and one by
/// one as transformers 4 did.
#[test]
fn numbered_experts_resume_like_transformers() {
    let sandbox = Sandbox::with_fixtures(&["fsdp2", "fused_experts"]);
    for (kind, class) in [("mixtral", "Mixtral"), ("qwen3_moe", "Qwen3Moe")] {
        let folder = format!("fused_experts/{kind}");
        let run = format!(
            r#"{RUN} --set model.path={folder}/model --set fsdp.wrap=["{class}DecoderLayer"] --set train.steps=6"#
        );
        let end = format!("{kind}-end.safetensors");
        sandbox.succeed(&format!(
            "ckpt convert {folder}/expected_end.safetensors {end} --to safetensors --strip-prefix model. --no-sync"
        ));
        for (from, ranks) in [("numbered.pt", 1), ("separate.pt", 2), ("checkpoint-3", 2)] {
            let out = format!("{kind}-{from}");
            let more = format!("--set run.ranks={ranks} --set run.out_dir={out}");
            let ran = sandbox.succeed(&format!("{run} {more} --resume-from {folder}/{from}"));
            let derived =
                "names of the optimizer's numbered states, from the order of the model's parameters";
            assert!(ran.stderr.contains(derived), "{out}: {}", ran.stderr);
            assert!(!ran.stderr.contains("bits differ"), "the settings of groups are found: {}", ran.stderr);
            let fused = format!("{out}-fused.safetensors");
            sandbox.succeed(&format!(
                "ckpt convert {out}/model {fused} --to safetensors --experts fused --no-sync"
            ));
            sandbox.succeed(&format!("ckpt diff {fused} {end} --atol 1e-5"));
        }
        // Without a model, the numbers cannot follow the form.
        let separate = format!("ckpt convert {folder}/numbered.pt {kind}-separate --to dcp --experts");
        let form = if kind == "mixtral" { "fused" } else { "separate" };
        let from = if kind == "mixtral" { "separate.pt" } else { "numbered.pt" };
        std::fs::copy(
            sandbox.path(&format!("{folder}/model/config.json")),
            sandbox.path(&format!("{folder}/config.json")),
        )
        .unwrap();
        let separate = separate.replace("numbered.pt", from);
        let ran = sandbox.fsdp(&format!("{separate} {form}"));
        assert_eq!(ran.code, Some(2), "{}", ran.stderr);
        assert!(ran.stderr.contains("would change all numbers"), "{}", ran.stderr);
        sandbox.succeed(&format!("{separate} {form} --only model --no-sync"));
    }
}

/// Experts whose optimizer has other counts than their neighbors', or no moments, have no stacked form.
#[test]
fn experts_with_other_counts_are_not_stacked() {
    let sandbox = Sandbox::with_fixtures(&["fsdp2", "fused_experts"]);
    let run = format!(
        r#"{RUN} --set model.path=fused_experts/mixtral/model --set fsdp.wrap=["MixtralDecoderLayer"] --set checkpoint.every=2
        --set checkpoint.keep_last=0"#
    );
    let frozen = r#"--set fsdp.frozen=["experts[.]1[.]"]"#;
    sandbox.succeed(&format!("{run} --set train.steps=2 {frozen} --set run.out_dir=first"));
    let first = "first/checkpoints/step-00000002";
    let refused = |source: &str| {
        let ran = sandbox.fsdp(&format!("ckpt convert {source} stacked --to dcp --experts fused"));
        assert_eq!(ran.code, Some(2), "{source}: {}", ran.stderr);
        assert!(!sandbox.path("stacked").exists(), "{source}");
        ran.stderr
    };
    let lacking = refused(first);
    assert!(lacking.contains("expert 1 lacks its part of `optim.state."), "{lacking}");
    sandbox.succeed(&format!("ckpt convert {first} plain --to dcp --no-sync"));
    let ran =
        sandbox.succeed(&format!("{run} --set train.steps=4 --set run.out_dir=second --resume-from plain"));
    assert!(folded(&ran.stderr).replace('\n', " ").contains("no state of 3 parameters"), "{}", ran.stderr);
    let second = "second/checkpoints/step-00000004";
    let differing = refused(second);
    let named = "experts.0.w2.weight.step` and `optim.state.model.layers.0.block_sparse_moe.experts.1.w2.weight.step` differ";
    assert!(differing.contains(named), "{differing}");
    sandbox
        .succeed(&format!("ckpt convert {second} stacked --to dcp --experts fused --only model --no-sync"));
}

#[test]
fn loaded_state_is_reported_before_first_step() {
    let sandbox = Sandbox::with_fixtures(&["fsdp2"]);
    let run = format!("{RUN} --set train.steps=10 --set run.out_dir=out --set train.optimizer.lr=0.02");
    let run = format!("{run} --set train.optimizer.no_decay=[] --resume-from fsdp2/dcp");
    let ran = sandbox.succeed(&run);
    let stderr = ran.stderr.replace(&sandbox.path("").canonicalize().unwrap().display().to_string(), "");
    insta::assert_snapshot!(folded(&stderr), @r#"
    resuming from /fsdp2/dcp after step 10
    train.optimizer.lr was 0.01, now 0.02: from here on, bits differ from an unchanged run's
    train.optimizer.weight_decay of model.layers.0.input_layernorm.weight and 2 more was 0, now 0.1:
    from here on, bits differ from an unchanged run's
      format    PyTorch DCP 1.0.0
      taken     12 parameters; exp_avg, exp_avg_sq of 12; step 10
    (optim.state.model.embed_tokens.weight.step)
      derived   position in data.train: epoch 0, step 10 of it; learning rate of the next step: 0.02
      missing   random state: dropout follows from the seed and the step
      not used  -
    "#);
}

#[test]
fn resume_errors_explain_rejected_checkpoints() {
    let sandbox = Sandbox::with_fixtures(&["fsdp2"]);
    let input_error = |options: &str| {
        let ran = sandbox.fsdp(&format!("{RUN} --set run.out_dir=out {options}"));
        assert_eq!(ran.code, Some(2), "{options}: {}", ran.stderr);
        assert!(!sandbox.path("out").exists(), "{options}");
        let folder = sandbox.path("").canonicalize().unwrap().display().to_string();
        folded(&ran.stderr.replace(&format!("{folder}/"), ""))
    };
    std::fs::create_dir(sandbox.path("other")).unwrap();
    let config = sandbox.read("fsdp2/config.json");
    let mut config: Value = serde_json::from_str(&config).unwrap();
    config["intermediate_size"] = 8.into();
    config["num_hidden_layers"] = 2.into();
    sandbox.write("other/config.json", config.to_string());
    insta::assert_snapshot!(input_error("--resume-from fsdp2/model.safetensors"), @r#"
    error: fsdp2/model.safetensors has no optimizer state to resume from; to train from its weights,
    set model.init = "pretrained" and model.path to it, or to the output of `fsdp ckpt convert --to
    safetensors`
    "#);
    insta::assert_snapshot!(input_error("--resume-from fsdp2/dcp --at-step 12"), @r#"
    error: fsdp2/dcp: --at-step 12, but optim.state.model.embed_tokens.weight.step counts 10 steps,
    which the optimizer uses to correct its moments; omit --at-step
    "#);
    let other = "--set model.path=other --set model.init=random --resume-from fsdp2/dcp";
    insta::assert_snapshot!(input_error(other), @r#"
    error: the tensors in fsdp2/dcp do not match the requested model: 9 missing:
    `model.model.layers.1.self_attn.q_proj.weight`, `model.model.layers.1.self_attn.k_proj.weight`,
    `model.model.layers.1.self_attn.v_proj.weight`, `model.model.layers.1.self_attn.o_proj.weight`,
    `model.model.layers.1.mlp.gate_proj.weight`, `model.model.layers.1.mlp.up_proj.weight`,
    `model.model.layers.1.mlp.down_proj.weight`, `model.model.layers.1.input_layernorm.weight`,
    `model.model.layers.1.post_attention_layernorm.weight`; 9 of the wrong shape:
    `model.model.layers.0.mlp.gate_proj.weight` (expected [8, 9], got [12, 9]),
    `model.model.layers.0.mlp.up_proj.weight` (expected [8, 9], got [12, 9]),
    `model.model.layers.0.mlp.down_proj.weight` (expected [9, 8], got [9, 12]),
    `optim.state.model.layers.0.mlp.gate_proj.weight.exp_avg` (expected [8, 9], got [12, 9]),
    `optim.state.model.layers.0.mlp.gate_proj.weight.exp_avg_sq` (expected [8, 9], got [12, 9]),
    `optim.state.model.layers.0.mlp.up_proj.weight.exp_avg` (expected [8, 9], got [12, 9]),
    `optim.state.model.layers.0.mlp.up_proj.weight.exp_avg_sq` (expected [8, 9], got [12, 9]),
    `optim.state.model.layers.0.mlp.down_proj.weight.exp_avg` (expected [9, 8], got [9, 12]),
    `optim.state.model.layers.0.mlp.down_proj.weight.exp_avg_sq` (expected [9, 8], got [9, 12]); check
    that config and weights belong together
    "#);
    insta::assert_snapshot!(input_error("--resume-from fsdp2"), @r#"
    error: fsdp2 has no optimizer state to resume from; to train from its weights, set model.init =
    "pretrained" and model.path to it, or to the output of `fsdp ckpt convert --to safetensors`
    "#);
    let two = Sandbox::with_fixtures(&["fsdp2", "accelerate"]);
    let ran = two.fsdp(&format!("{RUN} --set run.out_dir=out --resume-from accelerate/two_optimizers"));
    assert!(
        ran.stderr.contains("there are several optimizers, each with numbers of its own"),
        "{}",
        ran.stderr
    );
    let alone = two.fsdp(&format!("{RUN} --set run.out_dir=out --resume-from accelerate/ddp/optimizer.bin"));
    assert!(alone.stderr.contains("it holds an optimizer without its model"), "{}", alone.stderr);
    insta::assert_snapshot!(input_error("--resume-from nowhere"), @r#"
    error: nowhere is not the checkpoint of a run: No such file or directory (os error 2); give a
    directory such as runs/a/checkpoints/step-00000050 (`fsdp ckpt inspect` shows what a path holds)
    "#);
}

#[test]
fn flipped_bit_in_dcp_tensor_is_detected_on_resume() {
    let sandbox = Sandbox::with_fixtures(&["fsdp2"]);
    let file = sandbox.path("fsdp2/dcp/__0_0.distcp");
    let mut bytes = std::fs::read(&file).unwrap();
    // Flip a bit of the first tensor. It follows the local header of its record, which ends with the name and extra
    // field.
    let name = b"archive/data/0";
    let name = bytes.windows(name.len()).position(|found| found == name).unwrap();
    let extra = usize::from(u16::from_le_bytes([bytes[name - 2], bytes[name - 1]]));
    bytes[name + 14 + extra] ^= 1;
    std::fs::write(&file, bytes).unwrap();
    let ran = sandbox.fsdp(&format!("{RUN} --set run.out_dir=out --resume-from fsdp2/dcp"));
    assert_eq!(ran.code, Some(2), "{}", ran.stderr);
    assert!(ran.stderr.contains("__0_0.distcp: bytes "), "{}", ran.stderr);
    assert!(ran.stderr.contains("their checksum is"), "{}", ran.stderr);
}

#[test]
fn several_processes_resume_from_dcp() {
    let sandbox = Sandbox::with_fixtures(&["fsdp2"]);
    let run = format!("{RUN} --set run.out_dir=out --resume-from fsdp2/dcp");
    sandbox.succeed(&format!("launch --nproc 2 -- {run}"));
    sandbox.succeed(&format!("{RUN} --set run.out_dir=one --resume-from fsdp2/dcp"));
    assert_eq!(sandbox.column("out", "loss"), sandbox.column("one", "loss"));
}

#[test]
fn wrapper_names_are_reported_and_stripped() {
    let sandbox = Sandbox::with_fixtures(&["fsdp2"]);
    let wrapped = r"--rename layers\.0=layers.0._checkpoint_wrapped_module --rename ^model\.(lm|mod)=model._orig_mod.$1";
    sandbox.succeed(&format!("ckpt convert fsdp2/dcp wrapped --to dcp {wrapped} --no-sync"));
    let note = "`_checkpoint_wrapped_module.`, `_orig_mod.`";
    let inspected = sandbox.succeed("ckpt inspect wrapped").stdout;
    assert!(inspected.contains(note) && inspected.contains("--strip-wrappers"), "{inspected}");
    let differs = sandbox.fsdp("ckpt diff wrapped fsdp2/dcp");
    assert_eq!(differs.code, Some(1));
    assert!(differs.stdout.contains("--strip-wrappers"), "{}", differs.stdout);
    sandbox.succeed("ckpt diff wrapped fsdp2/dcp --strip-wrappers");
    sandbox.succeed("ckpt convert wrapped plain --to dcp --strip-wrappers --no-sync");
    sandbox.succeed("ckpt diff plain fsdp2/dcp");
    let useless = sandbox.fsdp("ckpt convert fsdp2/dcp again --to dcp --strip-wrappers --no-sync");
    assert_eq!(useless.code, Some(2), "{}", useless.stderr);
    sandbox.succeed("ckpt convert wrapped base-model --to safetensors --config fsdp2/config.json --no-sync");
    let base = r#"train fsdp2/run.toml --set model.path=base-model --set data.train=["fsdp2/tokens.bin"]"#;
    let rejected = sandbox.fsdp(&format!("{base} --set run.out_dir=base"));
    assert_eq!(rejected.code, Some(2));
    assert!(
        rejected.stderr.contains(note) && rejected.stderr.contains("--strip-wrappers"),
        "{}",
        rejected.stderr
    );
    let run = format!("{RUN} --set train.steps=10 --set run.out_dir=out --resume-from wrapped");
    let stderr = sandbox.succeed(&run).stderr;
    assert!(stderr.contains("names without _checkpoint_wrapped_module., _orig_mod."), "{stderr}");
}
