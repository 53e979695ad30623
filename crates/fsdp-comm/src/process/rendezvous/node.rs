//! Lets the first process of a node tell the others there why it ends, if it ends before the rendezvous.
//!
//! It writes a file for each of them into the folder of the launch, which only this user can read; the reader removes
//! it.

use std::fs;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use super::{Method, Rendezvous, RendezvousError, common_name, write_private};
use crate::process::place::ProcessPlace;

/// Pause between two polls.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// An older file was left by an earlier start.
const FRESH: Duration = Duration::from_secs(10);

/// The common folder of the processes of one launch on one node.
pub struct NodeFolder {
    rendezvous: Rendezvous,
    place: ProcessPlace,
}

impl NodeFolder {
    /// The folder of this process; `variable` looks up an environment variable, `launcher` is the
    /// [process](crate::process::ancestor) that has started the processes of this node.
    pub fn of(place: ProcessPlace, variable: &dyn Fn(&str) -> Option<String>, launcher: u32) -> Self {
        let folder = match variable("FSDP_RENDEZVOUS_DIR") {
            Some(folder) => PathBuf::from(folder),
            None => std::env::temp_dir().join(common_name(place.launched_by, variable, launcher)),
        };
        Self { rendezvous: Rendezvous { method: Method::File, folder, is_private: true }, place }
    }

    /// Leaves a text for each other process on this node, and waits until they have read it, because launchers kill
    /// them once this process has ended. Texts that are not read within `limit` are removed.
    ///
    /// # Errors
    /// [`RendezvousError::Io`], [`RendezvousError::NotPrivate`].
    pub fn tell(&self, text: &str, limit: Duration) -> Result<(), RendezvousError> {
        let others = 1..self.place.local_processes;
        if others.is_empty() {
            return Ok(());
        }
        self.rendezvous.make_folder()?;
        others.clone().try_for_each(|process| write_private(&self.file(process), text.as_bytes()))?;
        let begin = Instant::now();
        while begin.elapsed() < limit && others.clone().any(|process| self.file(process).exists()) {
            thread::sleep(POLL_INTERVAL);
        }
        others.for_each(|process| drop(fs::remove_file(self.file(process))));
        drop(fs::remove_dir(&self.rendezvous.folder));
        Ok(())
    }

    /// Returns the text left by the first process of this node, or `None` if there is none within `limit`.
    pub fn hear(&self, limit: Duration) -> Option<String> {
        let (file, begin) = (self.file(self.place.local_process), Instant::now());
        loop {
            let is_fresh = |found: fs::Metadata| {
                found.modified().is_ok_and(|then| then.elapsed().is_ok_and(|age| age < FRESH))
            };
            if fs::symlink_metadata(&file).is_ok_and(is_fresh) && self.rendezvous.check_private().is_ok() {
                let text = fs::read_to_string(&file).ok();
                drop(fs::remove_file(&file));
                return text;
            }
            if begin.elapsed() >= limit {
                return None;
            }
            thread::sleep(POLL_INTERVAL);
        }
    }

    fn file(&self, process: usize) -> PathBuf {
        self.rendezvous.folder.join(format!("told-{process}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::place::LaunchedBy;

    #[test]
    fn node_message_reaches_peers_and_folder_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("launch");
        let variable =
            |name: &str| (name == "FSDP_RENDEZVOUS_DIR").then(|| folder.to_str().unwrap().to_owned());
        let at = &|local_process| {
            let place = ProcessPlace {
                launched_by: LaunchedBy::Srun,
                process: 4 + local_process,
                processes: 8,
                local_process,
                local_processes: 3,
            };
            NodeFolder::of(place, &variable, 1)
        };
        let limit = Duration::from_secs(60);
        assert_eq!(at(1).hear(Duration::ZERO), None);
        thread::scope(|scope| {
            let others = [1, 2].map(|process| scope.spawn(move || at(process).hear(limit)));
            at(0).tell("no file", limit).unwrap();
            for other in others {
                assert_eq!(other.join().unwrap().as_deref(), Some("no file"));
            }
        });
        assert!(!folder.exists());
        at(0).tell("nobody hears it", Duration::ZERO).unwrap();
        assert!(!folder.exists());
    }
}
