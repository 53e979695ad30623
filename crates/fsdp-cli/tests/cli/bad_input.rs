//! Invalid input: exit code 2, nothing started, and a message that names the key, file or parameter and says what to
//! do.

use std::path::Path;

use crate::support::{GPT2, Sandbox, folded};

impl Sandbox {
    /// Returns the error message of a command that must be refused before it writes anything.
    pub(crate) fn input_error(&self, args: &str) -> String {
        let ran = self.fsdp(args);
        assert_eq!(ran.code, Some(2), "fsdp {args}: {}{}", ran.stdout, ran.stderr);
        assert_eq!(ran.stdout, "", "nothing is reported");
        assert!(!ran.stderr.contains("panicked"), "{}", ran.stderr);
        assert!(!self.path("out").exists(), "nothing is written");
        folded(&ran.stderr)
    }

    /// Like [`Sandbox::input_error`], for `train run.toml` with overrides.
    pub(crate) fn input_error_with(&self, overrides: &str) -> String {
        self.input_error(&format!("train run.toml {overrides}"))
    }

    /// Like [`Sandbox::input_error`], for `train run.toml` with a changed `config.json`.
    pub(crate) fn model_error(&self, from: &str, to: &str) -> String {
        self.edit("model/config.json", from, to);
        self.input_error("train run.toml")
    }
}

#[cfg(not(feature = "tokenizers"))]
#[test]
fn tokenizer_json_without_feature_is_rejected() {
    let sandbox = Sandbox::new();
    sandbox.write("tokenizer.json", "{}");
    insta::assert_snapshot!(sandbox.input_error_with("--set data.tokenizer=tokenizer.json"), @r#"
    error: cannot load tokenizer tokenizer.json: this fsdp was built without tokenizers; build it with
    `--features tokenizers`; data.tokenizer must be "bytes" or a tokenizer.json
    "#);
}

#[test]
fn unknown_key_is_rejected() {
    let sandbox = Sandbox::new();
    insta::assert_snapshot!(sandbox.input_error_with("--set train.grad_clop=1.0"), @r"error: --set train.grad_clop: unknown key `train.grad_clop`; did you mean `train.grad_clip`?");
    insta::assert_snapshot!(sandbox.input_error_with("--set train.optimizer={name=\"sgd\",betas=[0.9,0.95]}"), @r"
    error: --set train.optimizer: unknown key `train.optimizer.betas`; known keys here: lr, momentum,
    dampening, weight_decay, nesterov, no_decay, group
    ");
    sandbox.edit("run.toml", "seq_len", "sequence_len");
    insta::assert_snapshot!(sandbox.input_error_with(""), @r"error: run.toml: unknown key `data.sequence_len`; did you mean `data.seq_len`?");
}

#[test]
fn unknown_table_is_rejected() {
    let sandbox = Sandbox::new();
    sandbox.edit("run.toml", "[fsdp]", "[fspd]");
    insta::assert_snapshot!(sandbox.input_error_with(""), @r"error: run.toml: unknown key `fspd`; did you mean `fsdp`?");
}

#[test]
fn wrong_value_type_is_rejected() {
    let sandbox = Sandbox::new();
    insta::assert_snapshot!(sandbox.input_error_with("--set train.steps=many"), @r#"error: --set train.steps: `train.steps` is "many"; it must be an integer of at least 1"#);
    insta::assert_snapshot!(sandbox.input_error_with("--set data.shuffle=1"), @r"error: --set data.shuffle: `data.shuffle` is 1; it must be true or false");
}

#[test]
fn out_of_range_value_is_rejected() {
    let sandbox = Sandbox::new();
    insta::assert_snapshot!(sandbox.input_error_with("--set train.grad_clip=-1.0"), @r#"
    error: --set train.grad_clip: `train.grad_clip` is -1.0; it must be a finite number above 0, or
    "none"
    "#);
    insta::assert_snapshot!(sandbox.input_error_with("--set run.ranks=0"), @r"error: --set run.ranks: `run.ranks` is 0; it must be an integer from 1 to 1048576");
    insta::assert_snapshot!(sandbox.input_error_with("--set train.optimizer={betas=[0.9,1.0]}"), @r"
    error: --set train.optimizer: `train.optimizer.betas` is [0.9, 1.0]; it must be two numbers of at
    least 0 and below 1, such as [0.9, 0.95]
    ");
}

#[test]
fn missing_required_key_is_rejected() {
    let sandbox = Sandbox::new();
    sandbox.edit("run.toml", "steps = 3\n", "");
    insta::assert_snapshot!(sandbox.input_error_with(""), @r"error: run.toml: `train.steps` is missing; set it to an integer of at least 1");
}

#[test]
fn invalid_toml_is_rejected() {
    let sandbox = Sandbox::new();
    sandbox.edit("run.toml", "steps = 3", "steps = 3 x");
    insta::assert_snapshot!(sandbox.input_error_with(""), @r"
    error: run.toml: not valid TOML: TOML parse error at line 8, column 9
        |
      8 | steps = 3 x
        |         ^^^
      string values must be quoted, expected literal string
    ");
}

#[test]
fn missing_run_file_is_rejected() {
    insta::assert_snapshot!(Sandbox::new().input_error("train runs.toml"), @r"
    error: cannot read runs.toml: No such file or directory (os error 2); give the path of an existing,
    readable file
    ");
}

#[test]
fn malformed_override_is_rejected() {
    insta::assert_snapshot!(Sandbox::new().input_error_with("--set steps=3"), @r"error: --set steps=3: expected table.key=value, such as --set train.steps=100");
}

#[test]
fn unsupported_config_json_settings_are_rejected() {
    let before = "\"rms_norm_eps\"";
    let key = |key: &str| Sandbox::new().model_error(before, &format!("{key}, {before}"));
    insta::assert_snapshot!(key(r#""rope_scaling": { "rope_type": "llama3", "factor": 8.0 }"#), @r"
    error: model: config.json lacks `rope_scaling.low_freq_factor`; take it from the file that the
    model was published with
    ");
    insta::assert_snapshot!(key(r#""hidden_act": "mish""#), @r#"
    error: model: config.json: `hidden_act` = "mish" is not supported, only "silu", "gelu",
    "gelu_pytorch_tanh" and "relu"
    "#);
    insta::assert_snapshot!(key(r#""sliding_window": 32"#), @r"error: model: config.json: `sliding_window` = 32 is not supported, only null");
}

#[test]
fn nested_config_json_errors_name_full_key() {
    let before = "\"rms_norm_eps\"";
    let key = |key: &str| Sandbox::new().model_error(before, &format!("{key}, {before}"));
    insta::assert_snapshot!(key(r#""rope_scaling": { "type": "mrope", "factor": 2.0 }"#), @r#"
    error: model: config.json: `rope_scaling.type` = "mrope" is not supported, only "default",
    "linear", "dynamic", "llama3", "yarn" and "longrope"
    "#);
    insta::assert_snapshot!(key(r#""rope_parameters": { "rope_theta": -1.0 }"#), @r"error: model: config.json: `rope_parameters.rope_theta` = -1.0, but it must be a positive number");
}

#[test]
fn unsupported_model_family_is_rejected() {
    insta::assert_snapshot!(Sandbox::new().model_error("\"llama\"", "\"mamba\""), @r#"
    error: model: config.json: `model_type` = "mamba" is not supported; the closest supported family is
    "llama", all: "cohere2", "deepseek_v3", "ernie4_5", "ernie4_5_moe", "exaone4", "gemma2",
    "gemma3_text", "glm4", "glm4_moe", "glm4_moe_lite", "gpt2", "gpt_neox", "gpt_oss", "granite",
    "granitemoe", "hunyuan_v1_dense", "llama", "minimax_m2", "mistral", "mixtral", "olmo2", "olmo3",
    "olmoe", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe",
    "qwen3_next", "seed_oss", "smollm3" and "starcoder2"
    "#);
}

#[test]
fn missing_config_json_is_rejected() {
    insta::assert_snapshot!(Sandbox::new().input_error_with("--set model.path=models"), @r"
    error: cannot read models/config.json; model.path must be a Hugging Face directory with config.json
      caused by: No such file or directory (os error 2)
    ");
}

#[test]
fn unknown_wrap_class_lists_known_ones() {
    insta::assert_snapshot!(Sandbox::new().input_error_with("--set fsdp.wrap=[\"GPT2Block\"]"), @r"
    error: no module of class `GPT2Block` to wrap: there are Embedding, Linear, LlamaAttention,
    LlamaDecoderLayer, LlamaForCausalLM, LlamaMLP, LlamaModel, LlamaRMSNorm, ModuleList; name some of
    these in fsdp.wrap
    ");
}

#[test]
fn wrap_with_min_num_params_is_rejected() {
    insta::assert_snapshot!(Sandbox::new().input_error_with("--set fsdp.min_num_params=100"), @r"
    error: --set fsdp.min_num_params: `fsdp.wrap` and `fsdp.min_num_params` exclude each other: choose
    units by class or by size, and remove the other
    ");
}

#[test]
fn tied_parameter_split_across_units_is_rejected() {
    insta::assert_snapshot!(Sandbox::new().input_error_with("--set fsdp.wrap=[\"Embedding\"]"), @r"
    error: the tied parameter `model.embed_tokens.weight` (also `lm_head.weight`) would be split over
    the units `model.embed_tokens` and `(root)`; leave both uses in one unit, usually the root: change
    fsdp.wrap or fsdp.min_num_params so that neither has a unit of its own
    ");
}

#[test]
fn indivisible_micro_batches_are_rejected() {
    let sandbox = Sandbox::new();
    insta::assert_snapshot!(sandbox.input_error_with("--set run.ranks=3"), @r"
    error: --set run.ranks: `run.ranks` = 3 does not divide the micro-batches per step,
    global_batch_size / micro_batch_size = 4; the nearest that does is 2, or change the other
    ");
    insta::assert_snapshot!(sandbox.input_error_with("--set train.micro_batch_size=3"), @r"
    error: --set train.micro_batch_size: `train.micro_batch_size` = 3 does not divide
    train.global_batch_size = 8; the nearest that does is 2, or change the other
    ");
}

#[test]
fn indivisible_attention_heads_are_rejected() {
    insta::assert_snapshot!(
        Sandbox::new().model_error("\"num_key_value_heads\": 2", "\"num_key_value_heads\": 3"), @r"
    error: model: config.json: `num_attention_heads` = 4 is not divisible by `num_key_value_heads` = 3;
    change one of them
    ");
    insta::assert_snapshot!(Sandbox::new().model_error("\"hidden_size\": 16", "\"hidden_size\": 18"), @r"
    error: model: config.json: `hidden_size` = 18 is not divisible by `num_attention_heads` = 4; change
    one of them
    ");
}

#[test]
fn replicas_not_dividing_ranks_are_rejected() {
    let overrides = "--set run.ranks=4 --set fsdp.mesh={replicate=3}";
    insta::assert_snapshot!(Sandbox::new().input_error_with(overrides), @r"
    error: --set fsdp.mesh: `fsdp.mesh.replicate` = 3 does not divide run.ranks = 4; the nearest that
    does is 2, or change the other
    ");
}

#[test]
fn reshard_group_not_dividing_shard_axis_is_rejected() {
    let overrides = "--set run.ranks=4 --set fsdp.reshard_after_forward=3";
    insta::assert_snapshot!(Sandbox::new().input_error_with(overrides), @r"
    error: --set fsdp.reshard_after_forward: `fsdp.reshard_after_forward` = 3 does not divide the shard
    axis, ranks / replicate = 4; the nearest that does is 2, or change the other
    ");
}

#[test]
fn unmatched_frozen_pattern_is_rejected() {
    insta::assert_snapshot!(Sandbox::new().input_error_with("--set fsdp.frozen=[\"wte\"]"), @r"
    error: fsdp.frozen: pattern `wte` matches no parameter of the model; one of its names is
    `model.embed_tokens.weight`
    ");
}

#[test]
fn invalid_frozen_regex_is_rejected() {
    insta::assert_snapshot!(Sandbox::new().input_error_with("--set fsdp.frozen=[\"(\"]"), @r#"error: --set fsdp.frozen: `fsdp.frozen`: "(" is not a regular expression: unclosed group"#);
}

#[test]
fn f64_params_with_f32_reduction_are_rejected() {
    insta::assert_snapshot!(Sandbox::new().input_error_with("--set fsdp.param_dtype=f64"), @r"
    error: fsdp.reduce_dtype = f32: gradients of param_dtype = f64 are reduced in f64; set both to f64,
    or param_dtype to f32, bf16 or f16
    ");
}

#[test]
fn unknown_reduce_op_is_rejected() {
    insta::assert_snapshot!(Sandbox::new().input_error_with("--set fsdp.reduce_op=mean"), @r#"error: --set fsdp.reduce_op: `fsdp.reduce_op` is "mean"; it must be "sum" or "average""#);
}

#[test]
fn bench_heads_not_dividing_hidden_size_are_rejected() {
    insta::assert_snapshot!(Sandbox::new().input_error("bench train --heads 7"), @r"error: --heads: 7 heads do not split --hidden 256 into parts of even width; change one");
}

#[test]
fn unmatched_no_decay_pattern_is_rejected() {
    let overrides = "--set train.optimizer={no_decay=[\"wte\"]}";
    insta::assert_snapshot!(Sandbox::new().input_error_with(overrides), @r"
    error: train.optimizer.no_decay: pattern `wte` matches no parameter of the model; one of its names
    is `model.embed_tokens.weight`
    ");
}

#[test]
fn unmatched_param_group_pattern_is_rejected() {
    let overrides = "--set train.optimizer={group=[{patterns=[\"wte\"],lr_scale=2}]}";
    insta::assert_snapshot!(Sandbox::new().input_error_with(overrides), @r"
    error: train.optimizer.group: pattern `wte` matches no parameter of the model; one of its names is
    `model.embed_tokens.weight`
    ");
}

#[test]
fn token_id_beyond_vocab_is_rejected() {
    let sandbox = Sandbox::new();
    insta::assert_snapshot!(sandbox.model_error("\"vocab_size\": 256", "\"vocab_size\": 100"), @r"
    error: data.txt: token id 115 (sample 0, position 2), but the model's vocab_size is 100; use the
    model's own tokenizer
    ");
}

#[test]
fn eos_id_beyond_vocab_is_rejected() {
    let overrides = "--set data.packing=documents --set data.eos=256";
    insta::assert_snapshot!(Sandbox::new().input_error_with(overrides), @r"error: `data.eos` has id 256, but the model's vocab_size is 256; choose another token or model");
}

#[test]
fn less_data_than_one_global_batch_is_rejected() {
    let sandbox = Sandbox::new();
    sandbox.write("data.txt", "short");
    insta::assert_snapshot!(sandbox.input_error_with(""), @r"
    error: the data holds 0 samples of 8 tokens, fewer than one global batch of 8; add data, or lower
    data.seq_len or train.global_batch_size
    ");
}

#[test]
fn missing_training_data_is_rejected() {
    insta::assert_snapshot!(Sandbox::new().input_error_with("--set data.train=[\"books\"]"), @r"error: cannot read books: No such file or directory (os error 2); check the paths of data.train");
}

#[test]
fn missing_evaluation_data_is_rejected() {
    insta::assert_snapshot!(Sandbox::new().input_error_with("--set data.eval=[\"held/out\"]"), @r"error: cannot read held/out: No such file or directory (os error 2); check the paths of data.eval");
}

#[test]
fn token_file_with_partial_token_is_rejected() {
    let sandbox = Sandbox::new();
    sandbox.write("data.bin", [0; 33]);
    let overrides = "--set data.train=[\"data.bin\"] --set data.format=tokens-u16";
    insta::assert_snapshot!(sandbox.input_error_with(overrides), @r"error: data.bin: it has 33 bytes, not a multiple of 2; is it truncated, or data.format wrong?");
}

#[test]
fn seq_len_beyond_position_table_is_rejected() {
    let sandbox = Sandbox::new();
    sandbox.write("model/config.json", GPT2);
    sandbox.edit("run.toml", "LlamaDecoderLayer", "GPT2Block");
    sandbox.edit("run.toml", "seq_len = 8", "seq_len = 17");
    insta::assert_snapshot!(sandbox.input_error("train run.toml"), @r"error: data.seq_len: 17 is more than the model's 16 positions; choose a shorter one");
    insta::assert_snapshot!(sandbox.input_error("schedule run.toml"), @r"error: data.seq_len: 17 is more than the model's 16 positions; choose a shorter one");
}

#[test]
fn llama_seq_len_beyond_max_positions_only_warns() {
    let sandbox = Sandbox::new();
    sandbox.edit("model/config.json", "\"max_position_embeddings\": 64", "\"max_position_embeddings\": 4");
    let ran = sandbox.succeed("train run.toml");
    insta::assert_snapshot!(folded(ran.stderr.lines().next().unwrap()), @r"
    warning: data.seq_len = 8 is beyond the 4 positions that the model was made for
    (max_position_embeddings)
    ");
}

#[test]
fn non_empty_out_dir_is_rejected() {
    let sandbox = Sandbox::new();
    sandbox.succeed("train run.toml");
    let before = sandbox.read("out/metrics.jsonl");
    let ran = sandbox.fsdp("train run.toml");
    assert_eq!(ran.code, Some(2));
    insta::assert_snapshot!(folded(&ran.stderr), @r"
    error: run.out_dir out is not empty; pass --resume to continue, --overwrite to replace it, or
    choose another run.out_dir
    ");
    assert_eq!(sandbox.read("out/metrics.jsonl"), before);
    // Checked before data is read, which can take long.
    std::fs::remove_file(sandbox.path("data.txt")).unwrap();
    assert!(sandbox.fsdp("train run.toml").stderr.contains("out is not empty"));
}

#[test]
fn file_as_out_dir_is_rejected() {
    let sandbox = Sandbox::new();
    insta::assert_snapshot!(sandbox.input_error_with("--set run.out_dir=run.toml"), @r"error: run.out_dir run.toml is a file; remove it, or choose another run.out_dir");
}

#[test]
fn resume_with_incompatible_settings_is_rejected() {
    let sandbox = Sandbox::new();
    sandbox.succeed("train run.toml --set checkpoint.every=1");
    let before = sandbox.read("out/metrics.jsonl");
    let ran = sandbox.fsdp("train run.toml --resume --set train.steps=2");
    assert_eq!(ran.code, Some(2));
    insta::assert_snapshot!(folded(&ran.stderr), @r"
    error: out/checkpoints/step-00000003 has done 3 steps, and train.steps is 2; extend the run with
    --set train.steps=N, or continue from an older checkpoint with --resume-from
    ");
    let ran = sandbox.fsdp("train run.toml --resume-from model --set run.out_dir=other");
    assert_eq!(ran.code, Some(2));
    let expected = "model: it holds no checkpoint of a known format (it holds config.json)";
    assert!(ran.stderr.contains(expected), "{}", ran.stderr);
    sandbox.edit("model/config.json", "1e-05", "1e-06");
    let ran = sandbox.fsdp("train run.toml --resume --set train.steps=5 --set data.seed=1 --set run.ranks=4");
    assert_eq!(ran.code, Some(2));
    insta::assert_snapshot!(folded(&ran.stderr), @r#"
    error: the run cannot resume from out/checkpoints/step-00000003: data.seed was 0, now 1;
    config.json rms_norm_eps was 0.00001, now 1e-6. Undo these changes, or start a new run (model.init
    = "pretrained" starts from exported weights)
    "#);
    assert_eq!(sandbox.read("out/metrics.jsonl"), before);
}

#[test]
fn uncreatable_trace_file_is_rejected() {
    insta::assert_snapshot!(Sandbox::new().input_error("train run.toml --trace missing/trace.json"), @r"
    error: --trace missing/trace.json: cannot create the file
      caused by: No such file or directory (os error 2)
    ");
}

#[test]
fn uncreatable_json_report_is_rejected() {
    insta::assert_snapshot!(Sandbox::new().input_error("verify run.toml --json missing/report.json"), @r"
    error: --json missing/report.json: cannot create the file
      caused by: No such file or directory (os error 2)
    ");
}

#[test]
fn schedule_rank_out_of_range_is_rejected() {
    insta::assert_snapshot!(Sandbox::new().input_error("schedule run.toml --rank 2"), @r"error: --rank 2: the run has 2 ranks, so give 0 to 1");
}

#[test]
fn verify_rejects_split_tied_parameter() {
    insta::assert_snapshot!(Sandbox::new().input_error("verify run.toml --set fsdp.wrap=[\"Embedding\"]"), @r"
    error: the tied parameter `model.embed_tokens.weight` (also `lm_head.weight`) would be split over
    the units `model.embed_tokens` and `(root)`; leave both uses in one unit, usually the root: change
    fsdp.wrap or fsdp.min_num_params so that neither has a unit of its own
    ");
}

#[test]
fn examples_are_accepted() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    for example in ["quickstart", "gpt2-tiny", "llama-8b", "llama-70b-qlora", "chat", "parquet", "mixture"] {
        let mut command = Sandbox::new().command();
        let output =
            command.current_dir(&root).args(["schedule", &format!("examples/{example}.toml")]).output();
        let output = output.unwrap();
        assert!(output.status.success(), "{example}: {}", String::from_utf8_lossy(&output.stderr));
        assert!(output.stderr.is_empty(), "{example}: {}", String::from_utf8_lossy(&output.stderr));
    }
}
