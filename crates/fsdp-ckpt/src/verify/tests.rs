//! Finds every damage that a checksum covers, and counts the bytes without one.

use std::{fs, path::Path, sync::atomic::AtomicBool};

use proptest::prelude::*;

use super::*;
use crate::{
    random_checkpoint::{RandomCheckpoint, Seeded},
    transfer::NoProgress,
};

fn verified(checkpoint: &Checkpoint, cancel: &AtomicBool) -> Result<Verification, Error> {
    let options = Options { window_bytes: 2000, ..Options::new(&NoProgress, cancel) };
    verify(checkpoint, &options)
}

fn sound(checkpoint: &Checkpoint) -> Verification {
    verified(checkpoint, &AtomicBool::new(false)).unwrap()
}

proptest! {
    #[test]
    fn gaps_are_maximal_runs_of_uncovered_bytes(
        covered in prop::collection::vec((0u64..40, 0u64..9), 0..8),
        len in 0u64..50,
    ) {
        let covered: Vec<_> = covered.iter().map(|(start, len)| *start..start + len).collect();
        let found = gaps(covered.clone(), len);
        let bytes: Vec<u64> = found.iter().cloned().flatten().collect();
        let expected: Vec<u64> = (0..len).filter(|byte| !covered.iter().any(|one| one.contains(byte))).collect();
        prop_assert_eq!(bytes, expected);
        prop_assert!(found.windows(2).all(|two| two[0].end < two[1].start), "{:?}", found);
    }

    #[test]
    fn random_checkpoints_are_sound_with_every_checksum_compared(seed in any::<u64>()) {
        let dir = tempfile::tempdir().unwrap();
        let made = RandomCheckpoint::write(&mut Seeded(seed), dir.path());
        let found = sound(&made.checkpoint);
        prop_assert!(found.is_sound(), "{:?}", found.problems);
        prop_assert_eq!(found.checksums, made.checkpoint.protections.len());
    }

    #[test]
    fn bit_flip_under_checksum_is_detected_and_named(seed in any::<u64>()) {
        let dir = tempfile::tempdir().unwrap();
        let mut random = Seeded(seed);
        let made = RandomCheckpoint::write(&mut random, dir.path());
        let checkpoint = &made.checkpoint;
        let plain = |source: usize| matches!(checkpoint.sources[source], Source::File { .. });
        let Some(protection) =
            checkpoint.protections.iter().find(|one| plain(one.source) && !one.range.is_empty())
        else {
            return Ok(());
        };
        let path = checkpoint.sources[protection.source].path();
        let mut bytes = fs::read(path).unwrap();
        let at = protection.range.start + random.below(protection.range.end - protection.range.start);
        bytes[at as usize] ^= 1 << random.below(8);
        fs::write(path, bytes).unwrap();
        let found = sound(checkpoint);
        prop_assert_eq!(found.problems.len(), 1);
        prop_assert!(found.problems[0].to_string().contains(&path.display().to_string()));
    }
}

#[test]
fn bytes_without_checksum_are_counted() {
    let dir = tempfile::tempdir().unwrap();
    let tensors = [("a", 100), ("b", 28)]
        .map(|(name, len)| (name.to_owned(), (crate::safetensors::TensorType::U8, vec![3; len])));
    let mut made = RandomCheckpoint::flat(dir.path(), &tensors.into());
    assert_eq!(sound(&made.checkpoint).unprotected_bytes(), 0);
    made.checkpoint.protections.remove(0);
    let found = sound(&made.checkpoint);
    let path = dir.path().join("data");
    let [file] = &found.unprotected[..] else { panic!("{:?}", found.unprotected) };
    assert_eq!((&file.path, file.ranges.len(), &file.ranges[0]), (&path, 1, &(0..100)));
    assert_eq!(found.unprotected_bytes(), 100);
    assert_eq!((found.read_bytes, found.checksums), (128, 1));
}

#[test]
fn missing_file_and_missing_chunk_are_both_reported() {
    let dir = tempfile::tempdir().unwrap();
    let tensors = [("a".to_owned(), (crate::safetensors::TensorType::U8, vec![3; 9]))];
    let mut made = RandomCheckpoint::flat(dir.path(), &tensors.into());
    made.checkpoint.tensors.get_mut("a").unwrap().shape = vec![10];
    fs::remove_file(dir.path().join("data")).unwrap();
    let problems = sound(&made.checkpoint).problems;
    assert!(matches!(problems[..], [Error::NotWhole { .. }, Error::Io { .. }]), "{problems:?}");
}

#[test]
fn verification_can_be_canceled() {
    let dir = tempfile::tempdir().unwrap();
    let made = RandomCheckpoint::write(&mut Seeded(1), dir.path());
    let result = verified(&made.checkpoint, &AtomicBool::new(true));
    assert!(matches!(result, Err(Error::Canceled)));
}

#[test]
fn verify_all_covers_files_next_to_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let fixture = |name: &str| Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name);
    let all = |dir: &Path| {
        let checkpoint = crate::formats::open(dir).unwrap();
        verify_all(&checkpoint, &Options::new(&NoProgress, &AtomicBool::new(false))).unwrap()
    };
    let put = |from: &str, to: &str| {
        let to = dir.path().join(to);
        fs::create_dir_all(to.parent().unwrap()).unwrap();
        fs::copy(fixture(from), to).unwrap();
    };
    put("full.safetensors", "model.safetensors");
    put("full.pth", "older/inside/full.pth");
    fs::write(dir.path().join("notes.txt"), "words").unwrap();
    fs::create_dir(dir.path().join(".git")).unwrap();
    let found = all(dir.path());
    assert!(found.is_sound(), "{:?}", found.problems);
    let beside: Vec<_> = found.beside.iter().map(|one| &one.path).collect();
    assert_eq!(beside, [&dir.path().join("older/inside")]);
    let unread: Vec<_> = found.unread.iter().map(|one| (one.path.file_name().unwrap(), one.reason)).collect();
    assert_eq!(
        unread,
        [(".git".as_ref(), "it is hidden"), ("notes.txt".as_ref(), "it is not a file of tensors")]
    );
    // A file that should contain tensors but does not is a problem, and so is damage anywhere.
    fs::write(dir.path().join("b.pt"), "words").unwrap();
    assert!(all(dir.path()).problems[0].to_string().contains("b.pt"));
    fs::remove_file(dir.path().join("b.pt")).unwrap();
    let path = dir.path().join("older/inside/full.pth");
    let mut bytes = fs::read(&path).unwrap();
    let middle = bytes.len() / 2;
    bytes.truncate(middle);
    fs::write(&path, bytes).unwrap();
    assert!(!all(dir.path()).is_sound());
}
