//! Names with terminal control characters: no output of a command contains any.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use crate::support::{Ran, Sandbox};

/// A file name that clears the screen, forges a line, reverses text direction and is not UTF-8.
const FILE: &[u8] = b"e\x1b[2J\x1b]0;t\x07\r\nerror: none\x7f\xc2\x9b31m\xe2\x80\xae\xff.safetensors";

/// A tensor name of the same kind, in JSON, with a NUL; and with letters that must be kept.
const TENSOR: &str = r"w\u0000\u001b[2J\r\n\tsound\u007f\u009b\u202e\u2066-größe-日本語-🦀";

fn hostile() -> PathBuf {
    PathBuf::from(OsStr::from_bytes(FILE))
}

/// Writes a safetensors file with one element.
fn write(path: &Path, tensor: &str, element: u8) {
    let header = format!(r#"{{"{tensor}":{{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}}}"#);
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.push(element);
    fs::write(path, bytes).unwrap();
}

/// Asserts that a text contains nothing that acts on a terminal.
fn check(text: &str, args: &[&OsStr]) {
    let acts = |character: char| {
        let code = u32::from(character);
        (code < 0x20 && !matches!(character, '\n' | '\t'))
            || (0x7f..=0x9f).contains(&code)
            || [0x61c, 0x200e, 0x200f].contains(&code)
            || (0x2028..=0x202e).contains(&code)
            || (0x2066..=0x2069).contains(&code)
    };
    assert!(!text.chars().any(acts), "{args:?}: {text:?}");
    // A line break in a name does not produce a line that could be mistaken for output of `fsdp`.
    let is_forged = |line: &str| line.starts_with("error: none") || line.starts_with("sound\\");
    assert!(!text.lines().any(is_forged), "{args:?}: {text}");
}

impl Sandbox {
    fn show(&self, args: &[&OsStr]) -> Ran {
        let ran = Ran::of(self.command().args(args).output().unwrap());
        check(&ran.stdout, args);
        check(&ran.stderr, args);
        assert!(!ran.stderr.contains("panicked"), "{args:?}: {}", ran.stderr);
        ran
    }
}

#[test]
fn control_characters_in_names_are_escaped_in_output() {
    let sandbox = Sandbox::new();
    let (first, second) = (hostile(), PathBuf::from("b.safetensors"));
    write(&sandbox.path("").join(&first), TENSOR, 1);
    write(&sandbox.path("").join(&second), TENSOR, 2);
    let [ckpt, first, second] = [OsStr::new("ckpt"), first.as_os_str(), second.as_os_str()];
    for options in [&["--json"][..], &["--tensors"], &["--tensors", "--json"], &[]] {
        let mut args = vec![ckpt, OsStr::new("inspect"), first];
        args.extend(options.iter().map(OsStr::new));
        let ran = sandbox.show(&args);
        assert_eq!(ran.code, Some(0), "{}", ran.stderr);
        if options.contains(&"--tensors") {
            assert!(ran.stdout.contains(r"w\u0000\u001b[2J\r\n\tsound"), "{}", ran.stdout);
            assert!(ran.stdout.contains("-größe-日本語-🦀"), "ordinary letters stay: {}", ran.stdout);
        }
        if options.contains(&"--json") {
            let report: serde_json::Value = serde_json::from_str(&ran.stdout).unwrap();
            assert!(report["path"].as_str().unwrap().starts_with("e\u{1b}[2J"), "JSON means the name itself");
        }
    }
    for options in [&[][..], &["--json"]] {
        let options = options.iter().map(OsStr::new);
        let verify = [ckpt, OsStr::new("verify"), first].into_iter().chain(options.clone());
        assert_eq!(sandbox.show(&verify.collect::<Vec<_>>()).code, Some(0));
        let diff = [ckpt, OsStr::new("diff"), first, second].into_iter().chain(options.clone());
        assert_eq!(sandbox.show(&diff.collect::<Vec<_>>()).code, Some(1));
    }
    for (to, destination) in [("dcp", OsStr::from_bytes(b"out\x1b[2J\xff")), ("torch", OsStr::new("out.pth"))]
    {
        for options in [&["--json"][..], &[]] {
            let mut args =
                vec![ckpt, OsStr::new("convert"), first, destination, OsStr::new("--to"), OsStr::new(to)];
            args.extend(options.iter().map(OsStr::new));
            let ran = sandbox.show(&args);
            // The second command finds the output of the first.
            assert_eq!(ran.code, Some(if options.is_empty() { 2 } else { 0 }), "{}", ran.stderr);
        }
    }
}

#[test]
fn control_characters_in_names_are_escaped_in_errors() {
    let sandbox = Sandbox::new();
    let (file, name) = (hostile(), TENSOR);
    write(&sandbox.path("").join(&file), name, 1);
    let file = file.as_os_str();
    let missing = OsStr::from_bytes(b"gone\x1b[2J\nerror: none\xc2\x9b\xff");
    let set = |key: &str| {
        let mut text = OsStr::new(key).to_owned();
        text.push("x\u{1b}[2J\u{9b}\u{202e}");
        text
    };
    let [out_dir, path, unknown] = ["run.out_dir=", "model.path=", "run.no_such_key="].map(set);
    let words = |text: &'static str| text.split(' ').map(OsStr::new);
    let commands: Vec<Vec<&OsStr>> = vec![
        words("ckpt inspect").chain([missing]).collect(),
        words("ckpt verify").chain([missing]).collect(),
        words("ckpt diff").chain([file, missing]).collect(),
        words("ckpt convert")
            .chain([file, OsStr::new("out")])
            .chain(words("--to dcp --rename nothing=x"))
            .collect(),
        words("ckpt convert")
            .chain([file, OsStr::new("out")])
            .chain(words("--to dcp --only optimizer"))
            .collect(),
        words("ckpt convert").chain([missing, OsStr::new("out")]).chain(words("--to dcp")).collect(),
        words("ckpt inspect").chain([file, missing]).collect(),
        words("train").chain([missing]).collect(),
        words("train").chain([file]).collect(),
        words("train run.toml --resume-from").chain([missing]).collect(),
        words("train run.toml --set").chain([path.as_os_str()]).collect(),
        words("train run.toml --set").chain([unknown.as_os_str()]).collect(),
        words("schedule").chain([missing]).collect(),
        words("verify").chain([missing]).collect(),
        vec![missing],
    ];
    for args in commands {
        let ran = sandbox.show(&args);
        assert_eq!((ran.code, ran.stdout.as_str()), (Some(2), ""), "{args:?}: {}", ran.stderr);
    }
    // A run in a folder with such a name, and a second run that finds it there.
    let train: Vec<&OsStr> =
        words("train run.toml --set checkpoint.every=2 --set").chain([out_dir.as_os_str()]).collect();
    let ran = sandbox.show(&train);
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    assert!(ran.stderr.contains(r"x\u001b[2J\u009b\u202e/checkpoints"), "{}", ran.stderr);
    assert_eq!(sandbox.show(&train).code, Some(2));
}
