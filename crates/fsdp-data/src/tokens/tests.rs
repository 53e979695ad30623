use std::fs;

use proptest::prelude::*;

use super::*;

/// Reference implementation: reads all ids into a vector.
fn plain(bytes: &[u8], width: Width) -> Vec<u32> {
    let id = |bytes: &[u8]| bytes.iter().rev().fold(0, |id, &byte| id << 8 | u32::from(byte));
    bytes.chunks_exact(width.bytes()).map(id).collect()
}

fn noise(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|index| (index * index / 7) as u8 ^ (index >> 9) as u8 ^ seed).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Tests lengths around the minimum for mapping, and around the blocks of a scan.
    #[test]
    fn file_tokens_match_plain_reader(
        around in prop::sample::select(vec![0, MAPPED_BYTES_MIN as usize, BLOCK_BYTES, 3 * BLOCK_BYTES]),
        more in -3isize..=3, width in prop::sample::select(vec![Width::U16, Width::U32, Width::Marked]), seed: u8,
    ) {
        let len_bytes = around.saturating_add_signed(more * width.bytes() as isize);
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.bin");
        let written = noise(len_bytes, seed);
        fs::write(&path, &written).unwrap();

        let bytes = Bytes::open(&path).unwrap();
        prop_assert_eq!(matches!(bytes, Bytes::Mapped(_)), len_bytes as u64 >= MAPPED_BYTES_MIN);
        let tokens = Tokens::new(bytes, width, len_bytes / width.bytes());
        let expected = plain(&written, width);
        let mark = if width == Width::Marked { 1 << 31 } else { 0 };
        let token = |word: &u32| Token { id: word & !mark, counts: word & mark == 0 };
        prop_assert!((0..tokens.len()).map(|index| tokens.token(index)).eq(expected.iter().map(token)));

        let as_bytes: Vec<u8> = expected.iter().flat_map(|id| id.to_le_bytes()).collect();
        let scan = tokens.scan();
        prop_assert_eq!(scan.digest, DigestKind::Crc64.of(&as_bytes));
        prop_assert_eq!(scan.id_max, expected.iter().map(|word| word & !mark).max());
        prop_assert_eq!(scan.has_ignored, expected.iter().any(|word| word & mark != 0));
    }

    #[test]
    fn digest_of_bytes_matches_single_pass(len in 0..3 * BLOCK_BYTES, seed: u8) {
        let bytes = noise(len, seed);
        prop_assert_eq!(Bytes::digest(&bytes), DigestKind::Crc64.of(&bytes));
    }
}

#[test]
fn bytes_after_last_id_are_not_ids() {
    let tokens = Tokens::new(Bytes::Owned(vec![1, 0, 2, 0, 9, 9, 9, 9]), Width::U16, 2);
    assert_eq!(tokens.scan().id_max, Some(2));
    assert_eq!((tokens.len(), tokens.bytes().len()), (2, 8));
}

/// Creates files with these numbers of ids; id `index` of a file is `index * 7 % 40_000`.
fn files(lens: &[usize]) -> Vec<Tokens> {
    let file = |&len: &usize| {
        let ids = (0..len).flat_map(|index| ((index * 7 % 40_000) as u16).to_le_bytes());
        Tokens::new(Bytes::Owned(ids.collect()), Width::U16, len)
    };
    lens.iter().map(file).collect()
}

#[test]
fn sampled_scan_covers_every_block_and_file_length() {
    let ids_of_block = BLOCK_BYTES / 2;
    let lens = [40 * ids_of_block + 5, 3, ids_of_block - 1];
    let scan = |files: &[Tokens]| Scan::of_files(files.iter(), 1 << 20);
    let base = scan(&files(&lens));
    let whole = files(&lens).iter().map(Tokens::scan).fold(Scan::empty(), Scan::then);
    assert_eq!(Scan::of_files(files(&lens).iter(), usize::MAX), whole);
    assert_ne!(base.digest, whole.digest, "samples are not the whole");

    let changed = |file: usize, index: usize| {
        let mut files = files(&lens);
        let Bytes::Owned(bytes) = &mut files[file].bytes else { panic!("in memory") };
        bytes[2 * index + 1] = 0xff;
        scan(&files)
    };
    // There are few blocks, and the start of each is sampled.
    for (file, index) in
        [(0, 0), (0, 17 * ids_of_block + SAMPLE_BYTES / 2 - 1), (0, lens[0] - 1), (1, 2), (2, 0)]
    {
        let other = changed(file, index);
        assert_ne!(other.digest, base.digest, "id {index} of file {file}");
        assert!(other.id_max >= Some(0xff00), "id {index} of file {file}");
    }
    assert_eq!(changed(0, SAMPLE_BYTES / 2), base, "between samples");
    // One id moves from a file to the next.
    assert_ne!(scan(&files(&[lens[0] - 1, 4, lens[2]])).digest, base.digest);
}

#[test]
fn sample_count_is_bounded_for_huge_files() {
    // Holes in a file are read as zeros, and take no space.
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("long.bin");
    for len_bytes in [3 << 30, (1 << 34) + 2] {
        fs::File::create(&path).unwrap().set_len(len_bytes).unwrap();
        let tokens = Tokens::new(Bytes::open(&path).unwrap(), Width::U16, len_bytes as usize / 2);
        let scan = Scan::of_files([&tokens].into_iter(), FULL_SCAN_BYTES_MAX);
        // Each id becomes four bytes. The last block may be short.
        let samples = (scan.len_bytes - 8).div_ceil(2 * SAMPLE_BYTES as u64) as usize;
        assert!((SAMPLES_MIN..2 * SAMPLES_MIN).contains(&samples), "{samples}");
    }
}
