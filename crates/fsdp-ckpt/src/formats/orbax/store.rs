//! Where Orbax keeps the parts of arrays: under keys of an OCDBT store, or in files of these names.

use std::{
    collections::BTreeMap,
    ops::Range,
    path::{Path, PathBuf},
    sync::Arc,
};

use super::{
    ocdbt::{MANIFEST, Stored, Tree},
    zarr::Array,
};
use crate::{
    checkpoint::{Protection, Source, len_bytes},
    error::{Error, Fault},
    file_io::{Files, PathFile, is_plain_name},
};

/// Maximum length of the metadata of an array.
const METADATA_BYTES_MAX: u64 = 1 << 20;

/// The largest ratio of lengths in zstd, as a power of two: a block of 4 bytes decodes to 128 KiB at most.
const ZSTD_RATIO_LOG: u32 = 15;

/// Maximum length of a chunk of zeros that is not stored.
const ZEROS_BYTES_MAX: u64 = 1 << 34;

/// Maximum number of such chunks, and of their lengths.
const ZEROS_MAX: usize = 1 << 20;
const ZEROS_LENS_MAX: usize = 256;

/// A zstd stream of zeros: a frame with a window of 128 KiB, and blocks that repeat a byte.
fn zeros(len: u64) -> Vec<u8> {
    let mut stream = vec![0x28, 0xb5, 0x2f, 0xfd, 0, 7 << 3];
    let (mut rest, block_max) = (len, 1 << 17);
    loop {
        let block = rest.min(block_max);
        rest -= block;
        let header = (block as u32) << 3 | 1 << 1 | u32::from(rest == 0);
        stream.extend(&header.to_le_bytes()[..3]);
        stream.push(0);
        if rest == 0 {
            return stream;
        }
    }
}

/// The parts of all arrays of a checkpoint.
pub(super) struct Store {
    dir: PathBuf,
    /// The keys of a store; `None` if keys are names of files.
    tree: Option<BTreeMap<String, Stored>>,
    /// Whether chunks of zeros may have been left out. Only a tree shows that they were not lost.
    omits_zeros: bool,
    /// Streams of zeros, by length.
    zeros: BTreeMap<u64, Arc<[u8]>>,
    zeros_count: usize,
    pub(super) sources: Vec<Source>,
    pub(super) protections: Vec<Protection>,
    plain_sources: BTreeMap<Arc<Path>, usize>,
}

impl Stored {
    pub(super) fn len(&self) -> u64 {
        match self {
            Stored::Inline(_, bytes) => bytes.len() as u64,
            Stored::InFile(_, range) => range.end - range.start,
        }
    }

    /// A part of the value; `None` if it is not inside.
    pub(super) fn part(&self, range: Range<u64>) -> Option<Stored> {
        (range.start <= range.end && range.end <= self.len()).then(|| match self {
            Stored::Inline(path, bytes) => {
                Stored::Inline(path.clone(), bytes[range.start as usize..range.end as usize].into())
            }
            Stored::InFile(path, whole) => {
                Stored::InFile(path.clone(), whole.start + range.start..whole.start + range.end)
            }
        })
    }

    /// Reads the value, whose length the caller has limited.
    pub(super) fn read(&self) -> Result<Vec<u8>, Error> {
        match self {
            Stored::Inline(_, bytes) => Ok(bytes.to_vec()),
            Stored::InFile(path, range) => {
                let mut bytes = vec![0; self.len() as usize];
                PathFile::open(path)?.0.read_exact_at(&mut bytes, range.start)?;
                Ok(bytes)
            }
        }
    }
}

impl Store {
    /// The store in a directory.
    pub(super) fn open(dir: &Path, is_ocdbt: bool, has_all_chunks: bool) -> Result<Store, Error> {
        let tree = if is_ocdbt { Some(Tree::read(dir)?) } else { None };
        let (values, sources, protections) = match tree {
            Some(Tree { values, sources, protections, .. }) => (Some(values), sources, protections),
            None => (None, Vec::new(), Vec::new()),
        };
        let (dir, omits_zeros) = (dir.to_owned(), is_ocdbt && !has_all_chunks);
        let (zeros, plain_sources) = (BTreeMap::new(), BTreeMap::new());
        Ok(Store {
            dir,
            tree: values,
            omits_zeros,
            zeros,
            zeros_count: 0,
            sources,
            protections,
            plain_sources,
        })
    }

    /// A fault in what the checkpoint says about an array.
    pub(super) fn fault(&self, fault: Fault) -> Error {
        fault.in_file(&self.dir)
    }

    pub(super) fn missing(&self, key: &str) -> Error {
        let cause = "the save was not completed, a file was lost, or it is of a version that leaves out chunks of zeros";
        self.fault(Fault::new(format!(
            "`{key}` is not stored, or not all of it: {cause}; fetch or save it again"
        )))
    }

    /// Takes the value of a key, which no other array has.
    pub(super) fn find(&mut self, key: &str) -> Result<Option<Stored>, Error> {
        if let Some(tree) = &mut self.tree {
            return Ok(tree.remove(key));
        }
        if !key.split('/').all(is_plain_name) {
            return Err(self.fault(Fault::new(format!("`{key}` is not a path below its folder"))));
        }
        let path = self.dir.join(key);
        let found = Files::anywhere().metadata_if_there(&path)?;
        Ok(found.map(|found| Stored::InFile(path.into(), 0..found.len)))
    }

    /// Number of keys that were not taken.
    pub(super) fn left(&self) -> usize {
        self.tree.as_ref().map_or(0, BTreeMap::len)
    }

    /// Reads the metadata of an array whose keys begin with `prefix`.
    pub(super) fn array(&mut self, prefix: &str, is_zarr3: bool) -> Result<Array, Error> {
        let key = format!("{prefix}/{}", if is_zarr3 { "zarr.json" } else { ".zarray" });
        let stored = self.find(&key)?.ok_or_else(|| self.missing(&key))?;
        if stored.len() > METADATA_BYTES_MAX {
            let reason = format!("`{key}` has more than {METADATA_BYTES_MAX} bytes");
            return Err(self.fault(Fault::unsupported(reason)));
        }
        let text = stored.read()?;
        if let Stored::InFile(path, _) = &stored {
            self.plain_source(path)?;
        }
        let array = if is_zarr3 { Array::of_zarr3(&text) } else { Array::of_zarr2(&text) };
        array.map_err(|fault| self.fault(fault.of_part(&format!("`{key}`: "), 0)))
    }

    /// The source of a whole file.
    pub(super) fn plain_source(&mut self, path: &Arc<Path>) -> Result<usize, Error> {
        if let Some(&source) = self.plain_sources.get(path) {
            return Ok(source);
        }
        let (_, len) = PathFile::open(path)?;
        self.sources.push(Source::File { path: path.to_path_buf(), len });
        self.plain_sources.insert(path.clone(), self.sources.len() - 1);
        Ok(self.sources.len() - 1)
    }

    /// Adds the source of a chunk that is not stored, if it can only be one of zeros.
    pub(super) fn add_zeros(
        &mut self,
        key: &str,
        array: &Array,
        sizes: &[u64],
    ) -> Result<(usize, u64), Error> {
        let len = len_bytes(sizes, array.dtype.size_bytes()).expect("sizes of chunks were checked");
        if !self.omits_zeros || !array.is_of_zeros {
            return Err(self.missing(key));
        }
        self.zeros_count += 1;
        let is_new = !self.zeros.contains_key(&len);
        if len > ZEROS_BYTES_MAX
            || self.zeros_count > ZEROS_MAX
            || (is_new && self.zeros.len() == ZEROS_LENS_MAX)
        {
            let limit = format!("at most {ZEROS_MAX} such chunks of {ZEROS_LENS_MAX} lengths are read");
            let reason =
                format!("`{key}` stands for {len} bytes of zeros; {limit}, of {ZEROS_BYTES_MAX} bytes");
            return Err(self.fault(Fault::unsupported(reason)));
        }
        let stream = self.zeros.entry(len).or_insert_with(|| zeros(len).into()).clone();
        let path = self.dir.join(MANIFEST);
        self.sources.push(Source::Inline { path, key: key.to_owned(), stream, decoded_len_max: len });
        Ok((self.sources.len() - 1, 0))
    }

    /// Adds the source of a stored chunk of these sizes; returns it, and where in it the chunk begins.
    pub(super) fn add_source(
        &mut self,
        key: &str,
        stored: &Stored,
        array: &Array,
        sizes: &[u64],
    ) -> Result<(usize, u64), Error> {
        let len = len_bytes(sizes, array.dtype.size_bytes()).expect("sizes of chunks were checked");
        if array.is_zstd && len >> ZSTD_RATIO_LOG > stored.len() {
            let reason =
                format!("`{key}` has {} bytes, which cannot decode to {len}; save it again", stored.len());
            return Err(self.fault(Fault::new(reason)));
        }
        if !array.is_zstd && stored.len() != len {
            let reason =
                format!("`{key}` has a chunk of {} bytes, expected {len}; save it again", stored.len());
            return Err(self.fault(Fault::new(reason)));
        }
        let source = match (stored, array.is_zstd) {
            (Stored::InFile(path, range), false) => return Ok((self.plain_source(path)?, range.start)),
            (Stored::InFile(path, range), true) => {
                Source::Zstd { path: path.to_path_buf(), range: range.clone(), decoded_len_max: len }
            }
            (Stored::Inline(path, bytes), is_zstd) => {
                let failed =
                    |cause| Error::malformed(&**path, format!("`{key}` cannot be compressed: {cause}"));
                // Bytes that are plain become a stream, so that there is one kind of source in metadata.
                let plain = || zstd::bulk::compress(bytes, 1).map(Arc::from).map_err(failed);
                let stream = if is_zstd { bytes.clone() } else { plain()? };
                Source::Inline { path: path.to_path_buf(), key: key.to_owned(), stream, decoded_len_max: len }
            }
        };
        self.sources.push(source);
        Ok((self.sources.len() - 1, 0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_of_zeros_have_every_length() {
        for len in [0, 1, 5, (1 << 17) - 1, 1 << 17, (1 << 17) + 1, 1_000_000] {
            assert_eq!(zstd::decode_all(&zeros(len)[..]).unwrap(), vec![0; len as usize]);
        }
    }
}
