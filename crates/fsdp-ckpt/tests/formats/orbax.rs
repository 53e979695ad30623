//! Checkpoints of Orbax are read to what was saved, and damage to them is found.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    sync::atomic::AtomicBool,
};

use fsdp_ckpt::{
    checkpoint::{Checkpoint, Key, Role, Source, Value},
    conversion::{Conversion, Part, Target, convert},
    diff::{Tolerance, diff},
    formats,
    safetensors::SafetensorsReader,
    transfer::{NoProgress, Options},
    verify::{Verification, verify, verify_all},
};

use crate::{assert_equals_safetensors, bytes_of, fixture};

fn open(name: &str) -> Checkpoint {
    formats::open(fixture("orbax").join(name)).unwrap()
}

/// Compares the tensors of a checkpoint with expected ones, whose names begin with `prefix`.
fn assert_expected(checkpoint: &Checkpoint, prefix: &str) {
    checkpoint.check_coverage().unwrap();
    let expected = SafetensorsReader::open(fixture("orbax/expected.safetensors")).unwrap();
    for (name, tensor) in &checkpoint.tensors {
        let expected_name = format!("{prefix}{name}");
        let entry = expected.entry(&expected_name).unwrap();
        let shape: Vec<u64> = entry.shape().iter().map(|&dim| dim as u64).collect();
        assert_eq!(tensor.shape, shape, "{name}");
        let mut bytes = vec![0; entry.len_bytes() as usize];
        expected.read_rows(&expected_name, 0..entry.row_count(), &mut bytes).unwrap();
        assert_eq!(tensor.dtype, entry.dtype(), "{name}");
        assert_eq!(bytes_of(checkpoint, name), bytes, "{name}");
    }
    assert!(verified(checkpoint).is_sound());
}

fn verified(checkpoint: &Checkpoint) -> Verification {
    verify(checkpoint, &Options::new(&NoProgress, &AtomicBool::new(false))).unwrap()
}

#[test]
fn trees_in_all_layouts_equal_what_was_saved() {
    for (name, format) in [
        ("ocdbt_zarr2", "Orbax, OCDBT, zarr 2"),
        ("ocdbt_zarr3", "Orbax, OCDBT, zarr 3"),
        ("files_zarr2", "Orbax, folders, zarr 2"),
        ("files_zarr3", "Orbax, folders, zarr 3"),
    ] {
        let checkpoint = open(name);
        assert_eq!(checkpoint.format, format);
        assert_expected(&checkpoint, "");
        assert_eq!((checkpoint.notes.len(), checkpoint.limits.len()), (0, 1));
        assert_eq!(checkpoint.values["name"].value, Value::Str("tiny".to_owned()));
        let kernel = &checkpoint.tensors["params.layers.1.kernel"];
        let name = |text: &str| Key::Name(text.to_owned());
        assert_eq!(kernel.path, [name("params"), name("layers"), Key::Index(1), name("kernel")]);
        assert_eq!(kernel.role, Role::Model);
        assert!(kernel.chunks.len() >= 4, "{}", kernel.chunks.len());
        assert_eq!(checkpoint.tensors["rate"].role, Role::Other);
    }
    let checkpoint = open("ocdbt_zarr2");
    let expected = SafetensorsReader::open(fixture("orbax/expected.safetensors")).unwrap();
    assert_eq!(checkpoint.tensors.len(), expected.names().count());
    assert_eq!(checkpoint.tensors["opt_state.0.mu.embed"].role, Role::Optimizer);
    assert_eq!(checkpoint.values["nothing"].value, Value::None);
    assert_eq!(checkpoint.values["empty"].value, Value::Dict(Vec::new()));
    assert_eq!(checkpoint.world_size, Some(1));
}

#[test]
fn steps_and_their_items_are_read() {
    for name in ["standard", "manager/1"] {
        let checkpoint = open(name);
        assert!(checkpoint.tensors["step"].shape.is_empty());
        assert_expected_without_step(checkpoint);
    }
    let checkpoint = open("items/1");
    assert_eq!(checkpoint.limits.len(), 1);
    assert_eq!(checkpoint.run_state, [("step".to_owned(), "1".to_owned())]);
    assert_eq!(checkpoint.tensors["params.norm.scale"].role, Role::Model);
    assert_eq!(checkpoint.tensors["opt_state.0.nu.norm.scale"].role, Role::Optimizer);
    assert_expected(&checkpoint, "");
    assert_expected(&open("items/1/params"), "params.");
    let error = formats::open(fixture("orbax/manager")).unwrap_err().to_string();
    assert!(error.contains("name one of those in it: 1"), "{error}");
}

/// The step was saved as an integer of 32 bits there.
fn assert_expected_without_step(mut checkpoint: Checkpoint) {
    checkpoint.tensors.remove("step");
    assert_expected(&checkpoint, "");
}

#[test]
fn chunks_beyond_the_ends_of_arrays_are_cut() {
    for name in ["edges_zarr2", "edges_zarr3"] {
        let checkpoint = open(name);
        assert_equals_safetensors(&checkpoint, &fixture("orbax/edges.safetensors"), "");
        assert!(verified(&checkpoint).is_sound());
        assert!(checkpoint.limits[1].contains("a save that did not end"), "{:?}", checkpoint.limits);
    }
}

#[test]
fn chunks_of_zeros_may_be_left_out_of_a_tree() {
    let checkpoint = open("zeros");
    assert_equals_safetensors(&checkpoint, &fixture("orbax/zeros.safetensors"), "");
    assert!(verified(&checkpoint).is_sound());
    // A version that stores all chunks has lost them.
    let dir = tempfile::tempdir().unwrap();
    copy(&fixture("orbax/zeros"), dir.path());
    let path = dir.path().join("_METADATA");
    let text = fs::read_to_string(&path).unwrap();
    let stored = text.replacen('{', "{\"store_array_data_equal_to_fill_value\":true,", 1);
    fs::write(&path, stored).unwrap();
    let error = formats::open(dir.path()).unwrap_err().to_string();
    assert!(error.contains("`params.a/c/0/0` is not stored"), "{error}");
}

#[test]
fn uncommitted_saves_are_refused_as_such() {
    let step = "uncommitted/2.orbax-checkpoint-tmp";
    for name in [step.to_owned(), format!("{step}/default.orbax-checkpoint-tmp")] {
        let error = formats::open(fixture("orbax").join(name)).unwrap_err().to_string();
        assert!(error.contains("not committed") && error.contains("a save in progress"), "{error}");
    }
    let error = formats::open(fixture("orbax/uncommitted")).unwrap_err().to_string();
    assert!(error.contains("no checkpoint of a known format"), "{error}");
    // The same under a final name, as a copy of the folder may be.
    let dir = tempfile::tempdir().unwrap();
    copy(&fixture("orbax").join(step), &dir.path().join("2"));
    let error = formats::open(dir.path().join("2")).unwrap_err().to_string();
    assert!(error.contains("has no time of a commit"), "{error}");
    let copied = dir.path().join("1");
    copy(&fixture("orbax/standard"), &copied);
    fs::remove_file(copied.join("manifest.ocdbt")).unwrap();
    let error = formats::open(&copied).unwrap_err().to_string();
    assert!(error.contains("was not merged"), "{error}");
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy(&entry.path(), &target);
        } else {
            fs::copy(entry.path(), &target).unwrap();
        }
    }
}

#[test]
fn conversions_hold_the_same_bits() {
    let dir = tempfile::tempdir().unwrap();
    for (number, name) in ["ocdbt_zarr2", "files_zarr3", "edges_zarr3", "items/1"].into_iter().enumerate() {
        let checkpoint = open(name);
        let mut conversion = Conversion::new(Target::Safetensors);
        conversion.part = Part::All;
        let path = dir.path().join(format!("{number}.safetensors"));
        let cancel = AtomicBool::new(false);
        convert(&checkpoint, &path, &conversion, &Options::new(&NoProgress, &cancel)).unwrap();
        let converted = formats::open(&path).unwrap();
        assert_eq!(converted.tensors.len(), checkpoint.tensors.len());
        for tensor in converted.tensors.keys() {
            assert_eq!(bytes_of(&converted, tensor), bytes_of(&checkpoint, tensor), "{name} {tensor}");
        }
        let found =
            diff(&checkpoint, &converted, Tolerance::default(), &Options::new(&NoProgress, &cancel)).unwrap();
        assert!(found.is_equal(), "{name}");
    }
}

/// All files below a folder.
fn files_below(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap());
    let below = |entry: fs::DirEntry| match entry.file_type().unwrap().is_dir() {
        true => files_below(&entry.path()),
        false => vec![entry.path()],
    };
    let mut files: Vec<PathBuf> = entries.flat_map(below).collect();
    files.sort();
    files
}

/// All tensors of a checkpoint that can be read without an error, with their bytes, and whether it is sound.
fn outcome(path: &Path) -> Option<BTreeMap<String, Vec<u8>>> {
    let checkpoint = formats::open(path).ok()?;
    let verification = verified(&checkpoint);
    let names = checkpoint.tensors.keys();
    verification.is_sound().then(|| names.map(|name| (name.clone(), bytes_of(&checkpoint, name))).collect())
}

/// Whether a position of a file is in a range that the verdict counts as unprotected.
fn is_unprotected(checkpoint: &Checkpoint, file: &Path, at: u64) -> bool {
    let unprotected = verified(checkpoint).unprotected;
    unprotected.iter().any(|one| one.path == file && one.ranges.iter().any(|range| range.contains(&at)))
}

#[test]
fn damage_is_found_or_counted_as_unprotected() {
    let dir = tempfile::tempdir().unwrap();
    let (mut found, mut harmless, mut unprotected) = (0, 0, 0);
    for name in ["ocdbt_zarr2", "ocdbt_zarr3", "edges_zarr2", "edges_zarr3", "files_zarr3"] {
        let path = dir.path().join(name);
        copy(&fixture("orbax").join(name), &path);
        let whole = formats::open(&path).unwrap();
        let expected = outcome(&path).unwrap();
        for (number, file) in files_below(&path).into_iter().enumerate() {
            let bytes = fs::read(&file).unwrap();
            for trial in 0..12 {
                let at = (number * 7919 + trial * 104_729) % bytes.len();
                let damaged = match trial % 3 {
                    0 => bytes[..at].to_vec(),
                    _ => [&bytes[..at], &[bytes[at] ^ (1 << (trial % 8))], &bytes[at + 1..]].concat(),
                };
                fs::write(&file, &damaged).unwrap();
                match outcome(&path) {
                    None => found += 1,
                    Some(read) if read == expected => harmless += 1,
                    Some(_) => {
                        assert_ne!(trial % 3, 0, "{} cut at {at} was not found", file.display());
                        assert!(is_unprotected(&whole, &file, at as u64), "{} at {at}", file.display());
                        unprotected += 1;
                    }
                }
            }
            fs::write(&file, &bytes).unwrap();
        }
    }
    println!("{found} found, {harmless} changed nothing, {unprotected} in unprotected bytes");
    assert!(found > 400 && harmless > 100, "{found} {harmless} {unprotected}");
}

#[test]
fn exchanged_files_are_found_unless_values_have_equal_lengths() {
    let dir = tempfile::tempdir().unwrap();
    let (mut found, mut harmless, mut unseen) = (0, 0, 0);
    for name in ["ocdbt_zarr2", "two_processes", "edges_zarr3", "files_zarr3", "items/1"] {
        let path = dir.path().join(name);
        copy(&fixture("orbax").join(name), &path);
        let expected = outcome(&path).unwrap();
        let files = files_below(&path);
        for (number, file) in files.iter().enumerate() {
            let other = &files[(number * 31 + 7) % files.len()];
            let bytes = fs::read(file).unwrap();
            let others = fs::read(other).unwrap();
            fs::write(file, &others).unwrap();
            match outcome(&path) {
                None => found += 1,
                Some(read) if read == expected => harmless += 1,
                Some(_) => {
                    assert!(name == "files_zarr3" && bytes.len() == others.len(), "{file:?} {other:?}");
                    unseen += 1;
                }
            }
            fs::write(file, &bytes).unwrap();
        }
    }
    println!("{found} found, {harmless} changed nothing, {unseen} not found");
    assert!(found > 60 && harmless > 30, "{found} {harmless}");
}

#[test]
fn lost_files_are_named() {
    let dir = tempfile::tempdir().unwrap();
    for (name, lost) in [
        ("files_zarr2", "params.embed/1.1"),
        ("files_zarr3", "params.norm.scale/zarr.json"),
        ("ocdbt_zarr2", "_METADATA"),
        ("ocdbt_zarr2", "_strings.json"),
    ] {
        let path = dir.path().join(name);
        copy(&fixture("orbax").join(name), &path);
        fs::remove_file(path.join(lost)).unwrap();
        let error = formats::open(&path).unwrap_err().to_string();
        assert!(error.contains(lost), "{error}");
    }
    let step = dir.path().join("step");
    copy(&fixture("orbax/items/1"), &step);
    fs::remove_dir_all(step.join("opt_state")).unwrap();
    let error = formats::open(&step).unwrap_err().to_string();
    assert!(error.contains("its item `opt_state` is missing"), "{error}");
    // A file with values of a process.
    let path = dir.path().join("values");
    copy(&fixture("orbax/ocdbt_zarr2"), &path);
    let source = open("ocdbt_zarr2").sources.into_iter().find(|source| matches!(source, Source::Zstd { .. }));
    let relative = source.unwrap().path().strip_prefix(fixture("orbax/ocdbt_zarr2")).unwrap().to_owned();
    fs::remove_file(path.join(&relative)).unwrap();
    let error = formats::open(&path).unwrap_err().to_string();
    assert!(error.contains(&relative.display().to_string()), "{error}");
}

#[test]
fn saves_of_several_processes_are_read_as_one() {
    let checkpoint = open("two_processes");
    assert_equals_safetensors(&checkpoint, &fixture("orbax/two_processes.safetensors"), "");
    assert_eq!(checkpoint.world_size, Some(2));
    let process = |source: &Source| source.path().to_string_lossy().contains("ocdbt.process_1");
    assert!(checkpoint.sources.iter().any(process));
    assert!(verified(&checkpoint).is_sound());
    let error = formats::open(fixture("orbax/two_processes/ocdbt.process_1")).unwrap_err().to_string();
    assert!(error.contains("part of"), "{error}");
    // The values of a process may all be in the root's store.
    let dir = tempfile::tempdir().unwrap();
    copy(&fixture("orbax/two_processes"), dir.path());
    fs::create_dir(dir.path().join("ocdbt.process_2")).unwrap();
    fs::copy(dir.path().join("manifest.ocdbt"), dir.path().join("ocdbt.process_2/manifest.ocdbt")).unwrap();
    let checkpoint = formats::open(dir.path()).unwrap();
    let found = verify_all(&checkpoint, &Options::new(&NoProgress, &AtomicBool::new(false))).unwrap();
    assert!(found.is_sound(), "{:?}", found.problems);
    assert!(found.unread.iter().any(|unread| unread.path.ends_with("ocdbt.process_2")));
}
