//! Other files in the directory of a checkpoint, so that a verdict on the directory covers all of it.
//!
//! Each file below the directory is either read with the checkpoint, a checkpoint of its own, or not read, with the
//! reason.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
};

use super::{
    contents::{self, FileKind},
    dcp, detect, megatron, megatron_ranks, orbax,
    trainer_folder::TRAINER_STATE,
};
use crate::{
    checkpoint::Checkpoint,
    error::Error,
    file_io::{Files, directory_of},
    model_files::INDEX_FILE,
    native::MANIFEST_FILE,
};

/// Maximum depth of the search.
const DEPTH_MAX: usize = 4;

/// Maximum number of files and directories that are examined.
const SEARCHED_MAX: usize = 20_000;

/// Endings of files that hold nothing but checkpoints.
const SURE_ENDINGS: [&str; 4] = [".safetensors", ".pt", ".pth", ".ckpt"];

/// Files that are read to open the checkpoint and hold no tensors.
const OPENING: [&str; 6] = [
    dcp::METADATA_FILE,
    INDEX_FILE,
    contents::TORCH_INDEX,
    MANIFEST_FILE,
    TRAINER_STATE,
    megatron::KIND_FILE,
];

/// A file or directory that is not read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unread {
    /// The path of the file or directory.
    pub path: PathBuf,
    /// The reason, in words that complete "it is not read: ..".
    pub reason: &'static str,
}

/// The other contents of a checkpoint's directory.
#[derive(Debug, Default)]
pub struct OtherContents {
    /// Checkpoints of their own.
    pub checkpoints: Vec<Checkpoint>,
    /// Files and directories that are not checkpoints, or that were not searched.
    pub unread: Vec<Unread>,
    /// Errors for files that should be checkpoints but cannot be opened.
    pub problems: Vec<Error>,
}

/// Examines everything in the directory of a checkpoint that is not read with it. Finds nothing if the checkpoint is a
/// single file.
pub fn beside(checkpoint: &Checkpoint) -> OtherContents {
    let mut search = Search { found: OtherContents::default(), read: BTreeSet::new(), searched: 0 };
    search.add_read(checkpoint);
    if Files::anywhere().is_directory(&checkpoint.path) {
        search.directory(&checkpoint.path, DEPTH_MAX);
    }
    search.found
}

struct Search {
    found: OtherContents,
    read: BTreeSet<PathBuf>,
    searched: usize,
}

impl Search {
    fn add_read(&mut self, checkpoint: &Checkpoint) {
        self.read.extend(checkpoint.sources.iter().map(|source| source.path().clone()));
    }

    fn directory(&mut self, dir: &Path, depth: usize) {
        let names = match Files::anywhere().list(dir) {
            Ok(names) => names,
            Err(error) => return self.found.problems.push(error),
        };
        let lacks_metadata = dcp::lacks_metadata(dir, &names);
        if lacks_metadata {
            self.found.problems.push(dcp::no_metadata(dir));
        }
        for name in names {
            if lacks_metadata && name.ends_with(dcp::ITEMS_ENDING) {
                continue;
            }
            let path = dir.join(&name);
            self.searched += 1;
            if depth == 0 || self.searched > SEARCHED_MAX {
                return self.unread(dir.to_owned(), "it has too much content to search; name it");
            }
            if Files::anywhere().is_directory(&path) {
                self.inner_directory(&path, &name, depth - 1);
            } else if !self.read.contains(&path) {
                self.file(path, &name);
            }
        }
    }

    fn inner_directory(&mut self, path: &Path, name: &str, depth: usize) {
        if name.starts_with('.') {
            return self.unread(path.to_owned(), "it is hidden");
        }
        let is_read = self.read.iter().any(|read| read.starts_with(path));
        if !is_read && name.starts_with(orbax::PROCESS) {
            return self.unread(path.to_owned(), "the store around it has all that this process wrote");
        }
        if !is_read && contents::holds_checkpoint(path) {
            match detect::open(path) {
                Ok(checkpoint) => self.add(checkpoint),
                Err(error) => self.found.problems.push(error),
            }
        }
        self.directory(path, depth);
    }

    fn add(&mut self, checkpoint: Checkpoint) {
        self.add_read(&checkpoint);
        self.found.checkpoints.push(checkpoint);
    }

    fn unread(&mut self, path: PathBuf, reason: &'static str) {
        self.found.unread.push(Unread { path, reason });
    }

    fn file(&mut self, path: PathBuf, name: &str) {
        let is_rank_metadata = name.starts_with("__") && name.ends_with(".metadata");
        let opens_one_here = self.read.iter().any(|read| directory_of(read) == directory_of(&path));
        let is_latest =
            name == "latest" && self.read.iter().any(|read| read.starts_with(directory_of(&path)));
        if is_latest || ((OPENING.contains(&name) || is_rank_metadata) && opens_one_here) {
            return;
        }
        if name.ends_with(dcp::ITEMS_ENDING) {
            return self.unread(path, "the metadata of the checkpoint does not list it");
        }
        if name.starts_with('.') {
            return self.unread(path, "it is hidden");
        }
        if name == megatron_ranks::BUFFERS_FILE && opens_one_here {
            return self.unread(path, "the buffers of Megatron's distributed optimizer are not read");
        }
        let is_sure = SURE_ENDINGS.iter().any(|ending| name.ends_with(ending));
        let kind = contents::kind_at(&path);
        match kind {
            Ok(FileKind::Zip | FileKind::Safetensors | FileKind::Legacy) => {}
            Ok(_) if !is_sure => return self.unread(path, "it is not a file of tensors"),
            Ok(_) => {}
            Err(error) => return self.found.problems.push(error),
        }
        match detect::open(&path) {
            Ok(checkpoint) => self.add(checkpoint),
            // Other programs write zip archives too.
            Err(Error::Malformed { .. }) if !is_sure && !name.ends_with(".bin") => {
                self.unread(path, "it is an archive of another kind");
            }
            Err(error) => self.found.problems.push(error),
        }
    }
}
