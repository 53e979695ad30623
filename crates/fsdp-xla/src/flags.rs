//! Compiler settings that are not part of the program.

use std::ffi::OsString;

/// The variable with flags for XLA's TPU compiler; they precede ours.
const TPU_VARIABLE: &str = "LIBTPU_INIT_ARGS";

/// The environment variables that affect compiled programs.
pub(crate) const VARIABLES: [&str; 2] = ["XLA_FLAGS", TPU_VARIABLE];

/// The values of [`VARIABLES`]; empty if unset.
pub(crate) fn given() -> [OsString; 2] {
    VARIABLES.map(|variable| std::env::var_os(variable).unwrap_or_default())
}

/// Flags of XLA's TPU compiler that are off by default.
const TPU: [&str; 3] = [
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
    without(&TPU, &given)
}

/// The `flags` that `given` does not set.
fn without(flags: &[&'static str], given: &str) -> Vec<&'static str> {
    let names = |one: &str, flag: &str| one.trim_start_matches('-').split('=').next() == Some(flag);
    flags.iter().copied().filter(|flag| !given.split_whitespace().any(|one| names(one, flag))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn environment_flags_are_not_overridden() {
        let [first, second, third] = TPU;
        assert_eq!(without(&TPU, "--xla_other=true"), TPU);
        assert_eq!(without(&TPU, &format!("--xla_other=true --{first}=false")), [second, third]);
        assert_eq!(without(&TPU, &format!("--{first}x=true --{second} --{third}=true")), [first]);
        assert_eq!(flags("cpu"), [""; 0]);
    }
}
