//! The preamble of every message, from which the receiver identifies the message before it takes the data.

use fsdp_comm::Header;

/// The header, then the length of the data, little-endian.
pub(crate) type Preamble = [u8; PREAMBLE];
/// Length of a preamble in bytes.
pub(crate) const PREAMBLE: usize = size_of::<Header>() + 8;

/// Returns the preamble of data of this length.
pub(crate) fn preamble(header: &Header, len_bytes: u64) -> Preamble {
    let mut preamble = [0; PREAMBLE];
    preamble[..size_of::<Header>()].copy_from_slice(header);
    preamble[size_of::<Header>()..].copy_from_slice(&len_bytes.to_le_bytes());
    preamble
}

/// Splits a preamble into header and length.
pub(crate) fn split(preamble: &Preamble) -> (Header, u64) {
    let (header, len) = preamble.split_first_chunk().expect("a preamble begins with a header");
    (*header, u64::from_le_bytes(len.try_into().expect("eight bytes follow")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn preamble_round_trips() {
        let header: Header = std::array::from_fn(|place| place as u8);
        for len in [0, 1, u64::MAX] {
            assert_eq!(split(&preamble(&header, len)), (header, len));
        }
    }
}
