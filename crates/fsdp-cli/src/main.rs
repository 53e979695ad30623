//! The `fsdp` command.
fn main() {}
