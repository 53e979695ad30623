use super::*;
use crate::metrics::sink::figures;
use crate::metrics::tests::metrics;

/// Returns all files of a folder, in the order in which they are read.
fn files(out_dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(out_dir.join(TENSORBOARD)).unwrap();
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

/// Returns the steps of all files.
fn steps(out_dir: &Path) -> Vec<u64> {
    let bytes = files(out_dir).into_iter().map(|file| fs::read(file).unwrap());
    let of_file =
        |bytes: Vec<u8>| events(&bytes).filter(|event| event.has_summary).map(|event| event.step).collect();
    bytes.flat_map(|bytes| -> Vec<u64> { of_file(bytes) }).collect()
}

fn write(out_dir: &Path, from: u64, steps: std::ops::RangeInclusive<u64>) {
    cut(out_dir, from).unwrap();
    let mut file = EventFile::begin(out_dir, from).unwrap();
    steps.for_each(|step| file.step(step, &figures(&metrics(step, None))).unwrap());
}

#[test]
fn masked_crc_matches_tensorboard() {
    // CRC-32C of 32 zero bytes is 0x8a9136aa (RFC 3720, appendix B.4); `masked_crc32c` of tensorboard 2.21 turns it
    // into this.
    assert_eq!(masked_crc(&[0; 32]), 0x0fd7_fffa_u32.to_le_bytes());
}

#[test]
fn event_bytes_match_tensorboard_serialization() {
    let mut event = Message::default();
    event.double(1, 1.5);
    event.number(2, 300);
    event.message(5, |summary| {
        summary.message(1, |value| {
            value.bytes(1, b"a/b");
            value.float(2, 0.5);
        });
    });
    // The output of `Event.SerializeToString` of tensorboard 2.21.
    let expected = b"\x09\0\0\0\0\0\0\xf8\x3f\x10\xac\x02\x2a\x0c\x0a\x0a\x0a\x03a/b\x15\0\0\0\x3f";
    assert_eq!(event.0, expected);
}

#[test]
fn resume_cuts_later_steps_in_all_files_and_adds_new_one() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), 0, 1..=4);
    write(dir.path(), 2, 3..=6);
    assert_eq!(steps(dir.path()), (1..=6).collect::<Vec<_>>());
    assert_eq!(files(dir.path()).len(), 2);
    write(dir.path(), 1, 2..=2);
    assert_eq!(steps(dir.path()), [1, 2], "a file without steps is gone");
    assert_eq!(files(dir.path()).len(), 2);
    write(dir.path(), 0, 1..=1);
    assert_eq!(steps(dir.path()), [1]);
}

#[test]
fn damaged_record_is_cut_with_everything_after_it() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), 0, 1..=4);
    let file = files(dir.path()).remove(0);
    let whole = fs::read(&file).unwrap();
    let ends: Vec<usize> = events(&whole).map(|event| event.end).collect();
    // The first two records are the version and the start.
    for at in [ends[3], ends[3] + 9, ends[3] + 20, ends[4] - 1] {
        let mut damaged = whole.clone();
        damaged[at] ^= 0x40;
        fs::write(&file, damaged).unwrap();
        cut(dir.path(), 9).unwrap();
        assert_eq!(fs::read(&file).unwrap(), whole[..ends[3]], "{at}");
    }
    fs::write(&file, &whole[..whole.len() - 1]).unwrap();
    cut(dir.path(), 9).unwrap();
    assert_eq!(steps(dir.path()), [1, 2, 3]);
    fs::write(&file, b"something else").unwrap();
    cut(dir.path(), 9).unwrap();
    assert_eq!(files(dir.path()), [] as [PathBuf; 0]);
}

#[test]
fn cut_without_event_files_is_noop() {
    let dir = tempfile::tempdir().unwrap();
    cut(dir.path(), 3).unwrap();
    fs::create_dir(dir.path().join(TENSORBOARD)).unwrap();
    fs::write(dir.path().join(TENSORBOARD).join("notes.txt"), "keep").unwrap();
    cut(dir.path(), 0).unwrap();
    assert_eq!(files(dir.path()).len(), 1);
}
