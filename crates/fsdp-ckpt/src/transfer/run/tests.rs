//! Transfers of random checkpoints match a slow oracle for any window, and leave nothing behind when they fail.

use std::{
    collections::BTreeMap,
    ffi::OsString,
    fs, io,
    num::NonZero,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use proptest::prelude::*;

use super::*;
use crate::{
    digest::DigestKind,
    file_io::Files,
    files::{Access, FileSystem, Metadata, OpenFile, disk::Disk},
    random_checkpoint::{RandomCheckpoint, Seeded},
    safetensors::TensorType,
    transfer::{NoProgress, OutputKind, PlannedRun, Progress, Tail},
};

const FLOATS: [TensorType; 4] = [TensorType::F64, TensorType::F32, TensorType::Bf16, TensorType::F16];

/// A plan over all tensors, and the expected bytes of its files.
struct Expected {
    files: Vec<PlannedFile>,
    bytes: Vec<Vec<u8>>,
}

/// Places runs of all tensors in random files, with gaps, literals, conversions and digests.
fn random_plan(random: &mut Seeded, source: &RandomCheckpoint) -> Expected {
    let mut files: Vec<PlannedFile> = (0..1 + random.below(3))
        .map(|file| PlannedFile { name: format!("out-{file}"), ..PlannedFile::default() })
        .collect();
    let mut bytes = vec![Vec::new(); files.len()];
    for (name, tensor) in &source.checkpoint.tensors {
        let mut first = 0;
        let all = tensor.len();
        loop {
            let count = if random.below(3) == 0 { random.below(all - first + 1) } else { all - first };
            let dtype = if tensor.dtype.is_convertible() && random.below(3) == 0 {
                FLOATS[random.below(4) as usize]
            } else {
                tensor.dtype
            };
            let file = random.below(files.len() as u64) as usize;
            if random.below(3) == 0 {
                let literal: Vec<u8> = (0..random.below(9)).map(|_| random.below(256) as u8).collect();
                files[file].literals.push((bytes[file].len() as u64, literal.clone()));
                bytes[file].extend(literal);
                bytes[file].extend([0; 3]);
            }
            let digest = [None, Some(DigestKind::Crc32), Some(DigestKind::Crc64)][random.below(3) as usize];
            let elements = first..first + count;
            let offset = bytes[file].len() as u64;
            bytes[file].extend(source.oracle(name, elements.clone(), dtype));
            files[file].places.push(PlannedRun { offset, tensor: name.clone(), elements, dtype, digest });
            first += count;
            if first == all {
                break;
            }
        }
    }
    for (file, bytes) in files.iter_mut().zip(&bytes) {
        file.len = bytes.len() as u64;
    }
    Expected { files, bytes }
}

/// Returns the digests that a plan requests, computed over the expected bytes of its places.
fn expected_digests(expected: &Expected) -> Vec<Vec<Option<Digest>>> {
    let of_file = |(file, bytes): (&PlannedFile, &Vec<u8>)| {
        let of_place = |place: &PlannedRun| {
            let start = place.offset as usize;
            let len = (place.elements.end - place.elements.start) as usize * place.dtype.size_bytes();
            place.digest.map(|kind| kind.of(&bytes[start..start + len]))
        };
        file.places.iter().map(of_place).collect()
    };
    expected.files.iter().zip(&expected.bytes).map(of_file).collect()
}

fn options<'a>(
    window_bytes: usize,
    threads: usize,
    progress: &'a dyn Progress,
    cancel: &'a AtomicBool,
) -> Options<'a> {
    let threads = NonZero::new(threads).unwrap();
    Options { window_bytes, threads, sync: false, progress, cancel }
}

fn plan_of(expected: &Expected) -> OutputPlan {
    OutputPlan { files: expected.files.clone(), tail: Box::new(|_| Ok(Tail::default())) }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(192))]

    #[test]
    fn transfer_output_matches_oracle(
        seed in any::<u64>(), window in prop_oneof![Just(0_usize), 200..2000_usize, Just(1 << 20)], threads in 1..4_usize,
    ) {
        let dir = tempfile::tempdir().unwrap();
        let mut random = Seeded(seed);
        let source = RandomCheckpoint::write(&mut random, dir.path());
        source.checkpoint.check_coverage().unwrap();
        let expected = random_plan(&mut random, &source);
        let digests = expected_digests(&expected);
        let tail = move |got: &[Vec<Option<Digest>>]| {
            assert_eq!(got, digests);
            Ok(Tail { patches: vec![(0, 0, Vec::new())], files: vec![("last".to_owned(), b"end".to_vec())] })
        };
        let plan = OutputPlan { files: expected.files.clone(), tail: Box::new(tail) };
        let out = dir.path().join("out");
        let staged = Staged::new(&out, OutputKind::Directory).unwrap();
        let cancel = AtomicBool::new(false);
        let counted = Counted::default();
        let moved = run(&source.checkpoint, plan, staged, &options(window, threads, &counted, &cancel)).unwrap();
        for (file, bytes) in expected.files.iter().zip(&expected.bytes) {
            prop_assert_eq!(&fs::read(out.join(&file.name)).unwrap(), bytes, "{}", file.name);
        }
        prop_assert_eq!(fs::read(out.join("last")).unwrap(), b"end");
        prop_assert_eq!(counted.total.load(Ordering::Relaxed), moved.data_bytes);
        prop_assert_eq!(counted.done.load(Ordering::Relaxed), moved.data_bytes);
    }

    #[test]
    fn canceled_transfer_leaves_no_files(seed in any::<u64>(), after in 0..20_u64) {
        let dir = tempfile::tempdir().unwrap();
        let mut random = Seeded(seed);
        let source = RandomCheckpoint::write(&mut random, &dir.path().join("source"));
        let expected = random_plan(&mut random, &source);
        let cancel = Arc::new(AtomicBool::new(false));
        let stopper = Stopper { left: AtomicU64::new(after), cancel: cancel.clone() };
        let out = dir.path().join("out");
        let staged = Staged::new(&out, OutputKind::Directory).unwrap();
        let result = run(&source.checkpoint, plan_of(&expected), staged, &options(300, 2, &stopper, &cancel));
        let names = names(dir.path());
        match result {
            Ok(_) => prop_assert_eq!(names, ["out", "source"]),
            Err(error) => {
                prop_assert!(matches!(error, Error::Canceled), "{}", error);
                prop_assert_eq!(names, ["source"]);
            }
        }
    }

    #[test]
    fn truncated_source_is_named_and_leaves_no_files(seed in any::<u64>()) {
        let dir = tempfile::tempdir().unwrap();
        let mut random = Seeded(seed);
        let source = RandomCheckpoint::write(&mut random, &dir.path().join("source"));
        let expected = random_plan(&mut random, &source);
        let victim = source.checkpoint.sources[random.below(source.checkpoint.sources.len() as u64) as usize].path();
        let is_used = fs::metadata(victim).unwrap().len() > 0;
        fs::write(victim, b"").unwrap();
        let staged = Staged::new(&dir.path().join("out"), OutputKind::Directory).unwrap();
        let cancel = AtomicBool::new(false);
        let result = run(&source.checkpoint, plan_of(&expected), staged, &options(300, 2, &NoProgress, &cancel));
        match result {
            Ok(_) => prop_assert!(!is_used || !source.is_needed(victim)),
            Err(error) => {
                prop_assert!(error.to_string().contains(&victim.display().to_string()), "{}", error);
                prop_assert_eq!(names(dir.path()), ["source"]);
            }
        }
    }
}

/// Adds up the reported progress.
#[derive(Default)]
struct Counted {
    total: AtomicU64,
    done: AtomicU64,
}

impl Progress for Counted {
    fn begin(&self, total_bytes: u64) {
        self.total.store(total_bytes, Ordering::Relaxed);
    }

    fn advance(&self, bytes: u64) {
        self.done.fetch_add(bytes, Ordering::Relaxed);
    }
}

/// Cancels at the n-th piece.
struct Stopper {
    left: AtomicU64,
    cancel: Arc<AtomicBool>,
}

impl Progress for Stopper {
    fn begin(&self, _: u64) {}

    fn advance(&self, _: u64) {
        if self.left.fetch_sub(1, Ordering::Relaxed) == 0 {
            self.cancel.store(true, Ordering::Relaxed);
        }
    }
}

fn names(dir: &Path) -> Vec<String> {
    crate::file_io::Files::anywhere().list(dir).unwrap()
}

/// A checkpoint of one flat byte tensor in one file, protected as a whole.
fn small(dir: &Path, bytes: &[u8]) -> RandomCheckpoint {
    RandomCheckpoint::flat(dir, &BTreeMap::from([("w".to_owned(), (TensorType::U8, bytes.to_vec()))]))
}

fn whole(source: &RandomCheckpoint) -> Expected {
    let len = source.checkpoint.tensors["w"].len();
    let place =
        PlannedRun { offset: 0, tensor: "w".into(), elements: 0..len, dtype: TensorType::U8, digest: None };
    let file = PlannedFile { name: "x".into(), len, places: vec![place], ..PlannedFile::default() };
    Expected { files: vec![file], bytes: Vec::new() }
}

#[test]
fn checksum_mismatch_is_detected_while_copying() {
    let dir = tempfile::tempdir().unwrap();
    let source = small(&dir.path().join("source"), &[7; 5000]);
    let path = source.checkpoint.sources[0].path().clone();
    let mut bytes = fs::read(&path).unwrap();
    bytes[4321] ^= 1;
    fs::write(&path, bytes).unwrap();
    let staged = Staged::new(&dir.path().join("out"), OutputKind::File).unwrap();
    let cancel = AtomicBool::new(false);
    let error =
        run(&source.checkpoint, plan_of(&whole(&source)), staged, &options(3000, 2, &NoProgress, &cancel));
    let error = error.unwrap_err().to_string();
    assert!(error.contains("are damaged") && error.contains("tensor `w`"), "{error}");
    assert_eq!(names(dir.path()), ["source"]);
}

#[test]
fn single_file_transfer_counts_matching_checksums() {
    let dir = tempfile::tempdir().unwrap();
    let source = small(&dir.path().join("source"), &[7; 5000]);
    let staged = Staged::new(&dir.path().join("out"), OutputKind::File).unwrap();
    let cancel = AtomicBool::new(false);
    let options = Options { sync: true, ..options(3000, 2, &NoProgress, &cancel) };
    let moved = run(&source.checkpoint, plan_of(&whole(&source)), staged, &options).unwrap();
    assert_eq!(moved, Moved { data_bytes: 5000, files: 1, checked: 1 });
    assert_eq!(fs::read(dir.path().join("out")).unwrap(), [7; 5000]);
}

#[test]
fn unconvertible_dtype_is_rejected_before_writing() {
    let dir = tempfile::tempdir().unwrap();
    let source = small(&dir.path().join("source"), &[7; 50]);
    let mut expected = whole(&source);
    expected.files[0].places[0].dtype = TensorType::F16;
    let staged = Staged::new(&dir.path().join("out"), OutputKind::File).unwrap();
    let cancel = AtomicBool::new(false);
    let counted = Counted::default();
    let result = run(&source.checkpoint, plan_of(&expected), staged, &options(300, 1, &counted, &cancel));
    assert!(matches!(result, Err(Error::BadRequest { .. })));
    assert_eq!(counted.total.load(Ordering::Relaxed), 0);
    assert_eq!(names(dir.path()), ["source"]);
}

/// A disk on which one operation fails.
#[derive(Debug)]
struct FailingDisk {
    disk: Disk,
    left: Arc<AtomicU64>,
}

#[derive(Debug)]
struct FailingFile {
    file: Box<dyn OpenFile>,
    left: Arc<AtomicU64>,
}

/// Counts down; the operation at zero fails with a full disk.
fn count(left: &AtomicU64) -> io::Result<()> {
    if left.fetch_sub(1, Ordering::Relaxed) == 0 { Err(io::ErrorKind::StorageFull.into()) } else { Ok(()) }
}

impl FileSystem for FailingDisk {
    fn renames(&self) -> bool {
        Disk.renames()
    }

    fn open(&self, path: &Path, access: Access) -> io::Result<Box<dyn OpenFile>> {
        count(&self.left)?;
        let file = self.disk.open(path, access)?;
        Ok(Box::new(FailingFile { file, left: self.left.clone() }))
    }

    fn metadata(&self, path: &Path) -> io::Result<Metadata> {
        self.disk.metadata(path)
    }

    fn link_metadata(&self, path: &Path) -> io::Result<Metadata> {
        self.disk.link_metadata(path)
    }

    fn list(&self, dir: &Path) -> io::Result<Vec<OsString>> {
        count(&self.left).and_then(|()| self.disk.list(dir))
    }

    fn create_directory(&self, dir: &Path) -> io::Result<()> {
        count(&self.left).and_then(|()| self.disk.create_directory(dir))
    }

    fn sync_directory(&self, dir: &Path) -> io::Result<()> {
        count(&self.left).and_then(|()| self.disk.sync_directory(dir))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        count(&self.left).and_then(|()| self.disk.rename(from, to))
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        self.disk.remove_file(path)
    }

    fn remove_directory(&self, dir: &Path) -> io::Result<()> {
        self.disk.remove_directory(dir)
    }

    fn free_bytes(&self, dir: &Path) -> io::Result<u64> {
        self.disk.free_bytes(dir)
    }
}

impl OpenFile for FailingFile {
    fn read_at(&self, out: &mut [u8], offset: u64) -> io::Result<usize> {
        count(&self.left).and_then(|()| self.file.read_at(out, offset))
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<usize> {
        count(&self.left).and_then(|()| self.file.write_at(bytes, offset))
    }

    fn allocate(&self, len: u64) -> io::Result<bool> {
        count(&self.left).and_then(|()| self.file.allocate(len))
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        count(&self.left).and_then(|()| self.file.set_len(len))
    }

    fn metadata(&self) -> io::Result<Metadata> {
        self.file.metadata()
    }

    fn sync(&self) -> io::Result<()> {
        count(&self.left).and_then(|()| self.file.sync())
    }

    fn try_lock(&self) -> io::Result<bool> {
        self.file.try_lock()
    }
}

#[test]
fn any_failed_operation_leaves_complete_output_or_none() {
    for seed in [1, 2, 3, 4, 5] {
        let (mut failures, mut operation) = (0, 0);
        loop {
            let dir = tempfile::tempdir().unwrap();
            let mut random = Seeded(seed);
            let source = RandomCheckpoint::write(&mut random, &dir.path().join("source"));
            let expected = random_plan(&mut random, &source);
            let left = Arc::new(AtomicU64::new(operation));
            let files = Files::of(Arc::new(FailingDisk { disk: Disk, left: left.clone() }));
            let out = dir.path().join("out");
            let cancel = AtomicBool::new(false);
            let options = Options { sync: true, ..options(2000, 2, &NoProgress, &cancel) };
            let result = Staged::on(files, &out, OutputKind::Directory)
                .and_then(|staged| run(&source.checkpoint, plan_of(&expected), staged, &options));
            if out.exists() {
                // Only the very last step, making the name durable, can fail after that.
                for (file, bytes) in expected.files.iter().zip(&expected.bytes) {
                    assert_eq!(&fs::read(out.join(&file.name)).unwrap(), bytes);
                }
                assert_eq!(names(dir.path()), ["out", "source"]);
            } else {
                assert!(result.is_err());
                assert_eq!(names(dir.path()), ["source"], "after operation {operation}");
            }
            failures += u64::from(result.is_err());
            // Failing to lock a directory is harmless, so a failed operation need not fail the transfer.
            if result.is_ok() && left.load(Ordering::Relaxed) < u64::MAX / 2 {
                break;
            }
            operation += 1;
        }
        assert!(failures > 8, "{failures} operations failed");
    }
}
