//! Nothing to build without the feature `torch`.

fn main() {}
