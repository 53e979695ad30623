//! The contents of manifests and nodes: the newest version, children, and values or their places.

use std::{ops::Range, sync::Arc};

use super::input::{DataFile, Input};
use crate::error::Fault;

/// A value of a leaf.
pub(super) enum Value {
    Here(Arc<[u8]>),
    At(Location),
}

/// A place in a data file.
pub(super) struct Location {
    pub(super) file: Arc<DataFile>,
    pub(super) range: Range<u64>,
}

/// The root of the newest version in a manifest, its height, and the number of keys below it.
pub(super) fn newest(body: &[u8]) -> Result<(Location, u8, u64), Fault> {
    let mut input = Input { bytes: body };
    input.take(16)?;
    let kind = input.byte()?;
    if kind != 0 {
        let reason = format!("its tree is in numbered manifests (kind {kind}), which are not read");
        return Err(Fault::unsupported(reason));
    }
    // The longest inline value, the longest node and the arity of the tree of versions.
    input.numbers(2)?;
    input.byte()?;
    match input.number()? {
        0 => {}
        1 => _ = input.take(4)?,
        method => return Err(Fault::unsupported(format!("its compression is {method}; known are 0 and 1"))),
    }
    let files = input.files("")?;
    let count = input.count()?;
    if count == 0 {
        return Err(Fault::new("it has no version; save it again"));
    }
    let generations = input.numbers(count)?;
    let heights = input.take(count)?;
    let roots = places(&mut input, count)?;
    let keys = input.numbers(count)?;
    if !generations.is_sorted_by(|a, b| a < b) {
        return Err(Fault::new("its versions are not in order; save it again"));
    }
    let last = count as usize - 1;
    Ok((location(&files, roots[last])?, heights[last], keys[last]))
}

/// The number of a file in a table, an offset, and a length.
type Place = (u64, u64, u64);

/// Places of `count` nodes, by columns.
fn places(input: &mut Input, count: u64) -> Result<Vec<Place>, Fault> {
    let (ids, offsets) = (input.numbers(count)?, input.numbers(count)?);
    let lens = input.numbers(count)?;
    Ok(ids.into_iter().zip(offsets).zip(lens).map(|((id, offset), len)| (id, offset, len)).collect())
}

/// The range of a file at a place. A version without a root has the path of no file.
fn location(files: &[Arc<DataFile>], (id, offset, len): Place) -> Result<Location, Fault> {
    let file = usize::try_from(id).ok().and_then(|id| files.get(id)).filter(|file| !file.path.is_empty());
    match (file, offset.checked_add(len)) {
        (Some(file), Some(end)) => Ok(Location { file: file.clone(), range: offset..end }),
        _ => {
            Err(Fault::new(format!("it refers to {len} bytes at {offset} of file {id}, which is not there")))
        }
    }
}

/// The number of entries of a node, and the files that they refer to.
fn entries(input: &mut Input, base: &str) -> Result<(Vec<Arc<DataFile>>, u64), Fault> {
    let files = input.files(base)?;
    match input.count()? {
        0 => Err(Fault::new("it is empty; save it again")),
        count => Ok((files, count)),
    }
}

/// The children of an inner node, and what the keys of each have in common.
pub(super) fn children(mut input: Input, base: &str) -> Result<Vec<(Location, String)>, Fault> {
    let (files, count) = entries(&mut input, base)?;
    let (keys, common) = input.keys(count, true)?;
    let places = places(&mut input, count)?;
    let with_common = |((place, key), len): ((Place, String), u64)| {
        let place = location(&files, place)?;
        let common = usize::try_from(len).ok().and_then(|len| key.get(..len)).map(str::to_owned);
        Ok((place, common.ok_or_else(|| Fault::new(format!("its key `{key}` is shorter than stated")))?))
    };
    places.into_iter().zip(keys).zip(common).map(with_common).collect()
}

/// The keys of a leaf, each with its value or the place of it.
pub(super) fn leaf(mut input: Input, base: &str) -> Result<Vec<(String, Value)>, Fault> {
    let (files, count) = entries(&mut input, base)?;
    let (keys, _) = input.keys(count, false)?;
    let lens = input.numbers(count)?;
    let kinds = input.take(count)?;
    let elsewhere = kinds.iter().filter(|kind| **kind == 1).count() as u64;
    let (ids, offsets) = (input.numbers(elsewhere)?, input.numbers(elsewhere)?);
    let mut places = ids.into_iter().zip(offsets);
    let mut found = Vec::with_capacity(keys.len());
    for ((key, len), kind) in keys.into_iter().zip(lens).zip(kinds) {
        let value = match kind {
            0 => Value::Here(input.take(len)?.into()),
            1 => {
                let (id, offset) = places.next().expect("as many places as values elsewhere");
                Value::At(location(&files, (id, offset, len))?)
            }
            kind => return Err(Fault::unsupported(format!("the value of `{key}` is of the kind {kind}"))),
        };
        found.push((key, value));
    }
    match input.bytes.is_empty() {
        true => Ok(found),
        false => Err(Fault::new(format!("it has {} bytes beyond its end", input.bytes.len()))),
    }
}
