//! Native checkpoints as a target, for any number of ranks.
//!
//! Rows are split evenly: `ceil(rows / N)` per rank until none are left. Every chunk of the manifest is one place of
//! the plan, so the transfer computes exactly the digests that the manifest needs. Values are stored in the manifest;
//! the one named `run_state` becomes the state of the run again. Tied weights are each written.

use super::Selection;
use crate::{
    checkpoint::{Object, Role, join},
    digest::{Digest, DigestKind},
    error::Error,
    native::{
        MANIFEST_FILE, Manifest, ManifestFile, RUN_STATE, RankFile, SavePlan, SavedTensor, even_rows,
        manifest, manifest_file, value_to_run_state,
    },
    safetensors::TensorSpec,
    transfer::{OutputPlan, PlannedFile, PlannedRun, Tail},
};

/// Plans the files of a checkpoint of `world_size` ranks.
///
/// # Errors
/// [`Error::BadRequest`] for a tensor named `__metadata__` or sizes that the format cannot represent;
/// [`Error::Unsupported`] for a value that is nested too deeply for a manifest.
///
/// # Panics
/// If `world_size` is 0.
pub fn plan(selection: &Selection, world_size: usize) -> Result<OutputPlan, Error> {
    let tensors = selection.tensors.iter().map(|tensor| {
        let shape: Vec<usize> = tensor.shape.iter().map(|&size| size as usize).collect();
        let rows = even_rows(shape.first().copied().unwrap_or(1), world_size);
        let spec = TensorSpec { name: tensor.name.clone(), dtype: tensor.dtype, shape };
        SavedTensor { spec, path: tensor.path.clone(), role: tensor.role, rows }
    });
    let plan = SavePlan::new(world_size, tensors.collect())?;
    let layouts = (0..world_size).map(|rank| plan.lay_out(rank)).collect::<Result<Vec<_>, Error>>()?;
    let mut whole = manifest(&plan, Vec::new(), serde_json::Map::new());
    selection.values.iter().for_each(|object| add_value(&mut whole, object));
    // Find a value that does not fit before any data is moved.
    to_bytes(&whole)?;
    let files = layouts.iter().map(|layout| planned_file(selection, layout)).collect();
    let tail = move |digests: &[Vec<Option<Digest>>]| {
        let files = layouts.iter().zip(digests).map(|(layout, digests)| listed(&plan, layout, digests));
        whole.files = files.collect();
        let files = vec![(MANIFEST_FILE.to_owned(), to_bytes(&whole)?)];
        Ok(Tail { patches: Vec::new(), files })
    };
    Ok(OutputPlan { files, tail: Box::new(tail) })
}

fn add_value(manifest: &mut Manifest, object: &Object) {
    let name = join(&object.path);
    let run_state = match name == RUN_STATE && object.role == Role::Other {
        true => value_to_run_state(&object.value),
        false => None,
    };
    match run_state {
        Some(run_state) => manifest.run_state = run_state,
        None => drop(manifest.values.insert(name, object.clone())),
    }
}

fn planned_file(selection: &Selection, layout: &RankFile) -> PlannedFile {
    let mut places = Vec::new();
    for (index, shard) in layout.shards.iter().enumerate() {
        let (tensor, row_len) = (&selection.tensors[shard.tensor], layout.header.entries()[index].row_len());
        let chunks = layout.chunks(index).filter(|(_, bytes)| !bytes.is_empty());
        places.extend(chunks.map(|(rows, bytes)| PlannedRun {
            offset: bytes.start,
            tensor: tensor.source.clone(),
            elements: rows.start as u64 * row_len..rows.end as u64 * row_len,
            dtype: tensor.dtype,
            digest: Some(DigestKind::Crc64),
        }));
    }
    let (name, len) = (layout.name.clone(), layout.header.file_len());
    PlannedFile { name, len, literals: vec![(0, layout.prefix.clone())], places }
}

/// Builds a file's entry in the manifest from the digests of its places.
fn listed(plan: &SavePlan, layout: &RankFile, digests: &[Option<Digest>]) -> ManifestFile {
    let mut digests = digests.iter();
    let mut chunk = |is_empty: bool| match is_empty {
        true => DigestKind::Crc64.empty().value,
        false => digests.next().copied().flatten().expect("each place asked for a digest").value,
    };
    let mut shard = |index| layout.chunks(index).map(|(_, bytes)| chunk(bytes.is_empty())).collect();
    let chunks = (0..layout.shards.len()).map(&mut shard).collect();
    manifest_file(plan, layout, chunks)
}

fn to_bytes(manifest: &Manifest) -> Result<Vec<u8>, Error> {
    manifest.to_bytes().map_err(|fault| fault.in_file(MANIFEST_FILE))
}

#[cfg(test)]
mod tests;
