//! Input that is wrong: exit code 2, nothing started, and a message that names the key, file or parameter
//! and says what to do.

use std::path::Path;

use crate::support::{GPT2, Sandbox};

impl Sandbox {
    /// The message of a command that is refused, before it has written anything.
    fn refused(&self, args: &str) -> String {
        let ran = self.fsdp(args);
        assert_eq!(ran.code, Some(2), "fsdp {args}: {}{}", ran.stdout, ran.stderr);
        assert_eq!(ran.stdout, "", "nothing is reported");
        assert!(!ran.stderr.contains("panicked"), "{}", ran.stderr);
        assert!(!self.path("out").exists(), "nothing is written");
        ran.stderr
    }

    /// As [`Sandbox::refused`], for `train run.toml`.
    fn refused_with(&self, overrides: &str) -> String {
        self.refused(&format!("train run.toml {overrides}"))
    }

    /// As [`Sandbox::refused`], with a changed `config.json`.
    fn refused_model(&self, from: &str, to: &str) -> String {
        self.edit("model/config.json", from, to);
        self.refused("train run.toml")
    }

    /// Puts weights beside `config.json`, as an earlier run exports them.
    fn with_weights(self) -> Self {
        self.succeed("train run.toml --set train.steps=1 --set run.out_dir=earlier");
        let from = self.path("earlier/model/model.safetensors");
        std::fs::copy(from, self.path("model/model.safetensors")).unwrap();
        self.edit("run.toml", "path = \"model\"", "path = \"model\"\ninit = \"pretrained\"");
        self
    }
}

#[test]
fn an_unknown_key() {
    let sandbox = Sandbox::new();
    insta::assert_snapshot!(sandbox.refused_with("--set train.grad_clop=1.0"), @"");
    insta::assert_snapshot!(sandbox.refused_with("--set train.optimizer={name=\"sgd\",betas=[0.9,0.95]}"), @"");
    sandbox.edit("run.toml", "seq_len", "sequence_len");
    insta::assert_snapshot!(sandbox.refused_with(""), @"");
}

#[test]
fn an_unknown_table() {
    let sandbox = Sandbox::new();
    sandbox.edit("run.toml", "[fsdp]", "[fspd]");
    insta::assert_snapshot!(sandbox.refused_with(""), @"");
}

#[test]
fn a_value_of_the_wrong_type() {
    let sandbox = Sandbox::new();
    insta::assert_snapshot!(sandbox.refused_with("--set train.steps=many"), @"");
    insta::assert_snapshot!(sandbox.refused_with("--set data.shuffle=1"), @"");
}

#[test]
fn a_value_outside_its_range() {
    let sandbox = Sandbox::new();
    insta::assert_snapshot!(sandbox.refused_with("--set train.grad_clip=-1.0"), @"");
    insta::assert_snapshot!(sandbox.refused_with("--set run.ranks=0"), @"");
    insta::assert_snapshot!(sandbox.refused_with("--set train.optimizer={betas=[0.9,1.0]}"), @"");
}

#[test]
fn a_missing_key() {
    let sandbox = Sandbox::new();
    sandbox.edit("run.toml", "steps = 3\n", "");
    insta::assert_snapshot!(sandbox.refused_with(""), @"");
}

#[test]
fn text_that_is_not_toml() {
    let sandbox = Sandbox::new();
    sandbox.edit("run.toml", "steps = 3", "steps = 3 x");
    insta::assert_snapshot!(sandbox.refused_with(""), @"");
}

#[test]
fn a_run_file_that_is_not_there() {
    insta::assert_snapshot!(Sandbox::new().refused("train runs.toml"), @"");
}

#[test]
fn a_malformed_override() {
    insta::assert_snapshot!(Sandbox::new().refused_with("--set steps=3"), @"");
}

#[test]
fn a_config_key_that_changes_the_mathematics() {
    let before = "\"rms_norm_eps\"";
    let key = |key: &str| Sandbox::new().refused_model(before, &format!("{key}, {before}"));
    insta::assert_snapshot!(key(r#""rope_scaling": { "rope_type": "llama3", "factor": 8.0 }"#), @"");
    insta::assert_snapshot!(key(r#""hidden_act": "gelu""#), @"");
    insta::assert_snapshot!(key(r#""sliding_window": 32"#), @"");
}

#[test]
fn a_model_of_another_family() {
    insta::assert_snapshot!(Sandbox::new().refused_model("\"llama\"", "\"mamba\""), @"");
}

#[test]
fn a_model_folder_without_config() {
    insta::assert_snapshot!(Sandbox::new().refused_with("--set model.path=models"), @"");
}

#[test]
fn a_class_that_does_not_exist() {
    insta::assert_snapshot!(Sandbox::new().refused_with("--set fsdp.wrap=[\"GPT2Block\"]"), @"");
}

#[test]
fn classes_together_with_a_size() {
    insta::assert_snapshot!(Sandbox::new().refused_with("--set fsdp.min_num_params=100"), @"");
}

#[test]
fn a_tied_parameter_split_over_units() {
    insta::assert_snapshot!(Sandbox::new().refused_with("--set fsdp.wrap=[\"Embedding\"]"), @"");
}

#[test]
fn micro_batches_that_ranks_do_not_divide() {
    let sandbox = Sandbox::new();
    insta::assert_snapshot!(sandbox.refused_with("--set run.ranks=3"), @"");
    insta::assert_snapshot!(sandbox.refused_with("--set train.micro_batch_size=3"), @"");
}

#[test]
fn heads_that_do_not_divide() {
    insta::assert_snapshot!(
        Sandbox::new().refused_model("\"num_key_value_heads\": 2", "\"num_key_value_heads\": 3"), @"");
    insta::assert_snapshot!(Sandbox::new().refused_model("\"hidden_size\": 16", "\"hidden_size\": 18"), @"");
}

#[test]
fn replicas_that_do_not_divide_the_ranks() {
    let overrides = "--set run.ranks=4 --set fsdp.mesh={replicate=3}";
    insta::assert_snapshot!(Sandbox::new().refused_with(overrides), @"");
}

#[test]
fn groups_that_do_not_divide_the_shards() {
    let overrides = "--set run.ranks=4 --set fsdp.reshard_after_forward=3";
    insta::assert_snapshot!(Sandbox::new().refused_with(overrides), @"");
}

#[test]
fn a_frozen_pattern_that_matches_nothing() {
    insta::assert_snapshot!(Sandbox::new().refused_with("--set fsdp.frozen=[\"wte\"]"), @"");
}

#[test]
fn weights_that_are_not_there() {
    insta::assert_snapshot!(Sandbox::new().refused_with("--set model.init=pretrained"), @"");
}

#[test]
fn truncated_weights() {
    let sandbox = Sandbox::new().with_weights();
    let bytes = std::fs::read(sandbox.path("model/model.safetensors")).unwrap();
    sandbox.write("model/model.safetensors", &bytes[..bytes.len() - 1000]);
    insta::assert_snapshot!(sandbox.refused_with(""), @"");
    sandbox.write("model/model.safetensors", &bytes[..5]);
    insta::assert_snapshot!(sandbox.refused_with(""), @"");
}

#[test]
fn a_tensor_that_is_missing() {
    let sandbox = Sandbox::new().with_weights();
    insta::assert_snapshot!(
        sandbox.refused_model("\"num_hidden_layers\": 2", "\"num_hidden_layers\": 3"), @"");
}

#[test]
fn a_tensor_that_is_too_many() {
    let sandbox = Sandbox::new().with_weights();
    insta::assert_snapshot!(
        sandbox.refused_model("\"num_hidden_layers\": 2", "\"num_hidden_layers\": 1"), @"");
}

#[test]
fn a_tensor_of_the_wrong_shape() {
    let sandbox = Sandbox::new().with_weights();
    insta::assert_snapshot!(
        sandbox.refused_model("\"intermediate_size\": 24", "\"intermediate_size\": 32"), @"");
}

#[test]
fn a_token_beyond_the_vocabulary() {
    let sandbox = Sandbox::new();
    insta::assert_snapshot!(sandbox.refused_model("\"vocab_size\": 256", "\"vocab_size\": 100"), @"");
}

#[test]
fn a_special_token_beyond_the_vocabulary() {
    let overrides = "--set data.packing=documents --set data.eos=256";
    insta::assert_snapshot!(Sandbox::new().refused_with(overrides), @"");
}

#[test]
fn less_data_than_one_batch() {
    let sandbox = Sandbox::new();
    sandbox.write("data.txt", "short");
    insta::assert_snapshot!(sandbox.refused_with(""), @"");
}

#[test]
fn data_that_is_not_there() {
    insta::assert_snapshot!(Sandbox::new().refused_with("--set data.train=[\"books\"]"), @"");
}

#[test]
fn token_files_of_half_a_token() {
    let sandbox = Sandbox::new();
    sandbox.write("data.bin", [0; 33]);
    let overrides = "--set data.train=[\"data.bin\"] --set data.format=tokens-u16";
    insta::assert_snapshot!(sandbox.refused_with(overrides), @"");
}

#[test]
fn sequences_beyond_the_position_table() {
    let sandbox = Sandbox::new();
    sandbox.write("model/config.json", GPT2);
    sandbox.edit("run.toml", "LlamaDecoderLayer", "GPT2Block");
    sandbox.edit("run.toml", "seq_len = 8", "seq_len = 17");
    insta::assert_snapshot!(sandbox.refused("train run.toml"), @"");
    insta::assert_snapshot!(sandbox.refused("schedule run.toml"), @"");
}

#[test]
fn sequences_beyond_the_positions_of_a_llama_are_only_warned_of() {
    let sandbox = Sandbox::new();
    sandbox.edit("model/config.json", "\"max_position_embeddings\": 64", "\"max_position_embeddings\": 4");
    let ran = sandbox.succeed("train run.toml");
    insta::assert_snapshot!(ran.stderr.lines().next().unwrap(), @"");
}

#[test]
fn an_output_folder_that_is_not_empty() {
    let sandbox = Sandbox::new();
    sandbox.succeed("train run.toml");
    let before = sandbox.read("out/metrics.jsonl");
    let ran = sandbox.fsdp("train run.toml");
    assert_eq!(ran.code, Some(2));
    insta::assert_snapshot!(ran.stderr, @"");
    assert_eq!(sandbox.read("out/metrics.jsonl"), before);
}

#[test]
fn an_output_folder_that_is_a_file() {
    let sandbox = Sandbox::new();
    insta::assert_snapshot!(sandbox.refused_with("--set run.out_dir=data.txt"), @"");
}

#[test]
fn a_trace_that_cannot_be_created() {
    insta::assert_snapshot!(Sandbox::new().refused("train run.toml --trace missing/trace.json"), @"");
}

#[test]
fn a_report_that_cannot_be_created() {
    insta::assert_snapshot!(Sandbox::new().refused("verify run.toml --json missing/report.json"), @"");
}

#[test]
fn a_rank_that_the_run_does_not_have() {
    insta::assert_snapshot!(Sandbox::new().refused("schedule run.toml --rank 2"), @"");
}

#[test]
fn verification_refuses_the_same_input() {
    insta::assert_snapshot!(Sandbox::new().refused("verify run.toml --set fsdp.wrap=[\"Embedding\"]"), @"");
}

#[test]
fn examples_are_accepted() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    for example in ["quickstart", "gpt2-tiny", "llama-8b"] {
        let mut command = Sandbox::new().command();
        let output =
            command.current_dir(&root).args(["schedule", &format!("examples/{example}.toml")]).output();
        let output = output.unwrap();
        assert!(output.status.success(), "{example}: {}", String::from_utf8_lossy(&output.stderr));
        assert!(output.stderr.is_empty(), "{example}: {}", String::from_utf8_lossy(&output.stderr));
    }
}
