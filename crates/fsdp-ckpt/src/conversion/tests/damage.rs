//! Damage under checksums never passes through a conversion, even if only part of a record is used.

use std::collections::BTreeMap;

use super::*;
use crate::verify::verify;

/// Distance between flipped bytes.
const STEP: usize = 67;

pub(super) fn copy(from: &Path, to: &Path) {
    if from.is_dir() {
        fs::create_dir_all(to).unwrap();
        for entry in fs::read_dir(from).unwrap() {
            let entry = entry.unwrap();
            copy(&entry.path(), &to.join(entry.file_name()));
        }
    } else {
        fs::copy(from, to).unwrap();
    }
}

/// The files of an output, by name.
fn contents(dir: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let entries = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    entries.map(|path| (path.file_name().unwrap().into(), fs::read(&path).unwrap())).collect()
}

/// Flips bits of `file` in the checkpoint at `source`, and converts after each flip. Returns how many of them the
/// conversion itself detected.
fn flip(source: &Path, file: &Path, dir: &Path) -> usize {
    let out = dir.join("out");
    let cancel = AtomicBool::new(false);
    let options =
        Options { sync: false, threads: NonZero::<usize>::MIN, ..Options::new(&NoProgress, &cancel) };
    let conversion = Conversion { part: Part::All, ..Conversion::new(Target::Native) };
    convert(&formats::open(source).unwrap(), &out, &conversion, &options).unwrap();
    let (expected, bytes) = (contents(&out), fs::read(file).unwrap());
    let mut noticed = 0;
    for at in (0..bytes.len()).step_by(STEP) {
        fs::remove_dir_all(&out).unwrap();
        let mut changed = bytes.clone();
        changed[at] ^= 1 << (at % 8);
        fs::write(file, changed).unwrap();
        let converted = match formats::open(source) {
            Ok(opened) if !verify(&opened, &options).unwrap().is_sound() => {
                Some(convert(&opened, &out, &conversion, &options))
            }
            _ => None,
        };
        match converted {
            Some(Ok(_)) => assert!(contents(&out) == expected, "byte {at} of {}", file.display()),
            Some(Err(error)) => {
                assert!(error.to_string().contains(&file.display().to_string()), "{error}");
                noticed += 1;
            }
            None => {}
        }
        fs::create_dir_all(&out).unwrap();
    }
    noticed
}

#[test]
fn bit_flip_fails_conversion_or_leaves_output_unchanged() {
    let xla = "trained_rank-00000000-of-00000002.pth";
    let step = "global_step5/zero_pp_rank_1_mp_rank_00_optim_states.pt";
    let cases = [("kinds.pth", ""), ("xla_fsdp_2rank", xla), ("deepspeed_layout/zero3", step)];
    for (name, file) in cases {
        let dir = tempfile::tempdir().unwrap();
        let source = dir.path().join("source");
        copy(&fixture(name), &source);
        let source = if name == "xla_fsdp_2rank" { source.join(file) } else { source };
        let file = if source.is_dir() { source.join(file) } else { source.clone() };
        assert!(flip(&source, &file, dir.path()) > 0, "{name}");
    }
}
