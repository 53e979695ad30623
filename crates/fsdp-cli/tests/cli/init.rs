//! `fsdp init`.

use std::io::Write;
use std::process::{Command, Stdio};

use crate::support::{GPT2, Ran, Sandbox};

impl Sandbox {
    /// Writes a run file, which must pass `fsdp check`, and returns its text.
    fn init(&self, args: &str) -> String {
        let ran = self.succeed(&format!("init made.toml {args}"));
        assert!(ran.stdout.contains("fsdp check made.toml\n  fsdp train made.toml\n"), "{}", ran.stdout);
        self.succeed("check made.toml");
        self.read("made.toml")
    }

    /// Like [`Sandbox::init`], and trains two steps with the file, into the folder `out`.
    fn init_and_train(&self, out: &str, args: &str) -> String {
        let text = self.init(&format!("{args} --force --steps 2 --out {out}"));
        self.succeed("train made.toml");
        assert_eq!(self.metrics(out).len(), 2, "{text}");
        text
    }
}

#[test]
fn model_without_weights_is_trained_from_scratch() {
    let sandbox = Sandbox::new();
    insta::assert_snapshot!(sandbox.init_and_train("made", "--model model --data data.txt --eval data.txt"));
    sandbox.write("model/config.json", GPT2);
    let text = sandbox.init_and_train("other", "--model model --data *.txt --ranks 2");
    assert!(text.contains("wrap = [\"GPT2Block\"]") && text.contains("train = [\"*.txt\"]"), "{text}");
}

#[test]
fn init_supports_full_lora_and_from_scratch_training() {
    let sandbox = Sandbox::new();
    sandbox.succeed("train run.toml");
    let model = "--model out/model --data data.txt";
    let whole = sandbox.init_and_train("whole", &format!("{model} --ranks 2"));
    assert!(whole.contains("init = \"pretrained\"") && !whole.contains("[adapter]"), "{whole}");
    let beside = sandbox.init_and_train("beside", &format!("{model} --lora"));
    assert!(beside.contains("init = \"pretrained\"") && beside.contains("[adapter]"), "{beside}");
    assert!(sandbox.path("beside/adapter/adapter_model.safetensors").exists());
    let anew = sandbox.init(&format!("{model} --from-scratch --force"));
    assert!(anew.contains("init = \"random\"") && anew.contains("out_dir = \"runs/made\""), "{anew}");
}

#[test]
fn init_infers_data_format_from_records() {
    let sandbox = Sandbox::new();
    let pair = "{\"prompt\": \"What is a shard?\", \"completion\": \" A part.\"}\n";
    sandbox.write("pairs.jsonl", pair.repeat(20));
    let text = sandbox.init_and_train("made", "--model model --data pairs.jsonl");
    assert!(text.contains("packing = \"packed\"") && text.contains("loss_on = \"answers\""), "{text}");

    sandbox.write("named.jsonl", "{\"body\": \"text of some length\"}\n".repeat(20));
    let rejected = sandbox.fsdp("init column.toml --model model --data named.jsonl");
    assert_eq!(rejected.code, Some(2));
    assert!(rejected.stdout.contains("data.column") && !sandbox.path("column.toml").exists());
    sandbox.succeed("init column.toml --model model --data named.jsonl --column body --yes");

    sandbox.write("tokens.bin", [7, 0].repeat(200));
    let rejected = sandbox.fsdp("init tokens.toml --model model --data tokens.bin");
    assert!(rejected.stdout.contains("set data.format to"), "{}", rejected.stdout);
    sandbox.succeed("init tokens.toml --model model --data tokens.bin --format tokens-u16 --steps 2");
    sandbox.succeed("train tokens.toml");
}

#[cfg(feature = "tokenizers")]
#[test]
fn conversations_use_model_tokenizer_and_chat_template() {
    let sandbox = Sandbox::new();
    let example = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/chat");
    let data = format!("--model {example} --data {example}/conversations.jsonl --ranks 2");
    let text = sandbox.init_and_train("made", &data);
    assert!(text.contains("examples/chat/tokenizer.json\""), "{text}");
    assert!(text.contains("packing = \"packed\""), "{text}");
}

#[cfg(feature = "tokenizers")]
#[test]
fn init_sets_eos_if_tokenizer_adds_no_special_tokens() {
    let sandbox = Sandbox::new();
    let chat = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/chat");
    for file in ["config.json", "tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(format!("{chat}/{file}"), sandbox.path(&format!("model/{file}"))).unwrap();
    }
    sandbox.write("text.jsonl", "{\"text\": \"What is a shard? A part of a tensor.\"}\n".repeat(40));
    let text = sandbox.init_and_train("made", "--model model --data text.jsonl");
    assert!(text.contains("eos = \"<|end|>\""), "{text}");
    let ran = sandbox.succeed("train made.toml --overwrite");
    assert!(!ran.stderr.contains("warning"), "{}", ran.stderr);
    let glued = sandbox.succeed("train made.toml --overwrite --set data.eos=none --set data.bos=none");
    assert!(glued.stderr.contains("joins 40 documents"), "{}", glued.stderr);
}

#[test]
fn weights_without_tokenizer_cause_warning() {
    let sandbox = Sandbox::new();
    sandbox.edit("model/config.json", "\"vocab_size\": 256", "\"vocab_size\": 300");
    sandbox.succeed("train run.toml");
    let ran = sandbox.succeed("init made.toml --model out/model --data data.txt");
    assert!(ran.stderr.contains("warning: out/model has no tokenizer.json"), "{}", ran.stderr);
}

#[test]
fn init_overwrites_file_only_with_force() {
    let sandbox = Sandbox::new();
    let before = sandbox.files(".");
    insta::assert_snapshot!(sandbox.input_error("init --model model --data data.txt"), @"error: RUN.toml: run.toml exists already; give another name, or replace it with --force");
    assert_eq!(sandbox.files("."), before);
    sandbox.succeed("init --model model --data data.txt --force");
    assert!(sandbox.read("run.toml").starts_with("# A run file"));
    assert_eq!(sandbox.files(".").len(), before.len(), "nothing else is left");
    let mode = std::os::unix::fs::MetadataExt::mode(&sandbox.path("run.toml").metadata().unwrap());
    let usual = std::os::unix::fs::MetadataExt::mode(&sandbox.path("data.txt").metadata().unwrap());
    assert_eq!(mode, usual, "others may read it, as other files");
}

#[test]
fn invalid_init_arguments_leave_no_files() {
    let sandbox = Sandbox::new();
    let before = sandbox.files(".");
    let input_error = |args: &str| sandbox.input_error(&format!("init made.toml {args}"));
    insta::assert_snapshot!(input_error(""), @"error: fsdp init: give --model and --data: there is no default, and no terminal to ask on");
    insta::assert_snapshot!(input_error("--model model"), @"error: fsdp init: give --data: there is no default, and no terminal to ask on");
    insta::assert_snapshot!(input_error("--model model --data data.txt --lora"), @"error: --lora: model has no weights to add adapters to");
    insta::assert_snapshot!(sandbox.input_error("init gone/made.toml --model model --data data.txt"), @"error: RUN.toml: gone/made.toml is in gone, which is not a folder; create it first");
    assert!(input_error("--model nowhere --data data.txt").contains("cannot read nowhere/config.json"));

    let ran = sandbox.fsdp("init made.toml --model model --data nowhere.txt");
    assert_eq!(ran.code, Some(2), "{}", ran.stderr);
    assert!(ran.stdout.contains("error    data          cannot read nowhere.txt"), "{}", ran.stdout);
    assert_eq!(ran.stderr, "made.toml was not written\n");
    assert_eq!(sandbox.files("."), before);
}

/// Runs `fsdp` in a terminal made by `script`, with these lines as typed input. `None` if `script` is not installed.
fn at_terminal(sandbox: &Sandbox, args: &str, lines: &str) -> Option<Ran> {
    if Command::new("script").arg("--version").output().is_err() {
        println!("skipped: there is no `script` (util-linux) to make a terminal with");
        return None;
    }
    let fsdp = sandbox.command();
    let mut command = Command::new("script");
    command.args(["-qec", &format!("{} {args}", fsdp.get_program().display()), "/dev/null"]);
    command.current_dir(sandbox.path("")).env("NO_COLOR", "1");
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    child.stdin.take().unwrap().write_all(lines.as_bytes()).unwrap();
    Some(Ran::of(child.wait_with_output().unwrap()))
}

#[test]
fn init_prompts_for_missing_arguments_at_terminal() {
    let sandbox = Sandbox::new();
    sandbox.succeed("train run.toml");
    let lines = "nowhere\nout/model\nlora\nnothing.txt\ndata.txt\n2\n\n";
    let Some(ran) = at_terminal(&sandbox, "init made.toml", lines) else { return };
    assert_eq!(ran.code, Some(0), "{}", ran.stdout);
    for expected in [
        "Model (a Hugging Face directory): ",
        "cannot read nowhere/config.json",
        "or new weights from \"scratch\" [whole]: ",
        "cannot read nothing.txt",
        "Ranks (threads that share this machine's cores) [1]: ",
        "Optimizer steps [20]: ",
        "wrote made.toml",
    ] {
        assert!(ran.stdout.contains(expected), "{expected} is not in {}", ran.stdout);
    }
    let text = sandbox.read("made.toml");
    assert!(
        text.contains("[adapter]") && text.contains("ranks = 2") && text.contains("steps = 20"),
        "{text}"
    );
    sandbox.succeed("check made.toml");

    let ran = at_terminal(&sandbox, "init other.toml --yes", "").unwrap();
    assert_eq!(ran.code, Some(2), "{}", ran.stdout);
    assert!(ran.stdout.contains("give --model and --data"), "{}", ran.stdout);
}
