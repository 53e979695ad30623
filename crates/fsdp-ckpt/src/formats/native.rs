//! Reads native checkpoints: the full contents of the manifest as a format-independent [`Checkpoint`].
//!
//! The run state appears twice: as facts to display, and as the value `run_state`, which other formats carry along and
//! [`targets::native`](crate::targets::native) recognizes again.

use std::path::Path;

use crate::{
    checkpoint::{Checkpoint, Chunk, Key, Object, Protection, Region, Role, Source, Tensor},
    error::Error,
    formats::optimizer::{put_groups, settings_of},
    native::{MANIFEST_FILE, ManifestFile, NativeReader, RUN_STATE, RunDir, run_state_to_value, step_of},
};

/// The key of the optimizer's parameter groups in the run state.
const PARAM_GROUPS: &str = "param_groups";

/// Opens a native checkpoint directory. Checks the lengths and headers of its files.
///
/// # Errors
/// Those of [`NativeReader::open`].
pub fn open(dir: &Path) -> Result<Checkpoint, Error> {
    Ok(checkpoint(&NativeReader::open(dir)?))
}

fn checkpoint(reader: &NativeReader) -> Checkpoint {
    let manifest = reader.manifest();
    let mut checkpoint = Checkpoint {
        path: reader.dir().to_owned(),
        format: "native".to_owned(),
        world_size: Some(manifest.world_size),
        values: manifest.values.clone(),
        ..Checkpoint::default()
    };
    for (name, tensor) in &manifest.tensors {
        let shape = tensor.shape.iter().map(|&size| size as u64).collect();
        let (path, role, dtype) = (tensor.path.clone(), tensor.role, tensor.dtype);
        let tensor = Tensor { path, role, dtype, shape, chunks: Vec::new() };
        checkpoint.tensors.insert(name.clone(), tensor);
    }
    for (index, file) in manifest.files.iter().enumerate() {
        add_file(&mut checkpoint, reader, index, file);
    }
    let (len, digest) = reader.manifest_digest();
    let source = checkpoint.sources.len();
    checkpoint.sources.push(Source::File { path: reader.dir().join(MANIFEST_FILE), len });
    checkpoint.protections.push(Protection {
        source,
        range: 0..len,
        digest,
        what: "the manifest".to_owned(),
    });
    if let Some(groups) = manifest.run_state.get(PARAM_GROUPS) {
        let groups = groups.as_array().into_iter().flatten().filter_map(serde_json::Value::as_object);
        let settings = groups.filter_map(|group| settings_of(&run_state_to_value(group)));
        put_groups(&mut checkpoint, &settings.collect::<Vec<_>>(), |_, params| params.clone());
    }
    if !manifest.run_state.is_empty() {
        let value = run_state_to_value(&manifest.run_state);
        let object = Object { path: vec![Key::Name(RUN_STATE.to_owned())], role: Role::Other, value };
        checkpoint.values.insert(RUN_STATE.to_owned(), object);
    }
    for (name, object) in &checkpoint.values {
        checkpoint.opaque.extend(object.value.opaque_class().map(|class| (name.clone(), class.clone())));
    }
    checkpoint.notes.extend(other_name(reader));
    let facts = manifest.run_state.iter().filter(|(key, _)| *key != PARAM_GROUPS);
    let facts = facts.map(|(key, value)| (key.clone(), shown(value)));
    checkpoint.run_state = facts.collect();
    checkpoint
}

/// Adds the chunks of a file and the checksums that protect them.
fn add_file(checkpoint: &mut Checkpoint, reader: &NativeReader, index: usize, file: &ManifestFile) {
    let source = checkpoint.sources.len();
    checkpoint.sources.push(Source::File { path: reader.dir().join(&file.name), len: file.len });
    let what = "the header".to_owned();
    let header = Protection { source, range: 0..file.data_start, digest: file.header, what };
    checkpoint.protections.push(header);
    for (shard, part) in file.shards.iter().enumerate() {
        let whole = &reader.manifest().tensors[&part.tensor];
        let row_len = whole.row_bytes() / whole.dtype.size_bytes() as u64;
        let elements = part.rows.start as u64 * row_len..part.rows.end as u64 * row_len;
        let offset = reader.offset(index, shard);
        let tensor = checkpoint.tensors.get_mut(&part.tensor).expect("parts belong to described tensors");
        if !elements.is_empty() {
            tensor.chunks.push(Chunk { region: Region::Flat(elements), source, offset });
        }
        for chunk in 0..part.chunks.len() {
            let rows = part.chunk(chunk);
            let byte_of = |row: usize| offset + (row - part.rows.start) as u64 * whole.row_bytes();
            let range = byte_of(rows.start)..byte_of(rows.end);
            let what = format!("rows {}..{} of tensor `{}`", rows.start, rows.end, part.tensor);
            if !range.is_empty() {
                checkpoint.protections.push(Protection { source, range, digest: part.digest(chunk), what });
            }
        }
    }
}

/// A note for a directory that is named after another step than the one it was saved at.
fn other_name(reader: &NativeReader) -> Option<String> {
    let name = reader.dir().file_name()?.to_str()?;
    let saved = reader.manifest().run_state.get("step")?.as_u64()?;
    (step_of(name)? != saved).then(|| {
        format!(
            "the directory is named {name}, but the run had done {saved} steps when it was saved: it was \
             renamed. `fsdp train --resume` uses the names; rename it to {}",
            RunDir::name_of(saved)
        )
    })
}

fn shown(value: &serde_json::Value) -> String {
    match value {
        serde_json::Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}
