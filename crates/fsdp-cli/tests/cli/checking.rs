//! `fsdp check`.

use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::support::Sandbox;

#[test]
fn check_reports_all_parts_and_writes_nothing() {
    let sandbox = Sandbox::new();
    let before = sandbox.files(".");
    let stdout = sandbox.succeed("check run.toml").stdout;
    let (known, disk) = stdout.trim_end().rsplit_once('\n').unwrap();
    assert!(disk.starts_with("ok       disk          a checkpoint takes "), "{disk}");
    assert!(disk.ends_with(" free"), "{disk}");
    insta::assert_snapshot!(known, @"
    ok       run file      run.toml
    ok       device        cpu
    ok       data          1 file, 132 B, 132 tokens, 16 samples
    ok       output        out
    ok       model         llama, 8.0K parameters; 2 layers, hidden 16, heads 4/2, ffn 24, vocabulary 256
    ok       positions     8 of 64 in a sample
    ok       schedule      73 operations in 3 units on mesh 1 x 2 (replicate x shard), safe
    ok       weights       random
    ok       memory        179.7 KiB at the peak of a rank, of 2 ranks
    ");
    assert_eq!(sandbox.files("."), before);
}

#[test]
fn check_reports_all_errors_at_once() {
    let sandbox = Sandbox::new();
    let ran =
        sandbox.fsdp("check run.toml --set data.train=[\"nowhere\"] --set model.init=pretrained --json");
    assert_eq!(ran.code, Some(2), "{}", ran.stderr);
    let report: Value = serde_json::from_str(&ran.stdout).unwrap();
    let of = |verdict: &str| -> Vec<String> {
        let findings = report["findings"].as_array().unwrap().iter();
        let matching = findings.filter(|finding| finding["verdict"] == verdict);
        matching
            .map(|finding| {
                format!("{}: {}", finding["subject"].as_str().unwrap(), finding["detail"].as_str().unwrap())
            })
            .collect()
    };
    let errors = of("error");
    assert_eq!(errors.len(), 2, "{errors:?}");
    assert!(errors[0].starts_with("data: ") && errors[0].contains("nowhere"), "{errors:?}");
    assert!(errors[1].starts_with("weights: ") && errors[1].contains("model"), "{errors:?}");
    assert!(of("ok").iter().any(|line| line.starts_with("schedule: ")));
}

#[test]
fn check_reports_malformed_record_and_existing_run() {
    let sandbox = Sandbox::new();
    sandbox.write("data.jsonl", "{\"text\": \"a\"}\n{\"text\": 3}\n");
    let ran = sandbox.fsdp("check run.toml --set data.train=[\"data.jsonl\"]");
    assert_eq!(ran.code, Some(2));
    assert!(ran.stdout.contains("data.jsonl") && ran.stdout.contains("line 2"), "{}", ran.stdout);
    sandbox.succeed("train run.toml");
    let ran = sandbox.succeed("check run.toml");
    assert!(ran.stdout.contains("warning") && ran.stdout.contains("--overwrite"), "{}", ran.stdout);
    assert_eq!(sandbox.fsdp("check nowhere.toml").code, Some(2));
}

#[test]
fn all_examples_pass_check() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let files = fs::read_dir(root.join("examples")).unwrap().map(|entry| entry.unwrap().file_name());
    let names: Vec<String> = files.map(|name| name.into_string().unwrap()).collect();
    let examples: Vec<&str> = names.iter().filter_map(|name| name.strip_suffix(".toml")).collect();
    assert!(examples.len() >= 6, "{examples:?}");
    for example in examples {
        let mut command = Sandbox::new().command();
        let file = format!("examples/{example}.toml");
        let mut args = vec!["check", &file, "--json", "--set", "run.out_dir=target/nowhere"];
        if example == "llama-lora" {
            // Its base model is the output of another example.
            args.extend(["--set", "model.path=examples/llama-tiny", "--set", "model.init=random"]);
            args.extend(["--set", "adapter.merge=false"]);
        }
        let ran = command.current_dir(&root).args(args).output().unwrap();
        let report: Value = serde_json::from_slice(&ran.stdout).unwrap();
        let findings = report["findings"].as_array().unwrap().iter();
        let errors: Vec<&Value> = findings.filter(|finding| finding["verdict"] == "error").collect();
        // An example for a cluster does not fit on one machine.
        let is_expected = |error: &&Value| {
            ["llama-8b", "llama-70b-qlora"].contains(&example)
                && (error["subject"] == "memory" || error["subject"] == "disk")
        };
        assert!(errors.iter().all(is_expected), "{example}: {errors:#?}");
    }
}

/// The tokens of the sandbox are bytes; 97 is the letter "a".
#[test]
fn padding_row_is_named_and_can_be_trained() {
    let sandbox = Sandbox::new();
    let row = |args: &str| {
        let ran = sandbox.succeed(&format!("check run.toml {args}"));
        ran.stdout.lines().find(|line| line.contains("padding row")).map(str::to_owned)
    };
    let loss = |out: &str, args: &str| {
        sandbox.succeed(&format!("train run.toml --set run.out_dir={out} {args}"));
        sandbox.column(out, "loss")
    };
    assert_eq!(row(""), None);
    let plain = loss("plain", "");
    sandbox.edit("model/config.json", "{", "{\"pad_token_id\": 97, ");
    assert_eq!(
        row("").unwrap(),
        "ok       padding row   inputs give row 97 of the embedding (pad_token_id) no gradient, as in transformers; \
         model.padding_row = \"none\" trains it"
    );
    let padded = loss("padded", "");
    assert_ne!(padded, plain);
    let none = "--set model.padding_row=none";
    assert_eq!((row(none), loss("none", none)), (None, plain));
    let other = sandbox.fsdp("check run.toml --set model.padding_row=zero");
    assert_eq!(other.code, Some(2));
    assert!(other.stdout.contains("\"config\" or \"none\""), "{}", other.stdout);
}

/// Asserts that `check` and `train` both refuse the data with the message `expected`.
#[track_caller]
fn expect_error_before_training(sandbox: &Sandbox, overrides: &str, expected: &str) {
    let checked = sandbox.fsdp(&format!("check run.toml {overrides}"));
    assert_eq!(checked.code, Some(2), "{}", checked.stdout);
    assert!(
        checked.stdout.contains("error    data ") && checked.stdout.contains(expected),
        "{}",
        checked.stdout
    );
    let trained = sandbox.fsdp(&format!("train run.toml {overrides}"));
    assert_eq!(trained.code, Some(2), "{}", trained.stderr);
    assert!(trained.stderr.contains(expected), "{}", trained.stderr);
}

#[test]
fn data_without_samples_is_rejected() {
    let sandbox = Sandbox::new();
    for text in ["", "short"] {
        sandbox.write("data.txt", text);
        expect_error_before_training(&sandbox, "", "the data holds 0 samples of 8 tokens");
    }
    sandbox.write("data.txt", "a text of two samples");
    let check = "check run.toml --set train.global_batch_size=2 --set run.ranks=1";
    sandbox.succeed(&format!("{check} --set data.eval=[\"run.toml\"]"));
    sandbox.write("held.txt", "short");
    let ran = sandbox.fsdp(&format!("{check} --set data.eval=[\"held.txt\"]"));
    assert_eq!(ran.code, Some(2), "{}", ran.stdout);
    assert!(ran.stdout.contains("error    evaluation"), "{}", ran.stdout);
}

#[test]
fn token_ids_beyond_vocab_are_rejected() {
    let sandbox = Sandbox::new();
    sandbox.edit("model/config.json", "\"vocab_size\": 256", "\"vocab_size\": 100");
    expect_error_before_training(
        &sandbox,
        "",
        "data.txt: token id 115 (sample 0, position 2), but the model's vocab_size is 100",
    );
    let ids: Vec<u8> = (0..200u16).flat_map(|at| if at == 150 { 300 } else { 7u16 }.to_le_bytes()).collect();
    sandbox.write("tokens.bin", ids);
    let tokens = "--set data.train=[\"tokens.bin\"] --set data.format=tokens-u16";
    expect_error_before_training(&sandbox, tokens, "tokens.bin: token id 300 (sample 18, position 6)");
}

#[test]
fn possible_problems_in_long_text_are_warnings() {
    let sandbox = Sandbox::new();
    sandbox.write("data.txt", "a".repeat(3 << 20));
    sandbox.edit("model/config.json", "\"vocab_size\": 256", "\"vocab_size\": 100");
    let ran = sandbox.fsdp("check run.toml --set train.global_batch_size=800000");
    let warnings: Vec<&str> = ran.stdout.lines().filter(|line| line.starts_with("warning  data ")).collect();
    let [ids, samples] = *warnings else { panic!("{}", ran.stdout) };
    assert!(ids.contains("tokenizer bytes has 256 ids, but the model's vocab_size is 100"), "{ids}");
    assert!(samples.contains("a global batch has 800,000 samples, but there may be fewer"), "{samples}");
}

#[test]
fn impossible_settings_are_rejected() {
    let sandbox = Sandbox::new();
    for (overrides, key) in [
        (
            "--set run.ranks=8192 --set train.micro_batch_size=1 --set train.global_batch_size=8192",
            "run.ranks",
        ),
        ("--set train.router_aux_loss_coef=0.1", "train.router_aux_loss_coef"),
        ("--set train.router_z_loss_coef=0.1", "train.router_z_loss_coef"),
        ("--set train.router_sequence_loss_coef=0.1", "train.router_sequence_loss_coef"),
    ] {
        let checked = sandbox.fsdp(&format!("check run.toml {overrides}"));
        let message = checked.stdout.lines().find_map(|line| line.strip_prefix("error    settings      "));
        let message = message.unwrap_or_else(|| panic!("{}", checked.stdout));
        assert!(message.contains(key), "{message}");
        let trained = sandbox.fsdp(&format!("train run.toml {overrides}"));
        assert!(trained.stderr.contains(message), "{}", trained.stderr);
    }
    let sources =
        "[[data.source]]\npath = \"data.txt\"\nweight = 1e9\n[[data.source]]\npath = \"data.txt\"\n[train]";
    sandbox.edit("run.toml", "train = [\"data.txt\"]\n", "");
    sandbox.edit("run.toml", "[train]", sources);
    let checked = sandbox.fsdp("check run.toml").stdout;
    assert!(
        checked.contains("error    settings      data.source[1] gets less than one of 65536"),
        "{checked}"
    );
}

#[test]
fn all_missing_paths_and_missing_tokenizer_are_reported() {
    let sandbox = Sandbox::new();
    let ran = sandbox.fsdp(
        "check run.toml --set data.train=[\"gone.txt\",\"data.txt\",\"lost.txt\"] --set data.eval=[\"away.txt\"] \
         --set data.tokenizer=nope.json",
    );
    assert_eq!(ran.code, Some(2), "{}", ran.stderr);
    let errors: Vec<&str> = ran.stdout.lines().filter(|line| line.starts_with("error ")).collect();
    let [tokenizer, gone, lost, away] = *errors else { panic!("{}", ran.stdout) };
    assert!(tokenizer.contains("cannot load tokenizer nope.json"), "{tokenizer}");
    assert!(gone.contains("gone.txt") && lost.contains("lost.txt"), "{}", ran.stdout);
    assert!(away.starts_with("error    evaluation ") && away.contains("away.txt"), "{away}");
}

#[test]
fn check_reports_training_warnings_in_advance() {
    let sandbox = Sandbox::new();
    let line = "{\"text\": \"a text of more than a few tokens\"}\n";
    sandbox.write("data.jsonl", line.repeat(9));
    let args = "run.toml --set data.train=[\"data.jsonl\"] --set data.packing=documents --set data.eos=0 \
                --set data.eval=[{name=\"held\",paths=[\"data.jsonl\"],max_samples=2}]";
    let checked = sandbox.succeed(&format!("check {args}")).stdout;
    // 32 bytes and eos, of which 8 inputs and one target are used.
    let warning_for = |documents: usize| {
        format!(
            "{documents} documents are clipped to data.seq_len, which leaves out {} tokens",
            24 * documents
        )
    };
    assert!(checked.contains(&format!("warning  data          {}", warning_for(9))), "{checked}");
    assert!(checked.contains(&format!("warning  evaluation held  {}", warning_for(2))), "{checked}");
    assert!(checked.contains("297 tokens, 9 samples"), "{checked}");
    let trained = sandbox.succeed(&format!("train {args}")).stderr;
    assert!(trained.contains(&format!("warning: data.train: {}", warning_for(9))), "{trained}");
    assert!(trained.contains(&format!("warning: data.eval \"held\": {}", warning_for(2))), "{trained}");
    // If there is more data than `check` reads, it reports on the first records.
    sandbox.write("data.jsonl", line.repeat(60_000));
    let checked = sandbox.succeed(&format!("check {args}")).stdout;
    assert!(checked.contains("warning  data          of the first records: "), "{checked}");
}
