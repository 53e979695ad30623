use std::fs;

use proptest::prelude::*;

use super::*;

/// What is read is compared with these: all ids in a vector.
fn plain(bytes: &[u8], width: Width) -> Vec<u32> {
    let id = |bytes: &[u8]| bytes.iter().rev().fold(0, |id, &byte| id << 8 | u32::from(byte));
    bytes.chunks_exact(width.bytes()).map(id).collect()
}

fn noise(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|index| (index * index / 7) as u8 ^ (index >> 9) as u8 ^ seed).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Lengths around the one from which files are mapped, and around blocks of a scan.
    #[test]
    fn tokens_of_a_file_are_those_of_a_plain_reader(
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
        prop_assert_eq!(scan.has_silent, expected.iter().any(|word| word & mark != 0));
    }

    #[test]
    fn the_digest_of_bytes_is_that_of_one_pass(len in 0..3 * BLOCK_BYTES, seed: u8) {
        let bytes = noise(len, seed);
        prop_assert_eq!(Bytes::digest(&bytes), DigestKind::Crc64.of(&bytes));
    }
}

#[test]
fn what_is_behind_the_ids_is_no_id() {
    let tokens = Tokens::new(Bytes::Owned(vec![1, 0, 2, 0, 9, 9, 9, 9]), Width::U16, 2);
    assert_eq!(tokens.scan().id_max, Some(2));
    assert_eq!((tokens.len(), tokens.bytes().len()), (2, 8));
}
