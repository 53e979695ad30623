//! Entry points of the fuzz targets in `fuzz/`: private parsers on bytes in memory.
//!
//! Each returns if the bytes are refused, and panics if the result violates an invariant of its parser.

use std::path::Path;

use crate::{
    bytes::{Memory, Section},
    digest::DigestKind,
    formats::orbax,
    native::Manifest,
    pickle::{self, Budget},
    torch,
    zip::Archive,
};

/// Parses a pickle and expands its value.
pub fn pickle(bytes: &[u8]) {
    if let Ok(graph) = pickle::parse(bytes) {
        // The parser may refuse to expand a value that is too large.
        let _ = graph.value(graph.root(), &mut Budget::default());
    }
}

/// Reads an archive, both as a whole and as the beginning of a file, together with the content that `torch.save` would
/// have put into it.
pub fn zip(bytes: &[u8]) {
    let (memory, len) = (Memory(bytes.to_vec()), bytes.len() as u64);
    let section = Section::new(&memory, 0..len, Path::new("fuzzed"), "");
    if let Ok(archive) = Archive::open(section) {
        let mut records: Vec<_> = archive.records().values().map(|record| record.data.clone()).collect();
        records.sort_by_key(|data| (data.start, data.end));
        assert!(records.iter().all(|data| data.end <= len), "records lie inside");
        assert!(records.windows(2).all(|two| two[0].end <= two[1].start), "records do not overlap");
    }
    let _ = torch::open(section);
    let _ = torch::open_beginning(section, len);
}

/// Reads the metadata of an Orbax checkpoint: the tree, an array, or the decoded body of a manifest or node of OCDBT.
pub fn orbax(bytes: &[u8]) {
    orbax::parse_all(bytes);
}

/// Reads a manifest: the bytes as they are, and with a corrected digest, which lets the parser get further.
pub fn manifest(bytes: &[u8]) {
    // The parser may refuse the bytes.
    let _ = Manifest::parse(bytes.to_vec());
    let _ = manifest_with_digest(bytes);
}

/// Parses a manifest after replacing its digest, which may be absent or wrong. `None` if it is invalid otherwise.
fn manifest_with_digest(bytes: &[u8]) -> Option<Manifest> {
    let text = std::str::from_utf8(bytes).ok()?;
    let end = text.rfind(",\"digest\":").or_else(|| text.rfind('}'))?;
    let body = &text[..end];
    let sealed = format!("{body},\"digest\":\"{}\"}}\n", DigestKind::Crc64.of(body.as_bytes()));
    let manifest = Manifest::parse(sealed.into_bytes()).ok()?;
    // Readers accept slightly deeper nesting than the writer produces, so writing may fail.
    if let Ok(written) = manifest.to_bytes() {
        let again = Manifest::parse(written.clone()).expect("what is written can be read");
        assert_eq!(again.to_bytes().as_ref(), Ok(&written), "writing is stable");
    }
    Some(manifest)
}

#[cfg(test)]
mod tests {
    use std::{fs, path::PathBuf};

    use proptest::prelude::*;

    use super::*;

    /// The seeds of a fuzz target.
    fn seeds(target: &str) -> Vec<Vec<u8>> {
        let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/seeds").join(target);
        let files = fs::read_dir(folder).unwrap();
        files.map(|file| fs::read(file.unwrap().path()).unwrap()).collect()
    }

    #[test]
    fn pickle_and_zip_seeds_parse() {
        let (pickles, archives) = (seeds("pickle"), seeds("zip"));
        assert!(pickles.len() > 3 && archives.len() > 3);
        for bytes in pickles {
            pickle::parse(&bytes).unwrap();
            pickle(&bytes);
        }
        for bytes in archives {
            zip(&bytes);
            let (len, memory) = (bytes.len() as u64, Memory(bytes));
            let section = Section::new(&memory, 0..len, Path::new("seed"), "");
            let whole = torch::open(section).unwrap();
            assert_eq!(Archive::open(section).unwrap(), whole.archive);
            // A whole file is also the beginning of a file; it leaves no storage open.
            assert_eq!(torch::open_beginning(section, len).unwrap().root, whole.root);
        }
    }

    #[test]
    fn orbax_seeds_parse() {
        let seeds = seeds("orbax");
        assert!(seeds.len() > 4);
        seeds.iter().for_each(|bytes| assert_eq!(orbax::parse_all(bytes), 1));
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

        #[test]
        fn changed_orbax_seeds_are_refused_or_read(
            seed in any::<prop::sample::Index>(),
            changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
            end in any::<prop::sample::Index>(),
        ) {
            let mut seeds = seeds("orbax");
            let mut bytes = seeds.swap_remove(seed.index(seeds.len()));
            let len = bytes.len();
            changes.iter().for_each(|(at, byte)| bytes[at.index(len)] = *byte);
            super::orbax(&bytes);
            super::orbax(&bytes[..end.index(len)]);
        }
    }

    #[test]
    fn manifest_seeds_parse() {
        let seeds = seeds("manifest");
        assert!(seeds.len() > 2);
        for bytes in seeds {
            Manifest::parse(bytes.clone()).unwrap();
            manifest(&bytes);
            assert!(manifest_with_digest(&bytes).is_some());
        }
    }
}
