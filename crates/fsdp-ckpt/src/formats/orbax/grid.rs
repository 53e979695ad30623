//! Where the chunks of an array lie in it, and where in their store.

use super::{
    ocdbt::Stored,
    store::Store,
    zarr::{Array, Inner},
};
use crate::{
    checkpoint::{Chunk, Region, packed_strides},
    digest::{Digest, DigestKind},
    error::{Error, Fault},
};

/// Maximum number of chunks of one array.
const CHUNKS_MAX: u64 = 1 << 22;

/// The mark of a chunk that is not stored, in both numbers of an index.
const MISSING: u64 = u64::MAX;

/// The indexes of a grid that covers `shape` with chunks, in C order. `None` if there are too many.
pub(super) fn indexes(shape: &[u64], chunk: &[u64]) -> Option<impl Iterator<Item = Vec<u64>> + use<>> {
    let counts: Vec<u64> = shape.iter().zip(chunk).map(|(size, chunk)| size.div_ceil(*chunk)).collect();
    let total = counts.iter().try_fold(1u64, |total, count| total.checked_mul(*count))?;
    let at = move |mut number: u64| {
        let mut index = vec![0; counts.len()];
        for (step, count) in index.iter_mut().zip(&counts).rev() {
            (*step, number) = (number % count, number / count);
        }
        index
    };
    (total <= CHUNKS_MAX).then(|| (0..total).map(at))
}

/// The elements of a chunk that begins at `offsets`: those inside of the array. `None` if all of it is beyond its end.
pub(super) fn region(shape: &[u64], chunk: &[u64], offsets: Vec<u64>) -> Option<Region> {
    let sizes = shape.iter().zip(chunk.iter().zip(&offsets));
    let sizes: Vec<u64> =
        sizes.map(|(size, (chunk, offset))| size.saturating_sub(*offset).min(*chunk)).collect();
    (!sizes.contains(&0)).then(|| Region::Box { offsets, sizes, strides: packed_strides(chunk) })
}

/// Finds all chunks of an array whose keys begin with `prefix`, and adds their sources to the store's.
pub(super) fn chunks(store: &mut Store, prefix: &str, array: &Array) -> Result<Vec<Chunk>, Error> {
    let indexes = indexes(&array.shape, &array.chunk);
    let too_many = || Fault::unsupported(format!("`{prefix}` has more than {CHUNKS_MAX} chunks"));
    let mut found = Vec::new();
    for index in indexes.ok_or_else(|| store.fault(too_many()))? {
        let key = format!("{prefix}/{}", array.key(&index));
        let offsets: Vec<u64> = index.iter().zip(&array.chunk).map(|(index, size)| index * size).collect();
        let stored = store.find(&key)?;
        let (Some(inner), Some(stored)) = (&array.inner, &stored) else {
            let region =
                region(&array.shape, &array.chunk, offsets).expect("chunks of the grid begin inside");
            found.push(chunk(store, &key, stored.as_ref(), array, &array.chunk, region)?);
            continue;
        };
        let entries = read_index(store, &key, stored, array, inner)?;
        let inner_indexes = self::indexes(&array.chunk, &inner.chunk).expect("as many as there are entries");
        for (inner_index, (start, len)) in inner_indexes.zip(entries) {
            let steps = inner_index.iter().zip(&inner.chunk);
            let begin =
                offsets.iter().zip(steps).map(|(offset, (index, size))| offset + index * size).collect();
            let Some(region) = region(&array.shape, &inner.chunk, begin) else { continue };
            let part = match (start, len) {
                (MISSING, MISSING) => None,
                _ => {
                    let part = start.checked_add(len).and_then(|end| stored.part(start..end));
                    Some(part.ok_or_else(|| store.missing(&key))?)
                }
            };
            found.push(chunk(store, &key, part.as_ref(), array, &inner.chunk, region)?);
        }
    }
    Ok(found)
}

/// A chunk of these sizes whose elements in the array are `region`, with its source.
fn chunk(
    store: &mut Store,
    key: &str,
    stored: Option<&Stored>,
    array: &Array,
    sizes: &[u64],
    region: Region,
) -> Result<Chunk, Error> {
    let (source, offset) = match stored {
        Some(stored) => store.add_source(key, stored, array, sizes)?,
        None => store.add_zeros(key, array, sizes)?,
    };
    Ok(Chunk { region, source, offset })
}

/// The index of a chunk that is cut once more: where each of its chunks begins, and its length.
fn read_index(
    store: &Store,
    key: &str,
    stored: &Stored,
    array: &Array,
    inner: &Inner,
) -> Result<Vec<(u64, u64)>, Error> {
    let bad = |reason: &str| store.fault(Fault::new(format!("the index of the chunks in `{key}` {reason}")));
    let count = array.inner_count(inner).filter(|count| *count <= CHUNKS_MAX);
    let crc_len = if inner.has_crc { 4 } else { 0 };
    let len = count.map(|count| 16 * count + crc_len).filter(|len| *len <= stored.len());
    let len = len.ok_or_else(|| bad("is longer than its value; fetch or save it again"))?;
    let start = if inner.is_index_first { 0 } else { stored.len() - len };
    let part = stored.part(start..start + len).expect("the index lies inside");
    let bytes = part.read()?;
    let (entries, crc) = bytes.split_at((len - crc_len) as usize);
    if let Ok(crc) = crc.try_into() {
        let expected = Digest { kind: DigestKind::Crc32c, value: u32::from_le_bytes(crc).into() };
        let got = DigestKind::Crc32c.of(entries);
        if got != expected {
            return Err(bad(&format!(
                "is damaged: its checksum is {got}, it states {expected}; fetch it again"
            )));
        }
    }
    let number = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().expect("eight bytes"));
    Ok(entries.chunks_exact(16).map(|entry| (number(&entry[..8]), number(&entry[8..]))).collect())
}
