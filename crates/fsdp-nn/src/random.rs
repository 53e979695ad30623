//! Stand-in until the generators are merged.
/// Key.
pub fn dropout_key(seed: u64, step: u64, sample: u64, site: u64) -> u64 {
    seed ^ step ^ sample ^ site
}
