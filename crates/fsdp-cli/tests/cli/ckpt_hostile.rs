//! Checkpoints that are not of the named kind, and paths that are not regular files: refused at once, without blocking.

use std::fs;
use std::os::unix::fs::symlink;

use serde_json::Value;

use crate::support::{Ran, Sandbox, folded};

impl Sandbox {
    fn make_pipe(&self, name: &str) {
        assert_eq!(self.shell(&format!("mkfifo {name}")).code, Some(0));
    }

    /// Runs a command that must not block on a pipe without a writer.
    fn patient(&self, args: &str) -> Ran {
        let ran = self.shell(&format!("timeout 60 \"$FSDP\" {args}"));
        assert_ne!(ran.code, Some(124), "fsdp {args} waits");
        ran
    }
}

#[test]
fn pipes_and_devices_are_rejected_as_checkpoints() {
    let sandbox = Sandbox::with_fixtures(&["full.pth"]);
    sandbox.make_pipe("pipe");
    symlink("/dev/zero", sandbox.path("zeros")).unwrap();
    for (path, kind) in [("pipe", "a named pipe"), ("zeros", "a device"), ("/dev/zero", "a device")] {
        let reads = ["inspect", "verify", "diff full.pth", "diff --only model full.pth"];
        for command in reads.map(|command| format!("ckpt {command} {path}")) {
            let ran = sandbox.patient(&command);
            assert_eq!((ran.code, ran.stdout.as_str()), (Some(2), ""), "{command}: {}", ran.stderr);
            assert!(ran.stderr.contains(&format!("{path} is {kind}, not a regular file")), "{}", ran.stderr);
        }
        for args in [format!("{path} out"), format!("full.pth out --config {path}")] {
            let ran = sandbox.patient(&format!("ckpt convert {args} --to safetensors"));
            assert_eq!(ran.code, Some(2), "{args}: {}", ran.stderr);
            assert!(ran.stderr.contains(kind), "{}", ran.stderr);
            assert!(!sandbox.path("out").exists());
        }
    }
}

#[test]
fn pipe_or_device_as_checkpoint_file_does_not_block() {
    let fixtures = ["dcp_2rank", "hf_sharded", "fsdp2_rank_pth", "deepspeed_layout/zero2"];
    let whole = Sandbox::with_fixtures(&fixtures);
    whole.succeed("ckpt convert dcp_2rank native --to native --world-size 2 --no-sync");
    let mut named = 0;
    for directory in fixtures.into_iter().chain(["native"]) {
        for name in whole.names(directory) {
            let path = whole.path(directory).join(&name);
            if path.is_dir() {
                continue;
            }
            let kept = fs::read(&path).unwrap();
            for target in ["pipe", "/dev/zero"] {
                fs::remove_file(&path).unwrap();
                match target {
                    "pipe" => whole.make_pipe(&format!("{directory}/{name}")),
                    _ => symlink(target, &path).unwrap(),
                }
                let ran = whole.patient(&format!("ckpt verify {directory}"));
                let output = ran.stdout + &ran.stderr;
                named += usize::from(output.contains("not a regular file"));
                assert!(!output.contains("panicked"), "{output}");
            }
            fs::remove_file(&path).unwrap();
            fs::write(&path, kept).unwrap();
        }
    }
    // Not every replacement is named: configurations next to weights are not read, and a directory without the file
    // that identifies its format is not a checkpoint.
    assert!(named >= 20, "{named} were named");
}

#[test]
fn invalid_world_size_in_manifest_is_not_sound() {
    for (number, written) in [(0, "0"), (u64::MAX, "18446744073709551615")] {
        let sandbox = Sandbox::with_fixtures(&["dcp_2rank"]);
        sandbox.succeed("ckpt convert dcp_2rank native --to native --world-size 2 --no-sync");
        sandbox.reseal("native/manifest.json", |manifest| manifest["world_size"] = number.into());
        let ran = sandbox.find_fault("ckpt verify native");
        assert!(
            ran.stdout.contains(&format!("it says that {written} ranks saved it, but lists 2 files")),
            "{}",
            ran.stdout
        );
        let ran = sandbox.fsdp("ckpt inspect native");
        assert_eq!(ran.code, Some(2), "{}", ran.stdout);
    }
}

impl Sandbox {
    /// Changes the text of a manifest and updates its digest.
    fn reseal(&self, name: &str, change: impl FnOnce(&mut Value)) {
        let mut manifest: Value = serde_json::from_str(&self.read(name)).unwrap();
        change(&mut manifest);
        manifest.as_object_mut().unwrap().shift_remove("digest");
        let text = manifest.to_string();
        let body = text.strip_suffix('}').unwrap();
        let digest = fsdp_ckpt::digest::DigestKind::Crc64.of(body.as_bytes());
        self.write(name, format!("{body},\"digest\":\"{digest}\"}}\n"));
    }
}

#[test]
fn renamed_checkpoint_reports_actual_step() {
    let sandbox = Sandbox::new();
    sandbox.succeed("train run.toml --set checkpoint.every=1 --set run.ranks=1");
    let checkpoints = sandbox.path("out/checkpoints");
    fs::rename(checkpoints.join("step-00000003"), checkpoints.join("step-00000020")).unwrap();
    for command in ["inspect", "verify"] {
        let ran = sandbox.succeed(&format!("ckpt {command} out/checkpoints/step-00000020"));
        let note = ran.stdout.lines().find(|line| line.starts_with("note:")).unwrap();
        insta::allow_duplicates! {
            insta::assert_snapshot!(folded(note), @r"
            note: the directory is named step-00000020, but the run had done 3 steps when it was saved: it was
            renamed. `fsdp train --resume` uses the names; rename it to step-00000003
            ");
        }
    }
    let report = sandbox.json("ckpt verify out/checkpoints/step-00000020");
    assert_eq!(report["sound"], true);
    assert!(report["notes"][0].as_str().unwrap().contains("step-00000003"), "{report}");
    let ran = sandbox.succeed("ckpt verify out/checkpoints/step-00000002");
    assert!(!ran.stdout.contains("note:"), "{}", ran.stdout);
}

#[test]
fn diff_reports_run_state_when_tensors_are_equal() {
    let sandbox = Sandbox::new();
    sandbox.succeed("train run.toml --set checkpoint.every=3 --set run.ranks=1");
    let saved = sandbox.path("out/checkpoints/step-00000003");
    fs::create_dir(sandbox.path("other")).unwrap();
    for entry in fs::read_dir(saved).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), sandbox.path("other").join(entry.file_name())).unwrap();
    }
    sandbox.reseal("other/manifest.json", |manifest| manifest["run_state"]["step"] = 4.into());
    let diff = "ckpt diff out/checkpoints/step-00000003 other";
    insta::assert_snapshot!(sandbox.find_fault(diff).stdout, @r"
    A             out/checkpoints/step-00000003 (native)
    B             other (native)

     state of the run   A   B
    ──────────────────────────
     step               3   4

    values that differ: run_state

    they differ in 1 value; no tensor differs: 80 tensors (80 equal bits)
    ");
    let report: Value = serde_json::from_str(&sandbox.find_fault(&format!("{diff} --json")).stdout).unwrap();
    assert_eq!(report["run_state"], serde_json::json!({"step": ["3", "4"]}));
    assert_eq!(report["values"], serde_json::json!(["run_state"]));
    sandbox.succeed(&format!("{diff} --only model"));
}

#[test]
fn unknown_class_objects_are_skipped_or_rejected_if_strict() {
    let sandbox = Sandbox::with_fixtures(&["opaque.pth"]);
    let text = sandbox.succeed("ckpt inspect opaque.pth").stdout;
    assert!(text.contains("  when = <datetime.datetime, not read>\n"), "{text}");
    let report = sandbox.json("ckpt verify opaque.pth");
    assert_eq!((&report["sound"], &report["opaque"]["evil"]), (&Value::from(true), &"posix.system".into()));
    for target in ["dcp", "native", "torch", "safetensors"] {
        let report =
            sandbox.json(&format!("ckpt convert opaque.pth {target} --to {target} --only all --no-sync"));
        let dropped: Vec<&str> =
            report["dropped_values"].as_array().unwrap().iter().map(|name| name.as_str().unwrap()).collect();
        assert!(
            ["when", "config", "evil", "colors"].iter().all(|name| dropped.contains(name)),
            "{dropped:?}"
        );
        // The converted checkpoint names none of these classes, and `--strict` reads it without leaving anything out.
        let again = sandbox.json(&format!("ckpt inspect {target} --strict"));
        assert_eq!((&again["tensor_count"], &again["opaque"]), (&6.into(), &serde_json::json!({})));
    }
    assert!(!sandbox.path("PWNED").exists());
    for command in ["inspect opaque.pth", "convert opaque.pth out --to dcp", "diff opaque.pth opaque.pth"] {
        let ran = sandbox.fsdp(&format!("ckpt {command} --strict"));
        assert_eq!((ran.code, &ran.stdout[..]), (Some(2), ""), "{command}");
        assert!(ran.stderr.contains("`evil` (posix.system)"), "{}", ran.stderr);
    }
    let ran = sandbox.find_fault("ckpt verify opaque.pth --strict");
    assert!(
        ran.stdout.contains("not sound") && ran.stdout.contains("`evil` (posix.system)"),
        "{}",
        ran.stdout
    );
}
