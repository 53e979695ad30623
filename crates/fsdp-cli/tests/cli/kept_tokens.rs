//! Cached tokens: text is tokenized once, cached in the run's folder or `data.cache`, and verified before use.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use crate::support::{Ran, Sandbox};

/// Creates a sandbox with a tokenizer of 4 words and text to tokenize.
fn sandbox() -> Sandbox {
    let sandbox = Sandbox::new();
    sandbox.write(
        "tokenizer.json",
        r#"{"version": "1.0", "pre_tokenizer": {"type": "Whitespace"}, "model": {"type": "WordLevel",
            "vocab": {"the": 1, "cat": 2, "sat": 3, "<unk>": 0}, "unk_token": "<unk>"}}"#,
    );
    sandbox.write("data.txt", "the cat sat the dog sat on the cat ".repeat(20));
    sandbox.edit("run.toml", "seq_len = 8", "seq_len = 8\ntokenizer = \"tokenizer.json\"");
    sandbox
}

impl Sandbox {
    /// Returns the only file in a folder.
    fn kept(&self, folder: &str) -> PathBuf {
        let mut files: Vec<_> =
            fs::read_dir(self.path(folder)).unwrap().map(|file| file.unwrap().path()).collect();
        assert_eq!(files.len(), 1, "{files:?}");
        files.remove(0)
    }
}

#[test]
fn token_cache_is_reused_by_later_runs() {
    let sandbox = sandbox();
    let first = sandbox.succeed("train run.toml --set checkpoint.every=2");
    assert!(!first.stderr.contains("warning"), "{}", first.stderr);
    let (kept, losses) = (sandbox.kept("out/cache"), sandbox.column("out", "loss"));
    let inode = fs::metadata(&kept).unwrap().ino();

    // A cache alone does not make a folder a run's folder; the folder of a run is still refused.
    assert_eq!(sandbox.fsdp("train run.toml").code, Some(2));
    sandbox.succeed("train run.toml --overwrite");
    assert_eq!(sandbox.column("out", "loss"), losses);
    assert_eq!(fs::metadata(sandbox.kept("out/cache")).unwrap().ino(), inode, "it was used, not made again");
    let cache = sandbox.path("cache");
    fs::rename(sandbox.path("out/cache"), &cache).unwrap();
    fs::remove_dir_all(sandbox.path("out")).unwrap();
    fs::create_dir(sandbox.path("out")).unwrap();
    fs::rename(cache, sandbox.path("out/cache")).unwrap();
    sandbox.succeed("train run.toml");

    let whole = fs::read(&kept).unwrap();
    fs::remove_file(&kept).unwrap();
    fs::write(&kept, &whole[..100]).unwrap();
    let again = sandbox.succeed("train run.toml --overwrite");
    assert!(again.stderr.contains("is not used, and the text is tokenized again: "), "{}", again.stderr);
    assert_eq!(fs::read(&kept).unwrap(), whole);
    assert_eq!(sandbox.column("out", "loss"), losses);
}

#[test]
fn verify_schedule_and_rejected_train_cache_no_tokens() {
    let sandbox = sandbox();
    for (command, code) in [
        ("verify run.toml --world-sizes 2", 0),
        ("schedule run.toml", 0),
        ("train run.toml --resume-from missing", 2),
    ] {
        let ran = sandbox.fsdp(command);
        assert_eq!(ran.code, Some(code), "{command}: {}", ran.stderr);
        assert!(!sandbox.path("out").exists(), "{command}");
    }
}

#[test]
fn processes_and_runs_share_token_cache() {
    let sandbox = sandbox();
    sandbox.succeed("train run.toml --set run.out_dir=alone");
    let cache = "--set data.cache=shared/tokens";
    sandbox.succeed(&format!("launch --nproc 2 -- train run.toml {cache}"));
    let kept = sandbox.kept("shared/tokens");
    assert!(!sandbox.path("out/cache").exists());
    assert_eq!(sandbox.column("out", "loss"), sandbox.column("alone", "loss"));
    let inode = fs::metadata(&kept).unwrap().ino();
    sandbox.succeed(&format!("verify run.toml --world-sizes 2 {cache}"));
    sandbox.succeed(&format!("train run.toml {cache} --set run.out_dir=third"));
    assert_eq!(fs::metadata(sandbox.kept("shared/tokens")).unwrap().ino(), inode);
    // If the cache cannot be written, the run continues without it.
    let ran = sandbox.succeed("train run.toml --set data.cache=/proc/fsdp --set run.out_dir=fourth");
    assert!(
        ran.stderr.contains("warning: data.train: tokens are not cached in /proc/fsdp, so each start"),
        "{}",
        ran.stderr
    );
    assert_eq!(sandbox.column("fourth", "loss"), sandbox.column("alone", "loss"));
}

#[test]
fn only_one_process_tokenizes_text() {
    let sandbox = sandbox();
    let ran = |args: &str| {
        let mut command = sandbox.command();
        let args = format!(
            "launch --nproc 3 -- train run.toml --set run.ranks=3 --set train.global_batch_size=6 {args}"
        );
        Ran::of(command.args(args.split_whitespace()).env("RUST_LOG", "info").output().unwrap())
    };
    for (args, out) in [("", "out"), ("--set run.out_dir=other --set data.cache=shared", "other")] {
        let ran = ran(args);
        assert_eq!(ran.code, Some(0), "{}", ran.stderr);
        assert_eq!(ran.stderr.matches("tokenizing text").count(), 1, "{}", ran.stderr);
        assert_eq!(sandbox.column(out, "loss").len(), 3);
    }
    sandbox.kept("out/cache");
    sandbox.kept("shared");
    // If the run is refused, the cache that was made for the other processes is removed again.
    fs::remove_dir_all(sandbox.path("out/cache")).unwrap();
    let rejected = ran("");
    assert_eq!(rejected.code, Some(2), "{}", rejected.stderr);
    assert!(!sandbox.path("out/cache").exists());
}
