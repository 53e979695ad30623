//! Configurations that are rejected, and the text of the errors.

use super::*;

#[test]
fn rejects_invalid_evaluation_sets() {
    rejects(&["data.eval=docs"], &["`data.eval` is \"docs\"", "a list of paths", "[[data.eval]]"]);
    rejects(&["data.eval=[{name='a'}]"], &["`data.eval[0].paths` is missing"]);
    rejects(&["data.eval=[{paths=['a']}]"], &["`data.eval[0].name` is missing"]);
    let two = |second: &str| format!("data.eval=[{{name='a', paths=['a']}}, {{{second}}}]");
    rejects(&[&two("name='a', paths=['b']")], &["a list of sets with different names"]);
    rejects(&[&two("name='b/c', paths=['b']")], &["`data.eval[1].name` is \"b/c\"", "letters, digits"]);
    rejects(&[&two("name='b', path=['b']")], &["unknown key `data.eval[1].path`", "`data.eval[1].paths`"]);
    rejects(&[&two("name='b', paths=['b'], max_samples=-1")], &["`data.eval[1].max_samples` is -1"]);
}

#[test]
fn rejects_malformed_overrides() {
    for argument in ["train.steps", "steps=1", "train..steps=1", ".steps=1", "train.steps.deep=1"] {
        let error = parse(FULL, &[argument]).unwrap_err();
        assert!(matches!(error, ConfigError::Override { .. }), "{argument}: {error}");
    }
}

#[test]
fn unknown_key_error_suggests_nearest_at_any_depth() {
    rejects(&["modell.path=a"], &["unknown key `modell`", "did you mean `model`?"]);
    rejects(&["train.stepss=3"], &["--set train.stepss", "`train.stepss`", "did you mean `train.steps`?"]);
    rejects(&["train.optimizer.weight_decey=3"], &["did you mean `train.optimizer.weight_decay`?"]);
    rejects(&["train.optimizer.momentum=0.9"], &["`train.optimizer.momentum`", "known keys here: lr, betas"]);
    rejects(&["fsdp.mesh.replicas=1"], &["did you mean `fsdp.mesh.replicate`?"]);
    rejects(&["run.overwrite=true"], &["`run.overwrite`", "out_dir"]);
    rejects_line("ranks = 4", "ranks = 4\nrank = 4", &["run.toml: unknown key `run.rank`", "`run.ranks`"]);
}

#[test]
fn wrong_type_error_names_key_value_and_allowed_values() {
    rejects(
        &["train.steps=many"],
        &["--set train.steps", "`train.steps` is \"many\"", "an integer of at least 1"],
    );
    rejects(&["data.train=README.md"], &["`data.train`", "a list of at least one string"]);
    rejects(&["data.shuffle=1"], &["`data.shuffle` is 1", "true or false"]);
    rejects(&["fsdp.mesh=2"], &["`fsdp.mesh` is 2", "a table"]);
    rejects(&["train.optimizer=adamw"], &["`train.optimizer` is \"adamw\"", "a table"]);
    rejects(&["train.optimizer.betas=[0.9]"], &["`train.optimizer.betas` is [0.9]", "two numbers"]);
    rejects(&["data.bos=1.5"], &["`data.bos`", "\"auto\", a token (string) or an id"]);
    rejects_line("steps = 200", "steps = 200.5", &["run.toml: `train.steps` is 200.5"]);
}

#[test]
fn rejects_out_of_range_values() {
    rejects(&["train.steps=0"], &["`train.steps` is 0"]);
    rejects(&["data.seed=-1"], &["`data.seed` is -1", "at least 0"]);
    rejects(&["data.seq_len=0"], &["`data.seq_len`"]);
    rejects(&["data.train=[]"], &["`data.train` is []"]);
    rejects(&["data.pad=4294967295"], &["`data.pad`"]);
    rejects(&["train.grad_clip=0"], &["`train.grad_clip` is 0", "\"none\""]);
    rejects(&["train.grad_clip=inf"], &["`train.grad_clip` is inf"]);
    rejects(&["train.optimizer.betas=[0.9, 1.0]"], &["below 1"]);
    rejects(&["train.optimizer.lr=-1"], &["`train.optimizer.lr` is -1"]);
    rejects(&["train.lr_schedule.start_factor=-0.1"], &["at least 0 and at most 1"]);
    rejects(&["train.lr_schedule.start_factor=1.1"], &["at least 0 and at most 1"]);
    rejects(&["fsdp.reshard_after_forward=0"], &["`fsdp.reshard_after_forward` is 0", "\"auto\""]);
    rejects(&["run.timeout_s=0"], &["`run.timeout_s`"]);
    rejects(&["run.heartbeat_s=0"], &["`run.heartbeat_s`"]);
    rejects(&["run.timeout_s=1e300"], &["`run.timeout_s`", "1e9"]);
    rejects(&["run.timeout_s=inf"], &["`run.timeout_s`", "1e9"]);
    rejects(&["run.timeout_s=1e-12"], &["`run.timeout_s`", "from 0.1"]);
    rejects(&["run.timeout_s=0.0999"], &["`run.timeout_s`", "from 0.1"]);
    rejects(&["run.threads=1025"], &["`run.threads`", "1024"]);
    rejects(&["run.metrics=['csv', 'csv']"], &["`run.metrics` is [\"csv\", \"csv\"]", "each at most once"]);
    rejects(
        &["run.metrics=['wandb']"],
        &["`run.metrics`", "a list of \"tensorboard\", \"csv\" or \"mlflow\""],
    );
    rejects(&["run.metrics_listen=9100"], &["`run.metrics_listen` is 9100", "\"127.0.0.1:9100\""]);
    rejects(
        &["run.out_dir=s3://bucket/run"],
        &["`run.metrics` is [\"tensorboard\", \"csv\"]", "run.out_dir is a URL"],
    );
    rejects(&["fsdp.frozen=['(']"], &["`fsdp.frozen`", "is not a regular expression"]);
}

#[test]
fn unknown_name_error_lists_known_ones() {
    rejects(
        &["train.optimizer.name=adam"],
        &["`train.optimizer.name` is \"adam\"", "\"adamw\", \"adamw8bit\", \"sgd\""],
    );
    rejects(&["train.lr_schedule.name=cosine"], &["\"warmup-cosine\""]);
    rejects(&["data.format=csv"], &["\"jsonl\", \"parquet\""]);
    rejects(&["data.packing=pack"], &["\"stream\", \"documents\" or \"packed\""]);
    rejects(&["model.init=zeros"], &["\"random\" or \"pretrained\""]);
    rejects(&["fsdp.param_dtype=f8"], &["\"f32\", \"bf16\", \"f16\" or \"f64\""]);
    rejects(&["fsdp.accumulation=local"], &["\"reduce\" or \"unsharded\""]);
    rejects(&["fsdp.accumulation_order=any"], &["\"tree\" or \"running\""]);
    rejects(&["fsdp.reduce_op=mean"], &["`fsdp.reduce_op` is \"mean\"", "\"sum\" or \"average\""]);
    rejects(&["fsdp.offload=gpu"], &["\"none\" or \"cpu\""]);
    rejects(&["fsdp.activation_checkpointing=some"], &["\"none\", \"selective\" or \"full\""]);
    rejects(&["run.device=tpu"], &["`run.device` is \"tpu\"", "\"cpu\", \"torch-cpu\", \"cuda\" or \"xla\""]);
}

#[test]
fn rejects_missing_required_keys() {
    for (line, key) in [
        ("path = \"m\"", "model.path"),
        ("train = [\"a\"]", "data.train"),
        ("steps = 10", "train.steps"),
        ("out_dir = \"out\"", "run.out_dir"),
    ] {
        let message = parse(&MINIMAL.replace(line, ""), &[]).unwrap_err().to_string();
        assert!(message.starts_with(&format!("run.toml: `{key}` is missing; set it to ")), "{message}");
    }
}

#[test]
fn rejects_indivisible_batch_and_mesh_sizes() {
    rejects(
        &["train.micro_batch_size=3"],
        &["`train.micro_batch_size` = 3 does not divide train.global_batch_size = 16"],
    );
    rejects(&["run.ranks=3"], &["`run.ranks` = 3 does not divide the micro-batches per step", "= 8"]);
    rejects(&["fsdp.mesh.replicate=3"], &["`fsdp.mesh.replicate` = 3 does not divide run.ranks = 4"]);
    rejects(&["fsdp.reshard_after_forward=3"], &["= 3 does not divide the shard axis", "= 4"]);
}

#[test]
fn rejects_two_wrap_policies() {
    rejects(&["fsdp.min_num_params=100"], &["`fsdp.wrap` and `fsdp.min_num_params` exclude each other"]);
}

#[test]
fn rejects_what_adapters_of_experts_do_not_have() {
    let experts = "adapter.target_parameters=['mlp.experts.down_proj']";
    for (other, key) in [("adapter.dropout=0.1", "dropout"), ("adapter.dora=true", "dora")] {
        let conflict = format!("`adapter.target_parameters` and `adapter.{key}` exclude each other");
        rejects(&[experts, other], &[&conflict, "as in PEFT"]);
    }
    rejects(
        &["adapter.target_modules=[]"],
        &["`adapter.target_modules` is []", "only beside adapter.target_parameters"],
    );
    assert!(parse(MINIMAL, &[experts, "adapter.target_modules=[]"]).is_ok());
}

#[test]
fn rejects_invalid_lr_schedules() {
    rejects(
        &["train.lr_schedule.min_lr=1"],
        &["`train.lr_schedule.min_lr` is 1", "train.optimizer.lr = 0.003"],
    );
    let both = "train.lr_schedule={name='inverse-sqrt', min_lr=1e-4, min_lr_ratio=0.1}";
    rejects(&[both], &["`train.lr_schedule.min_lr` and `train.lr_schedule.min_lr_ratio` exclude each other"]);
    rejects(&["train.lr_schedule.cycles=2"], &["unknown key `train.lr_schedule.cycles`"]);
    rejects(&["train.lr_schedule={name='linear', min_lr_ratio=2}"], &["at least 0 and at most 1"]);
    rejects(&["train.lr_schedule={name='warmup-stable-decay', decay='sqrt'}"], &["\"1-sqrt\", \"linear\""]);
    let conflict = "`train.optimizer.relative_step` and `train.lr_schedule` exclude each other";
    rejects(&["train.optimizer={name='adafactor'}"], &[conflict]);
}

#[test]
fn rejects_invalid_param_groups() {
    let rejects_group = |group: &str, fragments: &[&str]| {
        rejects(&[&format!("train.optimizer.group=[{{patterns=['a']}}, {group}]")], fragments);
    };
    rejects_group("{lr=1}", &["`train.optimizer.group[1].patterns` is missing"]);
    rejects_group("{patterns=[], lr=1}", &["--set train.optimizer.group", "group[1].patterns` is []"]);
    rejects_group("{patterns=['(']}", &["group[1].patterns`", "is not a regular expression"]);
    rejects_group("{patterns=['b'], lr=1, lr_scale=1}", &["group[1].lr_scale` exclude each other"]);
    rejects_group("{patterns=['b'], decay=1}", &["unknown key `train.optimizer.group[1].decay`"]);
    rejects_group("7", &["`train.optimizer.group`", "tables [[train.optimizer.group]]"]);
    let adafactor = "train.optimizer={name='adafactor', group=[{patterns=['a'], lr=1}]}";
    rejects(&["train.lr_schedule={name='constant'}", adafactor], &["`train.optimizer.group`", "without lr"]);
}

#[test]
fn rejects_contradictory_optimizer_settings() {
    rejects(&["train.optimizer={name='sgd', nesterov=true}"], &["`train.optimizer.nesterov` is true"]);
    rejects(&["train.optimizer={name='adafactor', lr=1}"], &["`train.optimizer.lr` exclude each other"]);
    rejects(
        &["train.optimizer={name='adafactor', relative_step=false}"],
        &["`train.optimizer.lr` is missing"],
    );
    let warmup_init = "train.optimizer={name='adafactor', relative_step=false, lr=1, warmup_init=true}";
    rejects(&[warmup_init], &["`train.optimizer.warmup_init` is true"]);
}

#[test]
fn invalid_toml_error_names_line() {
    let message = parse("[model\npath = 1", &[]).unwrap_err().to_string();
    assert!(message.starts_with("run.toml: not valid TOML: TOML parse error at line 1"), "{message}");
}

#[test]
fn missing_file_error_names_path() {
    let message = Resolved::load("missing/run.toml".as_ref(), &[]).unwrap_err().to_string();
    assert!(message.contains("missing/run.toml"), "{message}");
}

#[test]
fn rejects_invalid_early_stopping() {
    rejects(&["train.early_stop.patience=0"], &["`train.early_stop.patience` is 0", "at least 1"]);
    rejects(&["train.early_stop.min_delta=-1"], &["`train.early_stop.min_delta`"]);
    rejects(&["train.early_stop.set=books"], &["`train.early_stop.set`", "evaluation set: eval"]);
    rejects(&["data.eval=[]"], &["`train.early_stop`", "unless data.eval is set"]);
    rejects(&["train.early_stop.wait=3"], &["unknown key `train.early_stop.wait`", "patience"]);
}

#[test]
fn loss_scale_requires_f16_and_power_of_two() {
    rejects(&["train.loss_scale.init=1024"], &["`train.loss_scale`", "fsdp.param_dtype is \"f16\""]);
    for init in ["1000", "0", "0.5", "-2", "inf", "1e39"] {
        let given = format!("train.loss_scale.init={init}");
        rejects(
            &["fsdp.param_dtype=f16", &given],
            &["`train.loss_scale.init`", "a power of two from 1 to 2^127"],
        );
    }
    rejects(&["fsdp.param_dtype=f16", "train.loss_scale.growth_interval=0"], &["at least 1"]);
    rejects(&["fsdp.param_dtype=f16", "train.loss_scale.factor=4"], &["unknown key", "growth_interval"]);
}
