//! Absurd sizes and malformed files: an error with exit code 2, quickly and in little memory.

use std::thread;
use std::time::Duration;

use crate::signals::Running;
use crate::support::{Ran, Sandbox, folded};
use crate::world::wait_until;

/// Runs a command with 600 MiB of address space, most of which the binary does not need.
fn confined(sandbox: &Sandbox, args: &str) -> Ran {
    sandbox.shell(&format!("ulimit -v 614400; exec \"$FSDP\" {args}"))
}

#[track_caller]
fn input_error(sandbox: &Sandbox, args: &str) -> String {
    let ran = confined(sandbox, args);
    assert_eq!(ran.code, Some(2), "fsdp {args}: {}", ran.stderr);
    assert!(!ran.stderr.contains("panicked"), "fsdp {args}: {}", ran.stderr);
    assert!(!sandbox.path("out").exists(), "nothing is written");
    folded(&ran.stderr)
}

#[test]
fn absurd_config_json_sizes_are_rejected() {
    for command in ["train run.toml", "schedule run.toml", "verify run.toml --shrink"] {
        for (from, to) in [
            ("\"num_hidden_layers\": 2", "\"num_hidden_layers\": 1099511627776"),
            ("\"num_hidden_layers\": 2", "\"num_hidden_layers\": 1048576"),
            ("\"hidden_size\": 16", "\"hidden_size\": 9223372036854775807"),
            ("\"vocab_size\": 256", "\"head_dim\": 4611686018427387904, \"vocab_size\": 256"),
            ("\"vocab_size\": 256", "\"vocab_size\": 18446744073709551615"),
        ] {
            let sandbox = Sandbox::new();
            sandbox.edit("model/config.json", from, to);
            let error = input_error(&sandbox, command);
            let key = to.split('"').nth(1).unwrap();
            assert!(error.contains(key) && error.contains("too large: at most"), "{error}");
        }
    }
}

#[test]
fn absurd_parameter_count_is_rejected() {
    let sandbox = Sandbox::new();
    sandbox.edit("model/config.json", "\"hidden_size\": 16", "\"hidden_size\": 1048576");
    sandbox.edit("model/config.json", "\"num_hidden_layers\": 2", "\"num_hidden_layers\": 4096");
    for command in ["train run.toml", "schedule run.toml", "verify run.toml --shrink"] {
        let error = input_error(&sandbox, command);
        assert!(error.contains("more than 281474976710656 (2^48) elements"), "{error}");
    }
}

#[test]
fn absurd_run_file_sizes_are_rejected() {
    let sandbox = Sandbox::new();
    for (overrides, fragment) in [
        ("--set data.seq_len=4294967295", "an integer from 1 to 8388608"),
        ("--set train.micro_batch_size=9223372036854775807", "an integer from 1 to 8388608"),
        ("--set run.ranks=1048577", "an integer from 1 to 1048576"),
        ("--set run.timeout_s=1e-12", "a number from 0.1 to 1e9"),
    ] {
        for command in ["train", "schedule", "verify"] {
            let error = input_error(&sandbox, &format!("{command} run.toml {overrides}")).replace('\n', " ");
            assert!(error.contains(fragment), "{command}: {error}");
        }
    }
    let long = input_error(&sandbox, "schedule run.toml --set train.global_batch_size=4294967292");
    assert!(long.replace('\n', " ").contains("a schedule that is too long"), "{long}");
    let many = "--set run.ranks=8192 --set train.global_batch_size=16384";
    sandbox.write("data.txt", "x".repeat(1 << 18));
    insta::assert_snapshot!(input_error(&sandbox, &format!("train run.toml {many}")), @r"
    error: run.ranks: 8192 are too many: a run has at most 4096 over all its processes; choose fewer
    (`fsdp schedule` shows the schedule and memory of larger worlds)
    ");
    assert_eq!(confined(&sandbox, &format!("schedule run.toml {many}")).code, Some(0));
}

#[test]
fn absurd_bench_options_are_rejected() {
    let sandbox = Sandbox::new();
    let largest = usize::MAX;
    for option in [
        "hidden",
        "layers",
        "heads",
        "kv-heads",
        "ffn",
        "vocab",
        "seq",
        "global-batch",
        "micro-batch",
        "ranks",
        "threads",
    ] {
        for size in [1 << 40, 1 << 62, (1 << 63) - 1, largest] {
            input_error(&sandbox, &format!("bench train --steps 2 --warmup 0 --{option} {size}"));
        }
    }
    let error = input_error(&sandbox, "bench train --global-batch 4294967295 --micro-batch 1 --seq 4096");
    assert!(error.contains("--global-batch: 4294967295 sequences of 4096 tokens are too many"), "{error}");
}

#[test]
fn model_larger_than_memory_is_rejected() {
    let sandbox = Sandbox::new();
    sandbox.edit("model/config.json", "\"vocab_size\": 256", "\"vocab_size\": 4194304");
    for command in ["train run.toml", "verify run.toml --world-sizes 2"] {
        let error = input_error(&sandbox, command);
        for fragment in [
            "need ",
            "the limit on the address space",
            "\n    parameter shards ",
            "per rank,",
            "in all",
            "\n    optimizer state ",
            "\n  Lower train.micro_batch_size",
        ] {
            assert!(error.contains(fragment), "{fragment}: {error}");
        }
    }
    let bench = input_error(&sandbox, "bench train --vocab 4194304 --hidden 64 --ffn 64");
    assert!(bench.contains("leaves") && bench.contains("gradient"), "{bench}");
}

#[test]
fn pipes_devices_and_oversized_files_are_rejected() {
    let sandbox = Sandbox::new();
    assert_eq!(sandbox.shell("mkfifo fifo; mkdir other; ln -s ../fifo other/config.json").code, Some(0));
    for (args, fragment) in [
        ("train fifo", "it is a FIFO, not a regular file"),
        ("train /dev/zero", "it is a device, not a regular file"),
        ("schedule run.toml --set model.path=other", "it is a FIFO, not a regular file"),
        ("train run.toml --set data.train=[\\\"fifo\\\"]", "it is a FIFO, not a regular file"),
        ("train run.toml --set data.train=[\\\"/dev/zero\\\"]", "it is a device, not a regular file"),
        ("train run.toml --set data.tokenizer=fifo", "it is a FIFO, not a regular file"),
        ("train run.toml --set data.tokenizer=/dev/zero", "it is a device, not a regular file"),
        ("train run.toml --set fsdp.config=fifo", "it is a FIFO, not a regular file"),
    ] {
        let error = input_error(&sandbox, args).replace('\n', " ");
        assert!(error.contains(fragment), "{args}: {error}");
    }
    for file in ["run.toml", "model/config.json"] {
        let sandbox = Sandbox::new();
        sandbox.write(file, " ".repeat((1 << 20) + 1));
        let error = input_error(&sandbox, "train run.toml");
        assert!(error.contains("more than 1048576 bytes"), "{error}");
    }
}

#[cfg(feature = "tokenizers")]
#[test]
fn tokenizer_claiming_huge_table_is_rejected() {
    let sandbox = Sandbox::new();
    let tokenizer = r#"{"version": "1.0", "normalizer": {"type": "Precompiled", "precompiled_charsmap": "/////2FiY2Q="},
        "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}"#;
    sandbox.write("tokenizer.json", tokenizer);
    insta::assert_snapshot!(input_error(&sandbox, "train run.toml --set data.tokenizer=tokenizer.json"), @r#"
    error: cannot load tokenizer tokenizer.json: its precompiled_charsmap claims a table of 4294967295
    bytes, but has 8 in total; data.tokenizer must be "bytes" or a tokenizer.json
    "#);
}

#[test]
fn run_suspended_longer_than_timeout_continues() {
    let sandbox = Sandbox::new();
    let run = Running::start(&sandbox, "train run.toml --set train.steps=1000000 --set run.timeout_s=5");
    for _ in 0..2 {
        run.signal("STOP");
        // Longer than `run.timeout_s`: the time during which the process is stopped must not count.
        thread::sleep(Duration::from_secs(6));
        let before = sandbox.read("out/metrics.jsonl").len();
        run.signal("CONT");
        wait_until("another step", || sandbox.read("out/metrics.jsonl").len() > before);
    }
    run.signal("TERM");
    let ran = run.end();
    assert_eq!(ran.code, Some(75), "{}", ran.stderr);
}
