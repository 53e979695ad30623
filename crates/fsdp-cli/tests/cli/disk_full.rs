//! Output that cannot be written: no half-written model, exit code 75 if the disk is full, since a retry can succeed,
//! and exit code 2 at a limit that the user has set.

use std::process::Command;

use fsdp_ckpt::native::RunDir;

use crate::support::{Ran, Sandbox, folded};

impl Sandbox {
    /// Runs a shell script; `$FSDP` is the binary.
    pub(crate) fn shell(&self, script: &str) -> Ran {
        let mut command = Command::new("sh");
        command.args(["-c", script]).current_dir(self.path("")).env_remove("RUST_LOG");
        command.env("FSDP", env!("CARGO_BIN_EXE_fsdp"));
        Ran::of(command.output().unwrap())
    }
}

/// Returns the error message without the number of the rank that failed first.
fn failure(ran: &Ran) -> String {
    let errors: Vec<&str> = ran.stderr.lines().skip_while(|line| !line.starts_with("error")).collect();
    let text = errors.join("\n");
    folded(&(0..2).fold(text, |text, rank| text.replace(&format!("rank {rank} failed"), "rank N failed")))
}

#[test]
fn file_size_limit_is_detected_before_training() {
    let sandbox = Sandbox::new();
    // A limit of 8 blocks (512 or 1024 bytes each): enough for the small files, not for the model.
    let ran = sandbox.shell("ulimit -f 8; exec \"$FSDP\" train run.toml");
    assert_eq!(ran.code, Some(2), "{}", ran.stderr);
    insta::assert_snapshot!(folded(&ran.stderr), @r"
    error: failed to allocate disk space for out/model/model.safetensors.tmp: File too large (os error
    27); choose a smaller shard size or another file system
    ");
    assert_eq!(std::fs::read_dir(sandbox.path("out/model")).unwrap().count(), 0);
}

#[test]
fn full_disk_leaves_no_partial_model() {
    let sandbox = Sandbox::new();
    std::fs::create_dir(sandbox.path("tiny")).unwrap();
    // A separate file system, which needs user namespaces.
    let mount = "mount -t tmpfs -o size=32k none tiny";
    if sandbox.shell(&format!("unshare --user --map-root-user --mount sh -c '{mount}'")).code != Some(0) {
        println!("skipped: this machine has no user namespaces in which tmpfs can be mounted");
        return;
    }
    let train = "$FSDP train run.toml --set run.out_dir=tiny/out; echo code $?; ls tiny/out/model";
    let ran = sandbox.shell(&format!("unshare --user --map-root-user --mount sh -c '{mount}; {train}'"));
    assert_eq!(ran.stdout, "code 75\n", "{}", ran.stderr);
    insta::assert_snapshot!(failure(&ran), @r"
    error: failed to allocate disk space for tiny/out/model/model.safetensors.tmp: No space left on
    device (os error 28); free space or choose a directory on another disk
    ");
}

#[test]
fn unwritable_metrics_end_run_with_checkpoint_and_model() {
    let sandbox = Sandbox::new();
    // Enough for the model and a checkpoint, not for the metrics of many steps.
    let train = "exec \"$FSDP\" train run.toml --set train.steps=1000000 --set run.ranks=1";
    let ran = sandbox.shell(&format!("ulimit -f 400; {train}"));
    assert_eq!(ran.code, Some(2), "{}", ran.stderr);
    let [done] = RunDir::new(sandbox.path("out")).steps().unwrap()[..] else { panic!("{}", ran.stderr) };
    insta::assert_snapshot!(failure(&ran).replace(&done.to_string(), "N"), @r"
    error: cannot write out/metrics.jsonl: File too large (os error 27); make room there, or choose
    another run.out_dir; the state after step N is in out/checkpoints/step-0000N: once this is
    fixed, --resume continues from there, or exports the model if no steps are left
    ");
    assert!(sandbox.path("out/model/model.safetensors").exists());
}

#[test]
fn locked_out_dir_exits_as_retryable() {
    let sandbox = Sandbox::new();
    sandbox.succeed("train run.toml");
    let held = std::fs::File::open(sandbox.path("out/.lock")).unwrap();
    held.lock().unwrap();
    let ran = sandbox.fsdp("train run.toml --overwrite");
    assert_eq!(ran.code, Some(75), "{}", ran.stderr);
    assert!(ran.stderr.contains("is locked by another process"), "{}", ran.stderr);
    drop(held);
    sandbox.succeed("train run.toml --overwrite");
}
