//! What `fsdp --version` says: enough to know which build a report is about.

use std::sync::LazyLock;

/// Version, commit (unless built for development; build.rs finds it), features and target, such as
/// `0.1.0 (1a2b3c4d, tokenizers, xla, x86_64-unknown-linux-gnu)`.
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
    let parts: Vec<String> =
        commit.into_iter().chain(features).chain([env!("FSDP_TARGET").to_owned()]).collect();
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
        let target = version.rsplit_once(", ").unwrap().1.trim_end_matches(')');
        assert!(target.split('-').count() >= 3, "{version}");
        for (libc, is_that) in [("musl", cfg!(target_env = "musl")), ("gnu", cfg!(target_env = "gnu"))] {
            assert_eq!(target.contains(libc), is_that, "{version}");
        }
    }
}
