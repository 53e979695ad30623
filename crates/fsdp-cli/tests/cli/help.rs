//! Help pages.

use crate::support::Sandbox;

fn help(args: &str) -> String {
    Sandbox::new().succeed(args).stdout
}

/// Removes from a help text the entry of a command that only some builds have.
fn without(command: &str, text: &str) -> String {
    let is_entry = |line: &str| line.starts_with("  ") && !line.starts_with("   ");
    let (mut lines, mut is_left_out) = (Vec::new(), false);
    for line in text.lines() {
        is_left_out = match line.split_whitespace().next() {
            Some(word) if is_entry(line) => word == command,
            Some(_) => is_left_out,
            None => false,
        };
        lines.extend((!is_left_out).then_some(line));
    }
    lines.join("\n")
}

#[test]
fn help_output_matches_snapshots() {
    let all = help("--help");
    let others = without("compile", &all);
    assert_eq!(others.lines().count() < all.lines().count(), cfg!(feature = "xla"));
    insta::assert_snapshot!("help", others);
    insta::assert_snapshot!("help_init", help("init --help"));
    insta::assert_snapshot!("help_train", help("train --help"));
    insta::assert_snapshot!("help_launch", help("launch --help"));
    insta::assert_snapshot!("help_verify", help("verify --help"));
    insta::assert_snapshot!("help_audit", help("audit --help"));
    insta::assert_snapshot!("help_eval", help("eval --help"));
    insta::assert_snapshot!("help_generate", help("generate --help"));
    insta::assert_snapshot!("help_check", help("check --help"));
    insta::assert_snapshot!("help_schedule", help("schedule --help"));
    insta::assert_snapshot!("help_report", help("report --help"));
    insta::assert_snapshot!("help_bench_train", help("bench train --help"));
    insta::assert_snapshot!("help_doctor", help("doctor --help"));
    insta::assert_snapshot!("help_completions", help("completions --help"));
    insta::assert_snapshot!("help_man", help("man --help"));
    insta::assert_snapshot!("help_schema", help("schema --help"));
    insta::assert_snapshot!("help_ckpt", help("ckpt --help"));
    insta::assert_snapshot!("help_ckpt_inspect", help("ckpt inspect --help"));
    insta::assert_snapshot!("help_ckpt_convert", help("ckpt convert --help"));
    insta::assert_snapshot!("help_ckpt_verify", help("ckpt verify --help"));
    insta::assert_snapshot!("help_ckpt_diff", help("ckpt diff --help"));
}

#[test]
fn published_run_schema_is_up_to_date() {
    let published = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/run.schema.json");
    let published = std::fs::read_to_string(published).unwrap();
    let printed = help("schema");
    assert!(printed == published, "docs/run.schema.json is old: fsdp schema > docs/run.schema.json");
}

#[test]
fn no_arguments_print_help_and_fail() {
    let ran = Sandbox::new().fsdp("");
    assert_eq!(ran.code, Some(2));
    assert!(ran.stderr.contains("Usage: fsdp [OPTIONS] <COMMAND>"), "{}", ran.stderr);
}

#[test]
fn completions_and_man_pages_cover_every_command() {
    let top = help("--help");
    let commands =
        top.lines().skip_while(|line| *line != "Commands:").skip(1).take_while(|line| !line.is_empty());
    let commands: Vec<&str> = commands
        .filter(|line| line.starts_with("  ") && !line.starts_with("   "))
        .filter_map(|line| line.split_whitespace().next())
        .collect();
    assert!(commands.len() > 8, "{commands:?}");
    for shell in ["bash", "zsh", "fish", "powershell", "elvish"] {
        let script = Sandbox::new().succeed(&format!("completions {shell}")).stdout;
        for command in &commands {
            assert!(script.contains(command), "{shell} does not complete {command}");
        }
    }
    let sandbox = Sandbox::new();
    sandbox.succeed("man pages/man1");
    for command in commands.iter().filter(|command| **command != "help") {
        let page = std::fs::read_to_string(sandbox.path(&format!("pages/man1/fsdp-{command}.1"))).unwrap();
        assert!(page.contains(".SH SYNOPSIS"), "{command}");
    }
}
