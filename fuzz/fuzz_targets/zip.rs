//! Any bytes as an archive of `torch.save`: refused, or records and tensors that lie inside.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| fsdp_ckpt::fuzzing::zip(bytes));
