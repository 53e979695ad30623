//! Checkpoints of Orbax, as JAX programs save them (Flax, MaxText).
//!
//! ```text
//! 1000/                       a step, of CheckpointManager
//!   _CHECKPOINT_METADATA      when the save began and when it was committed
//!   default/                  an item, also `state`, `items`, `params`; a Checkpointer saves an item alone
//!     _METADATA               the leaves of a tree: their paths and kinds
//!     manifest.ocdbt, d/      arrays in an OCDBT store (`ocdbt.rs`), or else
//!     params.w/.zarray, ..    arrays in folders
//!     _strings.json           leaves that are texts
//!     _sharding, array_metadatas/   how devices held arrays, which no reader of whole arrays needs
//! ```
//!
//! The arrays are zarr's (`zarr.rs`), their chunks the shards of devices. Neither has checksums of elements: what is known
//! to be unharmed is the tree of the store, and the indexes of chunks.

mod grid;
mod ocdbt;
mod store;
mod tree;
mod zarr;

use std::path::Path;

use serde::Deserialize;

use crate::{
    checkpoint::{Checkpoint, Key, Object, Role, Tensor, join},
    error::{Error, Fault},
    file_io::Files,
    formats::{
        optimizer::{expect_free, put_tensor},
        rank_fault::part_of_directory,
    },
};
use ocdbt::MANIFEST;
use store::Store;
use tree::{Kind, METADATA_BYTES_MAX, TreeMetadata};
use zarr::Array;

/// The list of the leaves of an item.
pub(super) const METADATA_FILE: &str = "_METADATA";

/// The times of a save.
const STEP_FILE: &str = "_CHECKPOINT_METADATA";

/// The damage that nothing in an item reveals.
const EXCHANGED: &str = "files that were exchanged for others with values of the same lengths: only the nodes of OCDBT have checksums";

/// A file that recent versions write last.
const COMMITTED: &str = "commit_success.txt";

/// What the names of folders contain until a save is complete.
pub(super) const UNCOMMITTED: &str = ".orbax-checkpoint-tmp";

/// Prefix of the folders that processes write before they are merged.
pub(super) const PROCESS: &str = "ocdbt.process_";

/// Names of items, by which a step of a version without [`STEP_FILE`] is recognized.
const ITEMS: [&str; 4] = ["default", "state", "items", "params"];

/// Whether a file of this name identifies an item or a step.
pub(super) fn is_part(name: &str) -> bool {
    [METADATA_FILE, STEP_FILE, MANIFEST].contains(&name) || name.starts_with(PROCESS)
}

/// Whether a directory with these names is an item, or a step with items.
pub(super) fn is_at(dir: &Path, names: &[String]) -> bool {
    let is_item = |name: &String| {
        ITEMS.contains(&&name[..]) && Files::anywhere().exists(&dir.join(name).join(METADATA_FILE))
    };
    names.iter().any(|name| is_part(name) || is_item(name)) || is_uncommitted(dir)
}

fn is_uncommitted(dir: &Path) -> bool {
    dir.components().any(|part| part.as_os_str().to_string_lossy().contains(UNCOMMITTED))
}

/// Reads an item, or all items of a step that are trees of arrays.
///
/// # Errors
/// Fails if the save was not committed, metadata is damaged or of a kind that is not read, or a chunk is missing.
pub fn open(dir: &Path) -> Result<Checkpoint, Error> {
    let names = Files::anywhere().list(dir)?;
    refuse_incomplete(dir, &names)?;
    let is_item = names.iter().any(|name| [METADATA_FILE, MANIFEST].contains(&&name[..]));
    let mut checkpoint = if is_item { open_item(dir, &names)? } else { open_step(dir, &names)? };
    if !names.iter().any(|name| [STEP_FILE, COMMITTED].contains(&&name[..])) {
        let unknown =
            format!("a save that did not end: neither {COMMITTED} nor the time of a commit is there");
        checkpoint.limits.push(unknown);
    }
    Ok(checkpoint)
}

/// Joins the items of a step that are trees of arrays.
fn open_step(dir: &Path, names: &[String]) -> Result<Checkpoint, Error> {
    let mut items = Vec::new();
    for name in names {
        let item = dir.join(name);
        if Files::anywhere().is_directory(&item) {
            let held = Files::anywhere().list(&item)?;
            refuse_incomplete(&item, &held)?;
            if held.iter().any(|name| [METADATA_FILE, MANIFEST].contains(&&name[..])) {
                items.push((name, open_item(&item, &held)?));
            }
        }
    }
    let mut step = match items.pop() {
        None => {
            let reason =
                format!("it is a step of Orbax without an item that has a {METADATA_FILE}; fetch it again");
            return Err(Error::malformed(dir, reason));
        }
        Some((_, only)) if items.is_empty() => only,
        Some(last) => {
            items.push(last);
            let world_size = items.iter().filter_map(|(_, item)| item.world_size).max();
            let format = items[0].1.format.clone();
            let mut step = Checkpoint { format, world_size, ..Checkpoint::default() };
            for (name, mut item) in items {
                item.limits.retain(|limit| !step.limits.contains(limit));
                step.join(item, &[Key::Name(name.clone())], None)?;
            }
            step.assign_roles();
            step
        }
    };
    dir.clone_into(&mut step.path);
    let number = dir.file_name().and_then(|name| name.to_str()).filter(|name| name.parse::<u64>().is_ok());
    step.run_state.extend(number.map(|number| ("step".to_owned(), number.to_owned())));
    Ok(step)
}

/// The part of [`STEP_FILE`] that is read.
#[derive(Deserialize)]
struct StepMetadata {
    init_timestamp_nsecs: Option<u64>,
    commit_timestamp_nsecs: Option<u64>,
    /// By the name of each item of a step; a text for an item alone.
    #[serde(default)]
    item_handlers: serde_json::Value,
}

/// Refuses a folder whose save has not ended, or that has lost an item.
fn refuse_incomplete(dir: &Path, names: &[String]) -> Result<(), Error> {
    let incomplete = |sign: &str| {
        let reason =
            format!("its save was not committed ({sign}), so arrays may be incomplete; use another step");
        Err(Error::malformed(dir, reason))
    };
    if is_uncommitted(dir) {
        return incomplete("its name is that of a save in progress");
    }
    if names.iter().any(|name| name.starts_with(PROCESS)) && !names.iter().any(|name| name == MANIFEST) {
        return incomplete(&format!("what its processes wrote was not merged, as there is no {MANIFEST}"));
    }
    if names.iter().any(|name| name == STEP_FILE) {
        let path = dir.join(STEP_FILE);
        let text = read_small(&path)?;
        let step: StepMetadata = serde_json::from_slice(&text).map_err(|error| {
            Error::malformed(&path, format!("it cannot be read: {error}; fetch it again"))
        })?;
        if step.init_timestamp_nsecs.is_some() && step.commit_timestamp_nsecs.is_none() {
            return incomplete(&format!("its {STEP_FILE} has no time of a commit"));
        }
        let mut items = step.item_handlers.as_object().into_iter().flat_map(|items| items.keys());
        if let Some(lost) = items.find(|item| !names.contains(item)) {
            let reason = format!("its item `{lost}` is missing, which its {STEP_FILE} lists; fetch it");
            return Err(Error::malformed(dir, reason));
        }
    }
    Ok(())
}

fn read_small(path: &Path) -> Result<Vec<u8>, Error> {
    let text = Files::anywhere().read_small(path, METADATA_BYTES_MAX)?;
    text.ok_or_else(|| Error::unsupported(path, format!("it has more than {METADATA_BYTES_MAX} bytes")))
}

/// Reads the list of the leaves of an item.
fn read_tree(dir: &Path, names: &[String]) -> Result<TreeMetadata, Error> {
    let has = |wanted: &str| names.iter().any(|name| name == wanted);
    let missing = |name: &str, what: &str| {
        Err(Error::malformed(dir, format!("its {name} is missing, which {what}; fetch it")))
    };
    let is_of_process = dir.file_name().is_some_and(|name| name.to_string_lossy().starts_with(PROCESS));
    match dir.parent() {
        Some(item) if is_of_process => return Err(part_of_directory(dir, item)),
        _ if !has(METADATA_FILE) => return missing(METADATA_FILE, "lists what it holds"),
        _ => {}
    }
    let path = dir.join(METADATA_FILE);
    let metadata = TreeMetadata::parse(&read_small(&path)?).map_err(|fault| fault.in_file(path))?;
    match metadata.is_ocdbt == Some(true) && !has(MANIFEST) {
        true => missing(MANIFEST, "leads to all arrays"),
        false => Ok(metadata),
    }
}

fn open_item(dir: &Path, names: &[String]) -> Result<Checkpoint, Error> {
    let metadata = read_tree(dir, names)?;
    let path = dir.join(METADATA_FILE);
    let in_metadata = |fault: Fault| fault.in_file(&path);
    let has_manifest = names.iter().any(|name| name == MANIFEST);
    let mut store = Store::open(dir, has_manifest, metadata.has_all_chunks)?;
    store.plain_source(&path.clone().into())?;
    let texts = match metadata.leaves.iter().any(|leaf| leaf.kind == Kind::Text) {
        true => tree::Texts::read(dir, &mut store)?,
        false => tree::Texts::default(),
    };
    let layout = if has_manifest { "OCDBT" } else { "folders" };
    let version = if metadata.is_zarr3 { 3 } else { 2 };
    let processes = names.iter().filter(|name| name.starts_with(PROCESS)).count();
    let mut checkpoint = Checkpoint {
        path: dir.to_owned(),
        format: format!("Orbax, {layout}, zarr {version}"),
        world_size: (processes > 0).then_some(processes),
        ..Checkpoint::default()
    };
    for leaf in metadata.leaves {
        let (name, path) = (join(&leaf.path), leaf.path);
        let value = match leaf.kind {
            Kind::Array => {
                let array = store.array(&name, metadata.is_zarr3)?;
                let chunks = grid::chunks(&mut store, &name, &array)?;
                let tensor =
                    Tensor { path, role: Role::Model, dtype: array.dtype, shape: array.shape, chunks };
                put_tensor(&mut checkpoint, tensor).map_err(in_metadata)?;
                continue;
            }
            Kind::Text => texts.get(&name).map_err(in_metadata)?,
            Kind::Value(value) => value,
        };
        expect_free(&checkpoint, &name).map_err(in_metadata)?;
        checkpoint.values.insert(name, Object { path, role: Role::Other, value });
    }
    if store.left() > 0 {
        checkpoint.notes.push(format!("{} keys of its store belong to no listed array", store.left()));
    }
    checkpoint.limits.push(EXCHANGED.to_owned());
    (checkpoint.sources, checkpoint.protections) = (store.sources, store.protections);
    checkpoint.assign_roles();
    Ok(checkpoint)
}

/// Parses bytes as each kind of metadata, for fuzzing. Returns how many kinds they are.
pub(crate) fn parse_all(bytes: &[u8]) -> usize {
    let is_tree = TreeMetadata::parse(bytes).is_ok();
    let is_array = [Array::of_zarr2(bytes), Array::of_zarr3(bytes)].iter().any(Result::is_ok);
    [is_tree, is_array, ocdbt::parse(bytes)].into_iter().filter(|is_one| *is_one).count()
}

#[cfg(test)]
mod tests;
