//! Many files with few handles: a checkpoint of thousands of ranks has more files than a process may open.

use std::{
    collections::VecDeque,
    path::PathBuf,
    sync::{Arc, Mutex},
};

use crate::{
    error::Error,
    file_io::{Files, PathFile},
    files::Access,
    lock::lock,
};

/// Maximum number of open handles per set of files.
const OPEN_MAX: usize = 64;

/// Files by number, opened on demand; the most recently used ones stay open.
#[derive(Debug)]
pub(super) struct OpenFiles {
    files: Files,
    paths: Vec<PathBuf>,
    /// [`Access::Read`] or [`Access::Write`].
    access: Access,
    /// Handles with the numbers of their files, the most recently used last.
    open: Mutex<VecDeque<(usize, Arc<PathFile>)>>,
}

impl OpenFiles {
    pub(super) fn new(files: Files, paths: Vec<PathBuf>, access: Access) -> OpenFiles {
        OpenFiles { files, paths, access, open: Mutex::new(VecDeque::new()) }
    }

    /// Returns the file of this number. It stays open at least as long as the caller holds it.
    pub(super) fn get(&self, file: usize) -> Result<Arc<PathFile>, Error> {
        let mut open = lock(&self.open);
        if let Some(position) = open.iter().rposition(|(number, _)| *number == file) {
            let found = open.remove(position).expect("the position was just found");
            let handle = found.1.clone();
            open.push_back(found);
            return Ok(handle);
        }
        let path = &self.paths[file];
        let handle = match self.access {
            Access::Read => self.files.open(path)?.0,
            _ => self.files.open_for_writing(path)?,
        };
        let handle = Arc::new(handle);
        if open.len() == OPEN_MAX {
            open.pop_front();
        }
        open.push_back((file, handle.clone()));
        Ok(handle)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn open_handles_stay_within_limit() {
        let dir = tempfile::tempdir().unwrap();
        let paths: Vec<PathBuf> = (0..OPEN_MAX * 3).map(|n| dir.path().join(n.to_string())).collect();
        for (number, path) in paths.iter().enumerate() {
            std::fs::write(path, [number as u8]).unwrap();
        }
        let files = OpenFiles::new(Files::anywhere(), paths, Access::Read);
        for round in 0..3 {
            for number in 0..OPEN_MAX * 3 {
                let number = (number * 7 + round) % (OPEN_MAX * 3);
                let mut byte = [0];
                files.get(number).unwrap().read_exact_at(&mut byte, 0).unwrap();
                assert_eq!(byte[0], number as u8);
                assert!(files.open.lock().unwrap().len() <= OPEN_MAX);
            }
        }
    }
}
