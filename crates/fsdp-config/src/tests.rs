use fsdp_core::DType;
use fsdp_core::schedule::{Checkpointing, Reshard};
use fsdp_core::wrap::WrapPolicy;
use proptest::prelude::*;

use super::*;

mod mesh;
mod refusals;

/// Every key of the specification, as a user would write it.
pub(super) const FULL: &str = r#"
[model]
path = "examples/llama-tiny"
init = "random"
seed = 0
padding_row = "config"
[data]
train = ["README.md", "crates"]
eval = ["docs"]
eval_every = 50
eval_batches = 4
format = "text"
column = "none"
malformed = "error"
expansion_max = 100
tokenizer = "bytes"
cache = "kept"
prompt = "none"
completion = "none"
chat_template = "none"
date = "none"
loss_on = "answers"
loss_on_reasoning = true
packing = "stream"
bos = "<s>"
eos = "</s>"
pad = "<pad>"
seq_len = 128
shuffle = true
seed = 0
source = []
[train]
steps = 200
micro_batch_size = 2
global_batch_size = 16
grad_clip = 1.0
ema_decay = "none"
label_smoothing = 0.0
z_loss = 0.0
router_aux_loss_coef = "none"
router_z_loss_coef = 0.0
router_sequence_loss_coef = 0.0
router_bias_update_speed = 0.0
optimizer = { name = "adamw", lr = 3e-3, betas = [0.9, 0.95], eps = 1e-8, weight_decay = 0.1, no_decay = [], group = [] }
lr_schedule = { name = "warmup-cosine", warmup_steps = 20, start_factor = 0.1, min_lr = 0.0 }
early_stop = { patience = 3, min_delta = 0.0, set = "eval" }
[fsdp]
wrap = ["LlamaDecoderLayer"]
reshard_after_forward = "auto"
forward_prefetch = 1
backward_prefetch = 1
accumulation = "reduce"
accumulation_order = "tree"
param_dtype = "f32"
reduce_dtype = "f32"
reduce_op = "sum"
activation_checkpointing = "none"
offload = "none"
mesh = { replicate = 1, shard = "none", context = 1, expert = 1 }
chunks = { context = 1, expert = 1 }
frozen = []
keep_f32 = ["router", "norm"]
[checkpoint]
every = 0
keep_last = 2
keep_best = 0
async = true
[run]
device = "cpu"
ranks = 4
threads = 2
share_gpu = true
deterministic = true
kernels = "aten"
xla = { plugin = "plugin.so", reduction = "native", scan_layers = true, dump = "programs", compile_cache = "compiled" }
out_dir = "runs/quickstart"
export_weights = "last"
export_dtype = "bf16"
timeout_s = 600
heartbeat_s = 2
transport = "tcp"
peak_tflops = 0.3
metrics = ["tensorboard", "csv"]
metrics_listen = "127.0.0.1:9100"
"#;

const MINIMAL: &str = r#"
[model]
path = "m"
[data]
train = ["a"]
seq_len = 8
[train]
steps = 10
micro_batch_size = 1
global_batch_size = 4
[run]
out_dir = "out"
"#;

fn parse(text: &str, overrides: &[&str]) -> Result<Loaded, ConfigError> {
    let overrides: Vec<String> = overrides.iter().map(|&text| text.to_owned()).collect();
    Resolved::parse(text, "run.toml", &overrides)
}

fn with(overrides: &[&str]) -> Resolved {
    parse(FULL, overrides).unwrap().config
}

/// Checks that the error for the full file with these overrides contains every fragment.
#[track_caller]
fn rejects(overrides: &[&str], fragments: &[&str]) {
    let message = parse(FULL, overrides).unwrap_err().to_string();
    for fragment in fragments {
        assert!(message.contains(fragment), "`{fragment}` is not in `{message}`");
    }
}

/// As [`rejects`], with a line of the file replaced.
#[track_caller]
fn rejects_line(old: &str, new: &str, fragments: &[&str]) {
    assert!(FULL.contains(old), "the line to replace is there");
    let message = parse(&FULL.replace(old, new), &[]).unwrap_err().to_string();
    for fragment in fragments {
        assert!(message.contains(fragment), "`{fragment}` is not in `{message}`");
    }
}

#[track_caller]
fn round_trips(config: &Resolved) {
    let text = config.to_toml();
    let again = parse(&text, &[]).unwrap_or_else(|error| panic!("{error}\n{text}"));
    assert_eq!(&again.config, config, "{text}");
    assert!(again.warnings.is_empty() || config.fsdp.reshard_after_forward == Reshard::ToGroup(1));
}

#[test]
fn full_file_is_parsed_as_written() {
    let config = with(&[]);
    assert_eq!(config.train.micro_batches_per_step(), 8);
    assert_eq!(config.train.optimizer.lr(), Some(3e-3));
    assert_eq!(config.train.lr_schedule.warmup, Warmup { steps: 20, start_factor: 0.1 });
    assert_eq!(config.fsdp.wrap, WrapPolicy::Classes(vec!["LlamaDecoderLayer".to_owned()]));
    assert_eq!(config.data.bos, Some(EndToken::Token(TokenRef::Token("<s>".to_owned()))));
    round_trips(&config);
}

#[test]
fn resolved_form_contains_every_key_of_full_file() {
    let written: toml::Table = toml::from_str(FULL).unwrap();
    let resolved: toml::Table = toml::from_str(&with(&[]).to_toml()).unwrap();
    assert_eq!(resolved, {
        let mut expected = written;
        expected["run"]["timeout_s"] = toml::Value::Float(600.0);
        expected["run"]["heartbeat_s"] = toml::Value::Float(2.0);
        expected
    });
}

#[test]
fn minimal_file_gets_defaults_and_round_trips() {
    let config = parse(MINIMAL, &[]).unwrap().config;
    assert_eq!((config.run.ranks, config.run.timeout_s, config.run.heartbeat_s), (1, 600.0, 1.0));
    assert_eq!(config.train.grad_clip, None);
    assert_eq!(config.data.pad, TokenRef::Id(0));
    assert_eq!(config.fsdp.reshard_after_forward, Reshard::Auto);
    let text = config.to_toml();
    for default in
        ["shuffle = true", "grad_clip = \"none\"", "eps = 0.00000001", "replicate = 1", "wrap = []"]
    {
        assert!(text.contains(default), "`{default}` is not in {text}");
    }
    round_trips(&config);
}

#[test]
fn every_key_form_round_trips() {
    for overrides in [
        &["fsdp.reshard_after_forward=true"][..],
        &["fsdp.reshard_after_forward=false"],
        &["fsdp.reshard_after_forward=2"],
        &["fsdp.param_dtype=bf16", "fsdp.reduce_dtype=f64", "fsdp.mesh={replicate=2}"],
        &["fsdp.frozen=['embed', '^lm_head']", "train.grad_clip=none", "data.bos=1", "data.eos=2"],
        &["data.format=tokens-u16", "data.packing=documents", "model.init=pretrained"],
        &[
            "train.optimizer={name='sgd', lr=1, momentum=0.9, nesterov=true}",
            "train.lr_schedule={name='linear'}",
        ],
        &["train.optimizer={name='adafactor'}", "train.lr_schedule={name='constant'}"],
        &["train.optimizer={name='adafactor', relative_step=false, lr=1e-3, beta1=0.9}"],
    ] {
        round_trips(&with(overrides));
    }
}

#[test]
fn eval_accepts_path_list_or_named_sets() {
    assert_eq!(parse(MINIMAL, &["data.eval=[]"]).unwrap().config.data.eval, []);
    assert_eq!(with(&[]).data.eval, [EvalSet::of_paths(vec!["docs".to_owned()])]);
    let sets = "data.eval=[{name='books', paths=['a', 'b']}, {name='c.d-e_2', paths=['c'], max_samples=9}]";
    let config = with(&[sets, "train.early_stop.set=books"]);
    let set = |name: &str, paths: &[&str], max_samples| EvalSet {
        name: name.to_owned(),
        paths: paths.iter().map(|&path| path.to_owned()).collect(),
        max_samples,
    };
    assert_eq!(config.data.eval, [set("books", &["a", "b"], 0), set("c.d-e_2", &["c"], 9)]);
    round_trips(&config);
    round_trips(&with(&["data.eval=[{name='eval', paths=['a'], max_samples=1}]"]));
    let tables = "\n[[data.eval]]\nname = 'books'\npaths = ['a']\n[train]\n";
    let written = FULL.replace("eval = [\"docs\"]\n", "").replace("\n[train]\n", tables);
    let written = written.replace("set = \"eval\"", "set = \"books\"");
    assert_eq!(parse(&written, &[]).unwrap().config.data.eval, [set("books", &["a"], 0)]);
}

#[test]
fn optimizer_defaults_match_their_libraries() {
    let text = with(&["train.optimizer={name='adafactor'}", "train.lr_schedule={}"]).train.optimizer;
    let OptimizerConfig::Adafactor(adafactor) = text else { panic!("adafactor was asked for") };
    assert_eq!((adafactor.lr, adafactor.beta1, adafactor.decay_rate), (None, None, -0.8));
    assert_eq!((adafactor.eps, adafactor.clip_threshold, adafactor.weight_decay), ([1e-30, 1e-3], 1.0, 0.0));
    assert!(adafactor.relative_step && adafactor.scale_parameter && !adafactor.warmup_init);
    let OptimizerConfig::Adamw(adamw) = parse(MINIMAL, &[]).unwrap().config.train.optimizer else {
        panic!("adamw is the default")
    };
    assert_eq!((adamw.lr, adamw.betas, adamw.eps, adamw.weight_decay), (1e-3, [0.9, 0.999], 1e-8, 1e-2));
}

#[test]
fn overrides_accept_toml_or_bare_strings_and_create_tables() {
    let config = with(&[
        "run.out_dir=runs/a b",
        "train.optimizer.lr = 1e-4",
        "data.train=['x']",
        "fsdp.mesh.replicate=2",
        "train.steps=30",
    ]);
    assert_eq!(config.run.out_dir, "runs/a b");
    assert_eq!(config.train.optimizer.lr(), Some(1e-4));
    assert_eq!(config.data.train, ["x"]);
    assert_eq!((config.fsdp.mesh.replicate, config.train.steps), (2, 30));
}

#[test]
fn every_schedule_round_trips_through_resolved_text() {
    for schedule in [
        "{name='constant', warmup_steps=3}",
        "{name='linear', min_lr_ratio=0.1}",
        "{name='cosine-with-restarts', cycles=3}",
        "{name='inverse-sqrt', warmup_steps=7}",
        "{name='warmup-stable-decay', decay_share=0.2, decay='linear', min_lr_ratio=0.5}",
    ] {
        let config = parse(FULL, &[&format!("train.lr_schedule={schedule}")]).unwrap().config;
        assert_eq!(parse(&config.to_toml(), &[]).unwrap().config, config);
    }
    let timescale = |warmup: u64| {
        let schedule = format!("train.lr_schedule={{name='inverse-sqrt', warmup_steps={warmup}}}");
        parse(FULL, &[&schedule]).unwrap().config.train.lr_schedule.shape
    };
    let min = MinLr::Absolute(0.0);
    assert_eq!(timescale(7), LrShape::InverseSqrt { timescale: 7, min });
    assert_eq!(timescale(0), LrShape::InverseSqrt { timescale: 10_000, min });
}

#[test]
fn param_groups_round_trip_in_order() {
    let groups = "train.optimizer.group=[{patterns=['norm'], lr=6e-3}, {patterns=['bias', 'x'], lr_scale=0.5, weight_decay=0}]";
    let config = with(&[groups]);
    let group = |patterns: &[&str], lr, lr_scale, weight_decay| {
        let patterns = patterns.iter().map(|&pattern| pattern.to_owned()).collect();
        GroupConfig { patterns, lr, lr_scale, weight_decay }
    };
    let expected =
        [group(&["norm"], Some(6e-3), None, None), group(&["bias", "x"], None, Some(0.5), Some(0.0))];
    assert_eq!(config.train.optimizer.groups(), expected);
    assert_eq!(expected[0].scale(config.train.optimizer.lr()), 2.0);
    round_trips(&config);
}

#[test]
fn ema_export_requires_ema_decay_and_local_out_dir() {
    rejects(
        &["run.export_weights=ema"],
        &["`run.export_weights` is \"ema\"", "unless train.ema_decay is set"],
    );
    let kept = ["train.ema_decay=0.9", "run.export_weights=ema"];
    round_trips(&with(&kept));
    rejects(&[kept[0], kept[1], "run.out_dir=s3://bucket/run"], &["where run.out_dir is an object store"]);
    rejects(&["train.ema_decay=1.0"], &["at least 0 and below 1, or \"none\""]);
}

#[test]
fn reshard_to_groups_of_one_warns() {
    let loaded = parse(FULL, &["fsdp.reshard_after_forward=1"]).unwrap();
    assert_eq!(loaded.warnings, [Warning::GroupsOfOne]);
}

#[test]
fn run_ending_within_warmup_warns_with_both_origins() {
    let loaded = parse(FULL, &["train.steps=10"]).unwrap();
    let [warning] = loaded.warnings.as_slice() else { panic!("one warning: {:?}", loaded.warnings) };
    let text = warning.to_string();
    assert!(text.contains("`train.steps` = 10 (--set train.steps)"), "{text}");
    assert!(text.contains("`train.lr_schedule.warmup_steps` = 20 (run.toml)"), "{text}");
}

#[test]
fn resolved_text_includes_keys_without_value() {
    let config = parse(MINIMAL, &[]).unwrap().config;
    let text = config.to_toml();
    for line in ["bos = \"auto\"", "eos = \"auto\"", "grad_clip = \"none\"", "peak_tflops = \"none\""] {
        assert!(text.lines().any(|found| found == line), "{line} in {text}");
    }
    round_trips(&config);
    let optimizer = "train.optimizer={name='adafactor'}";
    let config = parse(MINIMAL, &[optimizer]).unwrap().config;
    assert!(config.to_toml().contains("lr = \"none\"") && config.to_toml().contains("beta1 = \"none\""));
    round_trips(&config);
}

#[test]
fn invalid_regex_error_quotes_pattern_and_reason() {
    rejects(&["fsdp.frozen=[\"wte\", \"(\"]"], &["`fsdp.frozen`: \"(\" is not", "unclosed group"]);
}

#[test]
fn hugging_face_config_is_expanded_and_run_file_wins() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("fsdp_config.json");
    let json = r#"{"fsdp_min_num_params": 1000, "xla": true, "xla_fsdp_grad_ckpt": true,
        "xla_fsdp_settings": {"compute_dtype": "bfloat16", "fp32_reduce_scatter": true}}"#;
    std::fs::write(&path, json).unwrap();
    let config = format!("fsdp.config={}", path.display());
    let text = FULL.replace("wrap = [\"LlamaDecoderLayer\"]\n", "").replace("param_dtype = \"f32\"\n", "");
    let loaded = parse(&text, &[&config]).unwrap();
    assert_eq!(loaded.config.fsdp.wrap, WrapPolicy::MinParams(1000));
    assert_eq!(loaded.config.fsdp.param_dtype, DType::Bf16);
    assert_eq!(loaded.config.fsdp.activation_checkpointing, Checkpointing::None);
    let overridden = |key: &str| Warning::Overridden { key: format!("fsdp.{key}") };
    assert_eq!(loaded.warnings, [overridden("activation_checkpointing"), overridden("reduce_dtype")]);
    round_trips(&loaded.config);
    rejects(&[&config], &["`fsdp.wrap` and `fsdp.config` exclude each other"]);
}

#[test]
fn sharding_strategy_sets_mesh_unless_run_file_does() {
    let folder = tempfile::tempdir().unwrap();
    let json = folder.path().join("fsdp_config.json");
    let file = folder.path().join("run.toml");
    let base = FULL
        .replace("wrap = [\"LlamaDecoderLayer\"]\n", "")
        .replace("mesh = { replicate = 1, shard = \"none\", context = 1, expert = 1 }\n", "");
    std::fs::write(&file, base.replace("reshard_after_forward = \"auto\"\n", "")).unwrap();
    let mesh = |strategy: &str, nodes: Option<usize>, overrides: &[String]| {
        std::fs::write(&json, format!("{{\"sharding_strategy\": \"{strategy}\"}}")).unwrap();
        let overrides = [&[format!("fsdp.config={}", json.display())], overrides].concat();
        let loaded = Resolved::load_for(&file, &overrides, &|_| World { ranks: 1, nodes })?;
        let warnings: Vec<String> = loaded.warnings.iter().skip(1).map(ToString::to_string).collect();
        let fsdp = loaded.config.fsdp;
        Ok::<_, ConfigError>((fsdp.mesh.replicate, fsdp.reshard_after_forward, warnings.join("; ")))
    };
    let replicas = |count, over| format!("`fsdp.mesh.replicate` = {count}, the number of {over}");
    assert_eq!(mesh("FULL_SHARD", Some(2), &[]).unwrap(), (1, Reshard::Auto, String::new()));
    assert_eq!(mesh("SHARD_GRAD_OP", Some(2), &[]).unwrap(), (1, Reshard::Never, String::new()));
    assert_eq!(mesh("NO_SHARD", Some(2), &[]).unwrap(), (4, Reshard::Never, replicas(4, "ranks")));
    assert_eq!(mesh("HYBRID_SHARD", Some(2), &[]).unwrap(), (2, Reshard::Auto, replicas(2, "nodes")));
    assert_eq!(mesh("HYBRID_SHARD_ZERO2", Some(4), &[]).unwrap(), (4, Reshard::Never, replicas(4, "nodes")));
    let own = ["fsdp.mesh.replicate=4".to_owned()];
    let overridden = "`fsdp.mesh` overrides the fsdp_config.json".to_owned();
    assert_eq!(mesh("HYBRID_SHARD", Some(2), &own).unwrap(), (4, Reshard::Auto, overridden));
    let (one, _, said) = mesh("HYBRID_SHARD", None, &[]).unwrap();
    assert!(one == 1 && said.contains("no launcher says how many nodes there are"), "{said}");
    assert_eq!(mesh("NO_SHARD", None, &[]).unwrap().2, replicas(4, "ranks"));
    let uneven = mesh("HYBRID_SHARD", Some(3), &[]).unwrap_err().to_string();
    assert!(uneven.contains("`fsdp.mesh.replicate` = 3 does not divide run.ranks = 4"), "{uneven}");
}

#[test]
fn patterns_match_anywhere_unless_anchored() {
    let patterns = ["bias".to_owned(), r"^model\.layers\.1\.".to_owned(), "nowhere".to_owned()];
    let patterns = FqnPatterns::new(&patterns).unwrap();
    assert!(patterns.matches("h.0.attn.bias") && patterns.matches("model.layers.1.mlp.weight"));
    assert!(!patterns.matches("model.layers.10.mlp.weight"));
    let unused = patterns.unused(&["h.0.attn.bias", "model.layers.1.mlp.weight"]);
    assert_eq!(unused, ["nowhere"]);
}

proptest! {
    #[test]
    fn any_resolved_config_round_trips(
        seed in 0..=i64::MAX as u64, lr in 1e-12f64..1e3, clip in proptest::option::of(1e-300f64..1e300),
        text in "\\PC{1,20}", ranks in 1usize..9, rounds in 1usize..9, micro in 1usize..9,
    ) {
        let mut config = with(&[]);
        config.model.seed = seed;
        config.train.optimizer = OptimizerConfig::Adamw(AdamwConfig {
            lr, betas: [0.9, 0.999], eps: lr * 1e-9, weight_decay: 0.0, no_decay: vec![], group: vec![],
        });
        config.train.grad_clip = clip;
        config.run.out_dir = text;
        config.run.ranks = ranks;
        config.train.micro_batch_size = micro;
        config.train.global_batch_size = micro * ranks * rounds;
        round_trips(&config);
    }

    #[test]
    fn parser_never_panics_on_arbitrary_text(text in "\\PC{0,40}", key in "[a-z.]{0,12}") {
        let _ = parse(&text, &[]);
        let _ = parse(FULL, &[&format!("{key}={text}")]);
    }
}

#[test]
fn default_rank_count_depends_on_device() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("run.toml");
    let ranks = |text: &str, overrides: &[String]| {
        std::fs::write(&file, text).unwrap();
        let world = |run: &RunConfig| World::of_ranks(if run.device == Device::Cuda { 8 } else { 2 });
        Resolved::load_for(&file, overrides, &world).unwrap().config.run.ranks
    };
    assert_eq!(ranks(FULL, &[]), 4);
    let without = FULL.replace("ranks = 4\n", "");
    assert_eq!(ranks(&without, &[]), 2);
    assert_eq!(ranks(&without, &["run.device=\"cuda\"".to_owned()]), 8);
    assert_eq!(ranks(&without, &["run.ranks=1".to_owned()]), 1);
}

#[test]
fn column_and_completion_keys_are_mutually_exclusive() {
    rejects(
        &["data.column=a", "data.completion=b"],
        &["--set data.completion", "`data.column` and `data.completion`"],
    );
    let config = with(&[
        "data.prompt=a",
        "data.date=2024-02-29",
        "data.loss_on=all",
        "data.loss_on_reasoning=false",
        "data.bos=auto",
        "data.eos=none",
    ]);
    assert_eq!(config.data.date.as_deref(), Some("2024-02-29"));
    assert_eq!((&config.data.bos, &config.data.eos), (&Some(EndToken::Auto), &None));
    round_trips(&config);
}

#[test]
fn date_must_be_calendar_day() {
    for wrong in ["2024-02-30", "12:00:00", "2024-02-29T12:00:00", "today", "2024"] {
        rejects(&[&format!("data.date={wrong}")], &["`data.date`", "a day such as"]);
    }
}
