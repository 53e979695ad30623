//! Damages every bit and every length of every file of a checkpoint.

use super::*;

/// Returns the bytes of a file.
fn read(files: &FaultyFiles, path: &Path) -> Vec<u8> {
    Files::of(std::sync::Arc::new(files.clone())).read_small(path, 1 << 20).unwrap().unwrap()
}

/// Replaces the content of a file.
fn replace(files: &FaultyFiles, path: &Path, bytes: &[u8]) {
    let files = Files::of(std::sync::Arc::new(files.clone()));
    files.remove_if_there(path).unwrap();
    files.create_new(path).unwrap().write_all_at(bytes, 0).unwrap();
}

/// Reads everything, and returns the first error.
fn read_all(files: &FaultyFiles, dir: &Path) -> Result<(), Error> {
    let reader = open(files, dir)?;
    for (name, tensor) in &reader.manifest().tensors {
        let mut out = vec![0; tensor.row_count() * tensor.row_bytes() as usize];
        reader.read_rows(name, 0..tensor.row_count(), &mut out)?;
    }
    Ok(())
}

fn saved() -> (FaultyFiles, std::path::PathBuf) {
    let (files, plan) = (FaultyFiles::new(), plan(2));
    let run = run_dir(&files);
    save(&run.lock().unwrap(), &plan, 1, &mut false).unwrap();
    read_all(&files, &run.checkpoint(1)).unwrap();
    (files, run.checkpoint(1))
}

fn names(files: &FaultyFiles, dir: &Path) -> Vec<String> {
    Files::of(std::sync::Arc::new(files.clone())).list(dir).unwrap()
}

#[test]
fn load_and_verify_detect_damage_at_every_byte() {
    let (files, dir) = saved();
    let names = names(&files, &dir);
    assert_eq!(names.len(), 3);
    for name in names {
        let path = dir.join(&name);
        let mut bytes = read(&files, &path);
        for at in 0..bytes.len() {
            // One bit, varying with the position, then the case bit, then all bits.
            for mask in [1 << (at % 8), 0x20, 0xff] {
                bytes[at] ^= mask;
                replace(&files, &path, &bytes);
                let error = read_all(&files, &dir).expect_err(&format!("byte {at} of {name} ^ {mask:#x}"));
                assert!(error.to_string().contains(&name), "{error}");
                let verified = open(&files, &dir).and_then(|reader| reader.verify());
                assert!(verified.is_err(), "byte {at} of {name}");
                bytes[at] ^= mask;
            }
        }
        replace(&files, &path, &bytes);
    }
    read_all(&files, &dir).unwrap();
}

#[test]
fn every_truncated_or_extended_file_is_detected() {
    let (files, dir) = saved();
    for name in names(&files, &dir) {
        let path = dir.join(&name);
        let bytes = read(&files, &path);
        for len in 0..bytes.len() {
            replace(&files, &path, &bytes[..len]);
            assert!(read_all(&files, &dir).is_err(), "{name} cut to {len}");
        }
        for extra in [&b"\0"[..], b"\n", b" ", &bytes] {
            replace(&files, &path, &[&bytes, extra].concat());
            assert!(read_all(&files, &dir).is_err(), "{name} extended by {extra:?}");
        }
        replace(&files, &path, &bytes);
    }
    read_all(&files, &dir).unwrap();
}

#[test]
fn swapped_files_of_ranks_or_steps_are_detected() {
    let (files, dir) = saved();
    let run = run_dir(&files);
    save(&run.lock().unwrap(), &plan(2), 2, &mut false).unwrap();
    let [_, first, second] = names(&files, &dir).try_into().unwrap();
    let (of_first, of_second) = (read(&files, &dir.join(&first)), read(&files, &dir.join(&second)));
    replace(&files, &dir.join(&first), &of_second);
    replace(&files, &dir.join(&second), &of_first);
    assert!(read_all(&files, &dir).is_err());
    replace(&files, &dir.join(&first), &of_first);
    replace(&files, &dir.join(&second), &read(&files, &run.checkpoint(2).join(&second)));
    let error = read_all(&files, &dir).unwrap_err().to_string();
    assert!(error.contains(&second) && error.contains("rows 3..6 of tensor `m`"), "{error}");
}

#[test]
fn damaged_row_error_names_tensor_file_and_bytes() {
    let (files, dir) = saved();
    let path = dir.join("shard-00002-model-00001-of-00001.safetensors");
    let mut bytes = read(&files, &path);
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    replace(&files, &path, &bytes);
    let reader = open(&files, &dir).unwrap();
    let mut out = vec![0; 12];
    reader.read_rows("w", 0..1, &mut out).unwrap();
    let error = reader.read_rows("m", 3..4, &mut out[..2]).unwrap_err().to_string();
    let bytes = format!("(bytes {}..{})", last - 5, last + 1);
    for part in ["shard-00002", "rows 3..6 of tensor `m`", &bytes] {
        assert!(error.contains(part), "{error}");
    }
}
