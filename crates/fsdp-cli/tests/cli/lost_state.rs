//! No run loses its state: full disks, removed folders, non-finite values.

use std::fs;

use fsdp_ckpt::native::{NativeReader, RunDir};

use crate::signals::Running;
use crate::support::{Ran, Sandbox, folded};

/// Runs a shell script with a separate file system of `kib` KiB mounted at `disk`; `$FSDP` is the binary. `None` if the
/// machine does not allow it.
fn on_small_disk(sandbox: &Sandbox, kib: usize, script: &str) -> Option<Ran> {
    fs::create_dir_all(sandbox.path("disk")).unwrap();
    let mount = format!("mount -t tmpfs -o size={kib}k none disk");
    let inside =
        |script: &str| format!("unshare --user --map-root-user --mount sh -c '{mount} && {{ {script}; }}'");
    if sandbox.shell(&inside("true")).code != Some(0) {
        println!("skipped: this machine has no user namespaces in which tmpfs can be mounted");
        return None;
    }
    Some(sandbox.shell(&inside(script)))
}

/// Returns the error message of a run.
fn error_of(ran: &Ran) -> String {
    let lines: Vec<&str> = ran.stderr.lines().skip_while(|line| !line.starts_with("error")).collect();
    lines.join("\n")
}

#[test]
fn full_disk_saves_state_without_checkpoints_configured() {
    let sandbox = Sandbox::new();
    // After the first step, another program takes all remaining disk space.
    let script = "$FSDP train run.toml --set run.out_dir=disk/out --set train.steps=1000000 2>told & \
        until grep -q step told; do :; done; \
        dd if=/dev/zero of=disk/other bs=1k 2>dd; wait $!; echo code $?; cat told >&2; \
        cp -r disk/out/checkpoints disk/out/metrics.jsonl . && cp -r disk/out/model exported";
    let Some(ran) = on_small_disk(&sandbox, 4000, script) else { return };
    assert!(ran.stdout.contains("code 75"), "{} {}", ran.stdout, ran.stderr);
    let error = error_of(&ran);
    assert!(error.contains("cannot write disk/out/metrics.jsonl: No space left on device"), "{error}");
    let steps = RunDir::new(sandbox.path("")).steps().unwrap();
    let [step] = steps[..] else { panic!("{steps:?}: {error}") };
    assert!(
        error.contains(&format!("the state after step {step} is in disk/out/checkpoints/step-{step:08}")),
        "{error}"
    );
    NativeReader::open(sandbox.path(&format!("checkpoints/step-{step:08}"))).unwrap().verify().unwrap();
    // The model was exported too, with the same weights.
    let diff = format!("ckpt diff checkpoints/step-{step:08} exported/model.safetensors --only model");
    sandbox.succeed(&diff);
}

#[test]
fn space_for_next_save_is_reserved_before_disk_fills() {
    let sandbox = Sandbox::new();
    // Once a save is reported, space is reserved for the next one, last for the last rank.
    let script = "$FSDP train run.toml --set run.out_dir=disk/out --set train.steps=1000000 \
            --set checkpoint.every=200 --set checkpoint.keep_last=1 2>told & \
        until grep -q \"checkpoint after\" told && test -s disk/out/checkpoints/reserved-00002.*.tmp; do sleep 0.01; done; \
        dd if=/dev/zero of=disk/other bs=1k 2>dd; wait $!; echo code $?; cat told >&2; \
        cp -r disk/out/checkpoints .";
    let Some(ran) = on_small_disk(&sandbox, 6000, script) else { return };
    assert!(ran.stdout.contains("code 75"), "{} {}", ran.stdout, ran.stderr);
    let (newest, path) = RunDir::new(sandbox.path("")).newest().unwrap().unwrap();
    assert!(newest > 200, "{newest}: {}", ran.stderr);
    NativeReader::open(path).unwrap().verify().unwrap();
}

#[test]
fn insufficient_disk_space_is_reported_before_first_step() {
    // First enough space for the exported model but not for a checkpoint; then not even for the model.
    for (kib, what) in [
        (100, "a save needs"),
        (20, "failed to allocate disk space for disk/out/model/model.safetensors.tmp"),
    ] {
        let sandbox = Sandbox::new();
        let script = "$FSDP train run.toml --set run.out_dir=disk/out; echo code $?; ls disk/out/model disk/out/checkpoints";
        let Some(ran) = on_small_disk(&sandbox, kib, script) else { return };
        let error = error_of(&ran);
        assert!(error.contains(what), "{kib}: {error}");
        assert!(!ran.stderr.contains("step"), "no step was done: {}", ran.stderr);
        assert!(ran.stdout.starts_with("code 75\n"), "{}", ran.stdout);
        assert!(!ran.stdout.contains(".tmp"), "nothing is left: {}", ran.stdout);
    }
}

#[test]
fn full_disk_fails_synchronous_save_without_timeout() {
    let sandbox = Sandbox::new();
    let script = "TMPDIR=. $FSDP train run.toml --set run.out_dir=disk/out --set train.steps=1000000 \
            --set checkpoint.every=3 --set checkpoint.async=false --set checkpoint.keep_last=0 2>told; \
        echo code $?; cat told >&2; ls disk/out/checkpoints >names";
    let begin = std::time::Instant::now();
    let Some(ran) = on_small_disk(&sandbox, 1200, script) else { return };
    assert!(begin.elapsed().as_secs() < 500, "run.timeout_s is 600");
    assert!(ran.stdout.contains("code 75"), "{} {}", ran.stdout, ran.stderr);
    let error = error_of(&ran);
    assert!(error.contains("could not be saved") && error.contains("fsdp-state-"), "{error}");
}

#[test]
fn unsavable_state_leaves_no_temporary_files() {
    let sandbox = Sandbox::new();
    let script = "mkdir disk/tmp; TMPDIR=disk/tmp $FSDP train run.toml --set run.out_dir=disk/out \
            --set train.steps=1000000 --set checkpoint.every=3 --set checkpoint.async=false \
            --set checkpoint.keep_last=0 2>told; echo code $?; cat told >&2; ls -A disk/tmp >names";
    let Some(ran) = on_small_disk(&sandbox, 1200, script) else { return };
    assert!(ran.stdout.contains("code 75"), "{} {}", ran.stdout, ran.stderr);
    let error = error_of(&ran);
    assert!(error.contains("nor could it be saved elsewhere"), "{error}");
    assert_eq!(fs::read_to_string(sandbox.path("names")).unwrap(), "");
}

#[test]
fn removed_checkpoint_folder_saves_state_elsewhere() {
    let sandbox = Sandbox::new();
    let run = Running::start(&sandbox, "train run.toml --set train.steps=1000000");
    fs::remove_dir_all(sandbox.path("out/checkpoints")).unwrap();
    fs::write(sandbox.path("out/checkpoints"), "in the way").unwrap();
    run.signal("TERM");
    let ran = run.end();
    let error = error_of(&ran);
    assert!(error.contains("run.out_dir cannot be written, so the state after step"), "{error}");
    let dir = error.split_whitespace().find(|word| word.contains("fsdp-state-")).unwrap();
    let checkpoint = dir.trim_end_matches(':');
    // The message is right: the run can be resumed from that folder.
    let step: u64 = checkpoint.rsplit('-').next().unwrap().parse().unwrap();
    let on = format!(
        "train run.toml --set run.out_dir=on --resume-from {checkpoint} --set train.steps={}",
        step + 1
    );
    sandbox.succeed(&on);
}

/// Learning rates from too large to absurd.
const OPTIMIZERS: [&str; 8] = [
    r#"{name="sgd",lr=1e39}"#,
    r#"{name="sgd",lr=1e25}"#,
    r#"{name="sgd",lr=1e12,momentum=0.9}"#,
    r#"{name="adamw",lr=1e39}"#,
    r#"{name="adamw",lr=1e30}"#,
    r#"{name="adamw",lr=1e19}"#,
    r#"{name="adafactor",lr=1e38,relative_step=false,scale_parameter=false}"#,
    r#"{name="adafactor",lr=1e20,relative_step=false,scale_parameter=false}"#,
];

/// Returns the same optimizer with a usable learning rate.
fn mended(optimizer: &str) -> String {
    let (name, rest) = optimizer.split_once("lr=").unwrap();
    let rest = rest.find([',', '}']).map_or("", |at| &rest[at..]);
    format!("{name}lr=1e-3{rest}")
}

#[test]
fn non_finite_state_is_neither_saved_nor_exported() {
    for optimizer in OPTIMIZERS {
        for every in [0, 1] {
            let sandbox = Sandbox::new();
            let ran = sandbox
                .command()
                .args(["train", "run.toml", "--set", "train.steps=1", "--set", r#"train.grad_clip="none""#])
                .args([
                    "--set",
                    &format!("checkpoint.every={every}"),
                    "--set",
                    &format!("train.optimizer={optimizer}"),
                ])
                .output()
                .map(Ran::of)
                .unwrap();
            let model = sandbox.path("out/model/model.safetensors");
            match ran.code {
                Some(3) => assert!(!model.exists(), "{optimizer}"),
                Some(0) => assert!(is_finite(&fs::read(&model).unwrap()), "{optimizer}"),
                other => panic!("{optimizer}: {other:?} {}", ran.stderr),
            }
            let saved = RunDir::new(sandbox.path("out")).steps().unwrap();
            assert_eq!(saved.is_empty(), ran.code == Some(3) || every == 0, "{optimizer}: {saved:?}");
        }
    }
}

#[test]
fn diverged_run_resumes_with_lower_learning_rate() {
    for optimizer in OPTIMIZERS {
        for every in [1, 2] {
            let sandbox = Sandbox::new();
            let train = |optimizer: &str, steps: u64, more: &[&str]| {
                let set = |text: String| ["--set".to_owned(), text];
                let mut command = sandbox.command();
                command.args(["train", "run.toml", "--set", r#"train.grad_clip="none""#]);
                command
                    .args(set(format!("train.steps={steps}")))
                    .args(set(format!("checkpoint.every={every}")));
                command.args(set("checkpoint.keep_last=1".to_owned()));
                command.args(set(format!("train.optimizer={optimizer}"))).args(more);
                Ran::of(command.output().unwrap())
            };
            // First train with a usable learning rate, then with one that is too large.
            let good = mended(optimizer);
            assert_eq!(train(&good, 4, &[]).code, Some(0), "{optimizer}");
            let ran = train(optimizer, 12, &["--resume"]);
            if ran.code == Some(0) {
                continue;
            }
            assert_eq!(ran.code, Some(3), "{optimizer}: {}", ran.stderr);
            let error = error_of(&ran);
            assert!(error.contains("--resume continues from step"), "{optimizer}: {error}");
            let on = train(&good, 12, &["--resume"]);
            assert_eq!(on.code, Some(0), "{optimizer}, every {every}: {error} then {}", on.stderr);
        }
    }
}

#[test]
fn advice_after_divergences_comes_to_an_end() {
    let spoils_one_step = r#"{name="sgd",lr=1e6}"#;
    for optimizer in OPTIMIZERS.into_iter().chain([spoils_one_step]) {
        let sandbox = Sandbox::new();
        let train = |optimizer: &str| {
            let mut command = sandbox.command();
            command.args(["train", "run.toml", "--resume", "--set", r#"train.grad_clip="none""#]);
            command.args(["--set", "train.steps=12", "--set", "checkpoint.every=1"]);
            command.args(["--set", "checkpoint.keep_last=0"]);
            Ran::of(command.args(["--set", &format!("train.optimizer={optimizer}")]).output().unwrap())
        };
        // The run begins with a learning rate that is too large, then has one that is not.
        let mut given = Vec::new();
        let mut ran = train(optimizer);
        while ran.code == Some(3) {
            let error = error_of(&ran);
            assert!(!given.contains(&error), "{optimizer}: {error}");
            given.push(error);
            let is_advised = given.last().is_some_and(|error| error.contains("--resume continues from step"));
            if !is_advised {
                assert!(given.last().is_some_and(|error| error.contains(": start over")), "{given:?}");
                let left = RunDir::new(sandbox.path("out")).steps().unwrap();
                assert_eq!(left, [0; 0], "{given:?}");
            }
            ran = train(&mended(optimizer));
        }
        assert_eq!(ran.code, Some(0), "{optimizer}: {given:?} then {}", ran.stderr);
    }
}

/// A run whose loss explodes but stays finite ends with code 0 and says so, with a way back that works.
#[test]
fn run_that_ends_with_a_spoiled_loss_says_so() {
    let sandbox = Sandbox::new();
    let run = r#"train run.toml --set train.grad_clip="none" --set checkpoint.every=1 --set checkpoint.keep_last=0"#;
    let good = r#"--set train.optimizer={name="sgd",lr=1e-3}"#;
    let ran = sandbox.succeed(&format!("{run} {good} --set train.steps=4"));
    assert!(!ran.stderr.contains("not worth continuing"), "{}", ran.stderr);
    let spoiled = r#"--set train.optimizer={name="sgd",lr=1e2} --set train.steps=7"#;
    let ran = sandbox.succeed(&format!("{run} {spoiled} --resume"));
    let warned = folded(&ran.stderr).replace('\n', " ");
    assert!(warned.contains("warning: the last state is not worth continuing: its "), "{warned}");
    assert!(warned.contains("(train.optimizer.lr = 1.0e1 or less, since 1e2 failed)"), "{warned}");
    let back = "--resume-from out/checkpoints/step-00000004 --overwrite";
    assert!(warned.contains(&format!("{back} continues from step 4")), "{warned}");
    let again = sandbox.succeed(&format!("{run} {spoiled} {back}"));
    let repeated = "a run from step 4 had failed with this learning rate or a lower one before";
    assert!(folded(&again.stderr).replace('\n', " ").contains(repeated), "{}", again.stderr);
    let ran = sandbox.succeed(&format!("{run} {good} --set train.steps=7 {back}"));
    assert!(!ran.stderr.contains("not worth continuing"), "{}", ran.stderr);
}

/// The state that a run resumes from is sound if the first loss is, however the run goes on, and is kept then.
#[test]
fn sound_state_is_kept_when_the_resumed_run_ends_spoiled() {
    let sandbox = Sandbox::new();
    let run = r#"train run.toml --set train.grad_clip="none" --set checkpoint.keep_last=1"#;
    let good = r#"--set train.optimizer={name="sgd",lr=1e-3}"#;
    sandbox.succeed(&format!("{run} {good} --set train.steps=4 --set checkpoint.every=4"));
    let spoiled = r#"--set train.optimizer={name="sgd",lr=1e2} --set train.steps=9 --set checkpoint.every=1"#;
    let ran = sandbox.succeed(&format!("{run} {spoiled} --resume"));
    let warned = folded(&ran.stderr).replace('\n', " ");
    assert!(
        warned.contains("--resume-from out/checkpoints/step-00000004 --overwrite continues from step 4"),
        "{warned}"
    );
    assert!(sandbox.path("out/checkpoints/step-00000004/manifest.json").exists(), "{warned}");
}

/// Whether all values after the header of a safetensors file, read as `f32`, are finite.
fn is_finite(file: &[u8]) -> bool {
    let header = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    let (values, _) = file[8 + header..].as_chunks();
    values.iter().all(|&bytes| f32::from_le_bytes(bytes).is_finite())
}
