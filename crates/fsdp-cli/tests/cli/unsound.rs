//! Damaged checkpoints: the newest sound one is named, and `--skip-unsound` resumes from it.

use std::fs;

use crate::support::{Sandbox, folded};

/// Damage to a checkpoint.
#[derive(Clone, Copy, Debug)]
enum Damage {
    FlippedBit,
    MissingFile,
    CutFile,
    CutManifest,
    MissingManifest,
}

const DAMAGES: [Damage; 5] =
    [Damage::FlippedBit, Damage::MissingFile, Damage::CutFile, Damage::CutManifest, Damage::MissingManifest];

impl Damage {
    fn strike(self, sandbox: &Sandbox, step: u64) {
        let dir = format!("out/checkpoints/step-{step:08}");
        let shard = sandbox.path(&format!("{dir}/shard-00002-model-00001-of-00001.safetensors"));
        let manifest = sandbox.path(&format!("{dir}/manifest.json"));
        let cut = |path| {
            let bytes = fs::read(path).unwrap();
            fs::write(path, &bytes[..bytes.len() - 40]).unwrap();
        };
        match self {
            Damage::FlippedBit => {
                let mut bytes = fs::read(&shard).unwrap();
                let last = bytes.len() - 1;
                bytes[last] ^= 1;
                fs::write(shard, bytes).unwrap();
            }
            Damage::MissingFile => fs::remove_file(shard).unwrap(),
            Damage::CutFile => cut(&shard),
            Damage::CutManifest => cut(&manifest),
            Damage::MissingManifest => fs::remove_file(manifest).unwrap(),
        }
    }
}

/// Saves every step and keeps all checkpoints.
const SAVING: &str = "--set checkpoint.every=1 --set checkpoint.keep_last=0";

/// Creates a sandbox with a run of three steps that saved each one, and a run of five steps for comparison.
fn saved() -> Sandbox {
    let sandbox = Sandbox::new();
    sandbox.succeed(&format!("train run.toml {SAVING}"));
    sandbox.succeed("train run.toml --set run.out_dir=whole --set train.steps=5");
    sandbox
}

fn survives(damage: Damage) {
    let sandbox = saved();
    let on = format!("train run.toml {SAVING} --set train.steps=5 --resume");
    damage.strike(&sandbox, 3);
    let before = sandbox.files("out");
    let ran = sandbox.fsdp(&on);
    assert_eq!(ran.code, Some(2), "{damage:?}: {}", ran.stderr);
    for part in [
        "out/checkpoints/step-00000003 is damaged: ",
        "The newest sound one is out/checkpoints/step-00000002",
        "--resume --skip-unsound",
        "--resume-from out/checkpoints/step-00000002 --overwrite",
    ] {
        assert!(ran.stderr.contains(part), "{damage:?}: no {part} in {}", ran.stderr);
    }
    assert_eq!(sandbox.files("out"), before, "{damage:?}: nothing was touched");
    let ran = sandbox.succeed(&format!("{on} --skip-unsound"));
    let passed_over = "warning: out/checkpoints/step-00000003 is damaged and was skipped: ";
    assert!(ran.stderr.contains(passed_over), "{damage:?}: {}", ran.stderr);
    assert!(ran.stderr.contains("resuming from out/checkpoints/step-00000002"), "{damage:?}: {}", ran.stderr);
    assert_eq!(sandbox.column("out", "loss"), sandbox.column("whole", "loss"), "{damage:?}");
    assert_eq!(sandbox.steps("out"), [1, 2, 3, 4, 5]);
    // The damaged checkpoint is kept for inspection but no longer counts; --overwrite removes it.
    assert!(sandbox.path("out/checkpoints/step-00000003.unsound").is_dir(), "{damage:?}");
    sandbox.succeed("train run.toml --overwrite");
    assert_eq!(fs::read_dir(sandbox.path("out/checkpoints")).unwrap().count(), 0, "{damage:?}");
}

#[test]
fn skip_unsound_resumes_from_newest_sound_checkpoint() {
    DAMAGES.into_iter().for_each(survives);
}

#[test]
fn damage_error_names_file_and_remedy() {
    let sandbox = saved();
    Damage::CutFile.strike(&sandbox, 3);
    let ran = sandbox.fsdp("train run.toml --set train.steps=5 --resume");
    insta::assert_snapshot!(folded(&ran.stderr), @r"
    error: out/checkpoints/step-00000003 is damaged:
    out/checkpoints/step-00000003/shard-00002-model-00001-of-00001.safetensors: it has 56308 bytes, but
    the manifest says 56348; it was cut off or replaced. The newest sound one is
    out/checkpoints/step-00000002: resume from it with --resume --skip-unsound (damaged ones are kept,
    under names that end in .unsound), or with --resume-from out/checkpoints/step-00000002 --overwrite
    (later ones are removed)
    ");
}

#[test]
fn all_unsound_checkpoints_are_skipped() {
    let sandbox = saved();
    Damage::FlippedBit.strike(&sandbox, 2);
    Damage::CutManifest.strike(&sandbox, 3);
    let ran = sandbox.succeed("train run.toml --resume --skip-unsound --set train.steps=5");
    assert!(ran.stderr.contains("resuming from out/checkpoints/step-00000001"), "{}", ran.stderr);
    assert_eq!(sandbox.column("out", "loss"), sandbox.column("whole", "loss"));
    assert_eq!(sandbox.steps("out"), [1]);
    let aside = |step: u64| sandbox.path(&format!("out/checkpoints/step-{step:08}.unsound")).is_dir();
    assert!(aside(2) && aside(3));
}

#[test]
fn resume_without_sound_checkpoint_is_rejected() {
    let sandbox = saved();
    (1..=3).zip(DAMAGES).for_each(|(step, damage)| damage.strike(&sandbox, step));
    let before = sandbox.files("out");
    let ran = sandbox.fsdp("train run.toml --resume --set train.steps=5");
    assert_eq!(ran.code, Some(2), "{}", ran.stderr);
    assert!(ran.stderr.contains("No older one is sound"), "{}", ran.stderr);
    let ran = sandbox.fsdp("train run.toml --resume --skip-unsound --set train.steps=5");
    assert_eq!(ran.code, Some(2), "{}", ran.stderr);
    let error = ran.stderr.lines().find(|line| line.starts_with("error")).unwrap();
    insta::assert_snapshot!(folded(error), @r"
    error: none of the 3 checkpoints in out/checkpoints can be read completely; restore one from a
    copy, or pass --overwrite to start over
    ");
    assert_eq!(sandbox.files("out"), before, "nothing was touched");
}

#[test]
fn skip_unsound_keeps_sound_checkpoints() {
    let sandbox = saved();
    sandbox.succeed("train run.toml --resume --skip-unsound --set train.steps=5");
    assert_eq!(sandbox.column("out", "loss"), sandbox.column("whole", "loss"));
    assert_eq!(sandbox.steps("out"), [1, 2, 3]);
    let ran = sandbox.fsdp("train run.toml --skip-unsound");
    assert_eq!(ran.code, Some(2), "{}", ran.stderr);
    assert!(ran.stderr.contains("--resume"), "{}", ran.stderr);
}
