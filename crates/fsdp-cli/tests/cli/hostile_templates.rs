//! Chat templates that would take the whole program with them: they end only the process in which they run.

use std::fs;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::{Duration, Instant};

use crate::support::{Ran, Sandbox};
use crate::world::{send, wait_until};

/// The argument with which the program starts such a process.
const ARGUMENT: &str = "__run-chat-templates";

/// Takes longer than it may.
const COSTLY: &str = "{% set l = range(100000)|list %}{% for i in l %}{% set m = l|sort %}{% endfor %}";

/// Creates a sandbox with this many conversations.
fn sandbox(template: &str, conversations: usize) -> Sandbox {
    let sandbox = Sandbox::new();
    sandbox.write("chat.jinja", template);
    let line = "{\"messages\": [{\"role\": \"user\", \"content\": \"Hi\"}, {\"role\": \"assistant\", \"content\": \"Hello\"}]}\n";
    sandbox.write("data.jsonl", line.repeat(conversations));
    sandbox.edit("run.toml", "data.txt", "data.jsonl");
    let keys = "seq_len = 64\npacking = \"documents\"\nchat_template = \"chat.jinja\"";
    sandbox.edit("run.toml", "seq_len = 8", keys);
    sandbox
}

/// Returns the processes of a sandbox in which templates run.
fn workers(sandbox: &Sandbox) -> Vec<PathBuf> {
    let folder = sandbox.path("").canonicalize().unwrap();
    let is_worker = |process: &PathBuf| {
        let is_here = fs::read_link(process.join("cwd")).is_ok_and(|cwd| cwd == folder);
        is_here && fs::read_to_string(process.join("cmdline")).is_ok_and(|line| line.contains(ARGUMENT))
    };
    fs::read_dir("/proc").unwrap().map(|entry| entry.unwrap().path()).filter(is_worker).collect()
}

#[test]
fn hostile_template_ends_command_with_error_naming_it() {
    let deep = "{% set ns = namespace() %}{% set ns.a = ns %}{{ ns }}";
    let doubled = "{% set ns = namespace(s='0123456789') %}{% for i in range(40) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}";
    let long = "{% for i in range(9000) %}{% for j in range(90) %}{{ '0123456789' }}{% endfor %}{% endfor %}";
    // The first conversation is unsuspicious.
    let late = "{% if messages|length == 1 %}{% set ns = namespace() %}{% set ns.a = ns %}{{ ns }}{% endif %}\
                {% for m in messages %}{{ m.content }}{% endfor %}";
    for (template, limit) in [
        (deep, "nests too deeply"),
        (doubled, "(1024 MB)"),
        (long, "writes 8100000 bytes"),
        (late, "nests too deeply"),
        (COSTLY, "takes more than 10 s"),
    ] {
        let sandbox = sandbox(template, 1000);
        // Both commands wait for the same answer; the time is waited for once.
        let commands = ["train run.toml --set data.malformed=skip", "check run.toml"];
        for command in &commands[..if template == COSTLY { 1 } else { 2 }] {
            let start = Instant::now();
            let Ran { code, stdout, stderr } = sandbox.fsdp(command);
            let text = stdout + &stderr;
            assert_eq!(code, Some(2), "{template}: {text}");
            let is_named = ["chat.jinja: the chat template", "data.jsonl, line 1)", limit];
            assert!(is_named.iter().all(|part| text.contains(part)), "{template}: {text}");
            assert!(text.len() < 4000 && !text.contains("overflow"), "{template}: {text}");
            assert!(start.elapsed() < Duration::from_secs(200), "{template}: {:?}", start.elapsed());
        }
        assert!(workers(&sandbox).is_empty());
    }
}

#[test]
fn template_process_ends_with_its_program_and_inherits_nothing() {
    for (signal, code) in [("KILL", None), ("INT", Some(130)), ("TERM", Some(75))] {
        let sandbox = sandbox(COSTLY, 100);
        let mut command = sandbox.command();
        command.args(["train", "run.toml"]).stderr(Stdio::null());
        let mut program = command.spawn().unwrap();
        wait_until("a process that runs templates", || !workers(&sandbox).is_empty());
        // Besides the socket, of which it has a copy, it has only what this test has inherited itself.
        let mut files =
            fs::read_dir(workers(&sandbox)[0].join("fd")).unwrap().map(|file| file.unwrap().path());
        let is_inherited = |file: &PathBuf| {
            let own = PathBuf::from("/proc/self/fd").join(file.file_name().unwrap());
            fs::read_link(own).ok() == fs::read_link(file).ok()
        };
        let is_own = |file: &PathBuf| ["0", "1", "2", "3"].iter().any(|own| file.ends_with(own));
        assert!(files.all(|file| is_own(&file) || is_inherited(&file)));
        send(signal, program.id());
        assert_eq!(program.wait().unwrap().code(), code);
        wait_until("the end of all processes", || workers(&sandbox).is_empty());
    }
}

#[test]
fn argument_of_template_processes_does_nothing_by_hand() {
    let sandbox = Sandbox::new();
    for stdin in [Stdio::null(), Stdio::from(fs::File::open(sandbox.path("run.toml")).unwrap())] {
        let ran = Ran::of(sandbox.command().args([ARGUMENT, "run.toml"]).stdin(stdin).output().unwrap());
        assert_eq!((ran.code, ran.stdout.as_str()), (Some(2), ""), "{}", ran.stderr);
        assert!(ran.stderr.contains("is how a program starts itself"), "{}", ran.stderr);
    }
}
