//! Any bytes as a pickle: refused, or a graph that can be written out within its limit.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| fsdp_ckpt::fuzzing::pickle(bytes));
