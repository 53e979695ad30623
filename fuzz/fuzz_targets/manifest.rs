//! Any bytes as the manifest of a native checkpoint: refused, or read to what writes back the same.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| fsdp_ckpt::fuzzing::manifest(bytes));
