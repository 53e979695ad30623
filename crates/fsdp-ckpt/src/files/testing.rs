//! An in-memory file system for tests that fails, fills up and loses power.
//!
//! It separates what a crash may lose from what it must keep. A file consists of its durable bytes and the changes
//! since it was last synced; a directory of its durable names and the changes since. Programs see both. After a crash
//! ([`FaultyFiles::restart`]), any subset of the changes may have survived, in any order, and a write only in part:
//! POSIX promises no more. Only a rename survives or is lost as a whole.
//!
//! Symbolic links, permissions and moves between directories are not modeled.

mod chance;

use std::{
    collections::BTreeMap,
    ffi::{OsStr, OsString},
    io,
    path::{Component, Path},
    sync::{Arc, Mutex, MutexGuard},
};

use chance::Chance;

use super::{Access, FileKind, FileSystem, Metadata, OpenFile};

/// Maximum bytes of one write. Longer writes are split, and any part may be the last one.
const WRITE_BYTES_MAX: usize = 400;

const ROOT: usize = 0;

/// The fault to inject. Operations are counted from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    None,
    /// Only the operation with this number fails.
    FailAt(u64),
    /// The operation with this number succeeds but reports a failure, like a lost reply.
    LieAt(u64),
    /// The power fails during this operation; all later operations fail.
    CrashAt(u64),
    /// The total capacity of all files, in bytes.
    FullAt(usize),
    /// Locks are not supported, as on NFS without a lock service.
    NoLocks,
}

/// The non-durable changes that survive a crash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Survival {
    Nothing,
    Everything,
    NamesOnly,
    DataOnly,
    /// Only the last change of each file and directory, without the previous ones.
    LastOnly,
    /// A pseudo-random choice with this seed, in which writes may be torn.
    Chance(u64),
}

/// A file system; clones share its state.
#[derive(Clone, Debug)]
pub(crate) struct FaultyFiles(Arc<Mutex<State>>);

#[derive(Clone, Debug)]
struct State {
    nodes: Vec<Node>,
    fault: Fault,
    operations: u64,
    is_off: bool,
}

#[derive(Clone, Debug)]
enum Node {
    File { now: Vec<u8>, durable: Vec<u8>, changes: Vec<DataChange>, is_locked: bool },
    Directory { now: BTreeMap<OsString, usize>, durable: BTreeMap<OsString, usize>, changes: Vec<NameChange> },
}

#[derive(Clone, Debug)]
enum DataChange {
    Write(usize, Vec<u8>),
    Length(usize),
}

#[derive(Clone, Debug)]
enum NameChange {
    Add(OsString, usize),
    Remove(OsString),
    Rename(OsString, OsString, usize),
}

#[derive(Debug)]
struct FaultyFile {
    files: FaultyFiles,
    node: usize,
    holds_lock: Mutex<bool>,
}

impl FaultyFiles {
    /// An empty file system.
    pub(crate) fn new() -> FaultyFiles {
        let (now, durable, changes) = (BTreeMap::new(), BTreeMap::new(), Vec::new());
        let nodes = vec![Node::Directory { now, durable, changes }];
        FaultyFiles::of(State { nodes, fault: Fault::None, operations: 0, is_off: false })
    }

    /// A copy of the file system with a fault to inject.
    pub(crate) fn with(&self, fault: Fault) -> FaultyFiles {
        FaultyFiles::of(State { fault, operations: 0, is_off: false, ..self.state().clone() })
    }

    /// Number of operations since the fault was set.
    pub(crate) fn operations(&self) -> u64 {
        self.state().operations
    }

    /// Total bytes of all files that have a name.
    pub(crate) fn bytes(&self) -> usize {
        self.state().bytes()
    }

    /// The file system as a restart finds it if the power fails now.
    pub(crate) fn restart(&self, survival: Survival) -> FaultyFiles {
        let state = self.state().clone();
        let mut chance = Chance(match survival {
            Survival::Chance(seed) => seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1,
            _ => 1,
        });
        let nodes = state.nodes.into_iter().map(|node| node.survive(survival, &mut chance)).collect();
        FaultyFiles::of(State { nodes, fault: Fault::None, operations: 0, is_off: false })
    }

    fn of(state: State) -> FaultyFiles {
        FaultyFiles(Arc::new(Mutex::new(state)))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().expect("no test panics inside of the file system")
    }

    /// Counts an operation and runs it, unless it is to fail. If the power fails during the operation, it may still
    /// have happened, completely or in part.
    fn operate<T>(&self, run: impl FnOnce(&mut State, Extent) -> io::Result<T>) -> io::Result<T> {
        let mut state = self.state();
        let number = state.operations;
        state.operations += 1;
        if state.is_off {
            return Err(io::Error::other("the power is off"));
        }
        match state.fault {
            Fault::FailAt(at) if at == number => Err(io::Error::other("this operation was made to fail")),
            Fault::LieAt(at) if at == number => {
                let _ = run(&mut state, Extent::Whole);
                Err(io::Error::other("this operation was made to fail"))
            }
            Fault::CrashAt(at) if at == number => {
                let _ = run(&mut state, Extent::Torn);
                state.is_off = true;
                Err(io::Error::other("the power went"))
            }
            _ => run(&mut state, Extent::Whole),
        }
    }
}

/// Whether an operation happens completely or in part.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Extent {
    Whole,
    Torn,
}

impl Node {
    fn survive(self, survival: Survival, chance: &mut Chance) -> Node {
        let mut choose = |index: usize, count: usize, is_name: bool| match survival {
            Survival::Nothing => false,
            Survival::Everything => true,
            Survival::NamesOnly => is_name,
            Survival::DataOnly => !is_name,
            Survival::LastOnly => index + 1 == count,
            Survival::Chance(_) => chance.next() >> 20 & 1 == 0,
        };
        match self {
            Node::File { mut durable, changes, .. } => {
                let count = changes.len();
                for (index, change) in changes.into_iter().enumerate() {
                    if choose(index, count, false) {
                        let torn = matches!(survival, Survival::Chance(seed) if (seed + index as u64).is_multiple_of(3));
                        change.apply(&mut durable, torn);
                    }
                }
                Node::File { now: durable.clone(), durable, changes: Vec::new(), is_locked: false }
            }
            Node::Directory { mut durable, changes, .. } => {
                let count = changes.len();
                for (index, change) in changes.into_iter().enumerate() {
                    if choose(index, count, true) {
                        change.apply(&mut durable);
                    }
                }
                Node::Directory { now: durable.clone(), durable, changes: Vec::new() }
            }
        }
    }
}

impl DataChange {
    fn apply(self, bytes: &mut Vec<u8>, torn: bool) {
        match self {
            DataChange::Write(offset, mut written) => {
                if torn {
                    written.truncate(written.len() / 2);
                }
                bytes.resize(bytes.len().max(offset + written.len()), 0);
                bytes[offset..offset + written.len()].copy_from_slice(&written);
            }
            DataChange::Length(len) => bytes.resize(len, 0),
        }
    }
}

impl NameChange {
    fn apply(self, names: &mut BTreeMap<OsString, usize>) {
        match self {
            NameChange::Add(name, node) => drop(names.insert(name, node)),
            NameChange::Remove(name) => drop(names.remove(&name)),
            NameChange::Rename(from, to, node) => {
                names.remove(&from);
                names.insert(to, node);
            }
        }
    }
}

impl State {
    fn bytes(&self) -> usize {
        let mut dirs = vec![ROOT];
        let mut sum = 0;
        while let Some(dir) = dirs.pop() {
            match &self.nodes[dir] {
                Node::Directory { now, .. } => dirs.extend(now.values()),
                Node::File { now, .. } => sum += now.len(),
            }
        }
        sum
    }

    fn find(&self, path: &Path) -> io::Result<usize> {
        let names = path.components().filter_map(|component| match component {
            Component::Normal(name) => Some(name),
            _ => None,
        });
        names.into_iter().try_fold(ROOT, |node, name| match &self.nodes[node] {
            Node::Directory { now, .. } => now.get(name).copied().ok_or(io::ErrorKind::NotFound.into()),
            Node::File { .. } => Err(io::ErrorKind::NotADirectory.into()),
        })
    }

    fn parent<'a>(&self, path: &'a Path) -> io::Result<(usize, &'a OsStr)> {
        let name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?;
        Ok((self.find(path.parent().unwrap_or(Path::new("/")))?, name))
    }

    fn names(&mut self, dir: usize) -> io::Result<(&mut BTreeMap<OsString, usize>, &mut Vec<NameChange>)> {
        match &mut self.nodes[dir] {
            Node::Directory { now, changes, .. } => Ok((now, changes)),
            Node::File { .. } => Err(io::ErrorKind::NotADirectory.into()),
        }
    }

    fn change_name(&mut self, dir: usize, change: NameChange) -> io::Result<()> {
        let (now, changes) = self.names(dir)?;
        change.clone().apply(now);
        changes.push(change);
        Ok(())
    }

    fn add(&mut self, path: &Path, node: Node) -> io::Result<usize> {
        if let Fault::FullAt(bytes) = self.fault
            && self.bytes() >= bytes
        {
            return Err(io::ErrorKind::StorageFull.into());
        }
        let (dir, name) = self.parent(path)?;
        self.nodes.push(node);
        let added = self.nodes.len() - 1;
        self.change_name(dir, NameChange::Add(name.to_owned(), added))?;
        Ok(added)
    }

    fn remove(&mut self, path: &Path, kind: FileKind) -> io::Result<()> {
        let node = self.find(path)?;
        match &self.nodes[node] {
            Node::Directory { now, .. } if kind == FileKind::Directory && !now.is_empty() => {
                return Err(io::ErrorKind::DirectoryNotEmpty.into());
            }
            Node::File { .. } if kind == FileKind::Directory => {
                return Err(io::ErrorKind::NotADirectory.into());
            }
            Node::Directory { .. } if kind == FileKind::File => {
                return Err(io::ErrorKind::IsADirectory.into());
            }
            _ => {}
        }
        let (dir, name) = self.parent(path)?;
        self.change_name(dir, NameChange::Remove(name.to_owned()))
    }

    fn describe(&self, node: usize) -> Metadata {
        let (kind, len) = match &self.nodes[node] {
            Node::File { now, .. } => (FileKind::File, now.len() as u64),
            Node::Directory { .. } => (FileKind::Directory, 0),
        };
        Metadata { kind, len, id: (0, node as u64) }
    }

    fn change_data(&mut self, node: usize, change: DataChange) {
        let Node::File { now, changes, .. } = &mut self.nodes[node] else { panic!("a file is open") };
        change.clone().apply(now, false);
        changes.push(change);
    }
}

impl FileSystem for FaultyFiles {
    fn renames(&self) -> bool {
        true
    }

    fn open(&self, path: &Path, access: Access) -> io::Result<Box<dyn OpenFile>> {
        let node = self.operate(|state, _| match (state.find(path), access) {
            (Ok(_), Access::CreateNew) => Err(io::ErrorKind::AlreadyExists.into()),
            (Ok(node), _) => Ok(node),
            (Err(cause), Access::CreateNew | Access::CreateOrWrite)
                if cause.kind() == io::ErrorKind::NotFound =>
            {
                let (now, durable, changes) = (Vec::new(), Vec::new(), Vec::new());
                state.add(path, Node::File { now, durable, changes, is_locked: false })
            }
            (Err(cause), _) => Err(cause),
        })?;
        Ok(Box::new(FaultyFile { files: self.clone(), node, holds_lock: Mutex::new(false) }))
    }

    fn metadata(&self, path: &Path) -> io::Result<Metadata> {
        self.operate(|state, _| Ok(state.describe(state.find(path)?)))
    }

    fn link_metadata(&self, path: &Path) -> io::Result<Metadata> {
        self.metadata(path)
    }

    fn list(&self, dir: &Path) -> io::Result<Vec<OsString>> {
        self.operate(|state, _| {
            let dir = state.find(dir)?;
            Ok(state.names(dir)?.0.keys().cloned().collect())
        })
    }

    fn create_directory(&self, dir: &Path) -> io::Result<()> {
        self.operate(|state, _| {
            if state.find(dir).is_ok() {
                return Err(io::ErrorKind::AlreadyExists.into());
            }
            let (now, durable, changes) = (BTreeMap::new(), BTreeMap::new(), Vec::new());
            state.add(dir, Node::Directory { now, durable, changes }).map(drop)
        })
    }

    fn sync_directory(&self, dir: &Path) -> io::Result<()> {
        self.operate(|state, extent| {
            let dir = state.find(dir)?;
            match &mut state.nodes[dir] {
                Node::Directory { now, durable, changes } if extent == Extent::Whole => {
                    durable.clone_from(now);
                    changes.clear();
                    Ok(())
                }
                Node::Directory { .. } => Ok(()),
                Node::File { .. } => Err(io::ErrorKind::NotADirectory.into()),
            }
        })
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.operate(|state, _| {
            let node = state.find(from)?;
            let ((dir, from), (to_dir, to)) = (state.parent(from)?, state.parent(to)?);
            assert_eq!(dir, to_dir, "renames stay in their directory");
            state.change_name(dir, NameChange::Rename(from.to_owned(), to.to_owned(), node))
        })
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        self.operate(|state, _| state.remove(path, FileKind::File))
    }

    fn remove_directory(&self, dir: &Path) -> io::Result<()> {
        self.operate(|state, _| state.remove(dir, FileKind::Directory))
    }

    fn free_bytes(&self, _dir: &Path) -> io::Result<u64> {
        self.operate(|state, _| match state.fault {
            Fault::FullAt(bytes) => Ok(bytes.saturating_sub(state.bytes()) as u64),
            _ => Ok(u64::MAX),
        })
    }
}

impl OpenFile for FaultyFile {
    fn read_at(&self, out: &mut [u8], offset: u64) -> io::Result<usize> {
        self.files.operate(|state, _| {
            let Node::File { now, .. } = &state.nodes[self.node] else {
                return Err(io::ErrorKind::IsADirectory.into());
            };
            let rest = now.get(offset as usize..).unwrap_or(&[]);
            let count = rest.len().min(out.len());
            out[..count].copy_from_slice(&rest[..count]);
            Ok(count)
        })
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<usize> {
        self.files.operate(|state, extent| {
            let mut count = bytes.len().min(WRITE_BYTES_MAX);
            if let Fault::FullAt(full) = state.fault {
                count = count.min(full.saturating_sub(state.bytes()));
                if count == 0 {
                    return Err(io::ErrorKind::StorageFull.into());
                }
            }
            if extent == Extent::Torn {
                count /= 2;
            }
            state.change_data(self.node, DataChange::Write(offset as usize, bytes[..count].to_vec()));
            Ok(count)
        })
    }

    fn allocate(&self, len: u64) -> io::Result<bool> {
        self.files.operate(|state, _| {
            let Node::File { now, .. } = &state.nodes[self.node] else { panic!("a file is open") };
            let grows = (len as usize).saturating_sub(now.len());
            if let Fault::FullAt(full) = state.fault
                && state.bytes() + grows > full
            {
                return Err(io::ErrorKind::StorageFull.into());
            }
            if grows > 0 {
                state.change_data(self.node, DataChange::Length(len as usize));
            }
            Ok(true)
        })
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.files.operate(|state, _| {
            state.change_data(self.node, DataChange::Length(len as usize));
            Ok(())
        })
    }

    fn metadata(&self) -> io::Result<Metadata> {
        self.files.operate(|state, _| Ok(state.describe(self.node)))
    }

    fn sync(&self) -> io::Result<()> {
        self.files.operate(|state, extent| {
            if let (Node::File { now, durable, changes, .. }, Extent::Whole) =
                (&mut state.nodes[self.node], extent)
            {
                durable.clone_from(now);
                changes.clear();
            }
            Ok(())
        })
    }

    fn try_lock(&self) -> io::Result<bool> {
        self.files.operate(|state, _| {
            let Node::File { is_locked, .. } = &mut state.nodes[self.node] else {
                return Err(io::ErrorKind::IsADirectory.into());
            };
            if state.fault == Fault::NoLocks {
                return Err(io::ErrorKind::Unsupported.into());
            }
            let is_free = !*is_locked;
            *is_locked = true;
            *self.holds_lock.lock().expect("no test panics while locking") |= is_free;
            Ok(is_free)
        })
    }
}

impl Drop for FaultyFile {
    fn drop(&mut self) {
        let holds_lock = *self.holds_lock.lock().expect("no test panics while locking");
        if let (true, Node::File { is_locked, .. }) = (holds_lock, &mut self.files.state().nodes[self.node]) {
            *is_locked = false;
        }
    }
}
