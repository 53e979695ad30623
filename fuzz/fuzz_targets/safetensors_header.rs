//! Any bytes as a safetensors file: refused, or tensors that fill the data without holes.
#![no_main]

use fsdp_ckpt::safetensors::Header;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let prefix = &bytes[..bytes.len().min(8)];
    let Ok(len) = Header::parse_length(prefix, bytes.len() as u64) else { return };
    let text = &bytes[8..8 + len as usize];
    let Ok(header) = Header::parse(text, bytes.len() as u64) else { return };
    let covered: u64 = header.entries().iter().map(|entry| entry.len_bytes()).sum();
    assert_eq!(covered, header.data_len(), "tensors fill the data");
});
