//! Entry points of the fuzz targets in `fuzz/`: parsers that are not public, on bytes in memory.
//!
//! Each returns when the bytes are refused, and panics when what was read breaks a promise of its parser.

use std::path::Path;

use crate::{
    bytes::{Memory, Section},
    pickle::{self, Budget},
    torch,
    zip::Archive,
};

/// Parses a pickle and writes its value out.
pub fn pickle(bytes: &[u8]) {
    if let Ok(graph) = pickle::parse(bytes) {
        // Too large to be written out is a fine answer.
        let _ = graph.value(graph.root(), &mut Budget::default());
    }
}

/// Reads an archive, and what `torch.save` would have put into it, as a whole and as a beginning.
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

#[cfg(test)]
mod tests {
    use std::{fs, path::PathBuf};

    use super::*;

    /// The contents of the seeds of a target.
    fn seeds(target: &str) -> Vec<Vec<u8>> {
        let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/seeds").join(target);
        let files = fs::read_dir(folder).unwrap();
        files.map(|file| fs::read(file.unwrap().path()).unwrap()).collect()
    }

    #[test]
    fn seeds_get_past_the_first_checks() {
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
            // A whole file is a beginning too, and no storage needs to stay open.
            assert_eq!(torch::open_beginning(section, len).unwrap().root, whole.root);
        }
    }
}
