//! Any bytes as metadata of an Orbax checkpoint: refused, or read within the bytes.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| fsdp_ckpt::fuzzing::orbax(bytes));
