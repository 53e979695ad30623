//! Checkpoint failures: damage is found and named, invalid requests are refused, and nothing is left behind.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Stdio;

use crate::support::{Ran, Sandbox, folded};
use crate::world::{send, wait_until};

impl Sandbox {
    /// Returns the error message of a conversion that must fail and leave nothing behind.
    fn failed_conversion(&self, args: &str) -> String {
        let before = self.names("");
        let ran = self.fsdp(&format!("ckpt convert {args}"));
        assert_eq!(ran.code, Some(2), "fsdp ckpt convert {args}: {}", ran.stderr);
        assert_eq!(ran.stdout, "");
        assert!(!ran.stderr.contains("panicked"), "{}", ran.stderr);
        assert_eq!(self.names(""), before, "nothing is left behind");
        folded(&ran.stderr)
    }
}

impl Sandbox {
    /// Returns the file and byte offset of the first chunk of a tensor.
    fn place_of(&self, path: &str, name: &str) -> (String, isize) {
        let report = self.json(&format!("ckpt inspect {path} --tensors"));
        let tensors = report["tensors"].as_array().unwrap();
        let chunk = &tensors.iter().find(|tensor| tensor["name"] == name).unwrap()["chunks"][0];
        (chunk["file"].as_str().unwrap().to_owned(), chunk["offset"].as_i64().unwrap().try_into().unwrap())
    }
}

#[test]
fn diff_reports_changed_tensor() {
    let sandbox = Sandbox::with_fixtures(&["full.safetensors"]);
    sandbox.succeed("ckpt convert full.safetensors changed.safetensors --to safetensors --only all");
    sandbox.succeed("ckpt diff full.safetensors changed.safetensors");
    sandbox.flip("changed.safetensors", -1);
    let report = sandbox.find_fault("ckpt diff full.safetensors changed.safetensors --json").stdout;
    let report: serde_json::Value = serde_json::from_str(&report).unwrap();
    let tensors = report["tensors"].as_object().unwrap();
    let changed: Vec<&String> = tensors
        .iter()
        .filter(|(_, tensor)| tensor["outcome"] != "equal_bits")
        .map(|(name, _)| name)
        .collect();
    assert_eq!(changed.len(), 1);
    let text = sandbox.find_fault("ckpt diff full.safetensors changed.safetensors").stdout;
    assert!(text.contains(changed[0].as_str()), "{text}");
}

#[test]
fn flipped_byte_errors_name_file_tensor_and_range() {
    let sandbox = Sandbox::with_fixtures(&["dcp_2rank", "full.pth"]);
    sandbox.succeed("ckpt convert dcp_2rank native --to native --world-size 2");
    sandbox.flip("native/shard-00002-model-00001-of-00001.safetensors", -1);
    let native = sandbox.find_fault("ckpt verify native");
    insta::assert_snapshot!("verify_damaged_native", folded(&native.stdout));
    insta::assert_snapshot!(sandbox.failed_conversion("native out --to dcp"), @r"
    error: native/shard-00002-model-00001-of-00001.safetensors: bytes 7536..7544 (rows 8..16 of tensor
    `extra.rng_state`) are damaged: their checksum is crc64:ba6e68101497aeab, the checkpoint says
    crc64:90b43857fb7b2983; fetch or save the file again
    ");
    for path in ["dcp_2rank", "full.pth"] {
        let (file, offset) = sandbox.place_of(path, "model.emb.weight");
        sandbox.flip(&file, offset);
        let ran = sandbox.find_fault(&format!("ckpt verify {path}"));
        assert!(ran.stdout.contains(&file) && ran.stdout.contains("`model.emb.weight`"), "{}", ran.stdout);
        insta::assert_snapshot!(format!("verify_damaged_{path}"), folded(&ran.stdout));
        let message = sandbox.failed_conversion(&format!("{path} out --to native"));
        assert!(message.contains(&file), "{message}");
    }
}

#[test]
fn verify_reports_unopenable_checkpoint_as_damaged() {
    let sandbox = Sandbox::with_fixtures(&["dcp_2rank", "full.pth"]);
    sandbox.succeed("ckpt convert dcp_2rank native --to native --world-size 2");
    sandbox.flip("native/manifest.json", 40);
    sandbox.find_fault("ckpt verify native");
    let pth = fs::read(sandbox.path("full.pth")).unwrap();
    sandbox.write("full.pth", &pth[..pth.len() / 2]);
    let ran = sandbox.find_fault("ckpt verify full.pth");
    assert!(ran.stdout.contains("full.pth"), "{}", ran.stdout);
    fs::remove_file(sandbox.path("dcp_2rank/__1_0.distcp")).unwrap();
    let ran = sandbox.find_fault("ckpt verify dcp_2rank --json");
    let report: serde_json::Value = serde_json::from_str(&ran.stdout).unwrap();
    assert_eq!(report["sound"], false);
    assert!(report["problems"][0].as_str().unwrap().contains("__1_0.distcp"), "{report}");
}

#[test]
fn path_without_checkpoint_is_rejected() {
    let sandbox = Sandbox::with_fixtures(&["dcp_2rank"]);
    fs::create_dir(sandbox.path("runs")).unwrap();
    fs::rename(sandbox.path("dcp_2rank"), sandbox.path("runs/step-5")).unwrap();
    for command in ["inspect", "verify"] {
        for path in ["nowhere", "run.toml", "runs"] {
            let ran = sandbox.fsdp(&format!("ckpt {command} {path}"));
            assert_eq!((ran.code, ran.stdout.as_str()), (Some(2), ""), "{command} {path}: {}", ran.stderr);
            assert!(ran.stderr.contains(path), "{}", ran.stderr);
        }
    }
    insta::assert_snapshot!(folded(&sandbox.fsdp("ckpt inspect runs").stderr), @r"error: runs: it is not a checkpoint itself; name one of those in it: step-5");
}

#[test]
fn invalid_ckpt_options_are_rejected() {
    let sandbox = Sandbox::with_fixtures(&["dcp_2rank", "full.pth"]);
    let conversion_error = |options: &str| sandbox.failed_conversion(&format!("dcp_2rank out {options}"));
    insta::assert_snapshot!(conversion_error("--to torch --world-size 2"), @r"error: --world-size: it does not apply to --to torch, only to dcp and native; leave it out");
    insta::assert_snapshot!(conversion_error("--to dcp --max-shard-size 5GB"), @r"error: --max-shard-size: it does not apply to --to dcp, only to safetensors; leave it out");
    insta::assert_snapshot!(conversion_error("--to native --config config.json"), @r"
    error: --config: it does not apply to --to native, only to safetensors, with --experts, or from
    Megatron's names; leave it out
    ");
    insta::assert_snapshot!(conversion_error("--to safetensors --strip-prefix module."), @r"
    error: dcp_2rank: no name begins with `module.`; names are, for example,
    `model.blocks.0.down.weight`, `model.blocks.0.up.bias`, `model.blocks.0.up.weight`
    ");
    insta::assert_snapshot!(conversion_error("--to safetensors --rename blub=x"), @r"
    error: dcp_2rank: no name matches `blub`; names are, for example, `model.blocks.0.down.weight`,
    `model.blocks.0.up.bias`, `model.blocks.0.up.weight`
    ");
    insta::assert_snapshot!(conversion_error("--to torch --rename model.*=x"), @r"
    error: dcp_2rank: `model.blocks.0.down.weight` and `model.blocks.0.up.bias` would both be named
    `x`; change the renaming
    ");
    insta::assert_snapshot!(conversion_error("--to torch --rename (=x"), @r"
    error: invalid value '(=x' for '--rename <REGEX=REPL>': `(=x` is not a renaming: regex parse error:
        (
        ^
    error: unclosed group; write REGEX=REPLACEMENT

    For more information, try '--help'.
    ");
    insta::assert_snapshot!(conversion_error("--to safetensors --memory 5G"), @r"
    error: invalid value '5G' for '--memory <SIZE>': expected a size such as 5GB, 256MiB or 1000000

    For more information, try '--help'.
    ");
    insta::assert_snapshot!(conversion_error("--to safetensors --config nowhere.json"), @r"
    error: failed to open nowhere.json: No such file or directory (os error 2); check that the path
    exists
    ");
    insta::assert_snapshot!(conversion_error("--to dcp --world-size 0"), @r"
    error: invalid value '0' for '--world-size <N>': expected an integer of at least 1

    For more information, try '--help'.
    ");
    insta::assert_snapshot!(conversion_error("--to pickle"), @r"
    error: invalid value 'pickle' for '--to <FORMAT>'
      [possible values: safetensors, dcp, native, torch]

    For more information, try '--help'.
    ");
    insta::assert_snapshot!(folded(&sandbox.fsdp("ckpt diff dcp_2rank full.pth --atol -1").stderr), @r"
    error: invalid value '-1' for '--atol <X>': expected a finite number of at least 0, such as 1e-6

    For more information, try '--help'.
    ");
}

#[test]
fn existing_destination_is_not_overwritten() {
    let sandbox = Sandbox::with_fixtures(&["full.pth"]);
    sandbox.write("out", "precious");
    insta::assert_snapshot!(sandbox.failed_conversion("full.pth out --to torch"), @r"error: out: it exists already; remove it or choose another destination");
    assert_eq!(sandbox.read("out"), "precious");
    fs::create_dir(sandbox.path("empty")).unwrap();
    std::os::unix::fs::symlink("empty", sandbox.path("link")).unwrap();
    insta::assert_snapshot!(sandbox.failed_conversion("full.pth link --to dcp"), @r"
    error: link: it is a symbolic link to a directory, which an output cannot replace; name the
    directory that it points to, which must be empty, or another destination
    ");
    sandbox.failed_conversion("full.pth model --to dcp");
    assert_eq!(sandbox.names("model"), ["config.json"]);
    insta::assert_snapshot!(sandbox.failed_conversion("full.pth nowhere/out --to torch"), @r"error: failed to list nowhere: No such file or directory (os error 2); check that the path exists");
}

/// Returns the number of 512-byte blocks allocated to the files below a directory.
fn blocks(path: &Path) -> u64 {
    let Ok(entries) = fs::read_dir(path) else { return fs::metadata(path).map_or(0, |file| file.blocks()) };
    entries.map(|entry| blocks(&entry.unwrap().path())).sum()
}

/// Starts a conversion that would take far longer than a test, and interrupts it once its output grows.
fn interrupted(to: &str, signal: &str) -> (Sandbox, Ran) {
    const ELEMENTS: u64 = 32 << 30;
    // 8 MiB allocated on the disk.
    const BLOCKS: u64 = 16 << 10;
    let sandbox = Sandbox::new();
    let header = format!(r#"{{"w":{{"dtype":"U8","shape":[{ELEMENTS}],"data_offsets":[0,{ELEMENTS}]}}}}"#);
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    sandbox.write("large.safetensors", &bytes);
    // A sparse file: its data takes no space on the disk.
    let file = fs::File::options().write(true).open(sandbox.path("large.safetensors")).unwrap();
    file.set_len(bytes.len() as u64 + ELEMENTS).unwrap();
    fs::create_dir(sandbox.path("dir")).unwrap();
    let args = format!("ckpt convert large.safetensors dir/out --to {to} --no-sync");
    let mut command = sandbox.command();
    command.args(args.split(' ')).stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = command.spawn().unwrap();
    wait_until("the growth of the output", || blocks(&sandbox.path("dir")) >= BLOCKS);
    send(signal, child.id());
    let ran = Ran::of(child.wait_with_output().unwrap());
    (sandbox, ran)
}

#[test]
fn interrupted_conversion_leaves_no_files() {
    for (to, signal) in [("torch", "INT"), ("native", "TERM"), ("safetensors", "INT")] {
        let (sandbox, ran) = interrupted(to, signal);
        assert_eq!((ran.code, ran.stdout.as_str()), (Some(130), ""), "{}", ran.stderr);
        assert_eq!(ran.stderr, "error: interrupted; nothing was left behind\n");
        assert!(sandbox.names("dir").is_empty(), "{:?}", sandbox.names("dir"));
    }
}

#[test]
fn conversion_over_file_size_limit_leaves_no_files() {
    let sandbox = Sandbox::with_fixtures(&["dcp_2rank"]);
    let before = sandbox.names("");
    // A limit of 8 blocks; a block is 512 or 1024 bytes, depending on the shell.
    let convert = "exec \"$FSDP\" ckpt convert dcp_2rank out.pth --to torch";
    let ran = sandbox.shell(&format!("trap '' XFSZ; ulimit -f 8; {convert}"));
    assert_eq!(ran.code, Some(2), "{}", ran.stderr);
    assert!(ran.stderr.contains("File too large"), "{}", ran.stderr);
    assert_eq!(sandbox.names(""), before);
}

#[test]
fn conversion_on_full_disk_leaves_no_files() {
    let sandbox = Sandbox::with_fixtures(&["dcp_2rank"]);
    fs::create_dir(sandbox.path("tiny")).unwrap();
    // A separate file system, which needs user namespaces.
    let mount = "mount -t tmpfs -o size=32k none tiny";
    if sandbox.shell(&format!("unshare --user --map-root-user --mount sh -c '{mount}'")).code != Some(0) {
        println!("skipped: this machine has no user namespaces in which tmpfs can be mounted");
        return;
    }
    let convert = "$FSDP ckpt convert dcp_2rank tiny/out --to dcp; echo code $?; ls -A tiny";
    let ran = sandbox.shell(&format!("unshare --user --map-root-user --mount sh -c '{mount}; {convert}'"));
    assert_eq!(ran.stdout, "code 75\n", "{}", ran.stderr);
    assert!(ran.stderr.contains("No space left on device"), "{}", ran.stderr);
}
