//! What `fsdp --version` says of the build, and with libtorch, the run path under which the binary finds it.

use std::env;
use std::fs;
use std::path::Path;
use std::process::Command;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // Cargo sets it for build scripts alone.
    println!("cargo:rustc-env=FSDP_TARGET={}", env::var("TARGET").expect("cargo sets it"));
    println!("cargo:rerun-if-env-changed=FSDP_COMMIT");
    // Where it is set, the compiler finds it without our help.
    if env::var_os("FSDP_COMMIT").is_none()
        && let Some(commit) = packaged_commit().or_else(checked_out_commit)
    {
        println!("cargo:rustc-env=FSDP_COMMIT={commit}");
    }
    // Said by `fsdp-cuda`, when it is built with libtorch.
    if let Ok(folder) = env::var("DEP_FSDP_CUDA_LIBTORCH_LIB") {
        println!("cargo:rustc-link-arg=-Wl,-rpath,{folder}");
    }
}

/// Returns the commit that a package of a registry was made of: `cargo package` writes it.
fn packaged_commit() -> Option<String> {
    let text = fs::read_to_string(".cargo_vcs_info.json").ok()?;
    let commit = text.split("\"sha1\": \"").nth(1)?.get(..8)?;
    Some(commit.to_owned())
}

/// Returns the commit of a checkout of the repository. Not in builds for development: every commit would build them again.
fn checked_out_commit() -> Option<String> {
    if env::var("PROFILE").ok()? != "release" || !Path::new("../../.git").exists() {
        return None;
    }
    // Every commit and every switch of branches adds a line to it.
    let log = git(&["rev-parse", "--git-path", "logs/HEAD"]).filter(|log| Path::new(log).exists());
    println!("cargo:rerun-if-changed={}", log?);
    git(&["rev-parse", "--short=8", "HEAD"])
}

fn git(args: &[&str]) -> Option<String> {
    let ran = Command::new("git").args(args).output().ok().filter(|ran| ran.status.success())?;
    Some(String::from_utf8(ran.stdout).ok()?.trim().to_owned())
}
