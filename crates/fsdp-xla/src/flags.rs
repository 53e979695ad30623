//! Compiler settings that are not part of the program.

use std::ffi::OsString;

/// The variable with flags for XLA's TPU compiler; they precede ours.
const TPU_VARIABLE: &str = "LIBTPU_INIT_ARGS";

/// The environment variables that affect compiled programs.
pub(crate) const VARIABLES: [&str; 2] = ["XLA_FLAGS", TPU_VARIABLE];

/// The values of [`VARIABLES`]; empty if unset.
pub(crate) fn environment_flags() -> [OsString; 2] {
    VARIABLES.map(|variable| std::env::var_os(variable).unwrap_or_default())
}

/// Flags of XLA's TPU compiler that are off by default.
const TPU_FLAGS: [&str; 3] = [
    "xla_enable_async_all_gather",
    "xla_tpu_prefer_async_allgather_to_allreduce",
    "xla_tpu_enable_async_all_to_all",
];

/// The flags to turn on for a device kind; flags set in the environment are left alone.
pub(crate) fn flags(kind: &str) -> Vec<&'static str> {
    if !kind.starts_with("TPU") {
        return Vec::new();
    }
    let given = std::env::var(TPU_VARIABLE).unwrap_or_default();
    without(&TPU_FLAGS, &given)
}

/// The `flags` that `given` does not set.
fn without(flags: &[&'static str], given: &str) -> Vec<&'static str> {
    let sets = |setting: &str, flag: &str| setting.trim_start_matches('-').split('=').next() == Some(flag);
    flags
        .iter()
        .copied()
        .filter(|flag| !given.split_whitespace().any(|setting| sets(setting, flag)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn environment_flags_are_not_overridden() {
        let [first, second, third] = TPU_FLAGS;
        assert_eq!(without(&TPU_FLAGS, "--xla_other=true"), TPU_FLAGS);
        assert_eq!(without(&TPU_FLAGS, &format!("--xla_other=true --{first}=false")), [second, third]);
        assert_eq!(without(&TPU_FLAGS, &format!("--{first}x=true --{second} --{third}=true")), [first]);
        assert_eq!(flags("cpu"), [""; 0]);
    }
}
