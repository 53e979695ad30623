//! Reads a native checkpoint: metadata is checked strictly on opening, data is read later by rows and fully verified.

mod rows;

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Range,
    path::{Path, PathBuf},
    sync::Arc,
};

use super::{
    MANIFEST_FILE, Manifest, ManifestFile, ManifestShard, ManifestTensor, attempt::plain_name,
    seal::SEALED_LEN_MAX,
};
use crate::{
    differences::Differences,
    digest::{Digest, DigestKind},
    error::{Error, Fault},
    file_io::{Files, PathFile},
    safetensors::{HEADER_LEN_MAX, Header, TensorSpec, malformed},
};

/// Maximum number of files kept open; further files are opened for each read.
const OPEN_FILES_MAX: usize = 256;

/// An open native checkpoint. Reads are positioned, so any number of threads can share one reader.
#[derive(Debug)]
pub struct NativeReader {
    dir: PathBuf,
    files: Files,
    manifest: Manifest,
    manifest_digest: (u64, Digest),
    open: Vec<Option<Arc<PathFile>>>,
    /// Byte offset of each shard's rows, by file.
    offsets: Vec<Vec<u64>>,
    /// The locations of each tensor's rows, in row order.
    places: BTreeMap<String, Vec<RowLocation>>,
}

/// Location of some rows of a tensor.
#[derive(Debug)]
struct RowLocation {
    /// Index in [`Manifest::files`].
    file: usize,
    /// Index in [`ManifestFile::shards`].
    shard: usize,
}

impl NativeReader {
    /// Opens the directory of a checkpoint. The manifest, the lengths of all files and their headers are checked
    /// against each other; tensors are read and verified later, by rows.
    ///
    /// # Errors
    /// [`Error::Malformed`] with the file, the tensor, and the rows or bytes that are missing, stored twice, changed,
    /// or of another dtype or shape; [`Error::Unsupported`] for a later version of the format; [`Error::Io`].
    /// [`Error::Several`] if more than one file is missing or damaged.
    pub fn open(dir: impl Into<PathBuf>) -> Result<NativeReader, Error> {
        NativeReader::open_on(Files::anywhere(), dir.into())
    }

    pub(super) fn open_on(files: Files, dir: PathBuf) -> Result<NativeReader, Error> {
        let path = dir.join(MANIFEST_FILE);
        let text = files.read_small(&path, SEALED_LEN_MAX)?;
        let too_long = || format!("it has more than {SEALED_LEN_MAX} bytes, the limit for such a file");
        let text = text.ok_or_else(|| Error::malformed(&path, too_long()))?;
        let manifest_digest = (text.len() as u64, DigestKind::Crc64.of(&text));
        let manifest = Manifest::parse(text).map_err(|fault| fault.in_file(&path))?;
        let mut problems = foreign_files(&files, &dir, &manifest)?;
        let (mut open, mut offsets) = (Vec::new(), Vec::new());
        let mut places = BTreeMap::<String, Vec<RowLocation>>::new();
        for (index, listed) in manifest.files.iter().enumerate() {
            let (file, header) = match check_file(&files, &dir, &manifest, listed) {
                Ok(found) => found,
                Err(problem) => {
                    problems.push(problem);
                    continue;
                }
            };
            for (shard, part) in listed.shards.iter().enumerate() {
                places.entry(part.tensor.clone()).or_default().push(RowLocation { file: index, shard });
            }
            let offset = |part: &ManifestShard| {
                let entry = header.entry(&part.tensor).expect("the header was held against the manifest");
                header.data_start() + entry.data_range().start
            };
            offsets.push(listed.shards.iter().map(offset).collect());
            open.push((index < OPEN_FILES_MAX).then(|| Arc::new(file)));
        }
        Error::all_of(problems)?;
        for tensor in places.values_mut() {
            tensor.sort_by_key(|place| manifest.files[place.file].shards[place.shard].rows.start);
        }
        Ok(NativeReader { dir, files, manifest, manifest_digest, open, offsets, places })
    }

    /// The directory that was opened.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The content of the checkpoint, with the state of the run.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Length in bytes and digest of the manifest file.
    pub(crate) fn manifest_digest(&self) -> (u64, Digest) {
        self.manifest_digest
    }

    /// Byte offset of a shard's rows in its file.
    pub(crate) fn offset(&self, file: usize, shard: usize) -> u64 {
        self.offsets[file][shard]
    }

    /// Returns the description of a whole tensor.
    ///
    /// # Errors
    /// [`Error::BadRequest`].
    pub fn tensor(&self, name: &str) -> Result<&ManifestTensor, Error> {
        let tensors = &self.manifest.tensors;
        tensors.get(name).ok_or_else(|| Error::unknown_tensor(&self.dir, name, tensors.len()))
    }

    /// Checks that the checkpoint has exactly the expected tensors, by name, shape and dtype.
    ///
    /// # Errors
    /// [`Error::NamesDiffer`] with *all* tensors that are missing, unexpected, or of another shape or dtype.
    pub fn check_tensors<'a>(&self, expected: impl IntoIterator<Item = &'a TensorSpec>) -> Result<(), Error> {
        let (mut differences, mut seen) = (Differences::default(), BTreeSet::new());
        for spec in expected {
            seen.insert(spec.name.as_str());
            let found = self.manifest.tensors.get(&spec.name);
            differences.expect(&spec.name, &spec.shape, found.map(|tensor| &tensor.shape[..]));
            if let Some(got) = found.map(|tensor| tensor.dtype).filter(|got| *got != spec.dtype) {
                differences.wrong_dtype(&spec.name, spec.dtype, got);
            }
        }
        let extra = self.manifest.tensors.keys().filter(|name| !seen.contains(name.as_str()));
        differences.extra = extra.cloned().collect();
        differences.into_result(&self.dir)
    }

    fn file(&self, index: usize) -> Result<Arc<PathFile>, Error> {
        match &self.open[index] {
            Some(file) => Ok(file.clone()),
            None => Ok(Arc::new(self.files.open(&self.dir.join(&self.manifest.files[index].name))?.0)),
        }
    }
}

/// Reports unlisted safetensors files, because other readers take every such file in the directory for part of the
/// checkpoint. Files of other attempts are in other directories.
fn foreign_files(files: &Files, dir: &Path, manifest: &Manifest) -> Result<Vec<Error>, Error> {
    let listed: BTreeSet<&str> = manifest.files.iter().map(|file| plain_name(&file.name)).collect();
    let is_foreign = |name: &String| name.ends_with(".safetensors") && !listed.contains(name.as_str());
    let first = manifest.files.first().map_or("", |file| &file.name);
    let dir = dir.join(first.strip_suffix(plain_name(first)).unwrap_or(""));
    let foreign = files.list(&dir)?.into_iter().filter(is_foreign);
    let reason = "it is not listed in the manifest, but other programs would read it as a part; move it away";
    Ok(foreign.map(|name| Error::malformed(dir.join(name), reason)).collect())
}

/// Checks a file's length and header against the manifest.
fn check_file(
    files: &Files,
    dir: &Path,
    manifest: &Manifest,
    listed: &ManifestFile,
) -> Result<(PathFile, Header), Error> {
    let path = dir.join(&listed.name);
    let file = files.open(&path)?;
    // Both limits are applied before the allocation.
    let prefix_len = listed.data_start.min(listed.len).min(HEADER_LEN_MAX + 8);
    let prefix = read_header(&file, listed.len, prefix_len, listed.header)?;
    let malformed = |fault| malformed(&path, fault);
    let len = Header::parse_length(&prefix, listed.len).map_err(malformed)?;
    let text = prefix.get(8..).filter(|text| text.len() as u64 == len).ok_or_else(|| {
        let (expected, got) = (listed.data_start, len.saturating_add(8));
        let reason = format!("its data begins at byte {got}, but the manifest says {expected}");
        Error::malformed(&path, reason)
    })?;
    let header = Header::parse(text, listed.len).map_err(malformed)?;
    compare(manifest, listed, &header).map_err(|fault| fault.in_file(&path))?;
    Ok((file.0, header))
}

/// Checks that a file contains exactly the tensors that the manifest places in it.
fn compare(manifest: &Manifest, listed: &ManifestFile, header: &Header) -> Result<(), Fault> {
    let mut placed = BTreeSet::new();
    for shard in &listed.shards {
        let TensorSpec { name, dtype, shape } = shard.spec(&manifest.tensors[&shard.tensor]);
        let Some(entry) = header.entry(&name) else {
            let Range { start, end } = shard.rows;
            let rows = format!("rows {start}..{end} of tensor `{name}`");
            return Err(Fault::new(format!("the manifest places {rows} in it, but it has no such tensor")));
        };
        if (entry.dtype(), entry.shape()) != (dtype, &shape[..]) {
            let got = format!("{} {:?}", entry.dtype(), entry.shape());
            let reason = format!("tensor `{name}` is {got} in it, but the manifest says {dtype} {shape:?}");
            return Err(Fault::new(reason));
        }
        placed.insert(name);
    }
    match header.entries().iter().find(|entry| !placed.contains(entry.name())) {
        Some(entry) => {
            let name = entry.name();
            Err(Fault::new(format!("it holds tensor `{name}`, which the manifest does not place in it")))
        }
        None => Ok(()),
    }
}

/// Returns the first bytes of a file, if its length and their digest match the manifest.
pub(super) fn read_header(
    (file, got): &(PathFile, u64),
    len: u64,
    prefix_len: u64,
    header: Digest,
) -> Result<Vec<u8>, Error> {
    if *got != len {
        let reason = format!("it has {got} bytes, but the manifest says {len}; it was cut off or replaced");
        return Err(Error::malformed(file.path(), reason));
    }
    let prefix = file.read_first(prefix_len)?;
    let got = header.kind.of(&prefix);
    if got != header {
        let reason =
            format!("its header (bytes 0..{prefix_len}) gives {got}, but the manifest says {header}");
        return Err(Error::malformed(file.path(), reason));
    }
    Ok(prefix)
}
