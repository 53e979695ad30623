//! What `fsdp --version` says: enough to know which build a report is about.

use std::env::consts::{ARCH, OS};
use std::sync::LazyLock;

/// Version, commit (of builds by the scripts of the repository), features and target, such as
/// `0.1.0 (1a2b3c4d, tokenizers, xla, x86_64-linux)`.
pub(crate) static VERSION: LazyLock<String> = LazyLock::new(|| {
    let features = [
        ("object-store", cfg!(feature = "object-store")),
        ("tokenizers", cfg!(feature = "tokenizers")),
        ("torch", cfg!(feature = "torch")),
        ("cuda", cfg!(feature = "cuda")),
        ("xla", cfg!(feature = "xla")),
    ];
    let commit = option_env!("FSDP_COMMIT").map(str::to_owned);
    let features = features.into_iter().filter(|(_, has)| *has).map(|(name, _)| name.to_owned());
    let parts: Vec<String> = commit.into_iter().chain(features).chain([format!("{ARCH}-{OS}")]).collect();
    format!("{} ({})", env!("CARGO_PKG_VERSION"), parts.join(", "))
});

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn version_names_features_and_target() {
        let version = VERSION.as_str();
        assert!(version.starts_with(env!("CARGO_PKG_VERSION")), "{version}");
        assert_eq!(version.contains("tokenizers"), cfg!(feature = "tokenizers"), "{version}");
        assert!(version.ends_with(&format!("{ARCH}-{OS})")), "{version}");
    }
}
