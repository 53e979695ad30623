//! What the system runs out of: threads, file descriptors, memory, and space for a file.
//!
//! At every limit, a run ends with its result, or soon with an error that names what is missing and a code that says
//! whether another try can help: it neither panics, nor aborts, nor waits for what will not come.

use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::Command;

use crate::support::{LLAMA, Ran, Sandbox};

/// Far less than `run.timeout_s`, and far more than the run takes.
const HANGS_AFTER: &str = "60";

const SAVES: &str = "train run.toml --overwrite --set checkpoint.every=1 --set train.steps=4";

/// A folder in which every user may write, and the program where every user may start it.
struct Limited {
    sandbox: Sandbox,
    program: PathBuf,
}

impl Limited {
    fn new() -> Self {
        let sandbox = Sandbox::new();
        let program = sandbox.path("fsdp");
        std::fs::copy(env!("CARGO_BIN_EXE_fsdp"), &program).unwrap();
        std::fs::set_permissions(sandbox.path(""), PermissionsExt::from_mode(0o777)).unwrap();
        Self { sandbox, program }
    }

    /// Runs `fsdp` under a limit of `prlimit`; as a user with no other process, if `user` is one.
    fn run(&self, limit: &str, user: Option<u32>, args: &str) -> Ran {
        let mut command = Command::new("timeout");
        command.args(["-s", "KILL", HANGS_AFTER, "prlimit", limit]);
        if let Some(user) = user {
            command.args(["setpriv", "--clear-groups"]);
            command.args([format!("--reuid={user}"), format!("--regid={user}")]);
        }
        command.arg(&self.program).args(args.split_whitespace());
        command.env("TMPDIR", self.sandbox.path(""));
        Ran::of(self.sandbox.prepare(command).output().unwrap())
    }

    /// Runs under each of the limits; `names` are parts of errors, one of which must be there if a run fails.
    fn sweep(&self, kind: &str, limits: &[u64], user: Option<u32>, args: &str, names: &[&str]) {
        let codes = limits.iter().map(|limit| {
            let out = format!("out-{kind}-{limit}");
            let ran =
                self.run(&format!("--{kind}={limit}"), user, &format!("{args} --set run.out_dir={out}"));
            let case = format!("{args}: {kind} {limit}: {:?}: {}", ran.code, ran.stderr);
            assert!(matches!(ran.code, Some(0 | 2 | 75)), "{case}");
            assert!(!ran.stderr.contains("panicked"), "{case}");
            assert!(ran.code == Some(0) || names.iter().any(|name| ran.stderr.contains(name)), "{case}");
            ran.code
        });
        let codes: Vec<Option<i32>> = codes.collect();
        assert!(
            codes.first() != Some(&Some(0)) && codes.last() == Some(&Some(0)),
            "{args}: {kind}: {codes:?}"
        );
    }
}

/// A user without processes, if this one may become another: another one for each `number`, since limits on threads hold
/// for all processes of a user.
fn another_user(number: u32) -> Option<u32> {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        println!("skipped: only root can start processes as a user that has no others");
    }
    is_root.then(|| 61_000 + std::process::id() % 800 * 5 + number)
}

#[test]
fn thread_limit_ends_run_with_error_naming_thread() {
    let Some(user) = another_user(0) else { return };
    let limited = Limited::new();
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get() as u64);
    let limits: Vec<u64> = (1..cores + 10).collect();
    let names = ["thread", "cannot start"];
    // Which rank finds no thread differs from run to run.
    for _ in 0..2 {
        limited.sweep("nproc", &limits, Some(user), SAVES, &names);
    }
}

/// Chat templates run in processes of their own, which need descriptors and count like threads.
#[test]
fn missing_process_for_templates_ends_run_with_error() {
    let Some(user) = another_user(1) else { return };
    let limited = Limited::new();
    let lines = "{\"messages\": [{\"role\": \"user\", \"content\": \"Hi\"}]}\n".repeat(64);
    limited.sandbox.write("data.jsonl", lines);
    limited.sandbox.write("chat.jinja", "{% for m in messages %}{{ m.content }}{% endfor %}");
    limited.sandbox.edit("run.toml", "data.txt", "data.jsonl");
    let keys = "seq_len = 8\nchat_template = \"chat.jinja\"\nloss_on = \"all\"";
    limited.sandbox.edit("run.toml", "seq_len = 8", keys);
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get() as u64);
    let ran = limited.run(&format!("--nproc={}", cores + 1), Some(user), SAVES);
    assert_eq!(ran.code, Some(75), "{}", ran.stderr);
    assert!(ran.stderr.contains("cannot run the chat template in a process of its own"), "{}", ran.stderr);
    let limits: Vec<u64> = (1..cores + 12).collect();
    limited.sweep("nproc", &limits, Some(user), SAVES, &["thread", "cannot start", "process of its own"]);
    limited.sweep("nofile", &[5, 6, 7, 8, 9, 10, 11, 12, 14, 16, 64], None, SAVES, &["Too many open files"]);
}

#[test]
fn state_is_saved_where_no_thread_is_left_to_save_it() {
    let Some(user) = another_user(2) else { return };
    let limited = Limited::new();
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get() as u64);
    // The main thread, those of the pool, and two ranks.
    let ran = limited.run(&format!("--nproc={}", cores + 3), Some(user), SAVES);
    assert_eq!(ran.code, Some(75), "{}", ran.stderr);
    assert!(ran.stderr.contains("cannot start the thread that writes a checkpoint"), "{}", ran.stderr);
    assert!(ran.stderr.contains("out/checkpoints/step-0000000"), "{}", ran.stderr);
    let resumed = limited.sandbox.succeed("train run.toml --set train.steps=4 --resume");
    assert!(resumed.stdout.contains("model in out/model"), "{}", resumed.stdout);
}

#[test]
fn descriptor_limit_ends_run_with_error_naming_files() {
    let limited = Limited::new();
    let names = ["Too many open files"];
    limited.sweep("nofile", &[5, 6, 7, 8, 9, 10, 12, 14, 16, 64], None, SAVES, &names);
}

#[test]
fn memory_limit_ends_run_with_error_naming_memory() {
    let limited = Limited::new();
    // Below that, the system cannot load the program.
    let limits = [77, 80, 100, 150, 200, 300, 400, 2_000].map(|mebibytes| mebibytes << 20);
    limited.sweep("as", &limits, None, SAVES, &["memory", "thread"]);
}

const LAUNCH: &str = "launch --nproc 2 --max-restarts 0 -- train run.toml --resume --set checkpoint.every=1 --set train.steps=4";

#[test]
fn descriptor_limit_ends_launch_with_error_naming_files() {
    let limited = Limited::new();
    let names = ["Too many open files"];
    limited.sweep("nofile", &[6, 7, 8, 9, 10, 12, 14, 16, 18, 20, 64], None, LAUNCH, &names);
}

#[test]
fn thread_limit_ends_launch_with_error_naming_thread() {
    let Some(user) = another_user(3) else { return };
    let limited = Limited::new();
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get() as u64);
    // Those of the launcher, and of two processes.
    let limits: Vec<u64> = (1..=4).map(|part| part * (3 * cores + 26) / 4).collect();
    limited.sweep("nproc", &limits, Some(user), LAUNCH, &["thread", "cannot start"]);
}

/// With the restarts that it does by default.
#[test]
fn launch_without_threads_ends_in_seconds() {
    let Some(user) = another_user(4) else { return };
    let limited = Limited::new();
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get() as u64);
    let launch = LAUNCH.replace(" --max-restarts 0", "");
    // From too few for one thread per core in each of two processes, to nearly all.
    for limit in (cores + 2..=3 * cores + 20).step_by(3) {
        let start = std::time::Instant::now();
        let ran = limited.run(
            &format!("--nproc={limit}"),
            Some(user),
            &format!("{launch} --set run.out_dir=out-{limit}"),
        );
        let case = format!("{limit}: {:?} after {:?}: {}", ran.code, start.elapsed(), ran.stderr);
        assert!(
            matches!(ran.code, Some(0 | 75)) && start.elapsed() < std::time::Duration::from_secs(30),
            "{case}"
        );
    }
}

#[test]
fn tight_address_space_is_enough_for_a_small_run() {
    let limited = Limited::new();
    let ran = limited.run("--as=220200960", None, SAVES);
    assert_eq!(ran.code, Some(0), "210 MiB: {}", ran.stderr);
}

/// What a run leaves whose allocation fails anywhere, the next start removes.
#[test]
fn start_after_exhausted_memory_leaves_no_temporary_file() {
    let limited = Limited::new();
    let words = r#"{"version": "1.0", "pre_tokenizer": {"type": "Whitespace"}, "model": {"type": "WordLevel",
        "vocab": {"a": 1, "<unk>": 0}, "unk_token": "<unk>"}}"#;
    limited.sandbox.write("tokenizer.json", words);
    limited.sandbox.write("data.txt", "a ".repeat(1 << 17));
    let train = format!("{SAVES} --set data.tokenizer=tokenizer.json --set data.cache=cache");
    let mut codes = Vec::new();
    // From limits at which nothing starts to those that suffice.
    for mebibytes in (60..130).step_by(5) {
        let ran = limited.run(&format!("--as={}", mebibytes << 20_u64), None, &train);
        codes.push(ran.code);
        let again = limited.sandbox.fsdp(&train);
        assert_eq!(again.code, Some(0), "{mebibytes} MiB: {}", again.stderr);
        let files = limited.sandbox.files(".").into_keys();
        let left: Vec<PathBuf> =
            files.filter(|file| file.extension().is_some_and(|end| end == "tmp")).collect();
        assert!(left.is_empty(), "{mebibytes} MiB: {:?}: {left:?}", ran.code);
        std::fs::remove_dir_all(limited.sandbox.path("cache")).unwrap();
    }
    assert!(codes.contains(&Some(75)), "{codes:?}");
}

#[test]
fn memory_limit_on_many_ranks_or_tokens_leaves_no_folder() {
    let limited = Limited::new();
    limited.sandbox.write("data.txt", "what one rank keeps of a tensor. ".repeat(100));
    std::fs::create_dir(limited.sandbox.path("large")).unwrap();
    limited.sandbox.write("large/config.json", LLAMA.replace(": 256", ": 262144"));
    let ranks = "--set run.ranks=256 --set train.global_batch_size=256 --set train.micro_batch_size=1";
    let many_ranks = format!("{ranks} --set train.steps=2 --set checkpoint.every=1");
    let many_tokens = "--set model.path=large --set train.steps=2 --set checkpoint.every=1".to_owned();
    // From limits that are reported at the start to those that suffice.
    for (args, limits) in [(many_ranks, [600, 1_000, 2_000, 30_000]), (many_tokens, [200, 230, 260, 290])] {
        for mebibytes in limits {
            let out = format!("out-{mebibytes}");
            let train = format!("train run.toml --set run.out_dir={out} {args}");
            let ran = limited.run(&format!("--as={}", mebibytes << 20_u64), None, &train);
            let case = format!("{train}: {mebibytes} MiB: {:?}: {}", ran.code, ran.stderr);
            assert!(matches!(ran.code, Some(0 | 2 | 75)), "{case}");
            let is_named = ["memory", "thread"].iter().any(|name| ran.stderr.contains(name));
            assert!(ran.code == Some(0) || is_named, "{case}");
            if ran.code != Some(0)
                && !ran.stderr.contains("step 1/2")
                && !ran.stderr.contains("no more memory")
            {
                let again = limited.sandbox.fsdp(&train);
                assert_eq!(again.code, Some(0), "the same command: {case} then {}", again.stderr);
            }
        }
    }
}

#[test]
fn file_size_limit_ends_run_with_error_naming_file() {
    let limited = Limited::new();
    limited.sweep(
        "fsize",
        &[1, 100, 1_000, 5_000, 20_000, 1 << 30],
        None,
        SAVES,
        &["File too large", "out-fsize"],
    );
}
